"""Greedy search and sampling as pure functions of a step function: hypotheses that are extended one token at a time, each for itself.

They share the rules of `mtkit.decoding.search`: caps, log-probabilities, scores, forbidden ids, independence of the batch.

Shapes: B sentences, P paths (hypotheses), R rows of a step (paths that go on), V pieces of the vocabulary, C candidates, T steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtkit.data.tokenizer import BOS_ID, EOS_ID, PAD_ID
from mtkit.decoding import scoring
from mtkit.decoding.scoring import PenaltyKind, refuse_nan
from mtkit.decoding.search import NEG_INF, Hypothesis, StepFn

_DRAWN_ELEMENTS = 1 << 21
"""Probabilities that are drawn from at once, in fp64: a few times 16 MB."""


def greedy_search(
    step: StepFn,
    *,
    max_lengths: Sequence[int],
    length_penalty: float,
    penalty: PenaltyKind = "gnmt",
    forbidden_ids: Sequence[int] = (),
    device: torch.device | str = "cpu",
) -> list[list[Hypothesis]]:
    """Take the most probable piece at every step, until EOS or the cap. The result of `beam_search` with `beam_size` 1, found faster.

    Args:
        step: The model.
        max_lengths: Largest number of tokens per sentence, EOS included; each at least 1.
        length_penalty: Exponent alpha, for the reported score only.
        penalty: Which penalty.
        forbidden_ids: Ids that are never chosen.
        device: Where the step function's tensors live.

    Returns:
        Per sentence a list of one hypothesis; an empty one if no piece has a probability above zero.

    Raises:
        MTKitError: The model gave NaN.
    """

    def choose(log_probs_RV: Tensor, _paths_R: Tensor, _num_steps: int) -> Tensor:
        return log_probs_RV.argmax(dim=1)

    paths = _follow(step, choose, max_lengths=max_lengths, num_paths=1, forbidden_ids=forbidden_ids, device=device)
    return _ranked(paths, num_paths=1, alpha=length_penalty, penalty=penalty)


def sample(
    step: StepFn,
    *,
    max_lengths: Sequence[int],
    seeds: Sequence[int],
    num_samples: int,
    length_penalty: float,
    penalty: PenaltyKind = "gnmt",
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    forbidden_ids: Sequence[int] = (),
    device: torch.device | str = "cpu",
) -> list[list[Hypothesis]]:
    """Draw translations from the model's distribution.

    The random numbers of a sentence come from its own seed, so its samples depend neither on its batch nor on what was drawn before. Temperature,
    `top_k` and `top_p` shape the choice, in this order; the reported log-probability is the model's own.

    Args:
        step: The model.
        max_lengths: Largest number of tokens per sentence, EOS included; each at least 1.
        seeds: One per sentence, 0 to 2^63 - 1.
        num_samples: Samples per sentence; the same text may come twice.
        length_penalty: Exponent alpha, for the reported score only.
        penalty: Which penalty.
        temperature: Divides the log-probabilities, > 0; below 1 sharpens the distribution.
        top_k: Draw from this many most probable pieces only, or None for all.
        top_p: Draw from the fewest most probable pieces that together have at least this probability (Holtzman et al. 2020), or None for all.
        forbidden_ids: Ids that are never chosen.
        device: Where the step function's tensors live.

    Returns:
        Per sentence its samples, best score first.

    Raises:
        MTKitError: The model gave NaN.
    """
    if not max_lengths:
        return []
    uniform_PT = torch.zeros((len(max_lengths) * num_samples, max(max_lengths)))
    for index, (seed, cap) in enumerate(zip(seeds, max_lengths, strict=True)):
        block = slice(index * num_samples, (index + 1) * num_samples)
        uniform_PT[block, :cap] = torch.rand((num_samples, cap), generator=torch.Generator().manual_seed(seed))
    uniform_PT = uniform_PT.to(device)

    def choose(log_probs_RV: Tensor, paths_R: Tensor, num_steps: int) -> Tensor:
        return _draw(log_probs_RV, uniform_PT[paths_R, num_steps], temperature=temperature, top_k=top_k, top_p=top_p)

    paths = _follow(step, choose, max_lengths=max_lengths, num_paths=num_samples, forbidden_ids=forbidden_ids, device=device)
    return _ranked(paths, num_paths=num_samples, alpha=length_penalty, penalty=penalty)


def _draw(log_probs_RV: Tensor, uniform_R: Tensor, *, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Draw one id per row by inverting the cumulative distribution of the allowed ids, in the order of the ids.

    (In the order of their probability, two of the thousands of ids that are hardly probable change places by a rounding error, and everything that is
    drawn after them would be another.)
    """
    num_rows = max(1, _DRAWN_ELEMENTS // log_probs_RV.shape[1])
    blocks = zip(log_probs_RV.split(num_rows), uniform_R.split(num_rows), strict=True)
    return torch.cat([_draw_block(rows, uniform, temperature, top_k, top_p) for rows, uniform in blocks])


def _draw_block(log_probs_RV: Tensor, uniform_R: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    best = log_probs_RV.max(dim=1, keepdim=True)
    weights_RV = (log_probs_RV - best.values).double().div_(temperature).exp_()  # at most 1, and 1 somewhere, at any temperature
    if top_k is not None and top_k < weights_RV.shape[1]:
        ids_RC = log_probs_RV.topk(top_k, dim=1).indices
        weights_RV = torch.zeros_like(weights_RV).scatter_(1, ids_RC, weights_RV.gather(1, ids_RC))
    if top_p is not None:
        sorted_RV, ids_RV = weights_RV.sort(dim=1, descending=True, stable=True)
        before_RV = sorted_RV.cumsum(dim=1) - sorted_RV
        is_left_out_RV = before_RV >= top_p * sorted_RV.sum(dim=1, keepdim=True)
        weights_RV = weights_RV.scatter(1, ids_RV, sorted_RV.masked_fill(is_left_out_RV, 0.0))
    cumulative_RV = weights_RV.cumsum(dim=1)
    total_R1 = cumulative_RV[:, -1:]
    drawn_R1 = torch.searchsorted(cumulative_RV, uniform_R.unsqueeze(1).double() * total_R1, right=True)
    # A row without any weight, where the model gave NaN or nothing is allowed, shows that by its largest element.
    return torch.where(total_R1 > 0, drawn_R1, best.indices).squeeze(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Paths:
    """Hypotheses that were extended independently, P of them.

    Attributes:
        tokens_TP: The token of each step, meaningful up to the path's length.
        lengths_P: Number of tokens, EOS included.
        log_probs_P: Sum of their log-probabilities.
    """

    tokens_TP: Tensor
    lengths_P: Tensor
    log_probs_P: Tensor


def _follow(
    step: StepFn,
    choose: Callable[[Tensor, Tensor, int], Tensor],
    *,
    max_lengths: Sequence[int],
    num_paths: int,
    forbidden_ids: Sequence[int],
    device: torch.device | str,
) -> _Paths:
    """Extend `num_paths` hypotheses of each sentence by the tokens that `choose(log_probs_RV, paths_R, number of steps)` picks.

    Path p belongs to sentence p // num_paths; paths_R says which path each row is.
    """
    num_sentences = len(max_lengths)
    forbidden = torch.tensor(sorted(set(forbidden_ids)), dtype=torch.int64, device=device)
    cap_P = torch.tensor(max_lengths, dtype=torch.int64, device=device).repeat_interleave(num_paths)
    paths = _Paths(
        tokens_TP=torch.full((max(max_lengths, default=0), len(cap_P)), PAD_ID, dtype=torch.int64, device=device),
        lengths_P=torch.zeros_like(cap_P),
        log_probs_P=torch.zeros(len(cap_P), device=device),
    )
    tokens_R = torch.full((num_sentences,), BOS_ID, dtype=torch.int64, device=device)
    parents_R = torch.arange(num_sentences, device=device)
    paths_R = torch.arange(len(cap_P), device=device)
    num_steps = 0
    while len(paths_R):
        log_probs_RV = step(tokens_R, parents_R)
        log_probs_RV.index_fill_(1, forbidden, NEG_INF)
        parents_R = torch.arange(len(log_probs_RV), device=device)
        if num_steps == 0:
            log_probs_RV, parents_R = (rows.repeat_interleave(num_paths, dim=0) for rows in (log_probs_RV, parents_R))
        tokens_R = choose(log_probs_RV, paths_R, num_steps)
        paths.tokens_TP[num_steps, paths_R] = tokens_R
        num_steps += 1
        log_probs_R = paths.log_probs_P[paths_R] + log_probs_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1)
        paths.log_probs_P[paths_R] = log_probs_R
        paths.lengths_P[paths_R] = num_steps
        done_R = (tokens_R == EOS_ID) | (cap_P[paths_R] <= num_steps)
        *done, has_nan = torch.cat([done_R, log_probs_R.isnan().any().view(1)]).tolist()
        if has_nan:
            refuse_nan()
        if any(done):
            stay = torch.tensor([row for row, is_done in enumerate(done) if not is_done], dtype=torch.int64, device=device)
            tokens_R, parents_R, paths_R = tokens_R[stay], parents_R[stay], paths_R[stay]
    return paths


def _ranked(paths: _Paths, *, num_paths: int, alpha: float, penalty: PenaltyKind) -> list[list[Hypothesis]]:
    """The paths as hypotheses, grouped by sentence, best score first."""
    found = []
    columns = (paths.tokens_TP.T, paths.lengths_P, paths.log_probs_P)
    for tokens, length, log_prob in zip(*(column.tolist() for column in columns), strict=True):
        finished = tokens[length - 1] == EOS_ID
        score = log_prob / scoring.length_penalty(length, alpha, penalty)
        found.append(Hypothesis(tokens=tuple(tokens[: length - finished]), score=score, log_prob=log_prob, finished=finished))
    groups = [found[start : start + num_paths] for start in range(0, len(found), num_paths)]
    return [sorted((path for path in group if path.log_prob > NEG_INF), key=lambda path: -path.score) for group in groups]
