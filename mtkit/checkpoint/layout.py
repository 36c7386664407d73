"""Where the parts of a model, a checkpoint and a run lie, which of them a path stands for, and what can be read of them without torch."""

import contextlib
import json
import os
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO

from mtkit.artefacts import MANIFEST_NAME, read_manifest
from mtkit.data.tokenizer import META_NAME, Tokenizer
from mtkit.errors import ArtefactError
from mtkit.files import read_json

MODEL_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer"
CARD_NAME = "README.md"

CHECKPOINTS_NAME = "checkpoints"
"""The directory of a run that holds its checkpoints."""

EXPORT_KIND = "ctranslate2"
"""The kind of a directory that is made for CTranslate2, as its manifest has it."""

FINAL_MODEL_NAME = "model"
"""The directory of a run that holds the model which the run hands over."""

METRICS_NAME = "metrics.jsonl"
"""The file of a run that holds its records; the last one of a run that is over is of kind `end`."""

DATA_NAME = "data"
"""The directory of a run that holds what it has made of raw text."""

SHARDS_NAME = "shards"

SCALE_SUFFIX = ".scale"
"""Of the name of a tensor that holds the scales of an int8 matrix, after the name of the matrix."""

MAX_HEADER_BYTES = 8 << 20
"""Of a safetensors file; a tensor takes about a hundred."""

_CHECKPOINT = re.compile(r"step-(\d{7,})")

_LAST_RECORDS_BYTES = 1 << 16


def read_tensor_header(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> {dtype, shape, data_offsets} of a safetensors file.

    Raises:
        ArtefactError: The header is damaged.
    """
    try:
        with open(path, "rb") as stream:
            return read_open_header(stream, path)
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_open_header(stream: BinaryIO, path: Path) -> dict[str, dict[str, Any]]:
    """`read_tensor_header` of a file that is open at its beginning; the data begins where this ends. `path` is for messages."""
    try:
        (size,) = struct.unpack("<Q", stream.read(8))
        if size > min(MAX_HEADER_BYTES, os.fstat(stream.fileno()).st_size):
            raise ArtefactError(f"{path}: is damaged: its header claims {size} bytes")
        header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        for entry in header.values():
            for key in ("shape", "data_offsets"):
                if not all(isinstance(number, int) and number >= 0 for number in entry[key]):
                    raise ValueError(f"{key} of a tensor is not a list of whole numbers")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtefactError(f"{path}: is not a safetensors file: {error}") from error
    return dict(header)


def checkpoint_directories(directory: Path) -> list[tuple[int, Path]]:
    """Step and place of each checkpoint in a directory, by step; a copy under another name, such as `step-0001000.bak`, is none.

    Args:
        directory: That of a run; it need not exist.
    """
    paths = [manifest.parent for manifest in directory.glob(f"*/{MANIFEST_NAME}")]
    return sorted((step, path) for path in paths if (step := step_of(path)) is not None)


def read_every_steps(run: Path) -> int | None:
    """`checkpoint.every_steps` of a run; None where it has none, or no config that says it."""
    try:
        value = read_json(run / CONFIG_NAME)["checkpoint"]["every_steps"]
    except (ArtefactError, KeyError, TypeError):
        return None
    return value if isinstance(value, int) and value > 0 else None


def step_of(path: Path) -> int | None:
    """The step of what is a checkpoint by its name, or was meant to be one; None for any other name."""
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else None


def find_model(path: Path) -> Path:
    """The model or checkpoint directory that a path stands for.

    A run directory stands for the model it hands over, or for its latest checkpoint while it is still training; so too when it goes on after it has
    handed over a model.

    Raises:
        ArtefactError: There is no model at this path.
    """
    if (path / MANIFEST_NAME).is_file():
        kind = read_manifest(path).kind
        if kind not in ("model", "checkpoint"):
            hint = (
                "An export is for CTranslate2: mtkit translate --engine ct2. All else takes the model it was made of."
                if kind == EXPORT_KIND
                else None
            )
            raise ArtefactError(f"{path}: is not a model but of kind {kind}", hint=hint)
        return path
    has_model = (path / FINAL_MODEL_NAME / MANIFEST_NAME).is_file()
    checkpoint = _newest_checkpoint(path)
    if has_model and (checkpoint is None or not _goes_on(path)):
        return path / FINAL_MODEL_NAME
    if checkpoint is not None:
        return checkpoint
    what = "does not exist" if not path.exists() else "holds no model"
    raise ArtefactError(f"{path}: {what}", hint="Give a model, a checkpoint or a run directory that `mtkit train` or `mtkit average` wrote.")


def find_tokenizer(path: Path) -> Path:
    """The artefact whose tokenizer a path stands for: the tokenizer itself, or what holds it.

    Everything that a run keeps has one tokenizer; that of the model it hands over, of its latest checkpoint and of its data is the same.

    Args:
        path: A tokenizer, a model, a checkpoint, a shard set, an export or a run.

    Raises:
        ArtefactError: There is no tokenizer at this path; the message names the places looked at.
    """
    if (path / MANIFEST_NAME).is_file():
        return path
    if (path / META_NAME).is_file() and (path.parent / MANIFEST_NAME).is_file():  # the part of a model that is its tokenizer
        return path.parent
    data = path / DATA_NAME
    places = [path / FINAL_MODEL_NAME, _newest_checkpoint(path), data / TOKENIZER_NAME, data / SHARDS_NAME]
    for place in places:
        if place is not None and (place / MANIFEST_NAME).is_file():
            return place
    parts = f"{FINAL_MODEL_NAME}/, {CHECKPOINTS_NAME}/step-*/, {DATA_NAME}/{TOKENIZER_NAME}/ or {DATA_NAME}/{SHARDS_NAME}/"
    reason = f"it has no {MANIFEST_NAME}, as an artefact has, and no {parts}, as a run has"
    reason = "it does not exist" if not path.exists() else reason if path.is_dir() else "it is no directory"
    raise ArtefactError(
        f"{path}: is not a tokenizer and holds none: {reason}",
        hint="Give what `mtkit tokenizer train` wrote, or the directory of a model, checkpoint, shard set or run.",
    )


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer that a path stands for, see `find_tokenizer`.

    Raises:
        ArtefactError: There is none, or it is damaged.
    """
    return Tokenizer.load(find_tokenizer(path))


def _goes_on(run: Path) -> bool:
    """Whether a run has records of training that are not followed by that of its end."""
    try:
        with open(run / METRICS_NAME, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _LAST_RECORDS_BYTES))
            lines = stream.read().split(b"\n")
    except OSError:
        return False
    for line in reversed(lines):
        with contextlib.suppress(ValueError, RecursionError):  # a torn line is no record
            record = json.loads(line)
            return isinstance(record, dict) and record.get("kind") != "end"
    return False


def _newest_checkpoint(run: Path) -> Path | None:
    found = checkpoint_directories(run / CHECKPOINTS_NAME)
    return found[-1][1] if found else None
