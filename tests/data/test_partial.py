import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtkit.data.blocks import BlockEncoder, EncodedBlock
from mtkit.data.filters import FilterConfig
from mtkit.data.partial import PartialShards, partial_directory, partial_shards, unknown_ids
from mtkit.data.token_file import TokenFile
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import DataError, MTKitError

SHARD_FILES = {"shard-00000.src", "shard-00000.tgt", "shard-00000.hashes", "shard-00000.json"}


@pytest.fixture
def block(tokenizer: Tokenizer, make_pairs: Any) -> EncodedBlock:
    return BlockEncoder(tokenizer, FilterConfig(drop_duplicates=True)).encode([*make_pairs(6), ("", "x"), ("λ", "λ λ")])


def interrupt(output: Path, tokenizer: Tokenizer, block: EncodedBlock, *, job: str | None, error: BaseException, num_shards: int = 1) -> None:
    """Write shards, then raise."""

    def work() -> None:
        with partial_shards(output, job=job) as partial:
            for _ in range(num_shards):
                partial.write_shard([block], tokenizer=tokenizer)
            raise error

    with pytest.raises(type(error)):
        work()


def names(output: Path) -> set[str]:
    directory = partial_directory(output)
    return {path.name for path in directory.iterdir()} if directory.exists() else set()


def test_a_shard_holds_its_blocks(tmp_path: Path, tokenizer: Tokenizer, block: EncodedBlock) -> None:
    with partial_shards(tmp_path / "out", job="a") as partial:
        partial.write_shard([block, block], tokenizer=tokenizer)
        token_file = TokenFile(partial.directory / "shard-00000.tgt")
        assert np.concatenate([token_file.row(index) for index in range(14)]).tolist() == block.tgt_ids.tolist() * 2
        (record,) = partial.records
        assert (record.num_read, record.meta.num_pairs, record.dropped) == (16, 14, {"empty": 2})
        assert record.meta.num_src_tokens == 2 * len(block.src_ids)
        assert (record.num_src_unknown, record.num_tgt_unknown) == (2 * 2, 2 * 4)  # λ is two bytes
        assert [hashes.tolist() for hashes in partial.hashes()] == [block.hashes_N.tolist() * 2]  # type: ignore[union-attr]
    assert not partial_directory(tmp_path / "out").exists()


def test_an_empty_shard(tmp_path: Path, tokenizer: Tokenizer) -> None:
    empty = BlockEncoder(tokenizer, FilterConfig()).encode([("", "")])
    with partial_shards(tmp_path / "out", job="a") as partial:
        partial.write_shard([empty], tokenizer=tokenizer)
        assert TokenFile(partial.directory / "shard-00000.src").num_rows == 0
        assert list(partial.hashes()) == []


def test_unknown_ids_are_unk_and_bytes(tokenizer: Tokenizer) -> None:
    assert np.flatnonzero(unknown_ids(tokenizer, "src")).tolist() == [1, *range(4, 260)]


def test_finished_shards_outlive_an_interruption(tmp_path: Path, tokenizer: Tokenizer, block: EncodedBlock) -> None:
    output = tmp_path / "out"
    interrupt(output, tokenizer, block, job="a", error=KeyboardInterrupt())
    assert not output.exists()
    (partial_directory(output) / ".shard-00001.src.tmp-1-abc").write_bytes(b"half")  # what a SIGKILL leaves
    (partial_directory(output) / "shard-00001.src").write_bytes(b"without a record")
    (partial_directory(output) / "tokenizer").mkdir()
    with partial_shards(output, job="a") as partial:
        assert [record.meta.name for record in partial.records] == ["shard-00000"]
        assert names(output) == {*SHARD_FILES, "job.json", "lock"}
        partial.write_shard([block], tokenizer=tokenizer)
        assert [record.meta.name for record in partial.records] == ["shard-00000", "shard-00001"]


@pytest.mark.parametrize(
    ("job", "error", "num_shards"),
    [("a", DataError("bad input"), 1), (None, KeyboardInterrupt(), 1), ("a", KeyboardInterrupt(), 0)],
    ids=["bad input", "input that cannot be read again", "nothing finished"],
)
def test_nothing_stays_that_cannot_be_used(
    tmp_path: Path, tokenizer: Tokenizer, block: EncodedBlock, job: str | None, error: BaseException, num_shards: int
) -> None:
    interrupt(tmp_path / "out", tokenizer, block, job=job, error=error, num_shards=num_shards)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("job", ["b", None])
def test_shards_of_another_job_are_removed(tmp_path: Path, tokenizer: Tokenizer, block: EncodedBlock, job: str | None) -> None:
    output = tmp_path / "out"
    interrupt(output, tokenizer, block, job="a", error=KeyboardInterrupt())
    with partial_shards(output, job=job) as partial:
        assert partial.records == []
        assert names(output) == {"job.json", "lock"}


@pytest.mark.parametrize("name", sorted(SHARD_FILES))
@pytest.mark.parametrize("change", ["missing", "cut", "flipped"])
def test_a_damaged_shard_and_those_after_it_are_made_anew(tmp_path: Path, tokenizer: Tokenizer, block: EncodedBlock, name: str, change: str) -> None:
    output = tmp_path / "out"
    interrupt(output, tokenizer, block, job="a", error=KeyboardInterrupt(), num_shards=3)
    path = partial_directory(output) / name.replace("00000", "00001")
    data = bytearray(path.read_bytes())
    if change == "missing":
        path.unlink()
    else:
        data[len(data) // 2] ^= 0x80
        path.write_bytes(data if change == "flipped" else data[:-3])
    with partial_shards(output, job="a") as partial:
        assert len(partial.records) == 1
        assert names(output) == {*SHARD_FILES, "job.json", "lock"}


def test_a_damaged_job_file_means_another_job(tmp_path: Path, tokenizer: Tokenizer, block: EncodedBlock) -> None:
    output = tmp_path / "out"
    for content in (b"{", b"[]", json.dumps({"job": 3}).encode()):
        interrupt(output, tokenizer, block, job="a", error=KeyboardInterrupt())
        (partial_directory(output) / "job.json").write_bytes(content)
        with partial_shards(output, job="a") as partial:
            assert partial.records == []


def test_two_runs_on_one_output_do_not_mix(tmp_path: Path) -> None:
    output = tmp_path / "out"
    program = (
        "import fcntl, os, sys; lock = os.open(sys.argv[1], os.O_RDWR); fcntl.flock(lock, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    )
    partial_directory(output).mkdir()
    lock = partial_directory(output) / "lock"
    lock.touch()
    with subprocess.Popen([sys.executable, "-c", program, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(MTKitError, match="another process is at work here"), partial_shards(output, job="a"):
            pass
        assert lock.exists()
        other.communicate()
    with partial_shards(output, job="a") as partial:
        assert partial.records == []


def test_a_file_system_without_locks_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_arguments: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with partial_shards(tmp_path / "out", job="a") as partial:
        assert isinstance(partial, PartialShards)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MTKitError, match="cannot be written: Not a directory"), partial_shards(tmp_path / "file" / "out", job="a"):
        pass


def test_the_directory_is_hidden_beside_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert partial_directory(Path("a/shards")) == tmp_path / "a" / ".shards.partial"
    assert partial_directory(Path(f"a/shards{os.sep}")) == tmp_path / "a" / ".shards.partial"


def test_what_is_unfinished_lies_beside_what_a_link_stands_for(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "shards")
    assert (
        partial_directory(tmp_path / "link") == partial_directory(tmp_path / "disk" / "shards") == (tmp_path / "disk" / ".shards.partial").resolve()
    )
