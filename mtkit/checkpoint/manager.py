"""Which checkpoints a run has and which it keeps.

The directory is the truth: a checkpoint exists when `step-NNNNNNN/` has a valid manifest. Anything else in the directory is ignored and never
touched, except what an earlier process of mtkit left half-written.
"""

import contextlib
import math
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mtkit import faults
from mtkit.artefacts import MANIFEST_NAME, Verify, atomic_directory, read_manifest, verify_directory
from mtkit.checkpoint.layout import step_of
from mtkit.errors import ArtefactError, ConfigError
from mtkit.files import make_directory, read_json, sync, temporary_name

STATE_NAME = "state.json"
Metric = Literal["loss", "bleu", "chrf"]

_UNFINISHED = re.compile(r"\.(step-\d{7,})\.tmp-\d+-[0-9a-f]{8}")
_REMOVED = re.compile(r"\.trash-\.step-\d{7,}\.tmp-\d+-[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When checkpoints are saved and which are kept."""

    every_steps: int | None = 1000
    """Updates between two checkpoints; None = only by time, with validations, and at the end."""
    every_minutes: float | None = 10.0
    """Minutes between two checkpoints, whichever comes first; None = only by steps."""
    keep_last: int = 5
    """How many of the newest to keep, at least 1; if more, those of every `every_steps` updates before what was saved in between, because of the time
    or of a stop, and the newest of all besides."""
    keep_best: int = 1
    """How many of the best by the metric of early stopping to keep besides, 0 or more."""

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(f"every_steps must be at least 1, but is {self.every_steps}")
        if self.every_minutes is not None and self.every_minutes <= 0:
            raise ConfigError(f"every_minutes must be positive, but is {self.every_minutes}")
        if self.keep_last < 1:
            raise ConfigError(f"keep_last must be at least 1, but is {self.keep_last}")
        if self.keep_best < 0:
            raise ConfigError(f"keep_best must not be negative, but is {self.keep_best}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCheckpoint:
    """A checkpoint on disk.

    Attributes:
        path: Its directory.
        step: Updates done.
        scores: Validation results at this step by metric (`loss`, `bleu`, `chrf`); empty where none was made.
    """

    path: Path
    step: int
    scores: dict[str, float]


def quality(scores: Mapping[str, float], metric: str) -> tuple[float, float]:
    """How good a validation result is, to be compared with others: by the metric, and where that is equal, as BLEU 0 is at the start, by the loss.

    Args:
        scores: Results by metric, `metric` among them.
        metric: What counts first.
    """
    return -scores[metric] if metric == "loss" else scores[metric], -scores.get("loss", math.inf)


class CheckpointManager:
    """Finds, adds and removes the checkpoints of one directory.

    Args:
        directory: Where they lie; made when first needed.
        config: Which to keep.
        metric: What `keep_best` goes by.
    """

    def __init__(self, directory: Path, *, config: CheckpointConfig, metric: Metric) -> None:
        self.directory = directory
        self._config = config
        self._metric = metric

    def stored(self) -> list[StoredCheckpoint]:
        """All valid checkpoints by step."""
        return list_checkpoints(self.directory)

    def latest(self, *, verify: Verify = "full") -> tuple[StoredCheckpoint | None, list[str]]:
        """The newest undamaged checkpoint, or None, and a line for each damaged one that was passed over.

        Raises:
            ArtefactError: There are checkpoints, but all are damaged.
        """
        stored, unreadable = scan_checkpoints(self.directory)
        damage = [f"{path}: its {MANIFEST_NAME} or {STATE_NAME} is missing or damaged" for _, path in reversed(unreadable)]
        for checkpoint in reversed(stored):
            try:
                verify_directory(checkpoint.path, kind="checkpoint", level=verify)
            except ArtefactError as error:
                damage.append(error.message)
                continue
            return checkpoint, damage
        if damage:
            raise ArtefactError(f"{self.directory}: every checkpoint is damaged: " + "; ".join(damage))
        return None, []

    @contextlib.contextmanager
    def write(self, step: int, *, config: dict[str, Any], inputs: dict[str, Any]) -> Iterator[Path]:
        """Write a checkpoint: the block fills a directory that becomes `step-NNNNNNN` when the block ends. Then older ones are removed.

        An earlier checkpoint of the same step is replaced once the new one is complete; anything else of that name is moved out of the way.
        """
        make_directory(self.directory)
        path = self.directory / f"step-{step:07d}"
        is_again = any(checkpoint.path == path for checkpoint in self.stored())
        if path.exists() and not is_again:
            path.rename(path.with_name(f"{path.name}.damaged-{secrets.token_hex(4)}"))
        with atomic_directory(path, kind="checkpoint", config=config, inputs=inputs, overwrite=is_again) as temporary:
            yield temporary
        self.prune(step)

    def prune(self, step: int) -> None:
        """Remove the checkpoints up to a step that are neither among the newest nor among the best. Failing to remove one never stops a run.

        Later ones are those which the run has passed over because they are damaged: they must not crowd out the good ones.
        """
        stored = [checkpoint for checkpoint in self.stored() if checkpoint.step <= step]
        spaced = evenly_spaced(stored, self._config.every_steps)
        others = [checkpoint for checkpoint in stored if checkpoint not in spaced]
        newest = [*others, *spaced][-self._config.keep_last :]
        newest = [*newest, *stored[-1:]] if self._config.keep_last > 1 else stored[-1:]
        keep = {checkpoint.step for checkpoint in (*newest, *self.ranked(stored)[: self._config.keep_best])}
        for checkpoint in stored:
            if checkpoint.step not in keep:
                doomed = temporary_name(checkpoint.path)
                doomed = doomed.with_name(f".trash-{doomed.name}")  # never taken for one that is to be recovered
                with contextlib.suppress(OSError):
                    faults.reach("retention.rename")
                    checkpoint.path.rename(doomed)
                    faults.reach("retention.remove")
                    shutil.rmtree(doomed)

    def ranked(self, stored: Sequence[StoredCheckpoint]) -> list[StoredCheckpoint]:
        """Those of some checkpoints that were validated by the metric, best first; of equals the earlier one."""
        candidates = sorted((checkpoint for checkpoint in stored if self._metric in checkpoint.scores), key=lambda checkpoint: checkpoint.step)
        return sorted(candidates, key=lambda checkpoint: quality(checkpoint.scores, self._metric), reverse=True)


def evenly_spaced(stored: Sequence[StoredCheckpoint], every_steps: int | None) -> list[StoredCheckpoint]:
    """Those of some checkpoints that lie about equally far from each other: at multiples of `checkpoint.every_steps`, and the newest if it is not
    just behind one. What was saved in between, because of the time or of a stop, or before the first update, is left out.

    Args:
        stored: By step.
        every_steps: Of the run; None = all.
    """
    if every_steps is None:
        return list(stored)
    spaced = [checkpoint for checkpoint in stored if checkpoint.step % every_steps == 0 < checkpoint.step]
    if stored and (not spaced or 2 * (stored[-1].step - spaced[-1].step) >= every_steps):
        spaced.append(stored[-1])
    return spaced


def clean_up(directory: Path) -> None:
    """Recover or remove what a killed process has left among the checkpoints of a run. Only call it while holding the lock of the run.

    A checkpoint that replaces an earlier one of its step is complete under another name for a moment, and so is the earlier one: where neither
    has the name of the step, the newer one gets it. All else that is half-written or half-removed goes.
    """
    if not directory.is_dir():
        return
    unfinished = [(path, match[1]) for path in directory.iterdir() if (match := _UNFINISHED.fullmatch(path.name))]
    complete = [(path, name) for path, name in unfinished if _is_whole(path)]
    for path, name in sorted(complete, key=lambda entry: (entry[0] / MANIFEST_NAME).stat().st_mtime_ns, reverse=True):
        if not (directory / name).exists():
            path.rename(directory / name)
            sync(directory)
    for path in directory.iterdir():
        if _UNFINISHED.fullmatch(path.name) or _REMOVED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _is_whole(path: Path) -> bool:
    try:
        verify_directory(path, kind="checkpoint", level="full")
    except ArtefactError:
        return False
    return True


def list_checkpoints(directory: Path) -> list[StoredCheckpoint]:
    """The checkpoints in a directory that have a manifest and a state, by step."""
    return scan_checkpoints(directory)[0]


def scan_checkpoints(directory: Path) -> tuple[list[StoredCheckpoint], list[tuple[int, Path]]]:
    """The checkpoints in a directory, by step, in one look at each, for a run may be adding and removing them.

    Returns:
        Those that have a manifest and a state; and step and place of what has the name of a checkpoint, and something in it, but lacks one of
        the two.
    """
    readable, unreadable = [], []
    for step, path in sorted((step, path) for path in directory.glob("step-*") if (step := step_of(path)) is not None):
        try:
            read_manifest(path, kind="checkpoint")
            scores = read_json(path / STATE_NAME).get("scores") or {}
            readable.append(StoredCheckpoint(path=path, step=step, scores={name: float(value) for name, value in scores.items()}))
        except (ArtefactError, AttributeError, TypeError, ValueError, OverflowError):
            if path.is_dir() and any(path.iterdir()):
                unreadable.append((step, path))
    return readable, unreadable
