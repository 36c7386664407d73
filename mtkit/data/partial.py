"""Where a shard set grows until it is complete: a hidden directory beside the output, from which an interrupted run can go on.

.shards.partial/
  job.json            what is being made from what; a run for something else starts anew
  lock                held by the process that works here
  tokenizer/          for worker processes to load
  shard-00000.src     the token files
  shard-00000.tgt
  shard-00000.hashes  hashes of the pairs kept, when duplicates are looked for
  shard-00000.json    the record of the shard, written last: without it, the shard does not count
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtkit.config import from_dict, to_dict
from mtkit.data.blocks import EncodedBlock
from mtkit.data.shards import ShardMeta
from mtkit.data.token_file import TokenFileWriter, id_dtype
from mtkit.data.tokenizer import UNK_ID, Side, Tokenizer
from mtkit.errors import ArtefactError, ConfigError, DataError, MTKitError
from mtkit.files import atomic_file, read_json, sha256_file, write_json

JOB_NAME = "job.json"
LOCK_NAME = "lock"
HASHES_SUFFIX = ".hashes"

_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """What is known of one finished shard."""

    meta: ShardMeta
    """Its name and sizes."""

    num_read: int
    """Pairs read for it."""

    num_src_unknown: int
    """Source tokens that are unknown, or single bytes of a character without a piece."""

    num_tgt_unknown: int
    """The same of the target."""

    dropped: dict[str, int]
    """Reason -> pairs dropped."""

    by_source: dict[str, int]
    """Number of a source in the corpus -> pairs kept from it."""

    sha256: dict[str, str]
    """File name -> sha256."""


class PartialShards:
    """The finished shards of an unfinished shard set.

    Attributes:
        directory: Where they are.
        records: Those finished so far, in order and without a gap.
    """

    def __init__(self, directory: Path, *, records: list[ShardRecord]) -> None:
        self.directory = directory
        self.records = records

    def write_shard(self, blocks: Iterable[EncodedBlock], *, tokenizer: Tokenizer) -> None:
        """Write the next shard from its blocks; it counts once its record is there."""
        name = shard_name(len(self.records))
        paths = {side: self.directory / f"{name}.{side}" for side in ("src", "tgt")}
        src_is_unknown_V, tgt_is_unknown_V = unknown_ids(tokenizer, "src"), unknown_ids(tokenizer, "tgt")
        num_read = num_pairs = num_src_unknown = num_tgt_unknown = 0
        dropped: dict[str, int] = {}
        by_source: dict[str, int] = {}
        hashes: list[NDArray[np.uint64]] = []
        with atomic_file(paths["src"]) as src_stream, atomic_file(paths["tgt"]) as tgt_stream:
            src_writer = TokenFileWriter(src_stream, dtype=id_dtype(tokenizer.src_vocab_size))
            tgt_writer = TokenFileWriter(tgt_stream, dtype=id_dtype(tokenizer.tgt_vocab_size))
            for block in blocks:
                src_writer.write(block.src_ids, block.src_lengths_N)
                tgt_writer.write(block.tgt_ids, block.tgt_lengths_N)
                num_read += block.num_read
                num_pairs += len(block.src_lengths_N)
                by_source[str(block.source)] = by_source.get(str(block.source), 0) + len(block.src_lengths_N)
                num_src_unknown += int(np.count_nonzero(src_is_unknown_V[block.src_ids]))
                num_tgt_unknown += int(np.count_nonzero(tgt_is_unknown_V[block.tgt_ids]))
                for reason, number in block.dropped.items():
                    dropped[reason] = dropped.get(reason, 0) + number
                if block.hashes_N is not None:
                    hashes.append(block.hashes_N)
            src_writer.finish()
            tgt_writer.finish()
        files = list(paths.values())
        if hashes:
            files.append(self.directory / f"{name}{HASHES_SUFFIX}")
            with atomic_file(files[-1]) as stream:
                stream.write(np.concatenate(hashes).astype("<u8", copy=False).tobytes())
        record = ShardRecord(
            meta=ShardMeta(name=name, num_pairs=num_pairs, num_src_tokens=src_writer.num_ids, num_tgt_tokens=tgt_writer.num_ids),
            num_read=num_read,
            num_src_unknown=num_src_unknown,
            num_tgt_unknown=num_tgt_unknown,
            dropped=dropped,
            by_source=by_source,
            sha256={file.name: sha256_file(file) for file in files},
        )
        write_json(self.directory / f"{name}.json", to_dict(record))
        self.records.append(record)

    def hashes(self) -> Iterator[NDArray[np.uint64]]:
        """The hashes of the pairs kept so far, shard by shard; none where duplicates are not looked for."""
        for record in self.records:
            path = self.directory / f"{record.meta.name}{HASHES_SUFFIX}"
            if path.name in record.sha256:
                yield np.fromfile(path, dtype="<u8").astype(np.uint64)


@contextmanager
def partial_shards(output: Path, *, job: str | None) -> Iterator[PartialShards]:
    """The partial shards of an output for the time of the block, with those that an earlier run for the same job has finished.

    When the block ends well, the directory is removed. When it raises, the directory stays only if a later run can go on from it: a shard is
    finished, the job has a name, and the input itself is not at fault.

    Args:
        output: The directory that is to be made.
        job: Stands for everything that the shards depend on; None if the input cannot be read a second time.

    Raises:
        MTKitError: Another process is making the same output, or the place cannot be written.
    """
    directory = partial_directory(output)
    with _locked(directory):
        records = _finished_records(directory) if job is not None and _read_job(directory) == job else []
        kept = {LOCK_NAME, *(name for record in records for name in (f"{record.meta.name}.json", *record.sha256))}
        _remove_others(directory, kept)
        write_json(directory / JOB_NAME, {"job": job})
        partial = PartialShards(directory, records=records)
        try:
            yield partial
        except BaseException as error:
            if job is None or not partial.records or isinstance(error, DataError):
                shutil.rmtree(directory, ignore_errors=True)
            raise
        shutil.rmtree(directory, ignore_errors=True)


def partial_directory(output: Path) -> Path:
    """The hidden directory beside `output`."""
    target = Path(os.path.realpath(output))
    return target.with_name(f".{target.name}.partial")


def shard_name(index: int) -> str:
    """The name of a shard; its files add a suffix."""
    return f"shard-{index:05d}"


def unknown_ids(tokenizer: Tokenizer, side: Side) -> NDArray[np.bool_]:
    """Which ids of a vocabulary are unknown, or single bytes of a character that has no piece."""
    vocab_size = tokenizer.src_vocab_size if side == "src" else tokenizer.tgt_vocab_size
    pieces = tokenizer.pieces(range(vocab_size), side)
    return np.array([index == UNK_ID or _BYTE_PIECE.fullmatch(piece) is not None for index, piece in enumerate(pieces)], dtype=np.bool_)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Make the directory and hold its lock, which the kernel gives up when this process ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise MTKitError(f"{directory}: cannot be written: {error.strerror or error}") from error
    try:
        with suppress(OSError):  # a file system without locks must do without
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise MTKitError(
                    f"{directory}: another process is at work here", hint="Wait until it has ended, or choose another output."
                ) from error
        yield
    finally:
        os.close(descriptor)


def _read_job(directory: Path) -> str | None:
    try:
        job = read_json(directory / JOB_NAME)["job"]
    except (ArtefactError, KeyError, TypeError):
        return None
    return job if isinstance(job, str) else None


def _finished_records(directory: Path) -> list[ShardRecord]:
    """The records of the shards that are complete and undamaged, up to the first one that is not."""
    records: list[ShardRecord] = []
    while True:
        path = directory / f"{shard_name(len(records))}.json"
        try:
            record = from_dict(ShardRecord, read_json(path))
            if any(sha256_file(directory / name) != sha256 for name, sha256 in record.sha256.items()):
                return records
        except (ArtefactError, ConfigError, OSError):
            return records
        records.append(record)


def _remove_others(directory: Path, kept: set[str]) -> None:
    for path in directory.iterdir():
        if path.name in kept:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
