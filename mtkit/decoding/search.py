"""Beam search as a pure function of a step function. No model, no text, no files. (Greedy search and sampling: `mtkit.decoding.sampling`.)

Shapes: B sentences, K beam places, R rows of a step, V pieces of the vocabulary, C candidates, N hypotheses kept of a sentence, T steps.

A `StepFn` stands for the model. Its rows are the hypotheses that are being extended; `parents_R` says which row of the previous call each of them
continues, so a model-backed step function reorders its cache by it, and rows of finished sentences simply stop being named. On the first call there
is one row per sentence, all tokens are BOS, and parents_R is 0..B-1.

What all searches share:

- `max_lengths[i]` is the largest number of tokens of sentence i, EOS included. It belongs to the sentence and never depends on the others.
- A log-probability is the sum over the tokens, EOS included if there is one, in fp32, over the whole vocabulary: ids that are forbidden are left
  out of the choice *after* the softmax, so that scoring a pair by teacher forcing gives the same number.
- The score is the log-probability divided by the length penalty of the number of tokens, EOS included (`mtkit.decoding.scoring.length_penalty`).
- A sentence's result depends on its own rows only, so batch size and order do not matter.
- NaN is an error, never a result.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mtkit.data.tokenizer import BOS_ID, EOS_ID, PAD_ID
from mtkit.decoding import scoring
from mtkit.decoding.scoring import PenaltyKind, refuse_nan
from mtkit.errors import ConfigError

StepFn = Callable[[Tensor, Tensor], Tensor]
"""(tokens_R int64, parents_R int64) -> log_probs_RV fp32, a log-softmax. The search may write into the result."""


class Extensions(NamedTuple):
    """The most probable pieces after each row, the most probable first.

    Attributes:
        log_prob_RC: Their log-probabilities, fp32; -inf where there is none.
        token_RC: Which pieces, int64.
    """

    log_prob_RC: Tensor
    token_RC: Tensor


ExtendFn = Callable[[Tensor, Tensor], Extensions]
"""As a `StepFn`, but it returns the best extensions only, and none that is forbidden."""

NEG_INF = float("-inf")

_BLOCK = 64
"""Columns that are compared as one in the search for the largest values of a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypothesis:
    """One translation of a sentence, as token ids.

    Attributes:
        tokens: Token ids without BOS and EOS.
        score: `log_prob` divided by the length penalty; what hypotheses are ranked by.
        log_prob: Sum of the log-probabilities of the tokens, and of EOS if finished.
        finished: Whether it ended with EOS; False means that the length cap cut it.
    """

    tokens: tuple[int, ...]
    score: float
    log_prob: float
    finished: bool


def beam_search(
    step: StepFn,
    *,
    max_lengths: Sequence[int],
    beam_size: int,
    length_penalty: float,
    penalty: PenaltyKind = "gnmt",
    n_best: int = 1,
    forbidden_ids: Sequence[int] = (),
    device: torch.device | str = "cpu",
) -> list[list[Hypothesis]]:
    """Find the best hypotheses of each sentence with a beam.

    At every step the candidates of a sentence (each live hypothesis extended by each piece) are ranked by log-probability. Those among the first
    `beam_size` that end with EOS are finished; the first `beam_size` that do not end stay live. So finished hypotheses never take a live one's place,
    and asking for more of them never changes the search.

    A sentence is done when one of these holds:

    - no live hypothesis can still beat the worst of the `n_best` kept ones. A live log-probability can only fall, so its score can never exceed
      log_prob / penalty(cap): this test loses nothing;
    - all of the first `beam_size` candidates end with EOS: the beam has nothing left to extend. With `beam_size` 1 this is greedy search;
    - the length cap is reached, or no candidate has a probability above zero.

    Args:
        step: The model.
        max_lengths: Largest number of tokens per sentence, EOS included; each at least 1.
        beam_size: Live hypotheses per sentence, K.
        length_penalty: Exponent alpha of the penalty, >= 0; 0 ranks by the plain log-probability.
        penalty: Which penalty.
        n_best: Hypotheses to return per sentence, at most `beam_size`.
        forbidden_ids: Ids that are never chosen.
        device: Where the step function's tensors live.

    Returns:
        Per sentence the best hypotheses, best score first. Finished ones come first; unfinished ones, cut at the cap, fill the places that are left.
        Fewer than `n_best` are returned only if no more exist.

    Raises:
        ConfigError: `n_best` exceeds `beam_size`.
        MTKitError: The model gave NaN.
    """
    forbidden = torch.tensor(sorted(set(forbidden_ids)), dtype=torch.int64, device=device)

    def extend(tokens_R: Tensor, parents_R: Tensor) -> Extensions:
        return best_extensions(step(tokens_R, parents_R).index_fill_(1, forbidden, NEG_INF), beam_size + 1)

    return search_extensions(
        extend, max_lengths=max_lengths, beam_size=beam_size, length_penalty=length_penalty, penalty=penalty, n_best=n_best, device=device
    )


def search_extensions(
    extend: ExtendFn,
    *,
    max_lengths: Sequence[int],
    beam_size: int,
    length_penalty: float,
    penalty: PenaltyKind = "gnmt",
    n_best: int = 1,
    device: torch.device | str = "cpu",
) -> list[list[Hypothesis]]:
    """`beam_search` for a model that chooses the best extensions of each row itself, and leaves out what is forbidden.

    Args:
        extend: The model, for at least beam_size + 1 extensions of each row, or as many as there are pieces.
        max_lengths: See `beam_search`, here and below.
        beam_size: K.
        length_penalty: Exponent alpha.
        penalty: Which penalty.
        n_best: Hypotheses to return per sentence.
        device: Where the function's tensors live.

    Raises:
        ConfigError: `n_best` exceeds `beam_size`.
        MTKitError: The model gave NaN.
    """
    if n_best > beam_size:
        raise ConfigError(f"n_best must be at most beam_size, but is {n_best} with beam_size {beam_size}")
    if not max_lengths:
        return []
    beam = _Beam(max_lengths, beam_size=beam_size, n_best=n_best, alpha=length_penalty, penalty=penalty, device=device)
    tokens_R = torch.full((len(max_lengths),), BOS_ID, dtype=torch.int64, device=device)
    parents_R = torch.arange(len(max_lengths), device=device)
    while beam.num_active:
        tokens_R, parents_R = beam.advance(extend(tokens_R, parents_R))
    return beam.hypotheses()


def best_extensions(log_probs_RV: Tensor, count: int) -> Extensions:
    """The most probable pieces of each row, fewer than `count` if there are no more."""
    return Extensions(*largest_of_rows(log_probs_RV, min(count, log_probs_RV.size(1))))


class Candidates(NamedTuple):
    """Extensions of the live hypotheses of each sentence, the most probable first.

    Attributes:
        log_prob_AC: Log-probability, fp32; -inf where there is none.
        place_AC: The live hypothesis that it extends, int64.
        token_AC: By which piece, int64.
        is_eos_AC: Whether it ends there.
    """

    log_prob_AC: Tensor
    place_AC: Tensor
    token_AC: Tensor
    is_eos_AC: Tensor


class Finished(NamedTuple):
    """The best finished hypotheses of each sentence, the best first.

    Attributes:
        score_AN: What they are ranked by, fp32; -inf in an empty place.
        log_prob_AN: Log-probability, fp32.
        step_AN: The step in which it ended, from 0, int64.
        place_AN: The live hypothesis of the step before that it extends, int64.
    """

    score_AN: Tensor
    log_prob_AN: Tensor
    step_AN: Tensor
    place_AN: Tensor

    @classmethod
    def none(cls, shape: tuple[int, int], *, device: torch.device | str) -> "Finished":
        """Nothing finished yet, for a number of sentences and of hypotheses to keep of each."""
        scores = torch.full(shape, NEG_INF, device=device)
        steps = torch.zeros(shape, dtype=torch.int64, device=device)
        return cls(score_AN=scores, log_prob_AN=scores.clone(), step_AN=steps, place_AN=steps.clone())


def rank_candidates(extensions: Extensions, log_prob_AK: Tensor) -> Candidates:
    """The best candidates of each sentence.

    Only one candidate of a row ends with EOS, so the best K + 1 of each row hold the best K of the sentence with EOS and the best K without.

    Args:
        extensions: The best K + 1 of each live hypothesis, sentence by sentence.
        log_prob_AK: Of the live hypotheses, fp32; -inf in an empty place.
    """
    num_active, per_row = log_prob_AK.size(0), extensions.token_RC.size(1)
    best_AKC, token_AKC = (x_RC.view(num_active, -1, per_row) for x_RC in extensions)
    total_AC = (best_AKC + log_prob_AK.unsqueeze(2)).view(num_active, -1)
    # The order is stable, so that equal candidates rank by place and the result is the same on every run.
    log_prob_AC, order_AC = total_AC.sort(dim=1, descending=True, stable=True)
    token_AC = token_AKC.reshape(num_active, -1).gather(1, order_AC)
    is_eos_AC = (token_AC == EOS_ID) & (log_prob_AC > NEG_INF)
    return Candidates(log_prob_AC=log_prob_AC, place_AC=order_AC // per_row, token_AC=token_AC, is_eos_AC=is_eos_AC)


def merge_finished(finished: Finished, candidates: Candidates, divisor: float | Tensor, step: int | Tensor, *, beam_size: int) -> Finished:
    """The finished hypotheses, and those of the first K candidates that end.

    Args:
        finished: So far.
        candidates: Of this step.
        divisor: Length penalty of what ends in this step: a number, or one per sentence, [A, 1].
        step: Number of this step, from 0: a number, or one per sentence, int64 [A, 1].
        beam_size: K.
    """
    is_eos_AK, place_AK = candidates.is_eos_AC[:, :beam_size], candidates.place_AC[:, :beam_size]
    log_prob_AK = candidates.log_prob_AC[:, :beam_size].masked_fill(~is_eos_AK, NEG_INF)
    step_AK = torch.full_like(place_AK, step) if isinstance(step, int) else step.expand_as(place_AK)
    new = Finished(score_AN=log_prob_AK / divisor, log_prob_AN=log_prob_AK, step_AN=step_AK, place_AN=place_AK)
    both = [torch.cat(pair, dim=1) for pair in zip(finished, new, strict=True)]
    score_AM, order_AM = both[0].sort(dim=1, descending=True, stable=True)
    order_AN = order_AM[:, : finished.score_AN.size(1)]
    return Finished(score_AM[:, : order_AN.size(1)], *(x_AM.gather(1, order_AN) for x_AM in both[1:]))


def all_end(candidates: Candidates, *, beam_size: int) -> Tensor:
    """Whether all of the first K candidates end, bool [A]: then the beam has nothing left to extend."""
    is_eos_AK = candidates.is_eos_AC[:, :beam_size]
    return is_eos_AK.all(dim=1) & (is_eos_AK.size(1) == beam_size)


def is_over(best_live_A: Tensor, worst_kept_A: Tensor, *, is_capped_A: Tensor, cap_penalty_A: Tensor) -> Tensor:
    """Whether no live hypothesis can change the result any more, bool [A].

    Args:
        best_live_A: Log-probability of the best live hypothesis; -inf where there is none.
        worst_kept_A: Score of the worst finished hypothesis that is kept; -inf where a place is empty.
        is_capped_A: Whether the length cap is reached.
        cap_penalty_A: Length penalty of the cap: no score of what is live can exceed best_live / cap_penalty.
    """
    return is_capped_A | (best_live_A == NEG_INF) | (best_live_A / cap_penalty_A <= worst_kept_A)


def live_candidates(candidates: Candidates, *, beam_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best K candidates that do not end: log_prob_AK, place_AK, token_AK. Places without a candidate have the log-probability -inf."""
    live_AC, place_AC, token_AC = candidates.log_prob_AC.masked_fill(candidates.is_eos_AC, NEG_INF), candidates.place_AC, candidates.token_AC
    missing = beam_size - live_AC.size(1)
    if missing > 0:
        live_AC = torch.nn.functional.pad(live_AC, (0, missing), value=NEG_INF)
        place_AC = torch.nn.functional.pad(place_AC, (0, missing))
        token_AC = torch.nn.functional.pad(token_AC, (0, missing), value=PAD_ID)
    live_AC, order_AC = live_AC.sort(dim=1, descending=True, stable=True)
    order_AK = order_AC[:, :beam_size]
    return live_AC[:, :beam_size], place_AC.gather(1, order_AK), token_AC.gather(1, order_AK)


def read_lattice(
    tokens_TK: Sequence[Sequence[int]],
    parents_TK: Sequence[Sequence[int]],
    finished: Iterable[tuple[float, float, int, int]],
    live: Sequence[float],
    *,
    length: int,
    alpha: float,
    penalty: PenaltyKind,
) -> list[Hypothesis]:
    """The results of a sentence: the finished hypotheses, and unfinished ones in the places that these leave.

    Args:
        tokens_TK: The token of every live hypothesis of every step.
        parents_TK: The place of the hypothesis of the step before that it extends.
        finished: Score, log-probability, step and place of each, as in `Finished`.
        live: Log-probabilities of the hypotheses that are live at the end.
        length: How many tokens these have.
        alpha: Exponent of the length penalty.
        penalty: Which penalty.
    """

    def trace(length: int, place: int) -> tuple[int, ...]:
        path = []
        for step in range(length - 1, -1, -1):
            path.append(tokens_TK[step][place])
            place = parents_TK[step][place]
        return tuple(reversed(path))

    places = list(finished)
    found = [
        Hypothesis(tokens=trace(step, place), score=score, log_prob=log_prob, finished=True)
        for score, log_prob, step, place in places
        if score > NEG_INF
    ]
    divisor = scoring.length_penalty(length, alpha, penalty)
    unfinished = [(place, log_prob) for place, log_prob in enumerate(live) if log_prob > NEG_INF][: len(places) - len(found)]
    return found + [
        Hypothesis(tokens=trace(length, place), score=log_prob / divisor, log_prob=log_prob, finished=False) for place, log_prob in unfinished
    ]


class _Beam:
    """State of a beam search over the sentences that are not done ("active"), A of them; B counts all.

    Hypotheses are not stored as token lists but as a lattice: the token and the parent place of every live hypothesis of every step. A finished
    hypothesis is the step and the place that it grew from; its tokens are read off backwards at the very end.
    """

    def __init__(
        self, max_lengths: Sequence[int], *, beam_size: int, n_best: int, alpha: float, penalty: PenaltyKind, device: torch.device | str
    ) -> None:
        num_sentences = len(max_lengths)
        self.beam_size, self.alpha, self.penalty, self.device = beam_size, alpha, penalty, torch.device(device)
        self.num_steps = 0
        self.active = list(range(num_sentences))
        self.cap_A = torch.tensor(max_lengths, device=device)
        self.cap_penalty_A = scoring.length_penalty(self.cap_A.float(), alpha, penalty)
        self.log_prob_AK = torch.zeros((num_sentences, 1), device=device)  # one row per sentence on the first call
        self.finished = Finished.none((num_sentences, n_best), device=device)
        # Of each step: which sentences were active, and the tokens and parent places of their live hypotheses.
        self.lattice: list[tuple[list[int], Tensor, Tensor]] = []
        # Of each sentence that is done: how many steps it took, its finished hypotheses, and the log-probabilities of those that are live.
        self.results: list[tuple[int, list[tuple[float, float, int, int]], list[float]]] = [(0, [], [])] * num_sentences

    @property
    def num_active(self) -> int:
        return len(self.active)

    def advance(self, extensions: Extensions) -> tuple[Tensor, Tensor]:
        """Take one step of all active sentences; returns the tokens and parent rows of the next one."""
        num_places = self.log_prob_AK.size(1)
        candidates = rank_candidates(extensions, self.log_prob_AK)
        # A GPU would have to be waited for to know whether anything ends; for a CPU it is most of the work here.
        if self.device.type != "cpu" or bool(candidates.is_eos_AC[:, : self.beam_size].any()):
            divisor = scoring.length_penalty(self.num_steps + 1, self.alpha, self.penalty)
            self.finished = merge_finished(self.finished, candidates, divisor, self.num_steps, beam_size=self.beam_size)
        self.log_prob_AK, place_AK, token_AK = live_candidates(candidates, beam_size=self.beam_size)
        self.lattice.append((self.active, token_AK, place_AK))
        self.num_steps += 1
        done_A = all_end(candidates, beam_size=self.beam_size) | is_over(
            self.log_prob_AK[:, 0], self.finished.score_AN[:, -1], is_capped_A=self.cap_A <= self.num_steps, cap_penalty_A=self.cap_penalty_A
        )
        # The only place where the host waits for the device.
        *done, nan = torch.cat([done_A, candidates.log_prob_AC.isnan().any().view(1)]).tolist()
        if nan:
            refuse_nan()
        row_A = torch.arange(len(self.active), device=self.device) * num_places
        if any(done):
            self._store([index for index, is_done in enumerate(done) if is_done])
            stay = torch.tensor([index for index, is_done in enumerate(done) if not is_done], dtype=torch.int64, device=self.device)
            self.active = [sentence for sentence, is_done in zip(self.active, done, strict=True) if not is_done]
            self.finished = Finished(*(x_AN[stay] for x_AN in self.finished))
            self.cap_A, self.cap_penalty_A, self.log_prob_AK, row_A, token_AK, place_AK = (
                x_A[stay] for x_A in (self.cap_A, self.cap_penalty_A, self.log_prob_AK, row_A, token_AK, place_AK)
            )
        return token_AK.reshape(-1), (row_A.unsqueeze(1) + place_AK).view(-1)

    def _store(self, done: list[int]) -> None:
        rows = torch.tensor(done, device=self.device)
        columns = [x_AN[rows].tolist() for x_AN in (*self.finished, self.log_prob_AK)]
        for index, *finished, live in zip(done, *columns, strict=True):
            self.results[self.active[index]] = (self.num_steps, list(zip(*finished, strict=True)), live)

    def hypotheses(self) -> list[list[Hypothesis]]:
        """Read the results off the lattice."""
        tokens_BTK: list[list[list[int]]] = [[] for _ in self.results]
        parents_BTK: list[list[list[int]]] = [[] for _ in self.results]
        for active, token_AK, place_AK in self.lattice:
            for sentence, tokens, places in zip(active, token_AK.tolist(), place_AK.tolist(), strict=True):
                tokens_BTK[sentence].append(tokens)
                parents_BTK[sentence].append(places)
        return [
            read_lattice(tokens, parents, finished, live, length=length, alpha=self.alpha, penalty=self.penalty)
            for tokens, parents, (length, finished, live) in zip(tokens_BTK, parents_BTK, self.results, strict=True)
        ]


def largest_of_rows(x_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row and their columns, largest first: `x_RV.topk(count)`, 3 to 10 times faster for wide rows on a CPU.

    Only the `count` blocks with the largest maxima can hold the `count` largest values, and maxima of blocks are cheap.
    """
    num_blocks = x_RV.size(1) // _BLOCK
    if num_blocks <= count:
        values_RC, columns_RC = x_RV.topk(count, dim=1)
        return values_RC, columns_RC
    maxima_RN = x_RV[:, : num_blocks * _BLOCK].reshape(-1, num_blocks, _BLOCK).amax(dim=2)
    starts_RC = maxima_RN.topk(count, dim=1).indices * _BLOCK
    columns_RW = (starts_RC.unsqueeze(2) + torch.arange(_BLOCK, device=x_RV.device)).flatten(1)
    rest = torch.arange(num_blocks * _BLOCK, x_RV.size(1), device=x_RV.device).expand(x_RV.size(0), -1)
    columns_RW = torch.cat([columns_RW, rest], dim=1)
    values_RC, places_RC = x_RV.gather(1, columns_RW).topk(count, dim=1)
    return values_RC, columns_RW.gather(1, places_RC)
