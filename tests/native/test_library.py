"""Where compiled kernels come from, and what happens where they cannot be had."""

import ctypes
import os
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from mtkit.native import library

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(library.SWITCH, raising=False)
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.c").write_bytes(b'#include "one.h"\nlong decode_step(void) { return NUMBER; }\n')  # compiled sooner than the real ones
    (sources / "two.c").write_bytes(b"#ifdef _OPENMP\nlong has_threads(void) { return 1; }\n#endif\n")
    (sources / "one.h").write_bytes(b"#define NUMBER 1\n")
    monkeypatch.setattr(library, "SOURCES", sources)
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
        assert hasattr(found, "has_threads")
    assert [path.suffix for path in cache_directory.iterdir()] == [".so"]
    assert len([line for line in log.read_text().split("\n") if "-o" in line.split()]) == 1


def test_another_source_or_compiler_is_another_library(cache_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    (library.SOURCES / "one.h").write_bytes(b"#define NUMBER 2\n")
    found, _ = load()
    assert found is not None
    assert found.decode_step() == 2
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
    assert "bin/cc cannot compile them: no such header" in why
    assert list(cache_directory.iterdir()) == []


def test_a_compiler_without_threads_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_of(tmp_path, monkeypatch, 'case "$*" in *-fopenmp*) exit 1;; esac', 'exec cc "$@"')
    found, why = load()
    assert found is not None, why
    assert not hasattr(found, "has_threads")


def test_the_next_compiler_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_of(tmp_path, monkeypatch, "exit 1")
    monkeypatch.setattr(library, "_COMPILERS", (*library._COMPILERS, "cc"))
    assert load()[0] is not None


def test_a_compiler_that_hangs_ends_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    compiler_of(tmp_path, monkeypatch, 'case "$1" in --version) echo 1; exit;; esac', f"sleep 1000 & echo $! > {pid}; wait")
    monkeypatch.setattr(library, "_SECONDS_TO_COMPILE", 0.5)
    found, why = load()
    assert found is None
    assert "timed out after 0.5 seconds" in why
    child = Path("/proc", pid.read_text().strip(), "stat")
    assert not child.exists() or " Z " in child.read_text()


def test_they_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTKIT_NATIVE", "0")
    assert load() == (None, "MTKIT_NATIVE is 0")


def test_a_relative_cache_directory_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG Base Directory specification has it: it would be another one in each working directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert load()[0] is not None
    assert not (tmp_path / "cache").exists()
    assert list((tmp_path / "home" / ".cache" / "mtkit").iterdir())


def test_without_a_home_they_are_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", os.devnull)
    assert load()[0] is not None

    def nowhere(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nowhere)
    assert load()[0] is not None


def test_with_nowhere_to_put_them_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_bytes(b"")
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda **_options: (_ for _ in ()).throw(FileNotFoundError("no usable temporary directory")))
    found, why = load()
    assert found is None
    assert "cannot be stored or loaded: no usable temporary directory" in why


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None])
def test_a_damaged_library_is_made_anew(cache_directory: Path, damage: bytes | None) -> None:
    assert load()[0] is not None
    (path,) = cache_directory.iterdir()
    good = path.read_bytes()
    path.unlink()  # it is loaded: another file has to have its name
    path.write_bytes(good[: len(good) // 2] if damage is None else damage)
    assert load()[0] is not None
    (path,) = cache_directory.iterdir()
    assert path.name.endswith(f"-{library._content(path)}.so")


def test_a_compiler_ends_with_who_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "slow", f"echo $$ > {tmp_path / 'pid'}", "exec sleep 60")
    real = subprocess.Popen.communicate

    def stop(process: Any, *arguments: Any, **named: Any) -> Any:
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text().strip():
            time.sleep(0.01)
        monkeypatch.setattr(subprocess.Popen, "communicate", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", stop)
    with pytest.raises(KeyboardInterrupt):
        library._run([str(tmp_path / "slow")])
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
