"""The records of a run: what `metrics.jsonl` holds, one JSON object per line.

Every record has `kind` and `step`. The kinds:

    start   a session of the run began: world size, device, precision, parameters, pairs, padding share, warning
    train   progress since the last such record: epoch, loss (smoothed, per target token), ppl (of the plain one), lr, gradient_norm,
            tgt_tokens_per_s (real target tokens), data_wait_share, tgt_tokens, skipped, elapsed_s, and how much of it went
            into checkpoints: saving_s
    valid   results on the dev set: loss, ppl, and bleu, chrf where it was translated; is_best
    end     why the run ended; handed_over, the step of the checkpoint that the model is
    unvalidated     a validation failed, and the run went on: reason, traceback

Other tools may rely on these names. A record is on disk before training goes on; a run that resumes first removes records after its checkpoint.
"""

import contextlib
import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtkit import faults
from mtkit.files import atomic_file, open_lines

Record = Mapping[str, Any]


class MetricsFile:
    """Appends records to a file, or to nothing (on all processes but the main one).

    Args:
        path: The file, or None.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._pending = b""

    def append(self, record: Record) -> None:
        """Add one record; a value that is not finite becomes null, as JSON has no word for it.

        Records that cannot be written now, because the disk is full, wait for the next one, or for `sync`.
        """
        if self._path is None:
            return
        clean = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()}
        self._pending += (json.dumps(clean, ensure_ascii=False) + "\n").encode()
        with contextlib.suppress(OSError):
            self._write()

    def _write(self) -> None:
        """Write what is pending, all of it or nothing."""
        if self._path is None or not self._pending:
            return
        with open(self._path, "ab", buffering=0) as stream:
            size = stream.tell()
            try:
                faults.reach("metrics")
                written = stream.write(self._pending)
                if written != len(self._pending):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            except OSError:
                stream.truncate(size)
                raise
        self._pending = b""

    def cut_after(self, step: int, *, is_validated: bool) -> None:
        """Remove what will be made again: the records after a step, a torn last line, and the end of an earlier session at this step.

        Args:
            step: Where the run goes on.
            is_validated: Whether the results of a validation at this step are known there; otherwise its record is removed too.
        """
        if self._path is None or not self._path.exists():
            return
        again = {"end"} if is_validated else {"end", "valid"}
        records = [record for record in read_metrics(self._path) if record["kind"] != "end"]
        kept = [record for record in records if record["step"] < step or (record["step"] == step and record["kind"] not in again)]
        with atomic_file(self._path) as stream:
            for record in kept:
                stream.write((json.dumps(record, ensure_ascii=False) + "\n").encode())

    def sync(self) -> None:
        """Make the records durable; called before a checkpoint that counts on them.

        Raises:
            OSError: They cannot be written.
        """
        self._write()
        if self._path is not None and self._path.exists():
            descriptor = os.open(self._path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`; a line that is not a whole record is left out."""
    records = []
    with open_lines(path) as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int) and isinstance(record.get("kind"), str):
                records.append(record)
    return records


class Meter:
    """Sums up updates between two records of kind `train`. Times come from the caller, so that they can be tested."""

    def __init__(self) -> None:
        self._loss_sum = self._nll_sum = self._seconds = self._wait_seconds = self._norm_sum = 0.0
        self._num_tokens = self._num_updates = 0

    def add(self, *, loss_sum: float, nll_sum: float, num_tokens: int, gradient_norm: float, seconds: float, wait_seconds: float) -> None:
        """Take in one applied update.

        Args:
            loss_sum: Smoothed loss over its target tokens.
            nll_sum: Negative log-likelihood over its target tokens.
            num_tokens: Its target tokens.
            gradient_norm: Before clipping.
            seconds: Wall-clock time from the end of the update before to the end of this one.
            wait_seconds: How much of it went into waiting for data.
        """
        self._loss_sum += loss_sum
        self._nll_sum += nll_sum
        self._num_tokens += num_tokens
        self._norm_sum += gradient_norm
        self._seconds += seconds
        self._wait_seconds += wait_seconds
        self._num_updates += 1

    @property
    def is_empty(self) -> bool:
        """Whether no update was taken in since the last `take`."""
        return self._num_updates == 0

    def take(self) -> dict[str, float]:
        """The values of a record of kind `train`, and start anew."""
        values = {
            "loss": self._loss_sum / self._num_tokens,
            "ppl": perplexity(self._nll_sum / self._num_tokens),
            "gradient_norm": self._norm_sum / self._num_updates,
            "tgt_tokens_per_s": self._num_tokens / max(self._seconds, 1e-9),
            "data_wait_share": self._wait_seconds / max(self._seconds, 1e-9),
        }
        self.__init__()  # type: ignore[misc]
        return values


def perplexity(nll: float) -> float:
    """exp of a mean negative log-likelihood in nats, infinite where it overflows."""
    return math.exp(nll) if nll < 700.0 else math.inf
