"""What tests of several modules share."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def shared_data(name: str) -> Path:
    """The directory of a real data set that lies beside the repository, or a skipped test where there is none."""
    root = Path(os.environ.get("MTKIT_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (root / name).is_dir():
        pytest.skip(f"needs the data set {name} in MTKIT_TEST_DATA")
    return root / name


def run_on_two_ranks(module: str, *arguments: str | Path) -> None:
    """Run `python -m MODULE ARGUMENTS` as the two processes of a group, each on one thread, and wait until both have ended well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    ranks = [subprocess.Popen(command, env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=REPOSITORY) for rank in range(2)]
    try:
        assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
