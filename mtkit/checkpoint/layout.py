"""Where the parts of a model, a checkpoint and a run lie, and what can be read of them without torch."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from mtkit.errors import ArtefactError

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

MAX_HEADER_BYTES = 8 << 20
"""Of a safetensors file; a tensor takes about a hundred."""


def read_tensor_header(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> {dtype, shape, data_offsets} of a safetensors file.

    Raises:
        ArtefactError: The header is damaged.
    """
    try:
        with open(path, "rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > min(MAX_HEADER_BYTES, os.fstat(stream.fileno()).st_size):
                raise ArtefactError(f"{path}: is damaged: its header claims {size} bytes")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        for entry in header.values():
            if not all(isinstance(length, int) and length >= 0 for length in entry["shape"]):
                raise ValueError("a shape is not a list of whole numbers")
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtefactError(f"{path}: is not a safetensors file: {error}") from error
    return dict(header)
