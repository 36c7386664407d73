"""Beam search on a GPU: the search of `mtkit.decoding.search`, for a stream of sentences that share a fixed number of slots.

Every step is the same work on the same tensors: no shape depends on what is found, and the host asks for nothing. So the step is recorded once as a
CUDA graph, and repeating it takes one launch. Now and then the host looks which sentences are done, takes their results, and puts new sentences
into their slots. Without a GPU the same code runs eagerly.

Shapes: B slots, F slots that are filled or read, K beam places, N hypotheses kept, T steps, S source positions, V pieces.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mtkit.data.tokenizer import BOS_ID
from mtkit.decoding import scoring
from mtkit.decoding.scoring import PenaltyKind, refuse_nan
from mtkit.decoding.search import (
    NEG_INF,
    Finished,
    Hypothesis,
    all_end,
    best_extensions,
    is_over,
    live_candidates,
    merge_finished,
    rank_candidates,
    read_lattice,
)
from mtkit.decoding.steps import pad_sources
from mtkit.model.device import record_graph
from mtkit.model.slots import SlotCache
from mtkit.model.transformer import Transformer

BATCH_TOKENS = 32_768
"""Source positions of a batch by default: enough sentences to fill the slots several times."""

MAX_SLOTS = 512
"""Sentences that are searched at the same time, at most."""

MAX_SEARCHES = 2
"""Sizes of slots that are kept at the same time: each has keys and values for `MAX_POSITIONS`, and a recorded graph."""

MAX_POSITIONS = 65_536
"""Target positions of all slots together, at most: with the `base` preset and a beam of 4 their keys and values take 3.2 GB in half precision."""

STEPS_BETWEEN_LOOKS = 4
"""Steps after which the host looks at what is done. A sentence that is done earlier keeps its slot so long."""

SMALLEST_REFILL = 8
"""One of so many slots has to be free before sentences are encoded for them, unless there is nothing else to do: the encoder likes large batches."""


class SlotSearches:
    """Slots of the sizes that were needed last; see `SlotSearch`. Lines come sorted by length, so that a size is rarely made twice.

    Args:
        model: In eval mode.
        max_length: The largest number of target tokens, EOS included, for a number of source tokens without EOS; grows with it.
        options: Of `SlotSearch`, all but its sizes.
    """

    def __init__(self, model: Transformer, max_length: Callable[[int], int], **options: Any) -> None:
        self._model = model
        self._max_length = max_length
        self._options = options
        self._searches: dict[tuple[int, int], SlotSearch] = {}

    def run(self, sources: Sequence[Sequence[int]]) -> list[list[Hypothesis]]:
        """Search sentences, given as token ids without EOS; see `SlotSearch.run`."""
        # Sizes are powers of two, so that few of them are ever made.
        src_capacity = max(16, 1 << max(map(len, sources)).bit_length())
        tgt_capacity = -(-self._max_length(src_capacity - 1) // 8) * 8
        num_slots = min(MAX_SLOTS, 1 << (len(sources) - 1).bit_length(), 1 << (max(1, MAX_POSITIONS // tgt_capacity).bit_length() - 1))
        key = (num_slots, src_capacity)
        search = self._searches.pop(key, None)
        if search is None:
            while len(self._searches) >= MAX_SEARCHES:
                del self._searches[next(iter(self._searches))]  # before the new one takes memory
            search = SlotSearch(self._model, num_slots=num_slots, src_capacity=src_capacity, tgt_capacity=tgt_capacity, **self._options)
        found = search.run(sources, [self._max_length(len(source)) for source in sources])
        self._searches[key] = search  # not one that failed, for NaN stays in it
        return found


class SlotSearch:
    """Searches sentences in slots. Its results are those of `search.beam_search`, but for the rounding of products of another shape.

    Args:
        model: In eval mode.
        num_slots: Sentences that are searched at the same time, B.
        src_capacity: Tokens of the longest source, EOS included, S.
        tgt_capacity: The most tokens of a translation, EOS included, T.
        beam_size: Live hypotheses per sentence, K; 1 is greedy search.
        n_best: Hypotheses to return per sentence, at most `beam_size`.
        length_penalty: Exponent alpha of the penalty.
        penalty: Which penalty.
        forbidden_ids: Ids that are never chosen.
        steps_between_looks: See `STEPS_BETWEEN_LOOKS`.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        num_slots: int,
        src_capacity: int,
        tgt_capacity: int,
        beam_size: int,
        n_best: int = 1,
        length_penalty: float,
        penalty: PenaltyKind = "gnmt",
        forbidden_ids: Sequence[int] = (),
        steps_between_looks: int = STEPS_BETWEEN_LOOKS,
    ) -> None:
        parameter = next(model.decoder.parameters())
        device = self._device = parameter.device
        self._model, self._alpha, self._penalty = model, length_penalty, penalty
        self._steps_between_looks = steps_between_looks
        self._cache = SlotCache(
            model.config,
            num_slots=num_slots,
            num_places=beam_size,
            src_capacity=src_capacity,
            tgt_capacity=tgt_capacity,
            dtype=parameter.dtype,
            device=device,
        )
        self._positions = model.positions(tgt_capacity, like=parameter)  # held, for a recorded step reads it where it was
        self._forbidden = torch.tensor(sorted(set(forbidden_ids)), dtype=torch.int64, device=device)
        # The penalty of every length, as Python computes it.
        penalties = [scoring.length_penalty(float(length), length_penalty, penalty) for length in range(1, tgt_capacity + 1)]
        self._penalty_T = torch.tensor(penalties, device=device)
        shape_BK = (num_slots, beam_size)
        self._slot_B = torch.arange(num_slots, device=device)
        self._token_BK = torch.full(shape_BK, BOS_ID, dtype=torch.int64, device=device)
        self._log_prob_BK = torch.full(shape_BK, NEG_INF, device=device)
        self._first_log_prob_K = torch.tensor([0.0] + [NEG_INF] * (beam_size - 1), device=device)  # one hypothesis in the first step
        self._is_done_B = torch.ones(num_slots, dtype=torch.bool, device=device)
        self._num_steps_B = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._cap_B = torch.ones(num_slots, dtype=torch.int64, device=device)
        self._has_nan = torch.zeros((), dtype=torch.bool, device=device)
        self._finished = Finished.none((num_slots, n_best), device=device)
        # One position more than there are steps: what is done goes on writing behind its end.
        self._lattice_token_BTK = torch.zeros(num_slots, tgt_capacity + 1, beam_size, dtype=torch.int64, device=device)
        self._lattice_parent_BTK = torch.zeros_like(self._lattice_token_BTK)
        self._run_step: Callable[[], None] = self._step
        if device.type == "cuda":
            # All slots are empty, so that what it computes meanwhile counts for nothing.
            self._run_step = record_graph(self._step, device)[0].replay

    def run(self, sources: Sequence[Sequence[int]], max_lengths: Sequence[int]) -> list[list[Hypothesis]]:
        """Search sentences.

        Args:
            sources: Token ids of each, without EOS; shorter than `src_capacity`.
            max_lengths: Largest number of tokens of each translation, EOS included; from 1 to `tgt_capacity`.

        Returns:
            What `search.beam_search` returns.

        Raises:
            MTKitError: The model gave NaN, which stays in the slots: search no more with them.
        """
        results: list[list[Hypothesis]] = [[] for _ in sources]
        # Longest first, so that what is encoded together has little padding and the last sentences are soon done.
        waiting = deque(sorted(range(len(sources)), key=lambda index: len(sources[index]), reverse=True))
        running: dict[int, int] = {}
        free = list(range(self._slot_B.shape[0]))
        while waiting or running:
            if waiting and (len(free) * SMALLEST_REFILL >= self._slot_B.shape[0] or not running):
                started = [(free.pop(), waiting.popleft()) for _ in range(min(len(free), len(waiting)))]
                running.update(started)
                self._start([slot for slot, _ in started], [(sources[index], max_lengths[index]) for _, index in started])
            for _ in range(self._steps_between_looks):
                self._run_step()
            *is_done, has_nan = torch.cat((self._is_done_B, self._has_nan.view(1))).tolist()
            if has_nan:
                refuse_nan()
            ended = [slot for slot in running if is_done[slot]]
            for slot, hypotheses in zip(ended, self._read(ended), strict=True):
                results[running.pop(slot)] = hypotheses
            free += ended
        return results

    def _start(self, slots: list[int], sentences: Sequence[tuple[Sequence[int], int]]) -> None:
        """Encode sentences, given as source and cap, and put them into free slots."""
        slots_F = torch.tensor(slots, device=self._device)
        src_FS, src_mask_FS = pad_sources([source for source, _ in sentences], device=self._device)
        cross_kv = self._model.decoder.cross_kv(self._model.encode(src_FS, src_mask_FS))
        self._cache.fill(slots_F, cross_kv, src_mask_FS)
        self._token_BK[slots_F] = BOS_ID
        self._log_prob_BK[slots_F] = self._first_log_prob_K
        self._is_done_B[slots_F] = False
        self._num_steps_B[slots_F] = 0
        self._cap_B[slots_F] = torch.tensor([cap for _, cap in sentences], device=self._device)
        self._finished.score_AN[slots_F] = NEG_INF

    @torch.no_grad()
    def _step(self) -> None:
        """Extend all hypotheses by one piece. Every tensor stays where it is, and what is done keeps its results."""
        beam_size = self._token_BK.shape[1]
        logits_RV = self._model.logits(self._model.decode_step(self._token_BK.view(-1), self._cache))
        log_probs_RV = logits_RV.float().log_softmax(dim=-1).index_fill_(1, self._forbidden, NEG_INF)
        candidates = rank_candidates(best_extensions(log_probs_RV, beam_size + 1), self._log_prob_BK)
        is_done_B1, step_B1 = self._is_done_B[:, None], self._num_steps_B[:, None]
        self._has_nan |= (candidates.log_prob_AC.isnan() & ~is_done_B1).any()
        divisor_B1 = self._penalty_T[step_B1.clamp(max=self._penalty_T.shape[0] - 1)]
        merged = merge_finished(self._finished, candidates, divisor_B1, step_B1, beam_size=beam_size)
        for old_BN, new_BN in zip(self._finished, merged, strict=True):
            old_BN.copy_(torch.where(is_done_B1, old_BN, new_BN))
        log_prob_BK, place_BK, token_BK = live_candidates(candidates, beam_size=beam_size)
        self._log_prob_BK.copy_(torch.where(is_done_B1, self._log_prob_BK, log_prob_BK))
        self._lattice_token_BTK[self._slot_B, self._num_steps_B] = token_BK
        self._lattice_parent_BTK[self._slot_B, self._num_steps_B] = place_BK
        self._token_BK.copy_(token_BK)
        self._cache.reorder(place_BK)
        self._num_steps_B += ~self._is_done_B
        self._is_done_B |= all_end(candidates, beam_size=beam_size) | is_over(
            self._log_prob_BK[:, 0],
            self._finished.score_AN[:, -1],
            is_capped_A=self._cap_B <= self._num_steps_B,
            cap_penalty_A=self._penalty_T[self._cap_B - 1],
        )

    def _read(self, slots: list[int]) -> list[list[Hypothesis]]:
        """The results of slots whose search is done."""
        if not slots:
            return []
        slots_F = torch.tensor(slots, device=self._device)
        lengths = self._num_steps_B[slots_F].tolist()
        longest = max(lengths)
        tokens_FTK, parents_FTK = (x_BTK[slots_F, :longest].tolist() for x_BTK in (self._lattice_token_BTK, self._lattice_parent_BTK))
        live_FK = self._log_prob_BK[slots_F].tolist()
        finished = [x_BN[slots_F].tolist() for x_BN in self._finished]
        return [
            read_lattice(tokens, parents, zip(*rows, strict=True), live, length=length, alpha=self._alpha, penalty=self._penalty)
            for length, tokens, parents, live, *rows in zip(lengths, tokens_FTK, parents_FTK, live_FK, *finished, strict=True)
        ]
