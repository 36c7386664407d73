"""From parallel text to a shard set: read, filter, encode, write.

The corpus flows through in blocks; what stays in memory is a few blocks, 16 bytes per pair of the shard in work, and, only when duplicates are looked
for, the set of hashes. The result depends on the text, the tokenizer and the config alone: not on the number of workers, nor on whether the run
was interrupted and went on. A run that was interrupted leaves finished shards in a hidden directory, see `mtkit.data.partial`.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtkit import __version__
from mtkit.artefacts import MANIFEST_NAME, atomic_directory, is_free, verify_directory
from mtkit.config import differences, from_dict, to_dict
from mtkit.data.blocks import EncodedBlock, encode_blocks, split_blocks
from mtkit.data.corpus import Corpus, ReadCounts, SourceRecord, TextPair, check_directions
from mtkit.data.filters import DUPLICATE, FilterConfig, SeenHashes, describe_drops
from mtkit.data.partial import PartialShards, partial_shards
from mtkit.data.shards import (
    HELD_OUT_DIRECTORY,
    KIND,
    META_NAME,
    REPORT_NAME,
    SHARDS_FORMAT,
    TOKENIZER_DIRECTORY,
    ShardSetMeta,
    held_out_paths,
)
from mtkit.data.sources import Skip
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import ConfigError, DataError, MTKitError, UsageError
from mtkit.files import is_blank, open_output, read_json, write_json

_HELD_OUT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessConfig:
    """How a corpus becomes a shard set."""

    filters: FilterConfig = field(default_factory=FilterConfig)
    """Which pairs are dropped."""

    shard_pairs: int = 1 << 18
    """Pairs read for one shard, at least 1. It is what an interrupted run has to do again at most."""

    def __post_init__(self) -> None:
        if self.shard_pairs < 1:
            raise ConfigError(f"shard_pairs must be at least 1, but is {self.shard_pairs}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessReport:
    """What became of a corpus."""

    num_read: int
    """Pairs read."""

    num_pairs: int
    """Pairs kept."""

    dropped: dict[str, int]
    """Reason -> pairs dropped, in the order in which the reasons are tried; a filter that is off has no entry."""

    num_src_tokens: int
    """Source tokens kept, without EOS."""

    num_tgt_tokens: int
    """Target tokens kept, without EOS."""

    num_src_unknown: int
    """Source tokens that are unknown, or single bytes of a character without a piece: many of them hint at the wrong tokenizer."""

    num_tgt_unknown: int
    """The same of the target."""

    num_bad_utf8: int
    """Lines with bytes that are not UTF-8, replaced by U+FFFD; dev and test sets included."""

    num_cut: int
    """Lines that were longer than 4 MiB and cut there; dev and test sets included."""

    num_shards: int
    """Shards written."""

    held_out: dict[str, int]
    """Name of each dev or test set -> its pairs."""

    num_reused_shards: int = 0
    """Shards that an earlier run had finished. Not in the report that the shard set holds, as it says nothing about the result."""

    def summary(self) -> str:
        """One line for people."""
        dropped = ", ".join(f"{reason} {number:,}" for reason, number in self.dropped.items() if number)
        return (
            f"{self.num_pairs:,} of {self.num_read:,} pairs in {self.num_shards} shard{'s' * (self.num_shards != 1)}, "
            f"{self.num_src_tokens:,} source and {self.num_tgt_tokens:,} target tokens" + (f"; dropped: {dropped}" if dropped else "")
        )


def preprocess(
    train: Corpus,
    *,
    held_out: Mapping[str, Corpus],
    tokenizer: Tokenizer,
    output: Path,
    config: PreprocessConfig,
    num_workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> PreprocessReport:
    """Make a shard set.

    If `output` is already the shard set of the same input, tokenizer and config, nothing is done. More than one worker starts processes that import
    the main module, so a script that calls this needs the usual `if __name__ == "__main__":`.

    Args:
        train: The training pairs; filtered and encoded.
        held_out: Name -> dev or test set; kept as raw text, whole.
        tokenizer: Encodes both sides and is bundled.
        output: The directory to make.
        config: Filters and sizes.
        num_workers: Processes that encode, at least 1. The result is the same for any number.
        progress: Called now and then with the number of training pairs done so far.

    Raises:
        DataError: The text cannot be used, or no pair is left. Nothing is left behind.
        MTKitError: `output` exists and is something else, or cannot be written.
    """
    if num_workers < 1:
        raise UsageError(f"the number of workers must be at least 1, but is {num_workers}")
    for name in held_out:
        if not _HELD_OUT_NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot be the name of a set", hint="Use letters, digits, dots, dashes and underscores.")
    check_directions({"the training corpus": train, **held_out})
    job = _describe_job(train, held_out=held_out, tokenizer=tokenizer, config=config)
    if not is_free(output):
        return _existing_report(output, job=job, filters=config.filters)
    counts = ReadCounts()
    held_out_pairs = {name: read_held_out(corpus, name=name, counts=counts) for name, corpus in held_out.items()}
    with partial_shards(output, job=job.shards_key) as partial:
        num_reused = len(partial.records)
        _write_shards(train, tokenizer=tokenizer, config=config, num_workers=num_workers, partial=partial, counts=counts, progress=progress)
        report = _report(partial, config=config, counts=counts, held_out={name: len(pairs) for name, pairs in held_out_pairs.items()})
        if not report.num_pairs:
            raise _nothing_left(report, train)
        corpora = _corpora(train, partial)
        _publish(output, partial=partial, corpora=corpora, tokenizer=tokenizer, job=job, held_out=held_out_pairs, report=report)
    return replace(report, num_reused_shards=num_reused)


# --- what is being made -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What a shard set is made from.

    Attributes:
        config: The config as plain data.
        inputs: Tokenizer, training corpus and held-out sets, by name and fingerprint.
        shards_key: sha256 over all that the training shards depend on, this version of mtkit included; None if it cannot be known.
        key: sha256 over all that the whole set depends on; None if it cannot be known.
    """

    config: dict[str, Any]
    inputs: dict[str, Any]
    shards_key: str | None
    key: str | None


def _describe_job(train: Corpus, *, held_out: Mapping[str, Corpus], tokenizer: Tokenizer, config: PreprocessConfig) -> _Job:
    train_records = train.check()
    held_out_records = {name: corpus.check() for name, corpus in held_out.items()}
    inputs = {
        "tokenizer": tokenizer.fingerprint,
        "train": [to_dict(record) for record in train_records],
        "held_out": {name: [to_dict(record) for record in records] for name, records in held_out_records.items()},
    }
    plain_config = to_dict(config)
    shards_parts = [SHARDS_FORMAT, tokenizer.fingerprint, plain_config, _fingerprints(train_records)]
    all_parts = [*shards_parts, {name: _fingerprints(records) for name, records in held_out_records.items()}]
    key = _hash(all_parts) if all(_fingerprints(records) for records in (train_records, *held_out_records.values())) else None
    return _Job(
        config=plain_config,
        inputs={**inputs, "key": key},
        shards_key=_hash([__version__, *shards_parts]) if _fingerprints(train_records) else None,
        key=key,
    )


def _fingerprints(records: tuple[SourceRecord, ...]) -> list[str] | None:
    """The fingerprints of all sources, or None if one has none."""
    fingerprints = [record.fingerprint for record in records if record.fingerprint is not None]
    return fingerprints if len(fingerprints) == len(records) else None


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _existing_report(output: Path, *, job: _Job, filters: FilterConfig) -> PreprocessReport:
    """The report of an output that is there already, if it is what the job would make."""
    if not (output / MANIFEST_NAME).is_file():
        raise MTKitError(f"{output}: exists already and is no shard set", hint="Choose another output, or remove it first.")
    manifest = verify_directory(output, kind=KIND)
    if job.key is None or manifest.inputs.get("key") != job.key:
        changes = differences(manifest.config, job.config)
        changes += [f"another {name}" for name, value in job.inputs.items() if name != "key" and manifest.inputs.get(name) != value]
        raise MTKitError(
            f"{output}: exists already and was made otherwise: {'; '.join(changes) or 'its input cannot be compared'}",
            hint="Choose another output, or remove it first.",
        )
    report = from_dict(PreprocessReport, read_json(output / REPORT_NAME))
    return replace(
        report,
        num_reused_shards=report.num_shards,
        dropped={reason: report.dropped[reason] for reason in filters.active_reasons()},  # JSON has sorted them
        held_out={name: report.held_out[name] for name in job.inputs["held_out"]},
    )


# --- making it --------------------------------------------------------------------------------------------------------------------------


def read_held_out(corpus: Corpus, *, name: str, counts: ReadCounts | None = None) -> list[TextPair]:
    """Read all pairs of a held-out set.

    Args:
        corpus: The set.
        name: What it is called in messages.
        counts: Receives the numbers of mended lines.

    Raises:
        DataError: No pair has text on both sides, or the corpus cannot be read.
    """
    pairs = list(corpus.pairs(counts=counts))
    if not pairs:
        raise DataError(f"{corpus.name}: is empty, so there is no {name} set")
    if all(is_blank(src) or is_blank(tgt) for src, tgt in pairs):
        raise DataError(f"{corpus.name}: holds no pair with text on both sides, so there is no {name} set")
    return pairs


def _write_shards(
    train: Corpus,
    *,
    tokenizer: Tokenizer,
    config: PreprocessConfig,
    num_workers: int,
    partial: PartialShards,
    counts: ReadCounts,
    progress: Callable[[int], None] | None,
) -> None:
    """Write the shards that are missing."""
    tokenizer_directory = partial.directory / TOKENIZER_DIRECTORY
    tokenizer_directory.mkdir()
    tokenizer.write_files(tokenizer_directory)
    seen = SeenHashes()
    for hashes in partial.hashes():
        seen.add(hashes)
    num_done = sum(record.num_read for record in partial.records)
    sources: deque[int] = deque()
    blocks = encode_blocks(
        _read_blocks(train, num_done=num_done, shard_pairs=config.shard_pairs, counts=counts, sources=sources),
        tokenizer=tokenizer,
        tokenizer_directory=tokenizer_directory,
        filters=config.filters,
        num_workers=num_workers,
    )
    with closing(blocks):
        named = (replace(block, source=sources.popleft()) for block in blocks)
        unique = _without_duplicates(named, seen, num_done=num_done, progress=progress)
        for first in unique:
            shard = _take_shard(itertools.chain([first], unique), shard_pairs=config.shard_pairs)
            partial.write_shard(shard, tokenizer=tokenizer)


def _read_blocks(train: Corpus, *, num_done: int, shard_pairs: int, counts: ReadCounts, sources: deque[int]) -> Iterator[list[TextPair]]:
    """The text after the first `num_done` pairs in blocks of one source each, whose number is added to `sources`."""
    num_read = 0
    for number, source in enumerate(train.sources):
        pairs = source.read(counts, Skip())
        num_skipped = sum(1 for _ in itertools.islice(pairs, max(0, num_done - num_read)))  # decoded, for their counts
        num_read += num_skipped
        for block in split_blocks(pairs, shard_pairs=shard_pairs, num_before=num_read):
            num_read += len(block)
            sources.append(number)
            yield block


def _corpora(train: Corpus, partial: PartialShards) -> tuple[int, ...]:
    """How many pairs of each source were kept."""
    return tuple(sum(record.by_source.get(str(number), 0) for record in partial.records) for number in range(len(train.sources)))


def _without_duplicates(
    blocks: Iterator[EncodedBlock], seen: SeenHashes, *, num_done: int, progress: Callable[[int], None] | None
) -> Iterator[EncodedBlock]:
    for block in blocks:
        num_done += block.num_read
        yield block if block.hashes_N is None else block.select(seen.add(block.hashes_N), reason=DUPLICATE)
        if progress is not None:
            progress(num_done)


def _take_shard(blocks: Iterator[EncodedBlock], *, shard_pairs: int) -> Iterator[EncodedBlock]:
    num_read = 0
    while num_read < shard_pairs:
        block = next(blocks, None)
        if block is None:
            return
        num_read += block.num_read
        yield block


def _report(partial: PartialShards, *, config: PreprocessConfig, counts: ReadCounts, held_out: dict[str, int]) -> PreprocessReport:
    records = partial.records
    return PreprocessReport(
        num_read=sum(record.num_read for record in records),
        num_pairs=sum(record.meta.num_pairs for record in records),
        dropped={reason: sum(record.dropped.get(reason, 0) for record in records) for reason in config.filters.active_reasons()},
        num_src_tokens=sum(record.meta.num_src_tokens for record in records),
        num_tgt_tokens=sum(record.meta.num_tgt_tokens for record in records),
        num_src_unknown=sum(record.num_src_unknown for record in records),
        num_tgt_unknown=sum(record.num_tgt_unknown for record in records),
        num_bad_utf8=counts.num_bad_utf8,
        num_cut=counts.num_cut,
        num_shards=len(records),
        held_out=held_out,
    )


def _nothing_left(report: PreprocessReport, train: Corpus) -> DataError:
    if not report.num_read:
        return DataError(f"{train.name}: is empty")
    counts, hint = describe_drops(report.dropped)
    return DataError(f"{train.name}: none of {report.num_read} pairs is left after filtering ({counts})", hint=hint)


def _publish(
    output: Path,
    *,
    partial: PartialShards,
    corpora: tuple[int, ...],
    tokenizer: Tokenizer,
    job: _Job,
    held_out: Mapping[str, list[TextPair]],
    report: PreprocessReport,
) -> None:
    """Put the finished shards and everything else into the output directory. They stay in the partial directory too, in case this is interrupted."""
    with atomic_directory(output, kind=KIND, config=job.config, inputs=job.inputs) as directory:
        (directory / TOKENIZER_DIRECTORY).mkdir()
        tokenizer.write_files(directory / TOKENIZER_DIRECTORY)
        for record in partial.records:
            for side in ("src", "tgt"):
                _link(partial.directory / f"{record.meta.name}.{side}", directory / f"{record.meta.name}.{side}")
        (directory / HELD_OUT_DIRECTORY).mkdir()
        for name, pairs in held_out.items():
            for path, lines in zip(held_out_paths(directory, name), zip(*pairs, strict=True), strict=True):
                with open_output(path) as writer:
                    for line in lines:
                        writer.write(line)
        shards = tuple(record.meta for record in partial.records)
        meta = ShardSetMeta(tokenizer=tokenizer.fingerprint, shards=shards, corpora=corpora, held_out=tuple(held_out))
        write_json(directory / META_NAME, to_dict(meta))
        plain_report = to_dict(report)
        del plain_report["num_reused_shards"]
        write_json(directory / REPORT_NAME, plain_report)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
