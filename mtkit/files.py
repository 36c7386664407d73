"""Text lines, atomic writes and manifests: every byte that mtkit reads as text or writes as an artefact passes here.

Text rules. A line ends at LF and nowhere else. One trailing CR is dropped and an inner CR becomes a space. Bytes that are not UTF-8 are
replaced by U+FFFD and counted. U+FEFF (byte-order mark) is removed. U+2028, U+0085, VT, FF and FS never split a line. A line of more than
`MAX_LINE_BYTES` is cut there and counted, so that memory stays bounded. The rules are the same for files, gzip files and pipes, and do not
depend on the locale.

Artefacts. A file or directory becomes visible by one rename, after its bytes have reached the disk. A directory holds a `MANIFEST.json` with
name, size and sha256 of every file in it; a directory without a valid one does not count as existing.
"""

import codecs
import contextlib
import dataclasses
import errno
import gzip
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

from mtkit import __version__
from mtkit.errors import ArtefactError, DataError, MTKitError, ResourceError

STDIO = "-"
"""The path that stands for stdin or stdout."""

MAX_LINE_BYTES = 4 << 20
"""A longer line is cut here."""

MANIFEST_NAME = "MANIFEST.json"
MANIFEST_FORMAT = 1
MAX_JSON_BYTES = 64 << 20

READ_ERRORS = (OSError, EOFError, zlib.error)
"""What reading a stream of `open_bytes` may raise: gzip files that are cut or damaged raise the latter two (`BadGzipFile` is an OSError)."""

_GZIP_MAGIC = b"\x1f\x8b"
_BOM = "\ufeff"
_LINE_BREAKS = re.compile("[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")

Verify = Literal["fast", "full"]


def decode_line(raw: bytes) -> tuple[str, bool]:
    """Turn the bytes of one line, with or without its LF, into text by the rules of this module.

    Returns:
        The text and whether it held bytes that are not UTF-8.
    """
    raw = raw.removesuffix(b"\n").removesuffix(b"\r")
    try:
        text, is_bad = raw.decode("utf-8"), False
    except UnicodeDecodeError:
        text, is_bad = raw.decode("utf-8", errors="replace"), True
    return text.replace("\r", " ").replace(_BOM, ""), is_bad


class LineReader(Iterator[str]):
    """Iterates over the lines of a binary stream.

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
        try:
            raw = self._stream.readline(MAX_LINE_BYTES)
            if not raw:
                raise StopIteration
            if len(raw) >= MAX_LINE_BYTES and not raw.endswith(b"\n"):
                raw = self._cut(raw)
        except READ_ERRORS as error:
            hint = "The file is damaged or was removed while being read."
            raise DataError(f"{self.name}:{self.num_lines + 1}: reading failed: {error}", hint=hint) from error
        self.num_lines += 1
        text, is_bad = decode_line(raw)
        self.num_bad_utf8 += is_bad
        return text

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


class LineWriter:
    """Writes lines as UTF-8, whatever the locale; a lone surrogate becomes U+FFFD."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, line: str) -> None:
        """Write one line and its LF.

        Args:
            line: Text without a line break; pass generated text through `one_line` first.
        """
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
    """Open a file, or stdout for `-`, for writing lines. A file appears under its name only when the block ends without an error."""
    if str(path) == STDIO:
        with _explain_write_errors(Path("stdout")):
            yield LineWriter(sys.stdout.buffer)
            sys.stdout.buffer.flush()
        return
    with atomic_file(Path(path)) as stream:
        yield LineWriter(stream)


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no reader takes for an artefact: hidden, with the process and a random part."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that appears, or replaces the old one, only when complete and on disk.

    A symbolic link is followed. A device or a named pipe is written to as it is, because it cannot be replaced by a file.

    Raises:
        ResourceError: The disk is full.
        MTKitError: The place cannot be written.
    """
    target = Path(os.path.realpath(path))
    temporary = temporary_name(target)
    with _explain_write_errors(path, temporary):
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            with open(path, "wb") as stream:
                yield stream
            return
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, target)
            _fsync(target.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


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
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ArtefactError(f"{path}: is not valid JSON: {error}") from error


def _fsync(path: Path) -> None:
    """Make the bytes of a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explain_write_errors(path: Path, temporary: Path | None = None) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has gone: not a fault of the place
    except OSError as error:
        where = "" if error.filename in (None, str(path), str(temporary)) else f" ({error.filename})"
        message = f"{path}: cannot be written: {error.strerror or error}{where}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ResourceError(message, hint="Free some space and run the command again.") from error
        raise MTKitError(message) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """One file of an artefact: size in bytes and sha256 in hex."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What an artefact directory says of itself.

    Attributes:
        kind: `tokenizer`, `shards`, `checkpoint` or `model`.
        files: Every file of the directory by its path relative to it.
        config: The resolved config that made it.
        inputs: Fingerprints of what it was made from.
        mtkit_version: The version that wrote it.
        format: Version of the manifest's own format.
    """

    kind: str
    files: dict[str, FileRecord]
    config: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    mtkit_version: str = __version__
    format: int = MANIFEST_FORMAT

    @property
    def fingerprint(self) -> str:
        """sha256 over the names and contents of the files: equal fingerprints mean equal bytes."""
        lines = (f"{name}\0{record.size}\0{record.sha256}\n" for name, record in sorted(self.files.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @classmethod
    def from_json(cls, value: Any, *, path: Path) -> Self:
        """Check and take over what a manifest file holds; `path` is for messages."""
        try:
            if value["format"] != MANIFEST_FORMAT:
                raise ArtefactError(
                    f"{path}: has format {value['format']!r}, this mtkit ({__version__}) reads format {MANIFEST_FORMAT}",
                    hint=f"It was written by mtkit {value.get('mtkit_version')}; use that version or make the artefact anew.",
                )
            files = {name: FileRecord(size=int(record["size"]), sha256=str(record["sha256"])) for name, record in value["files"].items()}
            bad = [name for name in files if not _SAFE_NAME.fullmatch(name)]
            if bad:
                raise ArtefactError(f"{path}: lists a file name that is not allowed: {bad[0]!r}")
            config, inputs = dict(value["config"]), dict(value["inputs"])
            return cls(kind=str(value["kind"]), files=files, config=config, inputs=inputs, mtkit_version=str(value["mtkit_version"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtefactError(f"{path}: is not a manifest of mtkit: {error!r}") from error


def sha256_file(path: Path) -> str:
    """sha256 of a file, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_directory(
    path: Path, *, kind: str, config: Mapping[str, Any] | None = None, inputs: Mapping[str, Any] | None = None, overwrite: bool = False
) -> Iterator[Path]:
    """Write an artefact directory that appears only when complete.

    The block gets a temporary directory beside `path` and fills it. Then every file is hashed and made durable, the manifest is written last,
    and one rename gives the directory its name. On an error the temporary directory is removed and `path` stays as it was.

    Args:
        path: The directory to make.
        kind: What it is; readers ask for it.
        config: The resolved config, for the manifest.
        inputs: Fingerprints of what it is made from, for the manifest.
        overwrite: Replace an existing artefact of the same kind. Anything else is never replaced.

    Raises:
        MTKitError: `path` exists and must not be replaced, or cannot be written.
        ResourceError: The disk is full.
    """
    target = Path(os.path.realpath(path))
    if target.exists():
        if not overwrite:
            raise MTKitError(f"{path}: exists already", hint="Choose another output, or remove it first.")
        read_manifest(path, kind=kind)
    temporary = temporary_name(target)
    with _explain_write_errors(path, temporary):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            seal_directory(temporary, kind=kind, config=config or {}, inputs=inputs or {})
            if overwrite and target.exists():
                _exchange(temporary, target)
            else:
                os.rename(temporary, target)
            _fsync(target.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _exchange(new: Path, target: Path) -> None:
    """Put `new` in the place of `target`; when that fails, the old one is back."""
    old = temporary_name(target)
    os.rename(target, old)
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def seal_directory(path: Path, *, kind: str, config: Mapping[str, Any], inputs: Mapping[str, Any]) -> Manifest:
    """Hash and fsync every file below `path`, give it the mode that the umask asks for, and write the manifest last."""
    os.umask(umask := os.umask(0o077))  # reading it means setting it; a strict one, in case another thread makes a file just now
    files = {}
    for file in [entry for entry in sorted(path.rglob("*")) if entry.is_file() and entry != path / MANIFEST_NAME]:
        name = file.relative_to(path).as_posix()
        if not _SAFE_NAME.fullmatch(name):
            raise ValueError(f"a file of an artefact cannot be named {name!r}")
        file.chmod(0o666 & ~umask)
        files[name] = FileRecord(size=file.stat().st_size, sha256=sha256_file(file))
        _fsync(file)
    for directory in [path, *(entry for entry in path.rglob("*") if entry.is_dir())]:
        _fsync(directory)
    manifest = Manifest(kind=kind, files=files, config=dict(config), inputs=dict(inputs))
    write_json(path / MANIFEST_NAME, dataclasses.asdict(manifest))
    return manifest


def read_manifest(path: Path, *, kind: str | None = None) -> Manifest:
    """Read the manifest of an artefact directory.

    Args:
        path: The directory.
        kind: What it has to be, or None for anything.

    Raises:
        ArtefactError: There is none, it is damaged, or it is of another kind.
    """
    if not (path / MANIFEST_NAME).is_file():
        reason = f"it has no {MANIFEST_NAME}" if path.is_dir() else "it is no directory" if path.exists() else "it does not exist"
        raise ArtefactError(f"{path}: is not {_article(kind)} of mtkit: {reason}")
    manifest = Manifest.from_json(read_json(path / MANIFEST_NAME), path=path / MANIFEST_NAME)
    if kind is not None and manifest.kind != kind:
        raise ArtefactError(f"{path}: is {_article(manifest.kind)}, and {_article(kind)} is needed here")
    return manifest


def verify_directory(path: Path, *, kind: str | None = None, level: Verify = "fast") -> Manifest:
    """Check an artefact directory against its manifest.

    Args:
        path: The directory.
        kind: What it has to be, or None for anything.
        level: `fast` compares names and sizes, `full` also the sha256 of every file.

    Raises:
        ArtefactError: A file is missing, has another size or other bytes.
    """
    manifest = read_manifest(path, kind=kind)
    for name, record in manifest.files.items():
        file = path / name
        try:
            size = file.stat().st_size
            damage = f"has {size} bytes, its manifest says {record.size}" if size != record.size else None
            if damage is None and level == "full" and sha256_file(file) != record.sha256:
                damage = "its sha256 differs from its manifest's"
        except OSError as error:
            damage = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        if damage is not None:
            raise ArtefactError(f"{file}: {damage}", hint="The directory is damaged or was copied incompletely; make or copy it anew.")
    return manifest


def _article(kind: str | None) -> str:
    names = {None: "an artefact", "shards": "a shard set"}
    return names.get(kind, f"a {kind}")
