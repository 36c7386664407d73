"""The directory of a run: its lock, its config, and the names in it.

config.json      the resolved config
metrics.jsonl    records of progress and validation, see `progress.py`
checkpoints/     step-NNNNNNN/ ...
data/            tokenizer and shards, where the run was given raw text
model/           the model that the run hands over, written at its end
run.lock         there and held while a process trains here
"""

import contextlib
import fcntl
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mtkit import config as codec
from mtkit.artefacts import MANIFEST_NAME, require_replaceable
from mtkit.checkpoint.layout import CHECKPOINTS_NAME, CONFIG_NAME, DATA_NAME, FINAL_MODEL_NAME, METRICS_NAME, SHARDS_NAME, TOKENIZER_NAME
from mtkit.checkpoint.manager import clean_up
from mtkit.errors import ArtefactError, ConfigError, MTKitError, UsageError
from mtkit.files import explain_write_errors, make_directory, read_json, write_json
from mtkit.training.config import TrainConfig, refused_changes

SOURCE_NAME = "source.json"
"""In `data/`: what the tokenizer and the shards beside it were made of."""

_TABLES = ("data", "model", "training")
"""What the config of every run has."""

_UNFINISHED = re.compile(r"\.(config\.json|metrics\.jsonl|diverged\.json|model|source\.json|tokenizer|shards)\.tmp-\d+-[0-9a-f]{8}")


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
        return self.path / METRICS_NAME

    @property
    def model(self) -> Path:
        """The model directory that the run hands over."""
        return self.path / FINAL_MODEL_NAME

    @property
    def _config(self) -> Path:
        return self.path / CONFIG_NAME

    @property
    def _lock(self) -> Path:
        return self.path / "run.lock"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process, and clean up after one that was killed; the kernel lets go of the lock even then.

        Where nothing was written meanwhile, all is as it was before: the lock is removed, and the directory, if it was made for it.

        Raises:
            MTKitError: Another process trains here; the message names it. Or the place cannot be written.
        """
        missing = itertools.takewhile(lambda directory: not directory.exists(), (self.path, *self.path.parents))
        with contextlib.ExitStack() as stack:
            stack.callback(_remove_empty, list(missing))
            with explain_write_errors(self.path):
                make_directory(self.path)
            stream = stack.enter_context(self._lock_file())
            stack.callback(self._remove_lock)  # while it is held
            self._clean_up()
            with explain_write_errors(self.path):
                stream.truncate(0)
                stream.write(f"process {os.getpid()} on {os.uname().nodename}\n".encode())
                stream.flush()
            yield

    @contextlib.contextmanager
    def _lock_file(self) -> Iterator[BinaryIO]:
        with contextlib.ExitStack() as stack:
            while True:
                with explain_write_errors(self.path):
                    stream = stack.enter_context(open(self._lock, "a+b"))
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    stream.seek(0)
                    holder = stream.read(200).decode("utf-8", "replace").strip() or "another process"
                    raise MTKitError(f"{self.path}: is in use by {holder}", hint="Wait for it to end, or choose another --output.") from error
                with contextlib.suppress(FileNotFoundError):  # whoever held it has removed it just now
                    if os.path.samestat(os.fstat(stream.fileno()), self._lock.stat()):
                        break
            yield stream

    def _remove_lock(self) -> None:
        with contextlib.suppress(OSError):
            self._lock.unlink()

    def _clean_up(self) -> None:
        """Remove what a killed process has left half-written, and recover what it has only half renamed."""
        clean_up(self.checkpoints)
        for path in itertools.chain.from_iterable(place.iterdir() for place in (self.path, self.path / DATA_NAME) if place.is_dir()):
            if _UNFINISHED.fullmatch(path.name):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def require_fitting(self, config: TrainConfig) -> None:
        """Refuse before any work what does not fit the run: another config than that with which it began, or files that it has not made.

        Raises:
            ConfigError: The config differs in something with which the same run cannot go on; the message lists the differences.
            ArtefactError: Something is in the way that no run has made, or the model of a run that cannot go on.
        """
        require_replaceable(self.model, kind="model")
        old = read_json(self._config) if self._config.exists() else None
        self._require_own_files(old, makes_data=config.data.shards is None and not config.data.stream)
        if self._is_over():
            raise ArtefactError(
                f"{self.model}: is the model of a run whose checkpoints are gone, so that it cannot go on",
                hint="To train anew, choose another --output, or move the model away. To go on from its weights, name it with --init-from.",
            )
        if old is not None and self.has_checkpoints():
            if is_same_start(old["training"].get("init_from"), config.training.init_from):
                old["training"]["init_from"] = config.training.init_from
            changes = refused_changes(old, config)
            if changes:
                raise ConfigError(
                    f"{self.path}: holds a run with another config: " + "; ".join(changes),
                    hint="Give the old values to go on with it, or choose another --output for a new run.",
                )

    def _require_own_files(self, config: Any, *, makes_data: bool) -> None:
        """Refuse what a run would take for its own, or replace, and what is of something else: as in the directory of a project."""
        foreign = []
        if config is not None and not (isinstance(config, dict) and all(isinstance(config.get(table), dict) for table in _TABLES)):
            foreign.append(self._config)
        if config is None and not self.has_checkpoints():
            foreign += [self.metrics] if self.metrics.exists() else []
        data = self.path / DATA_NAME
        if makes_data and not (data / SOURCE_NAME).exists():
            foreign += [path for path in (data / TOKENIZER_NAME, data / SHARDS_NAME) if path.exists()]
        if foreign:
            raise ArtefactError(
                f"{foreign[0]}: is in the way: a run has a file or directory of this name, and none has made this one",
                hint="Choose an --output of its own for each run, such as --output runs/NAME.",
            )

    def _is_over(self) -> bool:
        """Whether a run has handed over its model here and cannot go on."""
        return (self.model / MANIFEST_NAME).exists() and not self.has_checkpoints()

    def save_config(self, config: TrainConfig) -> None:
        """Save the config with which training begins or goes on. What it began with is not changed by another spelling later."""
        tree = codec.to_dict(config)
        if self.has_checkpoints() and self._config.exists():
            tree["training"]["init_from"] = read_json(self._config)["training"].get("init_from")
        write_json(self._config, tree)

    def require_new(self) -> None:
        """Refuse to go on where a run has begun.

        Raises:
            UsageError: It has.
        """
        if self.has_checkpoints() or self._is_over():
            raise UsageError(f"{self.path}: holds a run already", hint="Leave out --no-resume to go on with it, or choose another --output.")

    def has_checkpoints(self) -> bool:
        """Whether a run has begun here."""
        return self.checkpoints.is_dir() and any(path.name.startswith("step-") for path in self.checkpoints.iterdir())


def is_same_start(before: str | None, now: str | None) -> bool:
    """Whether a run that goes on names the model with which it began by another spelling, or one that is gone, which it does not need any more."""
    if before is None or now is None:
        return before == now
    return not Path(now).exists() or Path(before).resolve() == Path(now).resolve()


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove directories, each inside the next one, up to one that holds something."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()
