"""Preprocessing speed: text files in, shards out, through `mtkit.data.preprocess`."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtkit.benchmark.machine import Spread, spread
from mtkit.data.corpus import parse_corpus
from mtkit.data.preprocess import PreprocessConfig, preprocess
from mtkit.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessSpeed:
    """Preprocessing speed with some number of workers.

    Attributes:
        workers: Processes that encode.
        lines_per_s: Lines of both sides, from reading the files to the finished shard set.
        pairs: In each repeat.
        mb_per_s: Bytes of text read, in 10^6, at the median speed.
    """

    workers: int
    lines_per_s: Spread
    pairs: int
    mb_per_s: float


def bench_preprocess(
    files: tuple[Path, Path], tokenizer: Tokenizer, *, workers: Sequence[int], config: PreprocessConfig | None = None, repeats: int = 3
) -> list[PreprocessSpeed]:
    """Preprocess two files several times over with each number of workers, in turn.

    Args:
        files: Source and target text.
        tokenizer: To encode with.
        workers: Numbers of workers to compare.
        config: Filters and shard size; None = the defaults.
        repeats: Of the measurement; the median counts.
    """
    num_bytes = sum(file.stat().st_size for file in files)
    seconds: dict[int, list[float]] = {count: [] for count in workers}
    num_pairs = 0
    for repeat in range(repeats):
        for count in workers:
            with tempfile.TemporaryDirectory() as directory:
                corpus = parse_corpus([str(file) for file in files])
                started = time.perf_counter()
                report = preprocess(
                    corpus,
                    held_out={},
                    tokenizer=tokenizer,
                    output=Path(directory) / f"shards-{repeat}",
                    config=config or PreprocessConfig(),
                    num_workers=count,
                )
                seconds[count].append(time.perf_counter() - started)
                num_pairs = report.num_read
    return [
        PreprocessSpeed(
            workers=count,
            lines_per_s=spread([2 * num_pairs / value for value in values]),
            pairs=num_pairs,
            mb_per_s=num_bytes / 1e6 / spread(values).median,
        )
        for count, values in seconds.items()
    ]
