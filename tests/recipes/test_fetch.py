import gzip
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY

TEXT = b"Zwei Hunde rennen.\nEin Mann liest.\n"


def fetch(url: str, output: Path, sums: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "recipes" / "fetch.py"), url, str(output), "--sums", str(sums)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    path = tmp_path / "SHA256SUMS"
    path.write_text(f"{hashlib.sha256(b'other').hexdigest()}  other.de\n{hashlib.sha256(TEXT).hexdigest()}  a.de\n", encoding="utf-8")
    return path


def test_plain_file(tmp_path: Path, sums: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(TEXT)
    done = fetch(source.as_uri(), tmp_path / "data" / "a.de", sums)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data" / "a.de").read_bytes() == TEXT
    assert done.stdout == ""


def test_gzip_file_is_unpacked_and_checked_unpacked(tmp_path: Path, sums: Path) -> None:
    source = tmp_path / "source.gz"
    source.write_bytes(gzip.compress(TEXT))
    done = fetch(source.as_uri(), tmp_path / "a.de", sums)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.de").read_bytes() == TEXT


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("source", TEXT + b"!", "must have"),
        ("source.gz", gzip.compress(TEXT, mtime=0)[:-12], ""),
        ("source.gz", gzip.compress(TEXT, mtime=0)[:10] + b"\xff" * 20, ""),
        ("source.gz", b"<html>not found</html>", "gzip"),
        ("missing", None, "No such file"),
    ],
    ids=["wrong sum", "cut", "damaged", "not gzip", "missing"],
)
def test_bad_download_leaves_no_file_of_that_name(tmp_path: Path, sums: Path, name: str, content: bytes | None, message: str) -> None:
    source = tmp_path / name
    if content is not None:
        source.write_bytes(content)
    done = fetch(source.as_uri(), tmp_path / "data" / "a.de", sums)
    assert done.returncode == 1
    assert done.stderr.split("\n")[1].startswith(f"error: {source.as_uri()}: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data" / "a.de").exists()


def test_file_without_a_sum_is_not_downloaded(tmp_path: Path, sums: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(TEXT)
    done = fetch(source.as_uri(), tmp_path / "b.de", sums)
    assert done.returncode == 1
    assert "no sum for b.de" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["SHA256SUMS", "source"]
