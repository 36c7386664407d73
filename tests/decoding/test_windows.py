import gzip
import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtkit.decoding import windows
from mtkit.decoding.windows import LineWindows, open_windows
from mtkit.errors import DataError
from mtkit.files import read_lines


class Pipe:
    """A pipe whose reading end stands in for stdin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reader, self.descriptor = os.pipe()
        self.stdin = os.fdopen(reader, "r")
        monkeypatch.setattr(sys, "stdin", self.stdin)

    def write(self, data: bytes) -> None:
        os.write(self.descriptor, data)

    def close(self) -> None:
        os.close(self.descriptor)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    pipe = Pipe(monkeypatch)
    yield pipe
    pipe.stdin.close()


def next_within(lines: LineWindows, seconds: float) -> list[str] | None:
    """The next window, or None if it does not come in time."""
    result: list[list[str]] = []
    thread = threading.Thread(target=lambda: result.append(next(lines)), daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None


def test_a_slow_producer_gets_every_line_at_once(pipe: Pipe) -> None:
    with open_windows("-", size=1000) as lines:
        for number in range(3):
            pipe.write(f"line {number}\n".encode())
            assert next_within(lines, 5) == [f"line {number}"]
        pipe.close()
        assert list(lines) == []


def test_what_is_there_already_comes_together(pipe: Pipe) -> None:
    pipe.write(b"a\nb\nc\nd\nbegun but not end")
    with open_windows("-", size=3) as lines:
        assert next_within(lines, 5) == ["a", "b", "c"]
        assert next_within(lines, 5) == ["d"]
        pipe.write(b"ed\n\n")
        assert next_within(lines, 5) == ["begun but not ended", ""]
        pipe.write(b"no final newline")
        pipe.close()
        assert next_within(lines, 5) == ["no final newline"]
        assert list(lines) == []
        assert lines.reader.num_lines == 7


def test_a_fast_producer_fills_the_windows(pipe: Pipe) -> None:
    def produce() -> None:
        for number in range(50_000):
            pipe.write(f"{number} {'x' * 60}\n".encode())
        pipe.close()

    thread = threading.Thread(target=produce)
    thread.start()
    with open_windows("-", size=5_000) as lines:
        sizes = []
        for window in lines:
            sizes.append(len(window))
            time.sleep(0.01)  # the work on a window, meanwhile the producer meets a full pipe
    thread.join()
    assert sum(sizes) == 50_000
    assert len(sizes) <= 20


@given(
    data=st.binary(max_size=300).map(lambda data: data.replace(b"a", b"\n").replace(b"b", b"\r")).filter(lambda data: data[:2] != b"\x1f\x8b"),
    size=st.integers(1, 5),
)
def test_the_lines_are_those_of_a_file(data: bytes, size: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("lines") / "input"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as monkeypatch:
        pipe = Pipe(monkeypatch)
        pipe.write(data)
        pipe.close()
        with open_windows("-", size=size) as lines:
            found = list(lines)
        pipe.stdin.close()
    assert [line for window in found for line in window] == read_lines(path)
    assert all(len(window) == size for window in found[:-1])
    with open_windows(path, size=size) as lines:
        assert list(lines) == found


def test_a_window_waits_a_moment_for_one_more_line(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "PATIENCE_S", 10.0)
    pipe.write(b"a\nb")
    with open_windows("-", size=3) as lines:
        threading.Timer(0.2, lambda: pipe.write(b"b\nc\n")).start()
        assert next_within(lines, 5) == ["a", "bb", "c"]
    pipe.close()


def test_lines_do_not_wait_for_an_endless_one(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MAX_LINE_BYTES", 1 << 17)
    stop = threading.Event()

    def produce() -> None:
        pipe.write(b"first\n")
        while not stop.is_set():
            pipe.write(b"x" * 1000)
        pipe.close()

    thread = threading.Thread(target=produce)
    thread.start()
    with open_windows("-", size=10) as lines:
        assert next_within(lines, 5) == ["first"]
        stop.set()
        assert len(list(lines)) == 1
    thread.join()


def test_an_over_long_line_is_cut_and_does_not_grow_the_memory(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MAX_LINE_BYTES", 1 << 17)
    monkeypatch.setattr("mtkit.files.MAX_LINE_BYTES", 1 << 17)

    def produce() -> None:
        pipe.write(b"first\n" + b"x" * 1_000_000 + b"\nlast\n")
        pipe.close()

    thread = threading.Thread(target=produce)
    thread.start()
    with open_windows("-", size=10) as lines:
        found = [line for window in lines for line in window]
    thread.join()
    assert [len(line) for line in found] == [5, 1 << 17, 4]
    assert lines.reader.num_cut == 1


def test_windows_end_after_many_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MAX_WINDOW_CHARS", 10)
    path = tmp_path / "input"
    path.write_bytes(b"12345678\n123\n1\n2\n3\n")
    with open_windows(path, size=100) as lines:
        assert list(lines) == [["12345678", "123"], ["1", "2", "3"]]


def test_a_named_pipe_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    done = threading.Event()

    def produce() -> None:
        with open(path, "wb", buffering=0) as stream:
            stream.write(b"only\n")
            done.wait(10)

    thread = threading.Thread(target=produce)
    thread.start()
    with open_windows(path, size=10) as lines:
        assert next_within(lines, 5) == ["only"]
        done.set()
        assert list(lines) == []
    thread.join()


def test_gzip_files_and_text_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "input.gz"
    path.write_bytes(gzip.compress(b"a\nb\nc\n"))
    with open_windows(path, size=2) as lines:
        assert list(lines) == [["a", "b"], ["c"]]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\nc\n")))
    with open_windows("-", size=2) as lines:
        assert list(lines) == [["a", "b"], ["c"]]


def test_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing: cannot be read: No such file"), open_windows(tmp_path / "missing", size=2):
        pass
