"""The directory of a run: its lock, its config, and the names in it.

config.json      the resolved config
metrics.jsonl    records of progress and validation, see `progress.py`
checkpoints/     step-NNNNNNN/ ...
data/            tokenizer and shards, where the run was given raw text
model/           the model that the run hands over, written at its end
run.lock         held while a process trains here
"""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtkit import config as codec
from mtkit.checkpoint.layout import CHECKPOINTS_NAME, FINAL_MODEL_NAME
from mtkit.checkpoint.manager import clean_up
from mtkit.errors import ConfigError, MTKitError, UsageError
from mtkit.files import explain_write_errors, make_directory, read_json, write_json
from mtkit.training.config import TrainConfig, refused_changes

_UNFINISHED = re.compile(r"\.(config\.json|metrics\.jsonl|diverged\.json|model)\.tmp-\d+-[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDirectory:
    """Where a run keeps what it makes."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints."""
        return self.path / CHECKPOINTS_NAME

    @property
    def metrics(self) -> Path:
        """The file of the records."""
        return self.path / "metrics.jsonl"

    @property
    def model(self) -> Path:
        """The model directory that the run hands over."""
        return self.path / FINAL_MODEL_NAME

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process, and clean up after one that was killed; the kernel lets go of the lock even then.

        Raises:
            MTKitError: Another process trains here; the message names it. Or the place cannot be written.
        """
        with contextlib.ExitStack() as stack:
            with explain_write_errors(self.path):
                make_directory(self.path)
                stream = stack.enter_context(open(self.path / "run.lock", "a+b"))
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                stream.seek(0)
                holder = stream.read(200).decode("utf-8", "replace").strip() or "another process"
                raise MTKitError(f"{self.path}: is in use by {holder}", hint="Wait for it to end, or choose another --output.") from error
            self._clean_up()
            stream.truncate(0)
            stream.write(f"process {os.getpid()} on {os.uname().nodename}\n".encode())
            stream.flush()
            yield

    def _clean_up(self) -> None:
        """Remove what a killed process has left half-written, and recover what it has only half renamed."""
        clean_up(self.checkpoints)
        for path in self.path.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def adopt_config(self, config: TrainConfig) -> None:
        """Save the config of a new run, or compare it with that of the run which is here.

        Raises:
            ConfigError: It differs in something with which the same run cannot go on; the message lists the differences.
        """
        path = self.path / "config.json"
        if path.exists() and self.has_checkpoints():
            old: dict[str, Any] = read_json(path)
            changes = refused_changes(old, config)
            if changes:
                raise ConfigError(
                    f"{self.path}: holds a run with another config: " + "; ".join(changes),
                    hint="Give the old values to go on with it, or choose another --output for a new run.",
                )
        write_json(path, codec.to_dict(config))

    def require_new(self) -> None:
        """Refuse to go on where a run has begun.

        Raises:
            UsageError: It has.
        """
        if self.has_checkpoints():
            raise UsageError(f"{self.path}: holds a run already", hint="Leave out --no-resume to go on with it, or choose another --output.")

    def has_checkpoints(self) -> bool:
        """Whether a run has begun here."""
        return self.checkpoints.is_dir() and any(path.name.startswith("step-") for path in self.checkpoints.iterdir())
