"""Where compiled kernels come from, and what happens where they cannot be had."""

import ctypes
import os
import stat
from pathlib import Path

import pytest

from mtkit.native import library

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(library.SWITCH, raising=False)
    source = tmp_path / "kernels.c"
    source.write_bytes(b"long decode_step(void) { return 1; }\n")  # compiled sooner than the real one
    monkeypatch.setattr(library, "SOURCE", source)
    return tmp_path / "cache" / "mtkit"


def load() -> tuple[ctypes.CDLL | None, str]:
    """As a new process."""
    found: tuple[ctypes.CDLL | None, str] = library._load.__wrapped__()
    return found


def script(path: Path, *lines: str) -> None:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def compiler_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Let these lines of shell be the only compiler."""
    directory = tmp_path / "bin"
    directory.mkdir()
    script(directory / "cc", *lines)
    monkeypatch.setattr(library, "_COMPILERS", (str(directory / "cc"),))


def test_they_are_compiled_once(cache_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    compiler_of(tmp_path, monkeypatch, f'echo "$@" >> {log}', 'exec cc "$@"')
    for _ in range(2):
        found, why = load()
        assert found is not None
        assert why == ""
        assert hasattr(found, "decode_step")
    assert [path.suffix for path in cache_directory.iterdir()] == [".so"]
    assert len([line for line in log.read_text().split("\n") if "-o" in line.split()]) == 1


def test_another_source_or_compiler_is_another_library(cache_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    library.SOURCE.write_bytes(library.SOURCE.read_bytes() + b"/* changed */\n")
    load()
    assert len(list(cache_directory.iterdir())) == 2
    compiler_of(tmp_path, monkeypatch, 'exec cc "$@"')
    load()
    assert len(list(cache_directory.iterdir())) == 3


def test_the_cache_is_the_users_own(cache_directory: Path) -> None:
    load()
    assert stat.S_IMODE(cache_directory.stat().st_mode) == 0o700


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_bytes(b"")  # a file where the directory would be
    found, why = load()
    assert (found is not None, why) == (True, "")


def test_a_damaged_library_is_not_the_end(cache_directory: Path) -> None:
    load()
    (path,) = cache_directory.iterdir()
    path.unlink()  # not overwritten: this process has it mapped
    path.write_bytes(b"\x7fELF and nothing more")
    found, why = load()
    assert (found is not None, why) == (True, "")


def test_without_a_compiler_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_COMPILERS", ())
    assert load() == (None, "there is no C compiler")


def test_a_compiler_that_fails_is_named(cache_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_of(tmp_path, monkeypatch, 'case "$1" in --version) echo 1;; *) echo "no such header" >&2; exit 1;; esac')
    found, why = load()
    assert found is None
    assert "bin/cc cannot compile them" in why
    assert list(cache_directory.iterdir()) == []


def test_they_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTKIT_NATIVE", "0")
    assert load() == (None, "MTKIT_NATIVE is 0")


def test_without_a_home_they_are_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", os.devnull)
    assert load()[0] is not None
