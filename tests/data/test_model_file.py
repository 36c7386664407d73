"""What is checked of a sentencepiece model before sentencepiece reads it. That a tokenizer with such a file is refused: test_tokenizer.py."""

import hashlib
from pathlib import Path

import pytest

from mtkit.data import model_file
from mtkit.data.model_file import check_model, read_model
from mtkit.errors import ArtefactError


def field(number: int, content: bytes) -> bytes:
    """A field of a serialized message, with its length in front."""
    size, length = len(content), b""
    while size >= 0x80:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


PIECES = field(1, b"a") + field(1, b"b" * 300)
MODEL = PIECES + field(2, b"c" * 20_000) + field(3, b"")


def test_a_model_is_read_if_it_is_the_one_that_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(MODEL)
    assert read_model(path, sha256=hashlib.sha256(MODEL).hexdigest()) == MODEL
    with pytest.raises(ArtefactError, match="its sha256 differs"):
        read_model(path, sha256="0" * 64)
    path.write_bytes(b"")
    with pytest.raises(ArtefactError, match="0 bytes cannot be a sentencepiece model"):
        read_model(path, sha256="")
    path.unlink()
    with pytest.raises(ArtefactError, match="cannot be read: No such file"):
        read_model(path, sha256="")


def test_pieces_and_specifications_are_a_model() -> None:
    check_model(MODEL)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it has 0 pieces"),
        (field(2, b"c"), "it has 0 pieces"),
        (PIECES + b"\x0a", "is no length"),
        (PIECES + b"\x0a\xff\xff\xff\xff\xff\xff\x01", "is no length"),
        (PIECES + b"\x0a\xff\xff\xff\x7f", "its last field ends at byte"),
        (MODEL[:-5], "its last field ends at byte|is no length"),
        (PIECES + field(9, b""), "begins no field"),
        (PIECES + b"\x08\x01", "begins no field"),
        (b"<html>", "byte 0 begins no field"),
    ],
)
def test_what_is_no_model(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(data)


def test_too_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_file, "MAX_VOCAB_SIZE", 1)
    with pytest.raises(ValueError, match="it has 2 pieces"):
        check_model(MODEL)
