"""Artefact directories and their manifests, on a file system that fails and from people who mean harm."""

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from mtkit import artefacts
from mtkit.artefacts import MANIFEST_NAME, FileRecord, Manifest, atomic_directory, read_manifest, require_free, verify_directory
from mtkit.errors import ArtefactError, MTKitError


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def artefact(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    with atomic_directory(path, kind="model", config={"d_model": 8}, inputs={"shards": "abc"}) as directory:
        (directory / "model.safetensors").write_bytes(b"0123456789")
        (directory / "tokenizer").mkdir()
        (directory / "tokenizer" / "tokenizer.model").write_bytes(b"")
    return path


def test_manifest_round_trip(artefact: Path) -> None:
    manifest = verify_directory(artefact, kind="model", level="full")

    assert manifest.kind == "model"
    assert manifest.config == {"d_model": 8}
    assert manifest.inputs == {"shards": "abc"}
    assert {name: record.size for name, record in manifest.files.items()} == {"model.safetensors": 10, "tokenizer/tokenizer.model": 0}
    assert manifest.files["tokenizer/tokenizer.model"].sha256 == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert read_manifest(artefact) == manifest
    assert os.listdir(artefact.parent) == ["model"]


def test_equal_bytes_have_equal_fingerprints(artefact: Path) -> None:
    first = read_manifest(artefact)
    record = FileRecord(size=10, sha256="0" * 64)

    assert Manifest(kind="model", files=first.files, config={"other": 1}).fingerprint == first.fingerprint
    assert Manifest(kind="model", files=dict(reversed(first.files.items()))).fingerprint == first.fingerprint
    assert Manifest(kind="model", files={**first.files, "model.safetensors": record}).fingerprint != first.fingerprint
    assert Manifest(kind="model", files={"a": record}).fingerprint != Manifest(kind="model", files={"b": record}).fingerprint


def test_an_artefact_is_on_disk_before_it_has_its_name(tmp_path: Path, operations: list[str]) -> None:
    with atomic_directory(tmp_path / "model", kind="model") as directory:
        (directory / "weights").write_bytes(b"0")

    assert operations == [
        "fsync weights",
        "fsync TEMPORARY model",
        f"fsync TEMPORARY {MANIFEST_NAME}",
        f"rename TEMPORARY {MANIFEST_NAME} -> {MANIFEST_NAME}",
        "fsync TEMPORARY model",
        "rename TEMPORARY model -> model",
        f"fsync {tmp_path.name}",
    ]


def test_the_files_of_an_artefact_have_the_mode_of_the_umask(tmp_path: Path, umask: int) -> None:
    with atomic_directory(tmp_path / "model", kind="model") as directory:
        (directory / "weights").touch(mode=0o600)  # as safetensors makes them

    assert mode_of(tmp_path / "model" / "weights") == mode_of(tmp_path / "model" / MANIFEST_NAME) == 0o666 & ~umask
    assert mode_of(tmp_path / "model") == 0o777 & ~umask
    assert os.umask(umask) == umask


def test_an_error_leaves_no_artefact(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_directory(tmp_path / "model", kind="model") as directory:
            (directory / "weights").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert os.listdir(tmp_path) == []


def test_an_existing_path_is_not_replaced_unasked(artefact: Path) -> None:
    before = read_manifest(artefact)
    with pytest.raises(MTKitError, match="model: exists already"), atomic_directory(artefact, kind="model"):
        pass
    assert verify_directory(artefact, level="full") == before


def test_an_empty_directory_made_in_advance_is_filled(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    with atomic_directory(path, kind="model") as directory:
        (directory / "weights").write_bytes(b"x")
    assert sorted(verify_directory(path, level="full").files) == ["weights"]
    assert os.listdir(tmp_path) == ["model"]


def test_what_is_there_is_noticed_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "link").symlink_to(tmp_path / "full")
    for name in ("file", "full", "link"):
        with pytest.raises(MTKitError, match=f"{name}: exists already"):
            require_free(tmp_path / name)
    (tmp_path / "broken").symlink_to(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    for name in ("new", "new/below", "broken", "empty"):
        require_free(tmp_path / name)


def test_only_an_artefact_of_the_same_kind_is_replaced(artefact: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    for path, message in ((artefact, "is a model, and a shard set is needed"), (tmp_path / "home", "is not a shard set of mtkit")):
        with pytest.raises(ArtefactError, match=message), atomic_directory(path, kind="shards", overwrite=True):
            pass
    assert (tmp_path / "home" / "thesis.tex").exists()
    verify_directory(artefact, level="full")


@pytest.mark.parametrize("is_link", [False, True])
def test_an_artefact_is_replaced_whole(artefact: Path, tmp_path: Path, is_link: bool) -> None:
    path = artefact
    if is_link:
        path = tmp_path / "link"
        path.symlink_to(artefact)
    with atomic_directory(path, kind="model", overwrite=True) as directory:
        (directory / "other").write_bytes(b"1")
        verify_directory(path, level="full")  # the old one, until the block ends

    assert list(verify_directory(artefact, level="full").files) == ["other"]
    assert not (artefact / "model.safetensors").exists()
    assert sorted(os.listdir(tmp_path)) == (["link", "model"] if is_link else ["model"])


def test_a_failed_replacement_gives_the_old_artefact_back(artefact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def fail_on_the_new(old: Path, new: Path) -> None:
        if new == artefact and (old / "other").exists():
            raise OSError(errno.EIO, "Input/output error")
        rename(old, new)

    monkeypatch.setattr(os, "rename", fail_on_the_new)
    with (
        pytest.raises(MTKitError, match="model: cannot be written: Input/output error"),
        atomic_directory(artefact, kind="model", overwrite=True) as directory,
    ):
        (directory / "other").touch()

    assert "model.safetensors" in verify_directory(artefact, level="full").files
    assert os.listdir(artefact.parent) == ["model"]


@pytest.mark.parametrize("name", ["..", ".hidden", "a b", "-f", "a\nb", "ü"])
def test_a_file_of_an_artefact_has_a_plain_name(tmp_path: Path, name: str) -> None:
    if name == "..":
        name = "..x"
    with pytest.raises(ValueError, match="cannot be named"), atomic_directory(tmp_path / "model", kind="model") as directory:
        (directory / name).touch()
    assert os.listdir(tmp_path) == []


def test_damage_is_found(artefact: Path) -> None:
    file = artefact / "model.safetensors"
    file.write_bytes(b"0123456780")
    verify_directory(artefact, level="fast")
    with pytest.raises(ArtefactError, match=r"model.safetensors: its sha256 differs"):
        verify_directory(artefact, level="full")
    file.write_bytes(b"012345678")
    with pytest.raises(ArtefactError, match=r"model.safetensors: has 9 bytes, its manifest says 10"):
        verify_directory(artefact)
    file.unlink()
    with pytest.raises(ArtefactError, match=r"model.safetensors: is missing"):
        verify_directory(artefact)
    file.symlink_to(file)
    with pytest.raises(ArtefactError, match=r"model.safetensors: cannot be read: Too many levels"):
        verify_directory(artefact)


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b"01234x6789", "block 1 (bytes 4 to 7)"),
        (b"012345678x", "block 2 (bytes 8 to 9)"),
        (b"x12345678x", "block 0 (bytes 0 to 3) and 1 more"),
        (b"xxxxxxxxxx", "block 0 (bytes 0 to 3) and 2 more"),
    ],
)
def test_where_a_file_is_damaged_is_told_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, where: str) -> None:
    """A7, B1."""
    monkeypatch.setattr(artefacts, "BLOCK_BYTES", 4)
    with atomic_directory(tmp_path / "model", kind="model") as directory:
        (directory / "weights").write_bytes(b"0123456789")
        (directory / "short").write_bytes(b"0123")
    manifest = verify_directory(tmp_path / "model", level="full")
    assert manifest == read_manifest(tmp_path / "model")
    assert manifest.files["short"].crc32 is None
    (tmp_path / "model" / "weights").write_bytes(content)
    with pytest.raises(ArtefactError, match=re.escape(f"weights: its sha256 differs from its manifest's: damaged in {where}")):
        verify_directory(tmp_path / "model", level="full")


def test_a_manifest_without_checksums_of_blocks(artefact: Path) -> None:
    """A14: as former versions wrote them."""
    value = json.loads((artefact / MANIFEST_NAME).read_bytes())
    for record in value["files"].values():
        del record["crc32"]
    (artefact / MANIFEST_NAME).write_text(json.dumps(value))
    verify_directory(artefact, level="full")
    (artefact / "model.safetensors").write_bytes(b"012345678x")
    with pytest.raises(ArtefactError, match="its sha256 differs from its manifest's\nThe"):
        verify_directory(artefact, level="full")


def test_what_is_no_artefact(tmp_path: Path, artefact: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, message in (("file", "it is no directory"), ("empty", f"it has no {MANIFEST_NAME}"), ("missing", "it does not exist")):
        with pytest.raises(ArtefactError, match=f"{name}: is not a shard set of mtkit: {message}"):
            read_manifest(tmp_path / name, kind="shards")
    with pytest.raises(ArtefactError, match="model: is a model, and a checkpoint is needed here"):
        verify_directory(artefact, kind="checkpoint")


def change(manifest: dict[str, Any], key: str, value: object) -> None:
    place = manifest
    *path, last = key.split("/")
    for part in path:
        place = place[part]
    if value is None:
        del place[last]
    else:
        place[last] = value


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", 2, "has format 2, this mtkit .* reads format 1"),
        ("format", None, "is not a manifest"),
        ("kind", None, "is not a manifest"),
        ("files", None, "is not a manifest"),
        ("files", [], "is not a manifest"),
        ("files", {"../../etc/passwd": {"size": 1, "sha256": ""}}, r"not allowed: '\.\./\.\./etc/passwd'"),
        ("files", {"a/../b": {"size": 1, "sha256": ""}}, "not allowed"),
        ("files", {"/etc/passwd": {"size": 1, "sha256": ""}}, "not allowed"),
        ("files", {"a\n": {"size": 1, "sha256": ""}}, "not allowed"),
        ("files", {"": {"size": 1, "sha256": ""}}, "not allowed"),
        ("files/model.safetensors/size", "many", "is not a manifest"),
        ("files/model.safetensors/sha256", None, "is not a manifest"),
        ("config", 3, "is not a manifest"),
    ],
)
def test_a_manifest_that_is_not_as_it_should_be(artefact: Path, key: str, value: object, message: str) -> None:
    path = artefact / MANIFEST_NAME
    content = json.loads(path.read_bytes())
    change(content, key, value)
    path.write_bytes(json.dumps(content).encode())

    with pytest.raises(ArtefactError, match=message):
        verify_directory(artefact)


@pytest.mark.parametrize("content", [b"[]", b'"text"', b"null", b"3"])
def test_a_manifest_that_is_none(artefact: Path, content: bytes) -> None:
    (artefact / MANIFEST_NAME).write_bytes(content)

    with pytest.raises(ArtefactError, match="is not a manifest"):
        read_manifest(artefact)


def make(path: Path) -> None:
    with atomic_directory(path, kind="toy") as temporary:
        (temporary / "part").write_bytes(b"x")
        (temporary / "inner").mkdir()
        (temporary / "inner" / "more").write_bytes(b"y")


def test_a_directory_made_in_advance_keeps_its_mode_and_group(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private").chmod(0o2710)
    group = (tmp_path / "private").stat().st_gid
    make(tmp_path / "private")
    status = (tmp_path / "private").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o2710, group)


def test_what_cannot_be_replaced_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MTKitError, match="^.: is the current directory, in whose place no other directory can be put") as error:
        require_free(Path())
    assert "such as NAME" in (error.value.hint or "")
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "volume")
    with pytest.raises(MTKitError, match="volume: is a mount point"):
        require_free(tmp_path / "volume")


def test_a_mounted_directory_that_is_not_known_to_be_one_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bound").mkdir()
    real, inode = os.rename, (tmp_path / "bound").stat().st_ino

    def rename(old: Path, new: Path) -> None:
        if Path(new) == tmp_path / "bound":
            raise OSError(errno.EBUSY, "Device or resource busy")
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    make(tmp_path / "bound")
    verify_directory(tmp_path / "bound", kind="toy", level="full")
    assert (tmp_path / "bound").stat().st_ino == inode
    assert [path.name for path in tmp_path.iterdir()] == ["bound"]
