"""How a run begins on a corpus of any size: opening it, its first batch, its speed, going on in the middle; all through the trainer's own feed."""

import contextlib
import hashlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtkit.artefacts import atomic_directory, verify_directory
from mtkit.benchmark.machine import describe_machine
from mtkit.benchmark.synthetic import synthetic_pairs, synthetic_text
from mtkit.config import to_dict
from mtkit.data.loader import PackedBatch
from mtkit.data.pools import ShardPools
from mtkit.data.preprocess import PreprocessConfig
from mtkit.data.shards import KIND, META_NAME, SHARDS_FORMAT, TOKENIZER_DIRECTORY, ShardMeta, ShardSet, ShardSetMeta
from mtkit.data.token_file import TokenFileWriter, id_dtype
from mtkit.data.tokenizer import TokenizerConfig, train_tokenizer
from mtkit.distributed import World
from mtkit.errors import MTKitError, ResourceError
from mtkit.files import write_json
from mtkit.training.config import BatchConfig
from mtkit.training.dry_run import peak_memory_mb
from mtkit.training.feed import Feed, PlacedBatch, choose_budget

SHARD_PAIRS = PreprocessConfig().shard_pairs
VOCAB_SIZE = 1000
SPARE_BYTES = 1 << 30
"""Bytes of the disk that a generated corpus leaves free."""

_TOKENIZER_LINES = 3000
_SEED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedSpeed:
    """How fast batches come when nothing is computed with them.

    Attributes:
        pairs_per_s: Sentence pairs.
        tgt_tokens_per_s: Real target tokens, EOS included.
        padding_share: Of the positions of both sides.
    """

    pairs_per_s: float
    tgt_tokens_per_s: float
    padding_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReport:
    """What was measured; each in a process of its own, after the data had been dropped from the system's cache where that is possible.

    Attributes:
        pairs: In the corpus.
        gigabytes: Size of its token files, in 10^9 bytes.
        open_s: Seconds to open it.
        first_batch_s: Seconds from there to the first batch.
        rss_at_start_mb: Peak resident memory, in 10^6 bytes, when all modules are loaded and nothing is open.
        rss_mb: Peak when the first batch is there.
        peak_rss_mb: Peak at the end, after `pools` pools.
        pools: Pools that were read for the speeds.
        padded: Speed of padded batches.
        packed: Speed of packed batches.
        resume_s: Seconds to open it and get a batch in the middle of an epoch.
        resumed_is_equal: Whether that batch was the one of a run without interruption.
        machine: Processor, threads, versions.
    """

    pairs: int
    gigabytes: float
    open_s: float
    first_batch_s: float
    rss_at_start_mb: float
    rss_mb: float
    peak_rss_mb: float
    pools: int
    padded: FeedSpeed
    packed: FeedSpeed
    resume_s: float
    resumed_is_equal: bool
    machine: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """What a process of its own has to do: open the set, go to a place, take the batches from there.

    Attributes:
        directory: The shard set.
        batch: How much goes into an update.
        is_packed: Kind of the batches.
        start: Epoch, pool and position.
        num_pools: Pools to use up; 0 ends with the first batch.
        digest_at: Epoch, pool and position of the batch to remember.
    """

    directory: Path
    batch: BatchConfig
    is_packed: bool
    start: tuple[int, int, int]
    num_pools: int
    digest_at: tuple[int, int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """What it found; times in seconds, memory in 10^6 bytes."""

    open_s: float
    first_batch_s: float
    rss_at_start_mb: float
    rss_mb: float
    peak_rss_mb: float
    speed: FeedSpeed
    digest: str


def bench_data(directory: Path, *, batch_tokens: int = 25_000, max_tokens: int = 8192, num_pools: int = 2) -> DataReport:
    """Measure a shard set.

    Args:
        directory: What `generate_shards` or `mtkit preprocess` made.
        batch_tokens: Target tokens of an update.
        max_tokens: Positions of a micro-batch.
        num_pools: Pools to read for the speeds.
    """
    shards = ShardSet.open(directory)
    source = ShardPools(shards, seed=_SEED)
    middle = source.num_pools // 2
    batch = BatchConfig(batch_tokens=batch_tokens, max_tokens=max_tokens)
    feed = Feed(source, budget=choose_budget(source, batch, world_size=1, is_packed=False), seed=_SEED, world=World())
    place = (0, middle, feed.plan(0, middle).plan.num_updates // 2)
    num_bytes = sum(file.stat().st_size for name in shards.meta.shards for file in directory.glob(f"{name.name}.*"))

    def run(*, is_packed: bool = False, start: tuple[int, int, int], num_pools: int, digest_at: tuple[int, int, int] | None = None) -> _Result:
        work = _Work(
            directory=directory,
            batch=batch,
            is_packed=is_packed,
            start=start,
            num_pools=num_pools,
            digest_at=digest_at,
        )
        _drop_from_cache(directory)
        return _in_new_process(work)

    padded = run(start=(0, 0, 0), num_pools=num_pools)
    packed = run(is_packed=True, start=(0, 0, 0), num_pools=num_pools)
    whole = run(start=(0, middle, 0), num_pools=1, digest_at=place)
    resumed = run(start=place, num_pools=0, digest_at=place)
    return DataReport(
        pairs=shards.num_pairs,
        gigabytes=num_bytes / 1e9,
        open_s=padded.open_s,
        first_batch_s=padded.first_batch_s,
        rss_at_start_mb=padded.rss_at_start_mb,
        rss_mb=padded.rss_mb,
        peak_rss_mb=padded.peak_rss_mb,
        pools=num_pools,
        padded=padded.speed,
        packed=packed.speed,
        resume_s=resumed.open_s + resumed.first_batch_s,
        resumed_is_equal=bool(whole.digest) and resumed.digest == whole.digest,
        machine=describe_machine(torch.device("cpu")),
    )


# --- the generated corpus -----------------------------------------------------------------------------------------------------------------


def generate_shards(directory: Path, *, num_pairs: int, mean_length: float = 12.0) -> None:
    """Write a shard set of ids without meaning, at the speed of the disk: every shard has the same lengths, and the same ids moved along.

    Args:
        directory: To make. If it is there and is what would be made, nothing is done.
        num_pairs: How many.
        mean_length: Target tokens of a pair.

    Raises:
        MTKitError: The directory is something else.
        ResourceError: The disk has not enough space.
    """
    config = {"num_pairs": num_pairs, "mean_length": mean_length}
    if os.path.lexists(directory):
        if verify_directory(directory, kind=KIND).config != config:
            raise MTKitError(f"{directory}: holds other data than was asked for", hint="Give another --dir, or remove it.")
        return
    tokenizer = train_tokenizer(synthetic_text(_TOKENIZER_LINES), TokenizerConfig(vocab_size=VOCAB_SIZE))
    block = synthetic_pairs(min(num_pairs, SHARD_PAIRS), vocab_size=tokenizer.tgt_vocab_size, mean_length=mean_length)
    dtype = id_dtype(tokenizer.tgt_vocab_size)
    num_tokens = int(block.src_lengths.sum()) + int(block.tgt_lengths.sum())
    _require_space(directory, round((16 + dtype.itemsize * num_tokens / len(block.src_lengths)) * num_pairs))
    rng = np.random.default_rng(_SEED)
    ids = {side: rng.integers(4, tokenizer.tgt_vocab_size, size=num_tokens).astype(dtype) for side in ("src", "tgt")}
    with atomic_directory(directory, kind=KIND, config=config) as temporary:
        metas = []
        for number, first in enumerate(range(0, num_pairs, SHARD_PAIRS)):
            count = min(SHARD_PAIRS, num_pairs - first)
            sizes = []
            for side, lengths in (("src", block.src_lengths[:count]), ("tgt", block.tgt_lengths[:count])):
                with open(temporary / f"shard-{number:05d}.{side}", "wb") as stream:
                    writer = TokenFileWriter(stream, dtype=dtype)
                    writer.write(np.roll(ids[side], 7919 * number)[: int(lengths.sum())], lengths)
                    writer.finish()
                sizes.append(writer.num_ids)
            metas.append(ShardMeta(name=f"shard-{number:05d}", num_pairs=count, num_src_tokens=sizes[0], num_tgt_tokens=sizes[1]))
        (temporary / TOKENIZER_DIRECTORY).mkdir()
        tokenizer.write_files(temporary / TOKENIZER_DIRECTORY)
        meta = ShardSetMeta(format=SHARDS_FORMAT, tokenizer=tokenizer.fingerprint, shards=tuple(metas))
        write_json(temporary / META_NAME, to_dict(meta))


def _require_space(directory: Path, num_bytes: int) -> None:
    place = next(parent for parent in Path(os.path.abspath(directory)).parents if parent.is_dir())
    free = shutil.disk_usage(place).free
    if free < num_bytes + SPARE_BYTES:
        raise ResourceError(
            f"{directory}: needs {num_bytes / 1e9:.1f} GB and {SPARE_BYTES / 1e9:.1f} GB to spare, but {place} has {free / 1e9:.1f} GB free",
            hint="Give a --dir on another disk, fewer --pairs, or a smaller --mean-length.",
        )


# --- in a process of its own --------------------------------------------------------------------------------------------------------------


def _drop_from_cache(directory: Path) -> None:
    """Make the system forget the files, as if the machine had just started, where it can be asked to."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in directory.iterdir():
        if path.is_file():
            with open(path, "rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _in_new_process(work: _Work) -> _Result:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(there, work), daemon=True)
    process.start()
    there.close()
    try:
        result: _Result | BaseException = here.recv()
    except EOFError as error:
        process.join()
        raise MTKitError(f"the process that measures ended unexpectedly (exit code {process.exitcode})") from error
    process.join()
    if isinstance(result, BaseException):
        raise result
    return result


def _run(connection: "Connection[Any, Any]", work: _Work) -> None:
    """The life of the process."""
    try:
        connection.send(measure(work))
    except MTKitError as error:
        connection.send(error)


def measure(work: _Work) -> _Result:
    """Do the work of one process, in this one."""
    rss_at_start_mb = _peak_rss_mb()
    started = time.perf_counter()
    source = ShardPools(ShardSet.open(work.directory), seed=_SEED)
    open_s = time.perf_counter() - started
    budget = choose_budget(source, work.batch, world_size=1, is_packed=work.is_packed)
    feed = Feed(source, budget=budget, seed=_SEED, world=World())
    epoch, pool, position = work.start
    with feed.prefetch(feed.plan(epoch, pool), position=position) as batches:
        placed = next(batches)
        first_batch_s, rss_mb = time.perf_counter() - started - open_s, _peak_rss_mb()
        num_pairs, num_tokens, digest, padding = 0, 0, "", []
        began = time.perf_counter()
        for item in _pools(placed, batches, work.num_pools):
            num_pairs += sum(map(len, item.planned.plan.update(item.position)))
            num_tokens += item.batch.num_tgt_tokens
            if item.position == 0:
                padding.append(item.planned.plan.padding_share)
            if _place(item) == work.digest_at:
                digest = _digest(item)
        seconds = time.perf_counter() - began
    return _Result(
        open_s=open_s,
        first_batch_s=first_batch_s,
        rss_at_start_mb=rss_at_start_mb,
        rss_mb=rss_mb,
        peak_rss_mb=max(rss_mb, _peak_rss_mb()),  # the kernel's own figure may fall by a page or two
        speed=FeedSpeed(
            pairs_per_s=num_pairs / seconds, tgt_tokens_per_s=num_tokens / seconds, padding_share=sum(padding) / len(padding) if padding else 0.0
        ),
        digest=digest,
    )


def _pools(placed: PlacedBatch, batches: Iterator[PlacedBatch], num_pools: int) -> Iterator[PlacedBatch]:
    """A batch and those after it, up to the end of some pools; of none, the batch alone."""
    while True:
        yield placed
        if placed.following[2] == 0:
            num_pools -= 1
        if num_pools <= 0:
            return
        placed = next(batches)


def _place(placed: PlacedBatch) -> tuple[int, int, int]:
    return placed.planned.pool.epoch, placed.planned.pool.number, placed.position


def _digest(placed: PlacedBatch) -> str:
    """sha256 over all that a batch is."""
    digest = hashlib.sha256(repr((placed.pair_numbers(), placed.batch.seeds)).encode())
    for batch in placed.batch.micro_batches:
        for tensor in batch.tensors() if isinstance(batch, PackedBatch) else (batch.src_BS, batch.tgt_in_BT, batch.tgt_out_BT):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _peak_rss_mb() -> float:
    """Peak resident memory of this process; the limit that `getrusage` reports on Linux may be that of the process that started it."""
    with contextlib.suppress(OSError), open("/proc/self/status", "rb") as stream:
        for line in stream:
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    return peak_memory_mb(torch.device("cpu"))
