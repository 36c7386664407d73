"""Batches without padding: the sentences of a micro-batch lie one after the other in a fixed number of positions.

A fixed shape lets a GPU repeat one recorded sequence of kernels. What sentences do not fill is PAD, less than one in a hundred positions.

Shapes: B sentences, M source positions, N target positions.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

BALANCE_WINDOW = 1024
"""Sentences among which long and short sources, for the length of their targets, are brought together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedShape:
    """The size of every packed micro-batch of a run.

    Attributes:
        src_tokens: M.
        tgt_tokens: N.
        max_sentences: Sentences of a micro-batch, at most.
        max_length: Tokens of a sentence, at most, on either side.
    """

    src_tokens: int
    tgt_tokens: int
    max_sentences: int
    max_length: int

    @property
    def num_slots(self) -> int:
        """Sentences in the tensors: the real ones, and those that the unused positions are divided into."""
        return self.max_sentences + -(-max(self.src_tokens, self.tgt_tokens) // self.max_length)


def packed_shape(src: Indices, tgt: Indices, *, tgt_tokens: int, longest: int = 0) -> PackedShape:
    """The shape in which the sources and targets of a corpus fill up together.

    Args:
        src: Source tokens, with EOS, of a random part of the corpus.
        tgt: Target tokens, likewise.
        tgt_tokens: Target positions of a micro-batch.
        longest: Tokens, with EOS, that a sentence outside this part may have. The next power of two above the longest is the `max_length`.
    """
    src_tokens = -(-tgt_tokens * int(src.sum()) // (int(tgt.sum()) * 8)) * 8
    longest = max(longest, int(src.max()), int(tgt.max()))
    return PackedShape(
        src_tokens=src_tokens,
        tgt_tokens=tgt_tokens,
        max_sentences=-(-2 * tgt_tokens * len(tgt) // int(tgt.sum())),
        max_length=min(max(src_tokens, tgt_tokens), 1 << longest.bit_length()),
    )


def cut_packed(src: Indices, tgt: Indices, *, shape: PackedShape, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """Put sentences into micro-batches in random order.

    Args:
        src: Source tokens of each sentence, with EOS; none is longer than the shape.
        tgt: Target tokens, likewise.
        shape: Of the micro-batches.
        rng: Decides on the order.

    Returns:
        The order of the sentences, and where in it each micro-batch starts, with the end.
    """
    order = _balanced(rng.permutation(len(src)), src * (shape.tgt_tokens / shape.src_tokens) - tgt)
    src_ends, tgt_ends = np.cumsum(src[order]), np.cumsum(tgt[order])
    starts, src_start, tgt_start = [0], 0, 0
    while starts[-1] < len(order):
        stop = min(
            starts[-1] + shape.max_sentences,
            int(np.searchsorted(src_ends, src_start + shape.src_tokens, side="right")),
            int(np.searchsorted(tgt_ends, tgt_start + shape.tgt_tokens, side="right")),
        )
        starts.append(stop)
        src_start, tgt_start = int(src_ends[stop - 1]), int(tgt_ends[stop - 1])
    return order, np.asarray(starts, dtype=np.int64)


def _balanced(order: Indices, surplus: NDArray[np.floating[Any]]) -> Indices:
    """Bring each sentence with much source for its target next to one with little, so that both sides fill up together."""
    parts = [order[:0]]
    for start in range(0, len(order), BALANCE_WINDOW):
        window = order[start : start + BALANCE_WINDOW]
        ranked = np.argsort(surplus[window], kind="stable")
        half = len(ranked) // 2
        pairs = np.stack((ranked[:half], ranked[::-1][:half]), axis=1)
        in_random_order = np.argsort(pairs[:, 0], kind="stable")
        parts += [window[pairs[in_random_order].ravel()], window[ranked[half : len(ranked) - half]]]
    return np.concatenate(parts)


def pack_side(
    ids: NDArray[np.int64], lengths: Indices, *, tokens: int, num_slots: int, max_length: int, pad: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Fill up sequences that lie one after the other.

    Args:
        ids: Tokens of all sentences, one after the other.
        lengths: Tokens of each.
        tokens: Positions.
        num_slots: Sentences in the result.
        max_length: Of a sentence.
        pad: Id of unused positions. These form sentences of their own after the real ones.

    Returns:
        Ids and positions within their sentences, [tokens], and the starts of the sentences with the end, [num_slots + 1].
    """
    used = len(ids)
    packed = np.full(tokens, pad, dtype=np.int64)
    packed[:used] = ids
    starts = np.full(num_slots + 1, tokens, dtype=np.int32)
    starts[0] = 0
    starts[1 : len(lengths) + 1] = np.cumsum(lengths)
    rest = np.arange(used, tokens, max_length)
    starts[len(lengths) : len(lengths) + len(rest)] = rest
    positions = np.arange(tokens) - np.repeat(starts[:-1], np.diff(starts))
    return packed, positions, starts
