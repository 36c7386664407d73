"""A token file gives back its rows, whatever their size, and says where it is damaged."""

import io
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtkit.data.token_file import HEADER_SIZE, TokenFile, TokenFileWriter, id_dtype, offsets_position, pack_header
from mtkit.errors import ArtefactError


def write_rows(path: Path, rows: list[list[int]], *, vocab_size: int = 100, rows_per_write: int = 2) -> Path:
    with open(path, "wb") as stream:
        writer = TokenFileWriter(stream, dtype=id_dtype(vocab_size))
        for start in range(0, len(rows), rows_per_write):
            part = rows[start : start + rows_per_write]
            writer.write(np.array([index for row in part for index in row], dtype=np.uint32), np.array([len(row) for row in part], dtype=np.int32))
        writer.finish()
    return path


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
        patch.setattr("mtkit.data.token_file.zlib.crc32", lambda *_arguments: 0)
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


@pytest.mark.smoke
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
    monkeypatch.setattr("mtkit.data.token_file.TOKEN_FILE_VERSION", 2)
    path = write_rows(tmp_path / "x.src", ROWS)
    monkeypatch.undo()
    with pytest.raises(ArtefactError, match="has version 2 .* this mtkit reads version 1"):
        TokenFile(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"x\.src: cannot be read: No such file"):
        TokenFile(tmp_path / "x.src")


# --- without reading the file as a whole ------------------------------------------------------------------------------------------------


def damaged(path: Path, change: Any) -> TokenFile:
    """A file with some bytes changed, opened without reading all of it, for ids below 100."""
    data = bytearray(write_rows(path, ROWS).read_bytes())
    change(data)
    path.write_bytes(data)
    return TokenFile(path, vocab_size=100, read_offsets=False)


def flip(position: int) -> Any:
    def change(data: bytearray) -> None:
        data[position] ^= 0x80

    return change


OFFSETS = offsets_position(itemsize=2, num_ids=8)
READERS = {
    "row": lambda token_file, row: token_file.row(row),
    "row_lengths": lambda token_file, row: token_file.row_lengths(np.array([0, row])),
    "copy_rows": lambda token_file, row: token_file.copy_rows(np.array([row]), into=np.zeros(99, dtype="<u2"), at_N=np.array([0])),
    "prefetch_ids": lambda token_file, row: token_file.prefetch_ids(np.array([row])),
}


@pytest.mark.parametrize("byte", [0, 6, 7], ids=["small", "far", "negative"])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_an_impossible_offset_is_found_in_its_row_and_only_there(tmp_path: Path, read: Any, byte: int) -> None:
    token_file = damaged(tmp_path / "x.src", flip(OFFSETS + 8 * 3 + byte))
    assert token_file.row(1).tolist() == []
    with pytest.raises(ArtefactError, match=rf"x\.src: the offsets at byte {OFFSETS + 16}, of row 2, do not rise within 0 to 8"):
        read(token_file, 2)


@pytest.mark.parametrize("offset", [0, 4])
def test_the_ends_of_the_offsets_are_checked_when_the_file_is_opened(tmp_path: Path, offset: int) -> None:
    with pytest.raises(ArtefactError, match="do not rise from 0 to 8"):
        damaged(tmp_path / "x.src", flip(OFFSETS + 8 * offset))


def test_an_id_outside_the_vocabulary_is_found_in_its_row(tmp_path: Path) -> None:
    token_file = damaged(tmp_path / "x.src", flip(HEADER_SIZE + 2 * 5))
    into = np.zeros(8, dtype="<u2")
    token_file.copy_rows(np.array([2, 0]), into=into, at_N=np.array([0, 1]))
    assert into.tolist() == [8, 5, 6, 7, 0, 0, 0, 0]
    message = rf"x\.src: row 3, whose ids begin at byte {HEADER_SIZE + 8}, has the id 138, but the vocabulary has 100 pieces"
    with pytest.raises(ArtefactError, match=message):
        token_file.copy_rows(np.array([0, 1, 3]), into=into, at_N=np.array([0, 3, 3]))
    with pytest.raises(ArtefactError, match=message):
        token_file.row(3)


def test_what_was_announced_or_released_is_read_all_the_same(tmp_path: Path) -> None:
    rows = [[number % 100] * (number % 7) for number in range(20_000)]
    token_file = TokenFile(write_rows(tmp_path / "x.src", rows, rows_per_write=20_000), vocab_size=100, read_offsets=False)
    numbers = np.array([0, 1, 700, 5_000, 19_998, 19_999])
    token_file.prefetch_offsets(numbers)
    token_file.prefetch_ids(numbers)
    token_file.release()
    assert token_file.row_lengths(numbers).tolist() == [len(rows[number]) for number in numbers]
    assert [token_file.row(number).tolist() for number in numbers] == [rows[number] for number in numbers]
    assert token_file.lengths.tolist() == [len(row) for row in rows]


def test_what_is_announced_holds_the_rows_and_little_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[number % 100] * (number % 7) for number in range(20_000)]
    token_file = TokenFile(write_rows(tmp_path / "x.src", rows, rows_per_write=20_000), vocab_size=100, read_offsets=False)
    announced: list[tuple[int, int]] = []
    monkeypatch.setattr(token_file, "_advise", lambda _name, start, length: announced.append((start, start + length)))
    starts = HEADER_SIZE + 2 * np.cumsum([0, *map(len, rows)])
    offsets = offsets_position(itemsize=2, num_ids=sum(map(len, rows)))
    across_pages = (offsets // mmap.PAGESIZE + 20) * mmap.PAGESIZE // 8 - offsets // 8 - 1
    numbers = np.array([0, 1, 2, 700, 701, 5_000, across_pages, 19_998, 19_999])
    for read, begins, ends in (
        (token_file.prefetch_ids, starts[numbers], starts[numbers + 1]),
        (token_file.prefetch_offsets, offsets + 8 * numbers, offsets + 8 * (numbers + 2)),
    ):
        announced.clear()
        read(numbers)
        assert all(any(start <= begin and end <= stop for start, stop in announced) for begin, end in zip(begins, ends, strict=True))
        assert all(start % mmap.PAGESIZE == 0 and stop <= token_file.num_bytes for start, stop in announced)
        assert len(announced) <= 5
        assert sum(stop - start for start, stop in announced) <= 9 * mmap.PAGESIZE
