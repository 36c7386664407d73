"""`mtkit train` on a disk that is really full and with a memory that is really too small."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mtkit.artefacts import verify_directory
from tests.e2e.test_signals import CONFIG, Result, Training, result_of
from tests.e2e.toy import mtkit_environment, write_small_shards
from tests.helpers import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.reliability]

ISOLATED = ["unshare", "--user", "--map-root-user", "--mount"]

HUNGRY = """
import resource, sys
import numpy, torch
from mtkit.cli import main
from mtkit.training.step import Updater

accumulate, numbers = Updater.accumulate, iter(range(1_000))

def hungry(self, batch):
    number = next(numbers)
    if number == 10:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), -1))
    if number >= 10:
        ALLOCATE
    return accumulate(self, batch)

Updater.accumulate = hungry
sys.argv[0] = "mtkit"
main()
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that holds `shards` and `config.toml`."""
    place = tmp_path_factory.mktemp("resources")
    write_small_shards(place, CONFIG)
    return place


def words_of(data: Path, run: Path) -> list[str | Path]:
    return ["--shards", data / "shards", "--config", data / "config.toml", "--output", run]


@pytest.fixture(scope="module")
def straight(data: Path) -> Result:
    training = Training(words_of(data, data / "straight"))
    assert training.end() == 0, training.text
    return result_of(data / "straight")


def test_a_disk_that_is_really_full_in_the_middle_of_a_run(data: Path, straight: Result, tmp_path: Path) -> None:
    """A8, B50: two warnings, then exit 5; what was saved before is whole, and with some space the run goes on to the same end."""
    if shutil.which("unshare") is None or subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs user namespaces")
    commands = 'mount -t tmpfs -o size=8m none "$1" && exec "$2" -m tests.e2e.full_disk "$1" "$3"'
    command = [*ISOLATED, "sh", "-c", commands, "sh", str(tmp_path), sys.executable, str(data)]
    result = subprocess.run(command, capture_output=True, check=False, cwd=REPOSITORY, env=mtkit_environment())
    assert result.returncode == 0, result.stderr.decode()
    outcome = json.loads(result.stdout)
    assert outcome["code"] == 5, outcome["text"]
    assert outcome["text"].count("could not be saved, and the run goes on") == 2
    assert "could not be saved, 3 times in a row" in outcome["text"]
    assert outcome["checkpoints"]
    assert f"going on from {tmp_path}/run/checkpoints/{outcome['checkpoints'][-1]}" in outcome["again"]
    assert Result(**{**outcome["result"], "records": [tuple(record) for record in outcome["result"]["records"]]}) == straight


@pytest.mark.parametrize("allocate", ["torch.empty(1 << 34)", "numpy.empty(1 << 34)"])
def test_a_memory_that_is_really_too_small(data: Path, straight: Result, tmp_path: Path, allocate: str) -> None:
    """C4: exit 5 with advice, the last checkpoint is whole, and with more memory the run goes on to the same end."""
    command = [sys.executable, "-c", HUNGRY.replace("ALLOCATE", allocate), "train", *map(str, words_of(data, tmp_path / "run")), "--threads", "1"]
    result = subprocess.run(command, capture_output=True, check=False, env=mtkit_environment(), timeout=200)
    assert result.returncode == 5, result.stderr.decode()
    assert "does not fit into the memory of cpu\nLower batch.max_tokens" in result.stderr.decode()
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints
    for path in checkpoints:
        verify_directory(path, kind="checkpoint", level="full")
    again = Training(words_of(data, tmp_path / "run"))
    assert again.end() == 0, again.text
    assert result_of(tmp_path / "run") == straight
