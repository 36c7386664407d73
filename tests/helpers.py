"""What tests of several modules share."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mtkit.artefacts import MANIFEST_NAME
from mtkit.files import sha256_file

REPOSITORY = Path(__file__).resolve().parent.parent


def shared_data(name: str) -> Path:
    """The directory of a real data set that lies beside the repository, or a skipped test where there is none."""
    root = Path(os.environ.get("MTKIT_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (root / name).is_dir():
        pytest.skip(f"needs the data set {name} in MTKIT_TEST_DATA")
    return root / name


def refresh_manifest(path: Path) -> None:
    """Have the manifest beside a file agree with it, as somebody would who changes the file with a purpose."""
    manifest_path = path.parent / MANIFEST_NAME
    manifest = json.loads(manifest_path.read_text())
    manifest["files"][path.name] = {"size": path.stat().st_size, "sha256": sha256_file(path)}
    manifest_path.write_text(json.dumps(manifest))


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
