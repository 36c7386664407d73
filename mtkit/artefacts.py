"""Artefacts: directories that appear when they are complete, and that say themselves what has to be in them.

A directory becomes visible by one rename, after its bytes have reached the disk. It holds a `MANIFEST.json`, written last, with name, size and sha256
of every file in it; a directory without a valid one does not count as existing.
"""

import contextlib
import dataclasses
import errno
import hashlib
import os
import re
import shutil
import stat
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from mtkit import __version__, faults
from mtkit.errors import ArtefactError, MTKitError
from mtkit.files import explain_write_errors, make_directory, read_json, sync, temporary_name, write_json

MANIFEST_NAME = "MANIFEST.json"
MANIFEST_FORMAT = 1

BLOCK_BYTES = 4 << 20
"""Of a file that is longer, each block has a checksum of its own."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")

Verify = Literal["fast", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """One file of an artefact.

    Attributes:
        size: In bytes.
        sha256: In hex.
        crc32: CRC-32 of each block of `BLOCK_BYTES`, by which damage is found; None where there is one block only, or a former mtkit wrote it.
    """

    size: int
    sha256: str
    crc32: tuple[int, ...] | None = None

    @classmethod
    def of(cls, path: Path) -> Self:
        """The record of a file as it is; reads it once."""
        digest, crcs, size = hashlib.sha256(), [], 0
        with open(path, "rb") as stream:
            while block := stream.read(BLOCK_BYTES):
                digest.update(block)
                crcs.append(zlib.crc32(block))
                size += len(block)
        return cls(size=size, sha256=digest.hexdigest(), crc32=tuple(crcs) if len(crcs) > 1 else None)

    def damage(self, found: "FileRecord") -> str | None:
        """What is wrong with a file of the right size; None if nothing is."""
        if found.sha256 == self.sha256:
            return None
        damaged = [number for number, pair in enumerate(zip(self.crc32 or (), found.crc32 or (), strict=False)) if pair[0] != pair[1]]
        where = [f"block {number} (bytes {number * BLOCK_BYTES} to {min((number + 1) * BLOCK_BYTES, self.size) - 1})" for number in damaged[:1]]
        where += [f"{len(damaged) - 1} more"] * (len(damaged) > 1)
        return "its sha256 differs from its manifest's" + (f": damaged in {' and '.join(where)}" if where else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What an artefact directory says of itself.

    Attributes:
        kind: `tokenizer`, `shards`, `checkpoint`, `model` or `ctranslate2`.
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
            files = {name: _file_record(record) for name, record in value["files"].items()}
            bad = [name for name in files if not _SAFE_NAME.fullmatch(name)]
            if bad:
                raise ArtefactError(f"{path}: lists a file name that is not allowed: {bad[0]!r}")
            config, inputs = dict(value["config"]), dict(value["inputs"])
            return cls(kind=str(value["kind"]), files=files, config=config, inputs=inputs, mtkit_version=str(value["mtkit_version"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtefactError(f"{path}: is not a manifest of mtkit: {error!r}") from error


def _file_record(value: Any) -> FileRecord:
    crcs = value.get("crc32")
    return FileRecord(size=int(value["size"]), sha256=str(value["sha256"]), crc32=None if crcs is None else tuple(map(int, crcs)))


def is_free(path: Path) -> bool:
    """Whether nothing is at a path: an empty directory, made in advance, is nothing."""
    with explain_write_errors(path):
        return not os.path.lexists(os.path.realpath(path)) or (path.is_dir() and not any(path.iterdir()))


def require_free(path: Path) -> None:
    """Refuse to make what is there already, or what cannot get its name; for before the work that `atomic_directory` ends.

    Raises:
        MTKitError: Something is there, or it is the current directory or a mount point.
    """
    if not is_free(path):
        raise MTKitError(f"{path}: exists already", hint="Choose another output, or remove it first.")
    _require_movable(path)


def _require_movable(path: Path) -> None:
    """Refuse an empty directory in whose place no other can be put."""
    place = Path(os.path.realpath(path))  # of "." itself Python says that it is a mount point
    if place.is_dir() and (place.is_mount() or place.samefile(Path.cwd())):
        what = "a mount point" if place.is_mount() else "the current directory"
        raise MTKitError(f"{path}: is {what}, in whose place no other directory can be put", hint=f"Choose one inside it, such as {path / 'NAME'}.")


def require_replaceable(path: Path, *, kind: str) -> None:
    """Refuse to replace anything but an artefact of the same kind; for before the work that `atomic_directory` ends.

    Raises:
        ArtefactError: Something else is there.
    """
    if not is_free(path):
        try:
            read_manifest(path, kind=kind)
        except ArtefactError as error:
            hint = f"It would be replaced by {_article(kind)}: move it elsewhere, or choose another output."
            raise ArtefactError(error.message, hint=hint) from error


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
    if not overwrite:
        require_free(path)
    else:
        require_replaceable(path, kind=kind)
    temporary = temporary_name(target)
    with explain_write_errors(path, temporary):
        try:
            make_directory(temporary.parent)
            temporary.mkdir()
            yield temporary
            seal_directory(temporary, kind=kind, config=config or {}, inputs=inputs or {})
            faults.reach("artefact.rename")
            if target.is_dir():
                _take_over_access(temporary, target)
            if overwrite and target.exists():
                _exchange(temporary, target)
            else:
                _rename(temporary, target)
            faults.reach("artefact.dirsync")
            sync(target.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _take_over_access(new: Path, old: Path) -> None:
    """Give a directory the mode and the group of the one that it replaces, which somebody may have chosen."""
    status = old.stat()
    if status.st_gid != new.stat().st_gid:
        with contextlib.suppress(OSError):
            os.chown(new, -1, status.st_gid)
    new.chmod(stat.S_IMODE(status.st_mode))


def _rename(new: Path, target: Path) -> None:
    """Give a directory its name; one that is mounted somewhere and cannot be replaced is filled, with the manifest last."""
    try:
        os.rename(new, target)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        for entry in sorted(new.iterdir(), key=lambda entry: entry.name == MANIFEST_NAME):
            shutil.move(entry, target / entry.name)
        new.rmdir()


def _exchange(new: Path, target: Path) -> None:
    """Put `new` in the place of `target`; when that fails, the old one is back."""
    old = temporary_name(target)
    os.rename(target, old)
    try:
        faults.reach("artefact.rename")
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
        faults.reach("artefact.fsync")
        file.chmod(0o666 & ~umask)
        files[name] = FileRecord.of(file)
        sync(file)
    for directory in [path, *(entry for entry in path.rglob("*") if entry.is_dir())]:
        sync(directory)
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


def verify_directory(path: Path, *, kind: str | None = None, level: Verify = "fast", parts: Collection[str] | None = None) -> Manifest:
    """Check an artefact directory against its manifest.

    Args:
        path: The directory.
        kind: What it has to be, or None for anything.
        level: `fast` compares names and sizes, `full` also the sha256 of every file.
        parts: The files and directories directly in it that are checked; None = all.

    Raises:
        ArtefactError: A file is missing, has another size or other bytes.
    """
    manifest = read_manifest(path, kind=kind)
    for name, record in manifest.files.items():
        if parts is not None and name.partition("/")[0] not in parts:
            continue
        file = path / name
        try:
            size = file.stat().st_size
            damage = f"has {size} bytes, its manifest says {record.size}" if size != record.size else None
            if damage is None and level == "full":
                damage = record.damage(FileRecord.of(file))
        except OSError as error:
            damage = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        if damage is not None:
            raise ArtefactError(f"{file}: {damage}", hint="The directory is damaged or was copied incompletely; make or copy it anew.")
    return manifest


def _article(kind: str | None) -> str:
    return {None: "an artefact", "shards": "a shard set", "ctranslate2": "an export for CTranslate2"}.get(kind, f"a {kind}")
