"""The updates of a run, from any place on, computed ahead of their use.

Two threads do it: one reads and plans the next pool while the other makes tensors of this one, so that there is no wait between pools.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from mtkit.data.batching import Budget, PoolPlan, derive_budget, plan_pool, with_packing
from mtkit.data.loader import CLOSE_TIMEOUT_S, Prefetcher
from mtkit.data.pools import Pool, PoolSource
from mtkit.distributed import World
from mtkit.training.config import BatchConfig
from mtkit.training.step import UpdateBatch, update_batches

PIPE_TIMEOUT_S = 0.2
"""Seconds that a thread which reads a pipe has to end: it probably waits for more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPool:
    """A pool in memory and its batches.

    Attributes:
        pool: The pairs.
        plan: Their batches.
        digest: Of the pairs.
    """

    pool: Pool
    plan: PoolPlan
    digest: str

    @property
    def following(self) -> tuple[int, int]:
        """Epoch and number of the pool after it."""
        return (self.pool.epoch + 1, 0) if self.pool.is_last else (self.pool.epoch, self.pool.number + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedBatch:
    """What one process computes for one update, and where the update is in the run.

    Attributes:
        batch: This process's share.
        planned: The pool.
        position: Of the update in the pool, from 0.
    """

    batch: UpdateBatch
    planned: PlannedPool
    position: int

    @property
    def following(self) -> tuple[int, int, int]:
        """Epoch, pool and position of the update after it."""
        if self.position + 1 < self.planned.plan.num_updates:
            return self.planned.pool.epoch, self.planned.pool.number, self.position + 1
        return *self.planned.following, 0

    def tgt_shapes(self) -> list[list[int]]:
        """Sentences and target positions of each micro-batch, over all processes."""
        lengths = self.planned.pool.tgt_lengths
        return [[len(group), int(lengths[group].max()) + 1] for group in self.planned.plan.update(self.position)]

    def pair_numbers(self) -> list[list[int]]:
        """Numbers, in the corpus, of the pairs of each micro-batch, over all processes."""
        return [self.planned.pool.indices[group].tolist() for group in self.planned.plan.update(self.position)]


def choose_budget(source: PoolSource, config: BatchConfig, *, world_size: int, is_packed: bool) -> Budget:
    """The size of a micro-batch.

    Args:
        source: The training data. Packed micro-batches get a shape for its first pool, with room for the longest sentence of all.
        config: How much goes into an update.
        world_size: The number of micro-batches in an update becomes a multiple of it.
        is_packed: Whether micro-batches are packed.
    """
    budget = derive_budget(batch_tokens=config.batch_tokens, max_tokens=config.max_tokens, world_size=world_size)
    return with_packing(budget, *source.read(0, 0).lengths, longest=source.longest) if is_packed else budget


class Feed:
    """Gives a process its share of every update; a pure function of the arguments and of the place.

    Args:
        source: The training data.
        budget: Size of a micro-batch.
        seed: Of the run.
        world: This process among all.
    """

    def __init__(self, source: PoolSource, *, budget: Budget, seed: int, world: World) -> None:
        self.source = source
        self.budget = budget
        self._seed = seed
        self._world = world

    def plan(self, epoch: int, pool: int, *, budget: Budget | None = None) -> PlannedPool:
        """Read a pool and plan its batches.

        Args:
            epoch: From 0.
            pool: Its number in the epoch, from 0.
            budget: Size of a micro-batch, if it is another one for this pool.

        Raises:
            ArtefactError: The data is damaged.
            DataError: No pair fits into the budget.
        """
        pairs = self.source.read(epoch, pool)
        # By the numbers of the pool itself, which is a later one where some were empty: a run that goes on asks for that one.
        plan = plan_pool(pairs.src_lengths, pairs.tgt_lengths, budget=budget or self.budget, seed=self._seed, epoch=pairs.epoch, pool=pairs.number)
        return PlannedPool(pool=pairs, plan=plan, digest=pairs.digest())

    def updates_per_epoch(self, planned: PlannedPool) -> int | None:
        """Updates of an epoch: exact where an epoch is one pool, else estimated from the given pool by its share of the pairs, if that is known."""
        if planned.pool.is_last and planned.pool.number == 0:
            return planned.plan.num_updates
        return None if self.source.num_pairs is None else round(planned.plan.num_updates * self.source.num_pairs / len(planned.pool))

    def skipped_per_epoch(self, planned: PlannedPool) -> int:
        """Pairs of an epoch that no batch can hold: exact where an epoch is one pool, else estimated likewise."""
        num_skipped = planned.plan.num_skipped
        return num_skipped if self.source.num_pairs is None else round(num_skipped * self.source.num_pairs / len(planned.pool))

    def batches(self, pools: Iterator[PlannedPool], *, position: int = 0) -> Iterator[PlacedBatch]:
        """This process's share of the updates of some pools, one pool after the other.

        Args:
            pools: In order.
            position: The update of the first pool to begin with.
        """
        for planned in pools:
            shares = update_batches(planned.pool, planned.plan, world=self._world, seed=self._seed, position=position)
            for number, batch in enumerate(shares, start=position):
                yield PlacedBatch(batch=batch, planned=planned, position=number)
            position = 0

    @contextlib.contextmanager
    def prefetch(self, planned: PlannedPool, *, position: int) -> Iterator[Iterator[PlacedBatch]]:
        """The updates from a place on, epoch after epoch, without end if the data can be read again; the threads end with the `with` block.

        Args:
            planned: The pool to begin with.
            position: The update of it to begin with.
        """
        with Prefetcher(self._pools_from(planned), depth=1) as pools:
            del planned  # a pool is freed when it is used up
            with Prefetcher(self.batches(pools, position=position)) as batches:
                try:
                    yield batches
                finally:
                    self.source.close()
                    pools.close(timeout_s=CLOSE_TIMEOUT_S if self.source.num_epochs is None else PIPE_TIMEOUT_S)

    def _pools_from(self, planned: PlannedPool) -> Iterator[PlannedPool]:
        num_epochs = self.source.num_epochs
        yield planned
        while num_epochs is None or planned.following[0] < num_epochs:
            planned = self.plan(*planned.following)
            yield planned
