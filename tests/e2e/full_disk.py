"""Training on a disk that becomes full, for `test_resources.py`. A script: DISK DATA, run where DISK is a small file system of its own.

It prints what became of the run as JSON.
"""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path

from mtkit.artefacts import verify_directory
from tests.e2e.test_signals import Training, result_of


def fill(path: Path) -> None:
    """Write until nothing more goes in."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as stream:
        while True:
            stream.write(bytes(1 << 12))


def main() -> None:
    disk, data = Path(sys.argv[1]), Path(sys.argv[2])
    arguments: list[str | Path] = ["--shards", data / "shards", "--config", data / "config.toml", "--output", disk / "run"]
    training = Training(arguments)
    training.wait_for("step 12  saved")
    fill(disk / "filler")
    code = training.end()
    checkpoints = sorted((disk / "run" / "checkpoints").iterdir())
    for path in checkpoints:
        verify_directory(path, kind="checkpoint", level="full")
    (disk / "filler").unlink()
    again = Training(arguments)
    assert again.end() == 0, again.text
    outcome = {"code": code, "text": training.text, "checkpoints": [path.name for path in checkpoints], "again": again.text}
    json.dump({**outcome, "result": dataclasses.asdict(result_of(disk / "run"))}, sys.stdout)


if __name__ == "__main__":
    main()
