import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtkit.data.preprocess import PreprocessConfig, preprocess
from mtkit.data.shards import (
    HEADER_SIZE,
    ShardSet,
    TokenFile,
    TokenFileWriter,
    id_dtype,
    offsets_position,
    pack_header,
)
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import ArtefactError
from mtkit.files import MANIFEST_NAME, seal_directory


def write_rows(path: Path, rows: list[list[int]], *, vocab_size: int = 100, rows_per_write: int = 2) -> Path:
    with open(path, "wb") as stream:
        writer = TokenFileWriter(stream, dtype=id_dtype(vocab_size))
        for start in range(0, len(rows), rows_per_write):
            part = rows[start : start + rows_per_write]
            writer.write(np.array([index for row in part for index in row], dtype=np.uint32), np.array([len(row) for row in part], dtype=np.int32))
        writer.finish()
    return path


# --- one file ---------------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 65_535), max_size=5), max_size=7), st.sampled_from([65_536, 65_537]))
def test_rows_come_back(tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], vocab_size: int) -> None:
    token_file = TokenFile(write_rows(tmp_path_factory.mktemp("rows") / "x.src", rows, vocab_size=vocab_size))
    assert [token_file.row(index).tolist() for index in range(len(rows))] == rows
    assert token_file.lengths.tolist() == [len(row) for row in rows]
    assert token_file.lengths.dtype == np.int32
    assert (token_file.num_rows, token_file.num_ids) == (len(rows), sum(map(len, rows)))
    token_file.check_ids()


@pytest.mark.parametrize(("vocab_size", "itemsize", "largest"), [(65_536, 2, 65_535), (65_537, 4, 65_536)])
def test_ids_take_two_bytes_while_they_fit(tmp_path: Path, vocab_size: int, itemsize: int, largest: int) -> None:
    path = write_rows(tmp_path / "x.src", [[largest, 0, largest]], vocab_size=vocab_size)
    token_file = TokenFile(path)
    assert token_file.row(0).tolist() == [largest, 0, largest]
    assert token_file.row(0).itemsize == itemsize
    assert path.stat().st_size == HEADER_SIZE + {2: 8, 4: 16}[itemsize] + 2 * 8


def test_rows_are_views_that_cannot_be_written(tmp_path: Path) -> None:
    row = TokenFile(write_rows(tmp_path / "x.src", [[1, 2], [3]])).row(0)
    assert not row.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 7


def test_lengths_must_match_the_ids() -> None:
    writer = TokenFileWriter(io.BytesIO(), dtype=id_dtype(100))
    writer.write(np.array([1, 2, 3], dtype=np.uint16), np.array([2], dtype=np.int32))
    with pytest.raises(ValueError, match="rows of 2 ids in all, but 3"):
        writer.finish()


@pytest.mark.parametrize("num_bytes", [1 << 31, 1 << 32])
def test_offsets_beyond_32_bits(tmp_path: Path, num_bytes: int) -> None:
    """A file of 3 rows of int32 lengths that in bytes, and for 4 GiB also in ids, pass what 32 bits can count; it is sparse."""

    class SparseStream(io.FileIO):
        def write(self, data: Any) -> int:
            if len(data) > 1 << 20:  # the ids of the long rows, all zero, are left out
                self.seek(len(data), os.SEEK_CUR)
                return len(data)
            return super().write(data) or 0

    class Zeros:
        """Stands for an array of that many zero ids without being one."""

        def __init__(self, count: int) -> None:
            self.count = count

        def __len__(self) -> int:
            return self.count

        def astype(self, _dtype: Any, **_options: Any) -> "Zeros":
            return self

        def tobytes(self) -> Any:
            return range(self.count * 2)  # has the length of the bytes and none of them

    path = tmp_path / "big.src"
    half = num_bytes // 4 + 1
    with SparseStream(path, "wb") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtkit.data.shards.zlib.crc32", lambda *_arguments: 0)
        writer = TokenFileWriter(stream, dtype=id_dtype(100))
        writer.write(Zeros(2 * half), np.array([half, half], dtype=np.int32))  # type: ignore[arg-type]
        writer.write(np.array([7, 8, 9], dtype=np.uint16), np.array([3], dtype=np.int32))
        writer.finish()
        assert path.stat().st_size > num_bytes
        token_file = TokenFile(path)
    assert token_file.num_ids == 2 * half + 3
    assert token_file.row(2).tolist() == [7, 8, 9]
    assert token_file.lengths.tolist() == [half, half, 3]
    assert token_file.row(1)[-1] == 0


ROWS = [[5, 6, 7], [], [8], [9, 10, 11, 12]]
POSITIONS = {"magic": 0, "version": 8, "itemsize": 10, "rows": 16, "ids": 24, "crc": 36, "unused": 50, "header crc": 61}


@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS.keys())
def test_damage_to_the_header_is_found(tmp_path: Path, position: int) -> None:
    path = write_rows(tmp_path / "x.src", ROWS)
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtefactError, match=r"x\.src: "):
        TokenFile(path)


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.src", ROWS)
    good = path.read_bytes()
    padding = range(HEADER_SIZE + 16, offsets_position(itemsize=2, num_ids=8))
    for position in range(len(good)):
        data = bytearray(good)
        data[position] ^= 0x40
        path.write_bytes(data)
        if position not in padding:
            with pytest.raises(ArtefactError):
                TokenFile(path).check_ids()


@pytest.mark.parametrize("change", ["cut", "longer", "empty", "header only", "zeros"])
def test_a_file_of_the_wrong_size_is_refused(tmp_path: Path, change: str) -> None:
    path = write_rows(tmp_path / "x.src", ROWS)
    good = path.read_bytes()
    changed = {"cut": good[:-1], "longer": good + b"\0", "empty": b"", "header only": good[:HEADER_SIZE], "zeros": bytes(len(good))}
    path.write_bytes(changed[change])
    with pytest.raises(ArtefactError, match=r"x\.src: "):
        TokenFile(path)


def test_offsets_that_fall_are_refused(tmp_path: Path) -> None:
    import zlib

    ids, offsets = np.array([1, 2, 3, 4], dtype="<u2").tobytes(), np.array([0, 3, 2, 4], dtype="<i8").tobytes()
    header = pack_header(itemsize=2, num_rows=3, num_ids=4, ids_crc=zlib.crc32(ids), offsets_crc=zlib.crc32(offsets))
    (tmp_path / "x.src").write_bytes(header + ids + offsets)
    with pytest.raises(ArtefactError, match="do not rise from 0 to 4"):
        TokenFile(tmp_path / "x.src")


def test_a_newer_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.data.shards.TOKEN_FILE_VERSION", 2)
    path = write_rows(tmp_path / "x.src", ROWS)
    monkeypatch.undo()
    with pytest.raises(ArtefactError, match="has version 2 .* this mtkit reads version 1"):
        TokenFile(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"x\.src: cannot be read: No such file"):
        TokenFile(tmp_path / "x.src")


# --- a shard set ------------------------------------------------------------------------------------------------------------------------

NUM_PAIRS = 25


@pytest.fixture
def directory(tmp_path: Path, tokenizer: Tokenizer, make_pairs: Any, write_corpus: Any) -> Path:
    """A shard set of 25 pairs in 3 shards with a dev set."""
    preprocess(
        write_corpus(make_pairs(NUM_PAIRS)),
        held_out={"dev": write_corpus([("Hello … ", "\u201eHallo\u201c"), ("", "leer"), ("x\u2028y", "é")], name="dev")},
        tokenizer=tokenizer,
        output=tmp_path / "shards",
        config=PreprocessConfig(shard_pairs=10),
    )
    return tmp_path / "shards"


def test_pairs_come_back_across_shards(directory: Path, tokenizer: Tokenizer, make_pairs: Any) -> None:
    shards = ShardSet.open(directory)
    pairs = make_pairs(NUM_PAIRS)
    assert shards.num_pairs == NUM_PAIRS
    assert tokenizer.decode([shards.src(index) for index in range(NUM_PAIRS)], "src") == [src for src, _ in pairs]  # type: ignore[misc]
    assert [shards.tgt(index).tolist() for index in range(NUM_PAIRS)] == tokenizer.encode([tgt for _, tgt in pairs], "tgt")
    assert shards.src_lengths.tolist() == [len(shards.src(index)) for index in range(NUM_PAIRS)]
    assert shards.tgt_lengths.tolist() == [len(shards.tgt(index)) for index in range(NUM_PAIRS)]
    assert shards.src(0).dtype == np.uint16
    for index in (-1, NUM_PAIRS):
        with pytest.raises(IndexError):
            shards.src(index)


def test_held_out_text_is_raw(directory: Path) -> None:
    shards = ShardSet.open(directory)
    assert shards.held_out_names == ("dev",)
    assert shards.held_out("dev") == (["Hello … ", "", "x\u2028y"], ["\u201eHallo\u201c", "leer", "é"])
    with pytest.raises(ArtefactError, match="holds no set named 'test'") as caught:
        shards.held_out("test")
    assert caught.value.hint == "It holds: dev"


def test_another_tokenizer_is_refused_with_both_fingerprints(directory: Path, tokenizer: Tokenizer, other_tokenizer: Tokenizer) -> None:
    shards = ShardSet.open(directory)
    shards.require_tokenizer(tokenizer)
    with pytest.raises(ArtefactError, match=f"{tokenizer.fingerprint}.*{other_tokenizer.fingerprint}"):
        shards.require_tokenizer(other_tokenizer)


def test_the_tokenizer_is_bundled_byte_for_byte(directory: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    for name in ("tokenizer.model", "tokenizer.json"):
        assert (directory / "tokenizer" / name).read_bytes() == (tmp_path / "tokenizer" / name).read_bytes()
    assert ShardSet.open(directory).tokenizer.fingerprint == tokenizer.fingerprint


def test_an_exchanged_tokenizer_is_found_even_under_a_valid_manifest(directory: Path, other_tokenizer: Tokenizer) -> None:
    shutil.rmtree(directory / "tokenizer")
    (directory / "tokenizer").mkdir()
    other_tokenizer.write_files(directory / "tokenizer")
    seal_directory(directory, kind="shards", config={}, inputs={})
    with pytest.raises(ArtefactError, match=other_tokenizer.fingerprint):
        ShardSet.open(directory)


def test_exchanged_shards_are_found_even_under_a_valid_manifest(directory: Path) -> None:
    shutil.copy(directory / "shard-00002.src", directory / "shard-00001.src")
    seal_directory(directory, kind="shards", config={}, inputs={})
    with pytest.raises(ArtefactError, match=r"shard-00001\.src: has 5 rows .* says 10"):
        ShardSet.open(directory)


def test_each_shard_is_checked_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(TokenFile, "check_ids", lambda self: checked.append(self.path.name))
    shards = ShardSet.open(directory)
    for index in (3, 3, 24, 4):
        shards.src(index)
        shards.tgt(index)
    assert checked == ["shard-00000.src", "shard-00000.tgt", "shard-00002.src", "shard-00002.tgt"]


def test_damaged_ids_are_found_when_first_touched_and_only_there(directory: Path) -> None:
    path = directory / "shard-00001.tgt"
    data = bytearray(path.read_bytes())
    data[HEADER_SIZE + 4] ^= 1
    path.write_bytes(data)
    shards = ShardSet.open(directory)
    assert len(shards.tgt(9)) == shards.tgt_lengths[9]
    for _ in range(2):  # and again
        with pytest.raises(ArtefactError, match=r"shard-00001\.tgt: the ids in bytes 64 to \d+"):
            shards.src(10)
    with pytest.raises(ArtefactError, match=r"shard-00001\.tgt: its sha256 differs"):
        ShardSet.open(directory, verify="full")


@pytest.mark.parametrize(
    "name", ["shard-00000.src", "shard-00002.tgt", "held_out/dev.src", "tokenizer/tokenizer.model", "shards.json", MANIFEST_NAME]
)
@pytest.mark.parametrize("change", ["missing", "cut"])
def test_missing_and_cut_files_are_named(directory: Path, name: str, change: str) -> None:
    path = directory / name
    if change == "cut":
        path.write_bytes(path.read_bytes()[:-1])
        if name == MANIFEST_NAME:
            path.write_bytes(path.read_bytes()[:-5])
    else:
        path.unlink()
    with pytest.raises(ArtefactError, match=name):
        ShardSet.open(directory)


@pytest.mark.parametrize(("key", "value", "message"), [("format", 2, "has format 2"), ("shards", 3, "shards must be"), ("extra", 1, "unknown key")])
def test_other_metadata_is_refused(directory: Path, key: str, value: object, message: str) -> None:
    path = directory / "shards.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), key: value}))
    seal_directory(directory, kind="shards", config={}, inputs={})
    with pytest.raises(ArtefactError, match=rf"shards\.json: {message}"):
        ShardSet.open(directory)


def test_fingerprint_is_that_of_the_content(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "copy")
    assert ShardSet.open(tmp_path / "copy").fingerprint == ShardSet.open(directory).fingerprint
