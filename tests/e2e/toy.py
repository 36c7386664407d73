"""The toy language, how to run a command, and where the shared run keeps what it made.

The language has to be learnt: number words are translated and their order is reversed, so that copying, or translating word by word, scores nothing.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers import REPOSITORY

ENGLISH = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
GERMAN = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
SIZES = {"train": 4000, "dev": 60, "test": 100}


def run_mtkit(
    *arguments: str | Path, data: bytes | None = None, exit_code: int = 0, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[bytes]":
    """`python -m mtkit` in a process of its own, on one thread."""
    result = subprocess.run(
        [sys.executable, "-m", "mtkit", *map(str, arguments)],
        input=data,
        stdin=subprocess.DEVNULL if data is None else None,
        capture_output=True,
        check=False,
        env=mtkit_environment(**(environment or {})),
        timeout=280,
    )
    assert result.returncode == exit_code, result.stderr.decode()
    return result


def mtkit_environment(**changes: str) -> dict[str, str]:
    """The environment for a process of mtkit: one thread, and output buffered as it is for users."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "", **changes}


def write_pairs(directory: Path, sizes: dict[str, int], *, seed: int) -> None:
    """Write `NAME.en` and `NAME.de` for each name; no sentence occurs twice."""
    rng = random.Random(seed)
    seen: set[tuple[int, ...]] = set()
    directory.mkdir(parents=True, exist_ok=True)
    for name, size in sizes.items():
        sentences: list[tuple[int, ...]] = []
        while len(sentences) < size:
            digits = tuple(rng.randrange(10) for _ in range(rng.randint(2, 7)))
            if digits not in seen:
                seen.add(digits)
                sentences.append(digits)
        for suffix, words, order in (("en", ENGLISH, 1), ("de", GERMAN, -1)):
            lines = (" ".join(words[digit] for digit in digits[::order]).capitalize() for digits in sentences)
            (directory / f"{name}.{suffix}").write_bytes("".join(f"{line}.\n" for line in lines).encode())


def write_small_shards(directory: Path, config: str) -> None:
    """Make `shards` of a few hundred pairs, and `config.toml`, for runs of a second or two."""
    write_pairs(directory, {"train": 300, "dev": 8}, seed=5)
    (directory / "config.toml").write_text(config, "utf-8")
    train, dev = ([directory / f"{name}.en", directory / f"{name}.de"] for name in ("train", "dev"))
    run_mtkit("tokenizer", "train", *train, "--vocab-size", "300", "--output", directory / "tokenizer")
    made = ("--tokenizer", directory / "tokenizer", "--output", directory / "shards")
    run_mtkit("preprocess", "--train", *train, "--dev", *dev, *made, "--workers", "1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Where the shared run has put everything.

    Attributes:
        root: All of it is below.
        text: `train.en`, `train.de`, and so on for `dev` and `test`.
    """

    root: Path

    @property
    def text(self) -> Path:
        return self.root / "text"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def shards(self) -> Path:
        return self.root / "shards"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def average(self) -> Path:
        return self.root / "average"

    @property
    def hypothesis(self) -> Path:
        return self.root / "hyp.de"

    @property
    def scores(self) -> dict[str, Any]:
        """What `mtkit score --json` printed."""
        scores: dict[str, Any] = json.loads((self.root / "scores.json").read_bytes())
        return scores

    def parallel(self, name: str) -> Sequence[Path]:
        """The source and the target file of a set."""
        return self.text / f"{name}.en", self.text / f"{name}.de"
