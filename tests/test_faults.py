"""Faults that are asked for: which happen, when, and that nothing happens unasked."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from mtkit import faults
from tests.helpers import REPOSITORY

ALLOWED = {"MTKIT_ALLOW_FAULTS": "1"}


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    faults.arm({})


def reached(text: str, *points: str) -> list[str]:
    """What happens at each of some points, one after the other."""
    faults.arm({**ALLOWED, "MTKIT_FAULT": text})
    happened = []
    for point in points:
        try:
            faults.reach(point)
        except OSError as error:
            happened.append(errno.errorcode[error.errno or 0])
        except torch.OutOfMemoryError:
            happened.append("oom")
        else:
            happened.append("-")
    return happened


def test_a_fault_happens_once_at_its_count() -> None:
    assert reached("EIO@step:2", "step", "save", "step", "step") == ["-", "-", "EIO", "-"]


def test_a_fault_may_go_on() -> None:
    assert reached("oom@step:2+", "step", "step", "step") == ["-", "oom", "oom"]


def test_a_star_is_every_point() -> None:
    assert reached("ENOSPC@*:3,EIO@save:1", "step", "save", "save") == ["-", "EIO", "ENOSPC"]


@pytest.mark.parametrize(("rank", "expected"), [("0", ["-"]), ("1", ["EIO"])])
def test_a_fault_of_one_rank(rank: str, expected: list[str]) -> None:
    faults.arm({**ALLOWED, "MTKIT_FAULT": "EIO@step:1/1", "RANK": rank})
    try:
        faults.reach("step")
    except OSError:
        assert expected == ["EIO"]
    else:
        assert expected == ["-"]


@pytest.mark.parametrize("environment", [{}, ALLOWED, {"MTKIT_FAULT": "EIO@*:1+"}, {"MTKIT_FAULT": "EIO@*:1+", "MTKIT_ALLOW_FAULTS": "0"}])
def test_nothing_happens_unless_it_is_asked_for_and_allowed(environment: dict[str, str]) -> None:
    """A process that was told to fail and not allowed to writes its files as ever."""
    script = "from mtkit import faults; faults.reach('step'); assert not faults._armed; print('held')"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MTKIT_")}
    result = subprocess.run([sys.executable, "-c", script], env={**clean, **environment}, cwd=REPOSITORY, capture_output=True, check=False)
    assert (result.stdout, result.returncode) == (b"held\n", 0), result.stderr.decode()


def test_a_fault_that_is_none_is_a_mistake() -> None:
    for text in ("kill", "kill@step", "die@step:1", "ENONSENSE@step:1", "kill@step:1/x"):
        with pytest.raises(ValueError, match="is no fault"):
            faults.parse({**ALLOWED, "MTKIT_FAULT": text})


def test_a_killed_process_is_gone() -> None:
    script = "from mtkit import faults; faults.reach('step'); print('goes on')"
    environment = {**os.environ, **ALLOWED, "MTKIT_FAULT": "kill@step:1"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, cwd=REPOSITORY, capture_output=True, check=False)
    assert (result.stdout, result.returncode) == (b"", -9)
