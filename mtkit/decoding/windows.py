"""Input lines in windows: as many as there are right now, at most so many, so that a slow producer gets each line's result at once.

A window that waits until it is full would keep a program that writes one line and reads the answer waiting for ever. So a window begins with a line,
however long that takes, and goes on only while the next line is there already (or comes within `PATIENCE_S`, which lets a fast producer fill the pipe
again). Files fill every window.
"""

import contextlib
import io
import os
import select
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from mtkit.errors import DataError
from mtkit.files import MAX_LINE_BYTES, STDIO, LineReader, open_lines

PATIENCE_S = 0.005
"""Seconds that a window waits for one more line before it is handed over."""

MAX_WINDOW_CHARS = 16 << 20
"""A window ends after so many characters, so that memory stays bounded whatever the lines are like."""

_CHUNK_BYTES = 1 << 16

_MAX_WAIT_MS = 500
"""Python reacts to a signal that comes between two of its instructions, but not while it waits for input: it never waits longer than this."""


class LineWindows(Iterator[list[str]]):
    """Iterates over non-empty lists of lines.

    Args:
        reader: Where the lines come from.
        size: Largest number of lines of a window.
        is_ready: Says whether the reader's next line, or its end, is there without waiting.

    Attributes:
        reader: As above; it counts the lines.
    """

    def __init__(self, reader: LineReader, *, size: int, is_ready: Callable[[], bool]) -> None:
        self.reader = reader
        self._size = size
        self._is_ready = is_ready

    def __next__(self) -> list[str]:
        lines = [next(self.reader)]
        num_chars = len(lines[0])
        while len(lines) < self._size and num_chars < MAX_WINDOW_CHARS and self._is_ready():
            line = next(self.reader, None)
            if line is None:
                break
            lines.append(line)
            num_chars += len(line)
        return lines


@contextlib.contextmanager
def open_windows(path: str | Path, *, size: int) -> Iterator[LineWindows]:
    """Open a plain or gzip file, a named pipe, or stdin for `-`, for reading windows of lines.

    Args:
        path: Where the lines come from.
        size: Largest number of lines of a window.

    Raises:
        DataError: There is no such file or it cannot be read.
    """
    descriptor = _stdin_descriptor() if str(path) == STDIO else _pipe_descriptor(path)
    if descriptor is None:
        with open_lines(path) as reader:
            yield LineWindows(reader, size=size, is_ready=lambda: True)
        return
    feed = _Feed(descriptor)
    name = "stdin" if str(path) == STDIO else str(path)
    try:
        yield LineWindows(LineReader(cast(BinaryIO, feed), name=name), size=size, is_ready=feed.is_ready)
    finally:
        if str(path) != STDIO:
            os.close(descriptor)


def _stdin_descriptor() -> int | None:
    """The file descriptor of stdin; None if it is a stand-in that lives in memory."""
    try:
        return sys.stdin.buffer.fileno()
    except io.UnsupportedOperation:
        return None


def _pipe_descriptor(path: str | Path) -> int | None:
    """The file descriptor of a named pipe, opened for reading; None for any other file."""
    try:
        return os.open(path, os.O_RDONLY) if Path(path).is_fifo() else None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Feed:
    """`readline` over a file descriptor, and whether it would wait. Python's own buffered readers cannot tell what they hold."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._lines: deque[bytes] = deque()
        self._rest = b""
        self._has_ended = False

    def readline(self, limit: int) -> bytes:
        """The next line with its LF, or at most `limit` bytes of it; waits for it. Empty at the end."""
        while not self._lines and len(self._rest) < limit and not self._has_ended:
            self._read()
        if self._lines:
            line = self._lines.popleft()
            if len(line) > limit:
                self._lines.appendleft(line[limit:])
            return line[:limit]
        line, self._rest = self._rest[:limit], self._rest[limit:]
        return line

    def is_ready(self) -> bool:
        """Whether a whole line, or the end, is there or comes within `PATIENCE_S`. A line that is too long to be read whole is not."""
        while not self._lines and len(self._rest) < MAX_LINE_BYTES and not self._has_ended:
            if not self._poll.poll(PATIENCE_S * 1000):
                return False
            self._read()
        return bool(self._lines) or self._has_ended

    def _read(self) -> None:
        while not self._poll.poll(_MAX_WAIT_MS):
            pass
        chunk = os.read(self._descriptor, _CHUNK_BYTES)
        self._has_ended = not chunk
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._lines.extend(line + b"\n" for line in lines)
