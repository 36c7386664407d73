"""Which sentences go into which batch: a pure function of (lengths, budget, seed, epoch, pool).

An epoch comes in pools of pairs (`order.py`), and each pool has a plan of its own. Pairs of similar target and source length share a micro-batch, so
that little of it is padding; the micro-batches of the pool then come in random order. One update (optimizer step) takes the next `micro_per_update`
micro-batches, whatever the number of processes: rank r of w computes those at positions r, r + w, ... of the update. So 1 process x 4 micro-batches
and 4 processes x 1 give the same gradient.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mtkit.data.packing import PackedShape, cut_packed, packed_shape
from mtkit.errors import DataError

Lengths = NDArray[np.int32]
Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How large a micro-batch may be.

    Attributes:
        micro_per_update: Micro-batches in one update, over all processes; a multiple of the world size.
        tgt_tokens: Target positions, padding included, in one micro-batch.
        max_tokens: Positions of either side, padding included, that one device holds at once.
        shape: Of packed micro-batches; None = padded ones.
    """

    micro_per_update: int
    tgt_tokens: int
    max_tokens: int
    shape: PackedShape | None = None


def derive_budget(*, batch_tokens: int, max_tokens: int, world_size: int) -> Budget:
    """Split an update of `batch_tokens` target tokens into the fewest micro-batches that the devices can hold.

    The number of micro-batches is a multiple of `world_size` and each holds an equal part, so that the update stays the same size on any number of
    devices.

    Args:
        batch_tokens: Target tokens of one update.
        max_tokens: Positions that one device holds at once.
        world_size: Number of processes.

    Returns:
        Of padded micro-batches; `with_packing` makes one of packed ones of it.
    """
    smallest = -(-batch_tokens // max_tokens)
    micro_per_update = -(-smallest // world_size) * world_size
    return Budget(micro_per_update=micro_per_update, tgt_tokens=max(1, batch_tokens // micro_per_update), max_tokens=max_tokens)


def with_packing(budget: Budget, src_lengths: Lengths, tgt_lengths: Lengths, *, longest: int = 0) -> Budget:
    """The same budget for packed micro-batches.

    Args:
        budget: For padded ones.
        src_lengths: Source tokens, without EOS, of a random part of the corpus.
        tgt_lengths: Target tokens, likewise.
        longest: Tokens, without EOS, that a sentence outside this part may have.
    """
    src, tgt = src_lengths.astype(np.int64) + 1, tgt_lengths.astype(np.int64) + 1
    # Where sources are the longer side, they must fit too; the source positions of a shape are a multiple of 8.
    within = budget.max_tokens // 8 * 8 * int(tgt.sum()) // int(src.sum())
    return dataclasses.replace(budget, shape=packed_shape(src, tgt, tgt_tokens=max(1, min(budget.tgt_tokens, within)), longest=longest + 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """The batches of one pool.

    Attributes:
        epoch: It belongs to, from 0.
        pool: Its number in the epoch, from 0.
        indices: Numbers of pairs within the pool, micro-batch after micro-batch.
        starts: Where each micro-batch begins in `indices`, and the end; length = number of micro-batches + 1.
        micro_per_update: Micro-batches in one update.
        num_skipped: Pairs left out because one alone exceeds the budget.
        padding_share: Share of positions, both sides, that are padding; 0 to 1.
        shape: Of the micro-batches, if they are packed.
    """

    epoch: int
    pool: int
    indices: Indices
    starts: Indices
    micro_per_update: int
    num_skipped: int
    padding_share: float
    shape: PackedShape | None = None

    @property
    def num_updates(self) -> int:
        """Updates in the pool; the last one may hold fewer micro-batches."""
        return -(-(len(self.starts) - 1) // self.micro_per_update)

    def update(self, position: int) -> list[Indices]:
        """The micro-batches of the update at `position` (from 0), as arrays of numbers of pairs within the pool."""
        first = position * self.micro_per_update
        last = min(first + self.micro_per_update, len(self.starts) - 1)
        return [self.indices[self.starts[index] : self.starts[index + 1]] for index in range(first, last)]

    def largest(self, src_lengths: Lengths, tgt_lengths: Lengths) -> Indices:
        """The micro-batch with the most positions: what decides whether the memory suffices."""

        def positions(index: int) -> int:
            batch = self.indices[self.starts[index] : self.starts[index + 1]]
            return len(batch) * int(src_lengths[batch].max() + tgt_lengths[batch].max() + 2)

        index = max(range(len(self.starts) - 1), key=positions)
        return self.indices[self.starts[index] : self.starts[index + 1]]


def plan_pool(src_lengths: Lengths, tgt_lengths: Lengths, *, budget: Budget, seed: int, epoch: int, pool: int) -> PoolPlan:
    """Plan the batches of one pool.

    Args:
        src_lengths: Tokens of each source, without EOS.
        tgt_lengths: Tokens of each target, without EOS.
        budget: Size of a micro-batch.
        seed: Seed of the run.
        epoch: Number of the epoch, from 0.
        pool: Number of the pool in the epoch, from 0.

    Raises:
        DataError: No pair fits into the budget.
    """
    rng = np.random.default_rng([seed, epoch, pool])
    src, tgt = src_lengths.astype(np.int64) + 1, tgt_lengths.astype(np.int64) + 1
    fits = np.maximum(src, tgt) <= budget.max_tokens
    if budget.shape is not None:
        fits &= (np.maximum(src, tgt) <= budget.shape.max_length) & (src <= budget.shape.src_tokens) & (tgt <= budget.shape.tgt_tokens)
    (kept,) = fits.nonzero()
    if not len(kept):
        raise DataError(
            f"none of the {len(src)} training pairs fits into max_tokens = {budget.max_tokens} positions",
            hint="Raise batch.max_tokens, or look at the data with `mtkit inspect`.",
        )
    if budget.shape is None:
        order = kept[np.lexsort((rng.random(len(kept)), src[kept], tgt[kept]))]
        starts = _cut(src[order], tgt[order], budget)
        sizes = np.diff(starts)
        cells = int((sizes * (np.maximum.reduceat(src[order], starts[:-1]) + np.maximum.reduceat(tgt[order], starts[:-1]))).sum())
    else:
        within, starts = cut_packed(src[kept], tgt[kept], shape=budget.shape, rng=rng)
        order, sizes = kept[within], np.diff(starts)
        cells = len(sizes) * (budget.shape.src_tokens + budget.shape.tgt_tokens)
    shuffle = rng.permutation(len(sizes))
    return PoolPlan(
        epoch=epoch,
        pool=pool,
        indices=np.concatenate([order[starts[index] : starts[index + 1]] for index in shuffle]),
        starts=np.concatenate(([0], np.cumsum(sizes[shuffle]))).astype(np.int64),
        micro_per_update=budget.micro_per_update,
        num_skipped=len(src) - len(order),
        padding_share=1.0 - float((src[order] + tgt[order]).sum()) / cells,
        shape=budget.shape,
    )


def batches_by_length(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Group sentences of similar length for work without gradients; the longest come first, so that memory runs out at once or never.

    Args:
        lengths: Positions that each sentence takes.
        max_tokens: Positions of a batch, padding included; a longer sentence gets a batch of its own.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _cut(src: Indices, tgt: Indices, budget: Budget) -> Indices:
    """Cut sentences sorted by target length into the largest runs within the budget; returns the starts and the end."""
    starts = [0]
    while starts[-1] < len(src):
        start = starts[-1]
        stop = start + max(1, budget.tgt_tokens // int(tgt[start]))
        counts = np.arange(1, len(src[start:stop]) + 1)
        fits = (counts * np.maximum.accumulate(src[start:stop]) <= budget.max_tokens) & (counts * tgt[start:stop] <= budget.tgt_tokens)
        starts.append(start + max(1, int(fits.sum())))
    return np.asarray(starts, dtype=np.int64)
