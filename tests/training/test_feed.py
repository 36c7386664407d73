"""The updates of a run: every pair once per epoch over all pools, the same from any place on, shared by the processes."""

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtkit.data.batching import derive_budget
from mtkit.data.corpus import parse_corpus
from mtkit.data.filters import FilterConfig
from mtkit.data.loader import Batch
from mtkit.data.pools import Pool, ShardPools
from mtkit.data.shards import ShardSet
from mtkit.data.stream import StreamPools
from mtkit.distributed import World
from mtkit.errors import DataError
from mtkit.training.config import BatchConfig
from mtkit.training.feed import Feed, PlacedBatch, choose_budget

POOL_PAIRS = 50


@pytest.fixture(autouse=True)
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy corpus, 120 pairs, is three pools."""
    monkeypatch.setattr("mtkit.data.order.POOL_PAIRS", POOL_PAIRS)


@pytest.fixture(scope="module")
def shards(toy_shards: Path) -> ShardSet:
    return ShardSet.open(toy_shards)


def feed_of(shards: ShardSet, *, world: World | None = None, batch_tokens: int = 120) -> Feed:
    world = world or World()
    budget = derive_budget(batch_tokens=batch_tokens, max_tokens=60, world_size=2)
    return Feed(ShardPools(shards, seed=5), budget=budget, seed=5, world=world)


def take(feed: Feed, count: int, *, start: tuple[int, int, int] = (0, 0, 0)) -> list[PlacedBatch]:
    epoch, pool, position = start
    with feed.prefetch(feed.plan(epoch, pool), position=position) as batches:
        return list(itertools.islice(batches, count))


def place(placed: PlacedBatch) -> tuple[int, int, int]:
    return placed.planned.pool.epoch, placed.planned.pool.number, placed.position


def num_updates(feed: Feed, epoch: int) -> int:
    assert isinstance(feed.source, ShardPools)
    return sum(feed.plan(epoch, pool).plan.num_updates for pool in range(feed.source.num_pools))


def padded(placed: PlacedBatch) -> list[Batch]:
    return [batch for batch in placed.batch.micro_batches if isinstance(batch, Batch)]


def same(left: PlacedBatch, right: PlacedBatch) -> bool:
    pairs = zip(padded(left), padded(right), strict=True)
    return left.batch.seeds == right.batch.seeds and all(torch.equal(a.src_BS, b.src_BS) and torch.equal(a.tgt_in_BT, b.tgt_in_BT) for a, b in pairs)


def test_every_epoch_has_every_pair_once(shards: ShardSet) -> None:
    feed = feed_of(shards)
    counts = [num_updates(feed, epoch) for epoch in (0, 1)]
    placed = take(feed, sum(counts) + 1)
    for epoch, part in enumerate((placed[: counts[0]], placed[counts[0] : -1])):
        assert {item.planned.pool.epoch for item in part} == {epoch}
        assert sorted(number for item in part for group in item.pair_numbers() for number in group) == list(range(shards.num_pairs))
    assert [place(item) for item in placed[1:]] == [item.following for item in placed[:-1]]
    assert place(placed[-1]) == (2, 0, 0)
    assert len({seed for item in placed for seed in item.batch.seeds}) == sum(len(item.batch.seeds) for item in placed)


def test_a_packed_feed_has_every_pair_of_every_pool(shards: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.data.order.POOL_PAIRS", 5)
    longest = int(np.maximum(shards.src_lengths, shards.tgt_lengths).max())
    source = next(
        source
        for source in (ShardPools(shards, seed=seed) for seed in range(50))
        if 2 * max(map(max, source.read(0, 0).lengths)) <= longest  # a shape for the first pool alone would leave pairs out
    )
    budget = choose_budget(source, BatchConfig(batch_tokens=400, max_tokens=400), world_size=1, is_packed=True)
    feed = Feed(source, budget=budget, seed=5, world=World())
    assert isinstance(source, ShardPools)
    plans = [feed.plan(0, number).plan for number in range(source.num_pools)]
    assert sum(len(plan.indices) for plan in plans) == shards.num_pairs
    assert {plan.shape for plan in plans} == {budget.shape}


def test_skipped_pairs_are_estimated_for_the_whole_epoch(shards: ShardSet) -> None:
    longest = int(np.maximum(shards.src_lengths, shards.tgt_lengths).max())
    budget = derive_budget(batch_tokens=longest, max_tokens=longest // 2, world_size=1)
    feed = Feed(ShardPools(shards, seed=5), budget=budget, seed=5, world=World())
    planned = feed.plan(0, 0)
    assert planned.plan.num_skipped > 0
    assert feed.skipped_per_epoch(planned) == round(planned.plan.num_skipped * shards.num_pairs / len(planned.pool))


def test_the_pair_numbers_are_those_of_the_tensors(shards: ShardSet) -> None:
    for item in take(feed_of(shards), 12):
        for batch, numbers in zip(padded(item), item.pair_numbers(), strict=True):
            assert len(batch.src_BS) == len(numbers)
            for row_S, mask_S, number in zip(batch.src_BS, batch.src_mask_BS, numbers, strict=True):
                assert row_S[mask_S][:-1].tolist() == shards.src(number).tolist()


def test_from_any_place_on_it_is_the_same(shards: ShardSet) -> None:
    feed = feed_of(shards)
    whole = take(feed, num_updates(feed, 0) + 4)
    for index, item in enumerate(whole):
        rest = take(feed_of(shards), min(3, len(whole) - index), start=place(item))
        assert [place(right) for right in rest] == [place(left) for left in whole[index : index + 3]]
        assert all(same(left, right) for left, right in zip(whole[index : index + 3], rest, strict=True))


@pytest.mark.parametrize("size", [2, 4])
def test_the_processes_share_an_update_without_overlap(shards: ShardSet, size: int) -> None:
    feeds = [feed_of(shards, world=World(rank=rank, local_rank=rank, size=size)) for rank in range(size)]
    count = num_updates(feeds[0], 0)
    seen = []
    for shares in zip(*(take(feed, count) for feed in feeds), strict=True):
        numbers = shares[0].pair_numbers()
        assert all((place(share), share.pair_numbers()) == (place(shares[0]), numbers) for share in shares)
        real = [batch for share in shares for batch, weight in zip(padded(share), share.batch.weights, strict=True) if weight]
        rows = [row_S[mask_S][:-1].tolist() for batch in real for row_S, mask_S in zip(batch.src_BS, batch.src_mask_BS, strict=True)]
        assert sorted(rows) == sorted(shards.src(number).tolist() for group in numbers for number in group)
        seen += [number for group in numbers for number in group]
    assert sorted(seen) == list(range(shards.num_pairs))


def test_the_next_pool_is_read_while_this_one_is_used(shards: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = feed_of(shards, batch_tokens=20)
    has_begun = threading.Event()
    real = feed.source.read

    def read(epoch: int, number: int) -> Pool:
        if number == 1:
            has_begun.set()
        return real(epoch, number)

    monkeypatch.setattr(feed.source, "read", read)
    with feed.prefetch(feed.plan(0, 0), position=0) as batches:
        assert next(batches).planned.plan.num_updates > 10, "more than one thread has ready"
        assert has_begun.wait(timeout=10), "long before its first update is asked for"
    assert not [thread for thread in threading.enumerate() if thread.name == "mtkit-prefetch"], "the threads end"


def test_an_error_in_a_later_pool_is_raised_where_it_is_met(shards: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = feed_of(shards)
    real = feed.source.read

    def read(epoch: int, number: int) -> Pool:
        if number == 1:
            raise DataError("the disk is gone")
        return real(epoch, number)

    monkeypatch.setattr(feed.source, "read", read)
    planned = feed.plan(0, 0)
    with feed.prefetch(planned, position=0) as batches:
        for _ in range(planned.plan.num_updates):
            next(batches)
        with pytest.raises(DataError, match="the disk is gone"):
            next(batches)


@pytest.mark.parametrize("pool_pairs", [120, POOL_PAIRS])
def test_updates_per_epoch_are_exact_for_one_pool_and_else_estimated(shards: ShardSet, monkeypatch: pytest.MonkeyPatch, pool_pairs: int) -> None:
    monkeypatch.setattr("mtkit.data.order.POOL_PAIRS", pool_pairs)
    feed = feed_of(shards)
    estimate, exact = feed.updates_per_epoch(feed.plan(0, 0)), num_updates(feed, 0)
    assert estimate is not None
    assert estimate == exact if pool_pairs == 120 else abs(estimate - exact) <= 3


def test_the_numbers_of_a_plan_are_those_of_the_pool(shards: ShardSet) -> None:
    planned: Any = feed_of(shards).plan(0, 2)
    assert (planned.plan.epoch, planned.plan.pool, planned.following) == (0, 2, (1, 0))
    assert np.array_equal(np.sort(planned.plan.indices), np.arange(len(planned.pool)))


def stream_feed(toy_text: Path, toy_shards: Path, words: list[str]) -> Feed:
    source = StreamPools(parse_corpus(words), tokenizer=ShardSet.open(toy_shards).tokenizer, filters=FilterConfig())
    return Feed(source, budget=derive_budget(batch_tokens=120, max_tokens=60, world_size=2), seed=5, world=World())


def write_tsv(toy_text: Path, path: Path) -> bytes:
    sides = [(toy_text / f"train.{side}").read_bytes().split(b"\n")[:-1] for side in ("en", "de")]
    data = b"".join(b"\t".join(pair) + b"\n" for pair in zip(*sides, strict=True))
    path.write_bytes(data)
    return data


def test_a_stream_is_fed_epoch_after_epoch_and_a_pipe_once(toy_text: Path, toy_shards: Path, tmp_path: Path) -> None:
    data = write_tsv(toy_text, tmp_path / "train.tsv")
    feed = stream_feed(toy_text, toy_shards, [str(tmp_path / "train.tsv")])
    placed = take(feed, 40)
    assert [place(item) for item in placed[1:]] == [item.following for item in placed[:-1]]
    first = [item for item in placed if item.planned.pool.epoch == 0]
    assert sorted(number for item in first for group in item.pair_numbers() for number in group) == list(range(120))
    assert placed[-1].planned.pool.epoch > 1
    os.mkfifo(tmp_path / "pipe.tsv")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe.tsv").write_bytes(data))
    writer.start()
    piped = take(stream_feed(toy_text, toy_shards, [str(tmp_path / "pipe.tsv")]), 1000)
    writer.join()
    assert [place(item) for item in piped] == [place(item) for item in first]
    assert all(same(left, right) for left, right in zip(piped, first, strict=True))
    assert piped[-1].following == (1, 0, 0)


def test_updates_per_epoch_of_a_stream_are_known_when_it_is_one_pool(
    toy_text: Path, toy_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tsv(toy_text, tmp_path / "train.tsv")
    feed = stream_feed(toy_text, toy_shards, [str(tmp_path / "train.tsv")])
    assert [feed.updates_per_epoch(feed.plan(0, number)) for number in range(3)] == [None] * 3
    assert feed.skipped_per_epoch(feed.plan(0, 0)) == feed.plan(0, 0).plan.num_skipped
    assert feed.source.longest == 250
    monkeypatch.setattr("mtkit.data.order.POOL_PAIRS", 120)
    feed = stream_feed(toy_text, toy_shards, [str(tmp_path / "train.tsv")])
    planned = feed.plan(0, 0)
    assert feed.updates_per_epoch(planned) == planned.plan.num_updates


def test_a_pipe_that_says_no_more_does_not_keep_the_run_from_ending(
    toy_text: Path, toy_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtkit.data.loader.CLOSE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("mtkit.data.stream.HEAD_ROWS", 10)
    data = write_tsv(toy_text, tmp_path / "train.tsv")
    os.mkfifo(tmp_path / "pipe.tsv")
    may_end = threading.Event()

    def write() -> None:
        with open(tmp_path / "pipe.tsv", "wb") as stream:
            stream.write(b"\n".join(data.split(b"\n")[:110]) + b"\n")
            stream.flush()
            may_end.wait(timeout=30)

    writer = threading.Thread(target=write)
    writer.start()
    assert len(take(stream_feed(toy_text, toy_shards, [str(tmp_path / "pipe.tsv")]), 2)) == 2
    waiting = [thread for thread in threading.enumerate() if thread.name == "mtkit-prefetch"]
    assert len(waiting) == 1, "only the one that reads"
    may_end.set()
    for thread in (writer, *waiting):
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_a_pool_behind_an_empty_one_is_the_same_when_it_is_asked_for_itself(toy_text: Path, toy_shards: Path, tmp_path: Path) -> None:
    """A run that was stopped in the middle of it goes on by its own number."""
    pairs = zip(*((toy_text / f"train.{side}").read_text().split("\n")[:-1] for side in ("en", "de")), strict=True)
    (tmp_path / "gap.tsv").write_text("\t\n" * POOL_PAIRS + "".join(f"{src}\t{tgt}\n" for src, tgt in pairs))

    def feed() -> Feed:
        source = StreamPools(parse_corpus([str(tmp_path / "gap.tsv")]), tokenizer=ShardSet.open(toy_shards).tokenizer, filters=FilterConfig())
        return Feed(source, budget=derive_budget(batch_tokens=120, max_tokens=60, world_size=1), seed=5, world=World())

    whole = take(feed(), 6)
    first = whole[0].planned
    assert (first.pool.number, first.plan.pool) == (1, 1)
    for position in (1, 3):
        rest = take(feed(), 6 - position, start=(0, 1, position))
        assert [batch.pair_numbers() for batch in rest] == [batch.pair_numbers() for batch in whole[position:]]
        assert [batch.batch.seeds for batch in rest] == [batch.batch.seeds for batch in whole[position:]]
