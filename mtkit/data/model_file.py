"""Files of sentencepiece models: what is checked before the parser of sentencepiece, which is foreign code, sees them."""

import hashlib
from pathlib import Path

from mtkit.errors import ArtefactError

MAX_MODEL_BYTES = 64 << 20
MAX_VOCAB_SIZE = 1_000_000


def read_model(path: Path, *, sha256: str) -> bytes:
    """Read a model file and compare it with its recorded hash.

    Raises:
        ArtefactError: It cannot be read, is too large, or has another hash.
    """
    try:
        size = path.stat().st_size
        if not 0 < size <= MAX_MODEL_BYTES:
            raise ArtefactError(f"{path}: {size} bytes cannot be a sentencepiece model (1 to {MAX_MODEL_BYTES})")
        model = path.read_bytes()
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read: {error.strerror or error}") from error
    if hashlib.sha256(model).hexdigest() != sha256:
        raise ArtefactError(f"{path}: its sha256 differs from the one in tokenizer.json", hint="The file is damaged or was exchanged; copy it anew.")
    return model


def check_model(model: bytes) -> None:
    """Walk through the outermost fields of a serialized model, before memory is taken for them.

    Raises:
        ValueError: It is not a sequence of pieces and specifications, or has too many pieces.
    """
    position, num_pieces = 0, 0
    while position < len(model):
        key = model[position]
        if key & 7 != 2 or not 1 <= key >> 3 <= 5:  # all five fields of a model have a length before them
            raise ValueError(f"byte {position} begins no field of a model")
        num_pieces += key >> 3 == 1
        length, shift = 0, 0
        while True:
            position += 1
            if position >= len(model) or shift > 28:
                raise ValueError(f"byte {position} is no length")
            length |= (model[position] & 0x7F) << shift
            shift += 7
            if model[position] < 0x80:
                break
        position += 1 + length
    if position != len(model):
        raise ValueError(f"its last field ends at byte {position} of {len(model)}")
    if not 0 < num_pieces <= MAX_VOCAB_SIZE:
        raise ValueError(f"it has {num_pieces} pieces (1 to {MAX_VOCAB_SIZE})")
