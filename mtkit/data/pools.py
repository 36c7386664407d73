"""The pairs of one pool in memory. Training reads its data pool by pool: indices -> `Pool` -> plan of its batches (`batching.py`)."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mtkit.data import order as orders
from mtkit.data.order import EpochOrder, Order
from mtkit.data.shards import ShardSet
from mtkit.data.token_file import Ids

MIN_CORRELATED = 1000
"""Pairs from which on the correlation of lengths is not chance."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Sentence pairs as flat arrays, numbered from 0 within the pool.

    Attributes:
        epoch: It belongs to, from 0.
        number: Of the pool in its epoch, from 0.
        is_last: Whether the epoch ends with it.
        indices: Number of each pair in the corpus, (N,) int64.
        src_ids: The source ids of all pairs, one after the other, without EOS.
        src_offsets: (N + 1,) int64: the source of pair i is src_ids[src_offsets[i]:src_offsets[i + 1]].
        tgt_ids: The same of the targets.
        tgt_offsets: The same of the targets.
    """

    epoch: int
    number: int
    is_last: bool
    indices: NDArray[np.int64]
    src_ids: Ids
    src_offsets: NDArray[np.int64]
    tgt_ids: Ids
    tgt_offsets: NDArray[np.int64]

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.indices)

    def src(self, index: int) -> Ids:
        """Source ids of a pair, without EOS."""
        return self.src_ids[self.src_offsets[index] : self.src_offsets[index + 1]]

    def tgt(self, index: int) -> Ids:
        """Target ids of a pair, without EOS."""
        return self.tgt_ids[self.tgt_offsets[index] : self.tgt_offsets[index + 1]]

    @cached_property
    def src_lengths(self) -> NDArray[np.int32]:
        """Source tokens of each pair, without EOS, (N,)."""
        return np.diff(self.src_offsets).astype(np.int32)

    @cached_property
    def tgt_lengths(self) -> NDArray[np.int32]:
        """Target tokens of each pair, without EOS, (N,)."""
        return np.diff(self.tgt_offsets).astype(np.int32)

    @property
    def lengths(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Source and target tokens of each pair."""
        return self.src_lengths, self.tgt_lengths

    def length_correlation(self) -> float | None:
        """Pearson's correlation of the lengths of sources and targets; None where it says nothing: of few pairs, or where all have one length."""
        src, tgt = self.lengths
        if len(self) < MIN_CORRELATED or src.min() == src.max() or tgt.min() == tgt.max():
            return None
        return float(np.corrcoef(src, tgt)[0, 1])

    def digest(self) -> str:
        """sha256 over all pairs, in their order."""
        digest = hashlib.sha256()
        for array in (self.indices, self.src_ids, self.src_offsets, self.tgt_ids, self.tgt_offsets):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


class PoolSource(Protocol):
    """Where pools come from. What it gives is a pure function of (epoch, number)."""

    @property
    def num_pairs(self) -> int | None:
        """Pairs of an epoch; None = not known."""

    @property
    def num_epochs(self) -> int | None:
        """How often the data can be read from its beginning; None = any number of times."""

    @property
    def longest(self) -> int:
        """Tokens, without EOS, that a sentence may have; 0 = not known. An upper bound where finding the longest would take all the data."""

    def read(self, epoch: int, number: int) -> Pool:
        """Read a pool into memory. If it has no pairs, it is the next one that has some."""

    def close(self) -> None:
        """End a read that is going on in another thread. Nothing need be readable afterwards."""


class ShardPools:
    """The pools of a shard set.

    Args:
        shards: The data.
        seed: Of the run.
        order: Which pairs are in which pool; None = every pair once per epoch.

    Attributes:
        num_epochs: None: any number.
    """

    num_epochs = None

    def __init__(self, shards: ShardSet, *, seed: int, order: Order | None = None) -> None:
        self._shards = shards
        self._order = order or EpochOrder(num_pairs=shards.num_pairs, seed=seed)

    @property
    def num_pairs(self) -> int:
        """Pairs of an epoch."""
        return self._order.num_pairs

    @property
    def num_pools(self) -> int:
        """Pools of an epoch."""
        return self._order.num_pools

    @property
    def longest(self) -> int:
        """Tokens, without EOS, that a sentence may have. Where no filter bounds it, all lengths are looked at."""
        is_quick = self._shards.num_pairs <= orders.POOL_PAIRS
        return max(self._shards.max_lengths()) if is_quick or not self._shards.length_limit else self._shards.length_limit

    def read(self, epoch: int, number: int) -> Pool:
        """Read a pool into memory.

        Args:
            epoch: From 0.
            number: Of the pool in the epoch, from 0.

        Raises:
            ArtefactError: A shard is damaged.
        """
        indices = self._order.pool(epoch, number)
        (src_ids, src_offsets), (tgt_ids, tgt_offsets) = self._shards.gather(indices)
        return Pool(
            epoch=epoch,
            number=number,
            is_last=number + 1 == self.num_pools,
            indices=indices,
            src_ids=src_ids,
            src_offsets=src_offsets,
            tgt_ids=tgt_ids,
            tgt_offsets=tgt_offsets,
        )

    def close(self) -> None:
        """Do nothing: a read takes no time that would matter."""
