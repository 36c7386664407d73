"""What tests of several modules share."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def shared_data(name: str) -> Path:
    """The directory of a real data set that lies beside the repository, or a skipped test where there is none."""
    root = Path(os.environ.get("MTKIT_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (root / name).is_dir():
        pytest.skip(f"needs the data set {name} in MTKIT_TEST_DATA")
    return root / name
