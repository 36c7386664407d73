"""Text lines, atomic writes and manifests, against raw bytes and a file system that fails."""

import contextlib
import errno
import gzip
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtkit import files
from mtkit.errors import ArtefactError, DataError, MTKitError, ResourceError
from mtkit.files import (
    MANIFEST_NAME,
    FileRecord,
    LineReader,
    LineWriter,
    Manifest,
    atomic_directory,
    atomic_file,
    decode_line,
    one_line,
    open_bytes,
    open_lines,
    open_output,
    read_json,
    read_lines,
    read_manifest,
    verify_directory,
    write_json,
)

NOT_LINE_BREAKS = "a\u2028b\x85c\vd\fe\x1cf\x1dg\x1eh\u2029i"
"""What str.splitlines() would cut into nine pieces."""

text_bytes = st.lists(
    st.one_of(
        st.binary(max_size=8),
        st.sampled_from([b"\n", b"\r", b"\r\n", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\xc2\x85", b"\x0b", b"\x0c", b"\x1c", b"\x00", b"\xed\xa0\x80"]),
    ),
    max_size=12,
).map(b"".join)


@pytest.fixture
def umask() -> Iterator[int]:
    """A umask that differs from the usual one."""
    previous = os.umask(0o027)
    yield 0o027
    os.umask(previous)


def lines_of(data: bytes) -> list[str]:
    return list(LineReader(io.BytesIO(data), name="test"))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- lines ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"\n\n", ["", ""]),
        (b"x\ry\nz\n", ["x y", "z"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\r\r\n", ["a "]),
        (b"\r\n", [""]),
        (NOT_LINE_BREAKS.encode() + b"\n", [NOT_LINE_BREAKS]),
        (b"\xef\xbb\xbfHello\n\xef\xbb\xbfHello\n", ["Hello", "Hello"]),
        (b"caf\xe9\n", ["caf\ufffd"]),
        (b"\xed\xa0\x80\n", ["\ufffd\ufffd\ufffd"]),
        (b"a\x00b\tc\x1b[0m\n", ["a\x00b\tc\x1b[0m"]),
        (" a\u00a0b\u3000 \n".encode(), [" a\u00a0b\u3000 "]),
    ],
)
def test_lines_by_example(data: bytes, expected: list[str]) -> None:
    assert lines_of(data) == expected


@given(text_bytes)
def test_a_line_ends_at_lf_and_nowhere_else(data: bytes) -> None:
    lines = lines_of(data)

    assert len(lines) == data.count(b"\n") + (not data.endswith(b"\n") and data != b"")
    assert not any(set(line) & {"\n", "\r", "\ufeff"} for line in lines)


@given(text_bytes)
def test_bad_utf8_is_replaced_and_counted(data: bytes) -> None:
    reader = LineReader(io.BytesIO(data), name="test")
    lines = list(reader)

    def is_bad(raw: bytes) -> bool:
        try:
            raw.decode()
        except UnicodeDecodeError:
            return True
        return False

    assert reader.num_bad_utf8 == sum(is_bad(raw) for raw in data.split(b"\n"))
    assert reader.num_lines == len(lines)
    for line in lines:
        line.encode()  # no lone surrogates


@given(st.lists(st.text(alphabet=st.characters(exclude_characters="\n\r\ufeff", exclude_categories=["Cs"]))))
def test_what_is_written_is_read(lines: list[str]) -> None:
    stream = io.BytesIO()
    writer = LineWriter(stream)
    for line in lines:
        writer.write(line)

    assert lines_of(stream.getvalue()) == lines


@given(text_bytes)
def test_files_gzip_and_stdin_give_the_same_lines(data: bytes) -> None:
    if data.startswith(b"\x1f\x8b"):
        return
    reference = lines_of(data)
    script = "import sys; from mtkit.files import read_lines; sys.stdout.write(repr(read_lines('-')))"
    assert decode_line(b"\xef\xbb\xbfa\r\n") == ("a", False)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(_temporary_directory()))
        (directory / "plain.gz").write_bytes(data)  # the name does not decide
        (directory / "packed").write_bytes(gzip.compress(data))
        assert read_lines(directory / "plain.gz") == reference
        assert read_lines(directory / "packed") == reference
    assert script
