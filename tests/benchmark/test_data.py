"""The generated corpus is a real shard set; what is measured is the trainer's own feed, from the place that is said."""

import dataclasses
import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from mtkit.benchmark import data as module
from mtkit.benchmark.data import bench_data, generate_shards
from mtkit.data.shards import ShardSet
from mtkit.errors import MTKitError, ResourceError
from mtkit.training.config import BatchConfig

NUM_PAIRS = 250
BATCH = BatchConfig(batch_tokens=200, max_tokens=100)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three shards, and five pools to an epoch."""
    monkeypatch.setattr(module, "SHARD_PAIRS", 100)
    monkeypatch.setattr(module, "_TOKENIZER_LINES", 300)
    monkeypatch.setattr(module, "VOCAB_SIZE", 400)
    monkeypatch.setattr("mtkit.data.order.POOL_PAIRS", 50)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    generate_shards(tmp_path / "shards", num_pairs=NUM_PAIRS, mean_length=10)
    return tmp_path / "shards"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[module._Work]:
    """Measures in this process, where pools are small; gives what was measured."""
    seen: list[module._Work] = []

    def run(work: module._Work) -> module._Result:
        seen.append(work)
        return module.measure(work)

    monkeypatch.setattr(module, "_in_new_process", run)
    return seen


def test_the_generated_corpus_is_a_shard_set_with_different_shards(directory: Path) -> None:
    shards = ShardSet.open(directory, verify="full")
    assert [shard.num_pairs for shard in shards.meta.shards] == [100, 100, 50]
    assert shards.num_pairs == NUM_PAIRS
    (src_ids, _), (tgt_ids, _) = shards.gather(np.arange(NUM_PAIRS))
    assert min(src_ids.min(), tgt_ids.min()) >= 4
    assert float(shards.tgt_lengths.mean()) == pytest.approx(10, rel=0.1)
    assert shards.src(0).tolist() != shards.src(100).tolist()


def test_it_is_generated_once(directory: Path) -> None:
    before = (directory / "shard-00000.src").stat().st_mtime_ns
    generate_shards(directory, num_pairs=NUM_PAIRS, mean_length=10)
    assert (directory / "shard-00000.src").stat().st_mtime_ns == before
    with pytest.raises(MTKitError, match="holds other data than was asked for"):
        generate_shards(directory, num_pairs=NUM_PAIRS + 1, mean_length=10)


def test_too_small_a_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"big: needs \d+\.\d GB and 1\.1 GB to spare, but .* has \d+\.\d GB free"):
        generate_shards(tmp_path / "big", num_pairs=10**13)
    assert list(tmp_path.iterdir()) == []


def test_what_is_measured(directory: Path, here: list[module._Work]) -> None:
    report = bench_data(directory, batch_tokens=100, max_tokens=60, num_pools=2)
    shards = ShardSet.open(directory)
    assert report.pairs == NUM_PAIRS
    assert report.gigabytes == pytest.approx(sum(path.stat().st_size for path in directory.glob("shard-*")) / 1e9)
    assert report.resumed_is_equal
    assert report.rss_at_start_mb <= report.rss_mb <= report.peak_rss_mb
    for speed in (report.padded, report.packed):
        assert speed.tgt_tokens_per_s / speed.pairs_per_s == pytest.approx(float(shards.tgt_lengths.mean()) + 1, rel=0.1)
    padded, packed, whole, resumed = here
    assert (padded.start, padded.num_pools, packed.is_packed) == ((0, 0, 0), 2, True)
    assert whole.start == (0, 2, 0), "the middle pool of five"
    assert resumed.start == resumed.digest_at == whole.digest_at
    assert resumed.start[2] > 0


def test_another_batch_is_not_equal(directory: Path, here: list[module._Work], monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.measure
    monkeypatch.setattr(
        module, "measure", lambda work: real(work if work.num_pools else dataclasses.replace(work, start=(0, 2, 0), digest_at=(0, 2, 0)))
    )
    assert not bench_data(directory, batch_tokens=100, max_tokens=60, num_pools=1).resumed_is_equal
    assert len(here) == 4


def test_a_process_of_its_own_measures(directory: Path) -> None:
    work = module._Work(
        directory=directory, batch=BatchConfig(batch_tokens=200, max_tokens=100), is_packed=False, start=(0, 0, 3), num_pools=0, digest_at=(0, 0, 3)
    )
    result = module._in_new_process(work)
    assert len(result.digest) == 64
    assert 0 < result.rss_at_start_mb <= result.rss_mb


def test_an_error_of_the_process_is_handed_on(directory: Path) -> None:
    work = module._Work(
        directory=directory, batch=BatchConfig(batch_tokens=200, max_tokens=100), is_packed=False, start=(0, 0, 0), num_pools=0, digest_at=None
    )
    (directory / "shard-00000.src").unlink()
    here, there = multiprocessing.Pipe()
    module._run(there, work)
    error = here.recv()
    assert isinstance(error, MTKitError)
    assert "shard-00000.src: is missing" in error.message
