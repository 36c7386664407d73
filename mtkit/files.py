"""Text lines and atomic writes: every byte that mtkit reads as text or writes to a file of its own passes here.

Text rules. A line ends at LF and nowhere else. One trailing CR is dropped and an inner CR becomes a space. Bytes that are not UTF-8 are
replaced by U+FFFD and counted. U+FEFF (byte-order mark) is removed. U+2028, U+0085, VT, FF and FS never split a line. A line of more than
`MAX_LINE_BYTES` is cut there and counted, so that memory stays bounded. The rules are the same for files, gzip files and pipes, and do not
depend on the locale. Gzip files are unpacked; text that is packed otherwise, or in UTF-16, is refused: its lines would be nothing but noise.

A file that is written becomes visible by one rename, after its bytes have reached the disk. Directories are in `artefacts.py`.
"""

import codecs
import contextlib
import errno
import gzip
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import shutil
import stat
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mtkit import faults
from mtkit.errors import ArtefactError, DataError, MTKitError, ResourceError

STDIO = "-"
"""The path that stands for stdin or stdout."""

MAX_LINE_BYTES = 4 << 20
"""A longer line is cut here."""

MAX_JSON_BYTES = 8 << 20
"""JSON takes up to twenty times its size in memory."""

READ_ERRORS = (OSError, EOFError, zlib.error)
"""What reading a stream of `open_bytes` may raise: gzip files that are cut or damaged raise the latter two (`BadGzipFile` is an OSError)."""

_SPACE_HINT = "Free some space and run the command again."
_DESCRIPTOR = re.compile(r"/dev/(stdout|stderr)|(?:/dev|/proc/self)/fd/(\d+)")
_GZIP_MAGIC = b"\x1f\x8b"
_BOM = "\ufeff"
_PACKED = (
    (re.compile(rb"\x1f\x8b\x08"), "gzip", "gzip -dc"),
    (re.compile(rb"BZh[1-9]1AY&SY"), "bzip2", "bzip2 -dc"),
    (re.compile(rb"\xfd7zXZ\0"), "xz", "xz -dc"),
    (re.compile(rb"\x28\xb5\x2f\xfd"), "zstd", "zstd -dc"),
    (re.compile(rb"PK\x03\x04"), "zip", "unzip -p"),
)
"""How a packed file begins, what packed it, and what unpacks it."""
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_UTF16_BYTES = 8
_BLANK = re.compile(r"[\s\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]*")
_LINE_BREAKS = re.compile("[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")


def decode_line(raw: bytes) -> tuple[str, bool]:
    """The text of a line's bytes, with or without LF, by the rules of this module, and whether it held bytes that are not UTF-8."""
    raw = raw.removesuffix(b"\n").removesuffix(b"\r")
    try:
        text, is_bad = raw.decode("utf-8"), False
    except UnicodeDecodeError:
        text, is_bad = raw.decode("utf-8", errors="replace"), True
    return text.replace("\r", " ").replace(_BOM, ""), is_bad


def require_text(name: str, head: bytes) -> None:
    """Refuse what is no text, by its first bytes.

    Args:
        name: The path, for messages.
        head: The first line, or more.

    Raises:
        DataError: It is packed, or in UTF-16; the hint says how to make text of it.
    """
    for pattern, packer, unpack in _PACKED:
        if pattern.match(head):
            raise DataError(f"{name}: is packed with {packer}, not plain text", hint=f"Unpack it first: {unpack} FILE")
    if head[:2] in _UTF16_MARKS and len(head) >= _UTF16_BYTES and head.count(0) >= len(head) // 4:
        raise DataError(f"{name}: is UTF-16, but text must be UTF-8", hint="Convert it first: iconv -f UTF-16 -t UTF-8 FILE")


class LineReader(Iterator[str]):
    """Iterates over the lines of a binary stream. Reading raises `DataError` if it fails, or if the first line is of a stream that is no text.

    Attributes:
        name: The path, for messages.
        num_lines: Lines read so far.
        num_bad_utf8: Lines so far that held bytes which are not UTF-8.
        num_cut: Lines so far that were longer than `MAX_LINE_BYTES`.
    """

    def __init__(self, stream: BinaryIO, *, name: str) -> None:
        self.name = name
        self.num_lines = self.num_bad_utf8 = self.num_cut = 0
        self._stream = stream

    def __next__(self) -> str:
        raw = self._raw_line()
        if not raw:
            raise StopIteration
        text, is_bad = decode_line(raw)
        self.num_bad_utf8 += is_bad
        return text

    def skip(self, count: int) -> int:
        """Pass over lines without decoding them; returns how many there were, at most `count`."""
        return sum(1 for _ in zip(range(count), iter(self._raw_line, b""), strict=False))

    def _raw_line(self) -> bytes:
        try:
            raw = self._stream.readline(MAX_LINE_BYTES)
            if len(raw) >= MAX_LINE_BYTES and not raw.endswith(b"\n"):
                raw = self._cut(raw)
        except READ_ERRORS as error:
            raise DataError(f"{self.name}:{self.num_lines + 1}: reading failed: {error}", hint="Is the file damaged, or gone?") from error
        if not self.num_lines:
            require_text(self.name, raw)
        self.num_lines += bool(raw)
        return raw

    def _cut(self, raw: bytes) -> bytes:
        """Skip the rest of a line that starts with `raw`, in pieces; a character that the cut would split is left out."""
        rest = self._stream.readline(MAX_LINE_BYTES)
        if rest in (b"", b"\n", b"\r\n"):
            return raw
        self.num_cut += 1
        while rest and not rest.endswith(b"\n"):
            rest = self._stream.readline(MAX_LINE_BYTES)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(raw)
        return raw.removesuffix(decoder.getstate()[0])


def require_readable(path: str) -> None:
    """Refuse a file that is not there or cannot be opened, without opening it: a pipe could be opened only once.

    Raises:
        DataError: As `open_bytes` raises it.
    """
    try:
        Path(path).stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if Path(path).is_dir() or not os.access(path, os.R_OK):
        raise DataError(f"{path}: cannot be read: {os.strerror(errno.EISDIR if Path(path).is_dir() else errno.EACCES)}")


@contextlib.contextmanager
def open_bytes(path: str | Path) -> Iterator[BinaryIO]:
    """Open a plain or gzip file for reading bytes; gzip is told by its first bytes, not by its name. Reading may raise `READ_ERRORS`.

    Raises:
        DataError: There is no such file or it cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        stream: BinaryIO
        try:
            stream = plain = stack.enter_context(open(path, "rb"))
            if plain.peek(2)[:2] == _GZIP_MAGIC:
                stream = stack.enter_context(gzip.open(stream))  # type: ignore[assignment]
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        yield stream


@contextlib.contextmanager
def open_lines(path: str | Path) -> Iterator[LineReader]:
    """Open a plain or gzip file, or stdin for `-`, for reading lines. Stdin is always plain: telling gzip would mean to wait for its first byte.

    Raises:
        DataError: There is no such file or it cannot be read.
    """
    if str(path) == STDIO:
        yield LineReader(sys.stdin.buffer, name="stdin")
        return
    with open_bytes(path) as stream:
        yield LineReader(stream, name=str(path))


def read_lines(path: str | Path) -> list[str]:
    """Read all lines of a file that fits into memory."""
    with open_lines(path) as lines:
        return list(lines)


def one_line(text: str) -> str:
    """Replace whatever some reader takes for a line break by a space, so that one output stays one line everywhere."""
    return _LINE_BREAKS.sub(" ", text)


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: it has white space, controls and characters without a form of their own (zero-width, direction marks) only."""
    return _BLANK.fullmatch(text) is not None


class LineWriter:
    """Writes lines as UTF-8, whatever the locale; a lone surrogate becomes U+FFFD."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, line: str) -> None:
        """Write one line, which must not hold a line break (pass generated text through `one_line` first), and its LF."""
        if "\n" in line:
            raise ValueError(f"a line must not hold a line break: {line!r}")
        try:
            data = line.encode("utf-8")
        except UnicodeEncodeError:
            data = line.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode("utf-8")
        self._stream.write(data + b"\n")

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        self._stream.flush()


@contextlib.contextmanager
def open_output(path: str | Path) -> Iterator[LineWriter]:
    """Open a file, or stdout for `-`, for writing lines. A file appears under its name only when the block ends without an error.

    It is packed if its name ends with `.gz`; equal lines give equal bytes.
    """
    if str(path) == STDIO:
        with explain_write_errors(Path("stdout")):
            yield LineWriter(sys.stdout.buffer)
            sys.stdout.buffer.flush()
        return
    with atomic_file(Path(path)) as stream:
        if str(path).endswith(".gz"):
            with gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as packed:
                yield LineWriter(packed)  # type: ignore[arg-type]
        else:
            yield LineWriter(stream)


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no reader takes for an artefact: hidden, with the process and a random part."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that appears, or replaces the old one, only when complete and on disk.

    A symbolic link is followed. A device or a named pipe is written to as it is, because it cannot be replaced by a file; so is what this process has
    open under a name such as /dev/stdout, from where it stands. A file that is replaced keeps its mode.

    Raises:
        ResourceError: The disk is full.
        MTKitError: The place cannot be written.
    """
    target = Path(os.path.realpath(path))
    temporary = temporary_name(target)
    with explain_write_errors(path, temporary):
        if (descriptor := _own_descriptor(path)) is not None:
            with open(os.dup(descriptor), "wb") as stream:
                yield stream
            return
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            with open(path, "wb") as stream:
                yield stream
            return
        try:
            make_directory(target.parent)
            with open(temporary, "xb") as stream:
                if target.exists():
                    os.fchmod(stream.fileno(), stat.S_IMODE(target.stat().st_mode))
                yield stream
                faults.reach("atomic.write")
                stream.flush()
                faults.reach("atomic.fsync")
                os.fsync(stream.fileno())
            faults.reach("atomic.rename")
            _replace(temporary, target)
            faults.reach("atomic.dirsync")
            sync(target.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _replace(new: Path, target: Path) -> None:
    """Give a file its name; one that is mounted and cannot be replaced is written to."""
    try:
        os.replace(new, target)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        shutil.copyfile(new, target)
        new.unlink()


def _own_descriptor(path: Path) -> int | None:
    """The number of an open file of this process that a path stands for; None if it does not."""
    if (found := _DESCRIPTOR.fullmatch(os.path.abspath(path))) is None:
        return None
    return {"stdout": 1, "stderr": 2}.get(found[1]) or int(found[2])


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically, indented, with sorted keys."""
    with atomic_file(path) as stream:
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        stream.write((text + "\n").encode(errors="backslashreplace"))  # half a surrogate pair, as in odd file names, becomes JSON's own escape


def read_json(path: Path) -> Any:
    """Read a JSON file that mtkit wrote.

    Raises:
        ArtefactError: It is missing, too large or not JSON.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ArtefactError(f"{path}: {path.stat().st_size} bytes are too many for a JSON file of mtkit")
        return json.loads(path.read_bytes(), parse_constant=_finite, parse_float=_finite)
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ArtefactError(f"{path}: is not valid JSON: {error}") from error


def _finite(text: str) -> float:
    """A number of a JSON file; infinity and NaN are not JSON, although Python reads them."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def sync(path: Path) -> None:
    """Make the bytes of a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing, durably; one that is there is left as it is. A link is followed, also to nowhere."""
    path = Path(os.path.realpath(path))
    missing = list(itertools.takewhile(lambda directory: not directory.exists(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for directory in reversed(missing):
        sync(directory.parent)


def require_space(path: Path, num_bytes: int) -> None:
    """Refuse to begin writing what would not fit on the disk.

    Args:
        path: A directory that exists, on the disk in question.
        num_bytes: What is to be written; a fifth more has to be free.

    Raises:
        ResourceError: Less is free.
    """
    free, needed = shutil.disk_usage(path).free, num_bytes + num_bytes // 5
    if free < needed:
        raise ResourceError(f"{path}: needs {needed / 1e6:,.1f} MB for what is to be written, and {free / 1e6:,.1f} MB are free", hint=_SPACE_HINT)


@contextlib.contextmanager
def explain_write_errors(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Make errors for users of what writing `path` may raise; `temporary` is where it is written to at first, which is not worth a word.

    Raises:
        ResourceError: The disk is full.
        MTKitError: The place cannot be written.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has gone: not a fault of the place
    except OSError as error:
        where = "" if error.filename in (None, str(path), str(temporary)) else f" ({error.filename})"
        message = f"{path}: cannot be written: {error.strerror or error}{where}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ResourceError(message, hint=_SPACE_HINT) from error
        raise MTKitError(message) from error


def sha256_file(path: Path) -> str:
    """sha256 of a file, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
