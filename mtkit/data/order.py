"""In which order the pairs of a corpus come: an epoch in pools, each a pure function of (number of pairs, seed, epoch, pool), in O(1) memory.

Nothing is shuffled: the pair at a place of the epoch is computed by a keyed permutation of short runs of pairs. So any place can be entered at once,
however large the corpus.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

POOL_PAIRS = 1 << 17
"""Most pairs of a pool. A pool is held in memory and sorted by length; 2^17 sentences leave little padding and take some 20 MB."""

RUN_PAIRS = 32
"""Neighbouring pairs that stay together when an epoch is cut into pools. They lie in one or two pages of a file, so that a pool of a corpus that does
not fit into memory takes some thousand reads of the disk and not some hundred thousand. Within a pool, nothing of it is left."""

_NUM_ROUNDS = 6
_MIN_HALF_BITS = 2
_ORDER_STREAM = 1  # keeps the keys apart from other random numbers of the same seed and epoch
_SHIFT_STREAM = 2


class Permutation:
    """A pseudo-random permutation of `range(size)` that is computed and not stored.

    A balanced Feistel network permutes the numbers of an even number of bits (Luby and Rackoff, 1988); a result outside the range is permuted again
    until it is inside (cycle walking: Black and Rogaway, 2002), fewer than 4 times on average. The round function is the finalizer of SplitMix64.

    Args:
        size: From 1 to 2^62.
        key: Numbers >= 0; another key gives another permutation.
    """

    def __init__(self, size: int, key: Sequence[int]) -> None:
        if not 1 <= size <= 1 << 62:
            raise ValueError(f"a permutation of {size} numbers")
        self.size = size
        half_bits = max(_MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
        self._half_bits, self._mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
        self._keys = np.random.SeedSequence(key, spawn_key=(_ORDER_STREAM,)).generate_state(_NUM_ROUNDS, np.uint64)

    def __getitem__(self, positions: Indices) -> Indices:
        """The numbers at some positions.

        Args:
            positions: (N,), each from 0 to size - 1.

        Returns:
            (N,) int64.
        """
        if len(positions) and not 0 <= positions.min() <= positions.max() < self.size:
            raise IndexError(f"positions from {positions.min()} to {positions.max()} of {self.size}")
        values = self._permute(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while len(outside):
            walked = self._permute(values[outside])
            values[outside] = walked
            outside = outside[walked >= self.size]
        return values.astype(np.int64)

    def _permute(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return left << self._half_bits | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


class Walk:
    """An order of `range(size)` in which runs of `RUN_PAIRS` numbers follow each other, the runs in a pseudo-random order, computed and not stored.

    Where the runs are cut is another random number of the key, so that two walks do not have the same runs.

    Args:
        size: At least 1.
        key: Numbers >= 0; another key gives another walk.
    """

    def __init__(self, size: int, key: Sequence[int]) -> None:
        self.size = size
        self._num_in_runs = size // RUN_PAIRS * RUN_PAIRS
        self._runs = Permutation(max(1, size // RUN_PAIRS), key)
        self._shift = int(np.random.SeedSequence(key, spawn_key=(_SHIFT_STREAM,)).generate_state(1, np.uint64)[0]) % size

    def __getitem__(self, positions: Indices) -> Indices:
        """The numbers at some positions, (N,) int64; what is left of `size` after the last whole run comes at the end."""
        if len(positions) and not 0 <= positions.min() <= positions.max() < self.size:
            raise IndexError(f"positions from {positions.min()} to {positions.max()} of {self.size}")
        numbers = positions.astype(np.int64)
        in_runs = np.flatnonzero(numbers < self._num_in_runs)
        runs, within = np.divmod(numbers[in_runs], RUN_PAIRS)
        which, places = np.unique(runs, return_inverse=True)
        numbers[in_runs] = self._runs[which][places] * RUN_PAIRS + within
        return (numbers + self._shift) % self.size


class Order(Protocol):
    """Which pairs of a corpus are in which pool."""

    @property
    def num_pairs(self) -> int:
        """Pairs of an epoch."""

    @property
    def num_pools(self) -> int:
        """Pools of an epoch, at least one."""

    def pool(self, epoch: int, number: int) -> Indices:
        """The pairs of a pool, ascending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """Which pairs are in which pool: in every epoch each pair is in one of them.

    Attributes:
        num_pairs: Of the corpus.
        seed: Of the run.
    """

    num_pairs: int
    seed: int

    @property
    def num_pools(self) -> int:
        """Pools of an epoch, at least one."""
        return _num_pools(self.num_pairs)

    def pool(self, epoch: int, number: int) -> Indices:
        """The pairs of a pool, ascending, so that reading them goes through the files once; the sizes of two pools differ by at most one.

        Args:
            epoch: From 0.
            number: Of the pool in the epoch, from 0.
        """
        first, last = _pool_bounds(self.num_pairs, number)
        walk = Walk(max(1, self.num_pairs), (self.seed, epoch))
        return np.sort(walk[np.arange(first, last)])


class MixedOrder:
    """Pools in which each of several corpora has a fixed share, whatever its size; an epoch is as many pairs as all of them have.

    Number the pairs that the run draws from 0 on, over all epochs. Of the first t, corpus c has floor(C_c * t) - floor(C_{c-1} * t), where C_c is the
    sum of the shares up to c: less than one pair away from its share of t. Its own draws go through walks of the corpus, one after the other
    over pools and epochs, so that none of its pairs comes again before all have come.

    Args:
        sizes: Pairs of each corpus, at least 1; in the order in which they are numbered.
        weights: Of each corpus, above 0; the shares are their parts of the sum.
        seed: Of the run.

    Raises:
        ValueError: The share of a corpus is less than one pair in a pool.
    """

    def __init__(self, sizes: Sequence[int], *, weights: Sequence[float], seed: int) -> None:
        self._sizes = tuple(sizes)
        self._starts = (0, *itertools.accumulate(sizes))
        self._seed = seed
        exponent = math.frexp(max(weights))[1]
        weights = [math.ldexp(weight, -exponent) for weight in weights]  # the same shares, whose sum is a number
        total = math.fsum(weights)
        self._ends = (0.0, *(end / total for end in itertools.accumulate(weights[:-1])), 1.0)
        smallest = self.num_pairs // self.num_pools * min(weights) / total
        if smallest < 1.0:
            raise ValueError(f"a corpus has a share of {smallest:.2g} pairs in a pool")

    @property
    def num_pairs(self) -> int:
        """Pairs of an epoch: of all corpora together."""
        return self._starts[-1]

    @property
    def num_pools(self) -> int:
        """Pools of an epoch, at least one."""
        return _num_pools(self.num_pairs)

    def pool(self, epoch: int, number: int) -> Indices:
        """The pairs of a pool, ascending; those of a corpus that is smaller than its part of the pool come more than once.

        Args:
            epoch: From 0.
            number: Of the pool in the epoch, from 0.
        """
        first, last = (epoch * self.num_pairs + bound for bound in _pool_bounds(self.num_pairs, number))
        parts = [
            self._starts[corpus] + self._draws(corpus, first=self._num_drawn(corpus, first), last=self._num_drawn(corpus, last))
            for corpus in range(len(self._sizes))
        ]
        return np.sort(np.concatenate(parts))

    def _num_drawn(self, corpus: int, num_draws: int) -> int:
        """How many of the first draws of the run are of a corpus."""
        return math.floor(self._ends[corpus + 1] * num_draws) - math.floor(self._ends[corpus] * num_draws)

    def _draws(self, corpus: int, *, first: int, last: int) -> Indices:
        """The draws of a corpus from one to another, in any order."""
        size = self._sizes[corpus]
        parts = [np.zeros(0, dtype=np.int64)]
        for walk in sorted({first // size, last // size}):  # all that lie between are whole
            begin, end = max(first - walk * size, 0), min(last - walk * size, size)
            parts.append(Walk(size, (self._seed, walk, corpus + 1))[np.arange(begin, end)])
        num_whole = last // size - first // size - 1
        return np.concatenate([*parts, np.tile(np.arange(size), num_whole)] if num_whole > 0 else parts)


def _num_pools(num_pairs: int) -> int:
    return max(1, -(-num_pairs // POOL_PAIRS))


def _pool_bounds(num_pairs: int, number: int) -> tuple[int, int]:
    """First pair of a pool in the epoch and the one after its last; the sizes of two pools differ by at most one."""
    num_pools = _num_pools(num_pairs)
    if not 0 <= number < num_pools:
        raise IndexError(f"pool {number} of {num_pools}")
    return num_pairs * number // num_pools, num_pairs * (number + 1) // num_pools
