"""Settings for all tests."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A slow machine is not a failure: pytest-timeout bounds what hangs. A check of a change is to be repeatable; at a desk, each run tries new examples.
settings.register_profile("mtkit", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("mtkit")

# Shells start background jobs deaf to Ctrl-C, and nohup makes them deaf to a lost terminal. The processes that tests start would inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if "PYTEST_XDIST_TESTRUNUID" in os.environ and signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture
def umask() -> Iterator[int]:
    """A umask that differs from the usual one."""
    previous = os.umask(0o027)
    yield 0o027
    os.umask(previous)


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order in which the bytes and names reach the disk."""
    log: list[str] = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def shorten(name: object) -> str:
        return re.sub(r"^\.(.*)\.tmp-.*", r"TEMPORARY \1", Path(str(name)).name)

    def logged_fsync(descriptor: int) -> None:
        log.append(f"fsync {shorten(Path(f'/proc/self/fd/{descriptor}').readlink())}")
        fsync(descriptor)

    def logged_replace(old: Any, new: Any) -> None:
        log.append(f"rename {shorten(old)} -> {shorten(new)}")
        replace(old, new)

    def logged_rename(old: Any, new: Any) -> None:
        log.append(f"rename {shorten(old)} -> {shorten(new)}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    monkeypatch.setattr(os, "rename", logged_rename)
    return log
