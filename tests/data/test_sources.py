import gzip
import io
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtkit.data.sources import PairedFiles, ReadCounts, Skip, TsvFile, is_pipe
from mtkit.errors import DataError
from mtkit.files import MAX_LINE_BYTES

Pairs = list[tuple[str, str]]


def write_pair(directory: Path, src: bytes, tgt: bytes) -> PairedFiles:
    (directory / "a.en").write_bytes(src)
    (directory / "a.de").write_bytes(tgt)
    return PairedFiles(src=str(directory / "a.en"), tgt=str(directory / "a.de"))


def read(source: PairedFiles | TsvFile) -> Pairs:
    return list(source.read(ReadCounts(), Skip()))


# --- two text files ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src", "tgt", "pairs"),
    [
        ("a\u2028b\x85c\x0bd\x0ce\x1cf\n".encode(), b"A\n", [("a\u2028b\x85c\x0bd\x0ce\x1cf", "A")]),  # only LF ends a line
        (b"x\ry\nz\n", b"X\nZ\n", [("x y", "X"), ("z", "Z")]),  # nor does CR
        (b"x\r\nz\r\n", b"X\nZ\n", [("x", "X"), ("z", "Z")]),
        (b"a\n\nc\n", b"A\nB\nC\n", [("a", "A"), ("", "B"), ("c", "C")]),  # blank lines shift nothing
        (b"\na\n\n", b"X\nA\n\n", [("", "X"), ("a", "A"), ("", "")]),
        (b"\n\n", b"\n\n", [("", ""), ("", "")]),
        (b"", b"", []),
        (b"a\nb", b"A\nB\n", [("a", "A"), ("b", "B")]),  # a final LF may be missing
        ("\ufeffHello\nx\ufeffy\n".encode(), b"A\nB\n", [("Hello", "A"), ("xy", "B")]),
        (b"caf\xe9\n\xed\xa0\x80\n", b"A\nB\n", [("caf\ufffd", "A"), ("\ufffd\ufffd\ufffd", "B")]),
    ],
)
def test_paired_files_keep_lines_together(tmp_path: Path, src: bytes, tgt: bytes, pairs: Pairs) -> None:
    source = write_pair(tmp_path, src, tgt)
    assert read(source) == pairs
    assert source.check().num_pairs == len(pairs)


@pytest.mark.parametrize(
    ("src", "tgt", "numbers"),
    [
        (b"a\nb\nc\n", b"A\nB\n", (3, 2)),
        (b"a\nb\n", b"A\nB\nC\n", (2, 3)),
        (b"a\nb\nc", b"A\nB\n", (3, 2)),
        (b"a\nb\n", b"A\nB\n\n", (2, 3)),  # an extra empty line is a line
        (b"", b"A\n", (0, 1)),
        (b"a\n" * 500, b"A\n" * 3, (500, 3)),
    ],
)
def test_unequal_line_counts_are_named(tmp_path: Path, src: bytes, tgt: bytes, numbers: tuple[int, int]) -> None:
    source = write_pair(tmp_path, src, tgt)
    message = rf"a\.en has {numbers[0]} lines and .*a\.de has {numbers[1]};"
    with pytest.raises(DataError, match=message):
        source.check()
    with pytest.raises(DataError, match=message):
        read(source)


@given(st.lists(st.binary(max_size=8), max_size=6).map(b"\n".join), st.lists(st.binary(max_size=8), max_size=6).map(b"\n".join))
def test_check_counts_what_read_gives(tmp_path_factory: pytest.TempPathFactory, src: bytes, tgt: bytes) -> None:
    source = write_pair(tmp_path_factory.mktemp("pair"), src, tgt)
    try:
        pairs = read(source)
    except DataError:
        with pytest.raises(DataError):
            source.check()
        return
    assert source.check().num_pairs == len(pairs)
    assert len(pairs) == len(src.split(b"\n")) - (src.endswith(b"\n") or not src)
    assert all("\n" not in text and "\r" not in text for pair in pairs for text in pair)


def test_mended_lines_are_counted(tmp_path: Path) -> None:
    source = write_pair(tmp_path, b"caf\xe9\nok\n" + b"x" * (MAX_LINE_BYTES + 1) + b"\n", b"\xff\xff\nok\nok\n")
    counts = ReadCounts()
    pairs = list(source.read(counts, Skip()))
    assert counts == ReadCounts(num_bad_utf8=2, num_cut=1)
    assert [len(src) for src, _ in pairs] == [4, 2, MAX_LINE_BYTES]


def test_gzip_is_read_like_plain_text(tmp_path: Path) -> None:
    plain = write_pair(tmp_path, b"a\nb\n", b"A\nB\n")
    (tmp_path / "z.gz").write_bytes(gzip.compress(b"a\n") + gzip.compress(b"b\n"))  # two members
    packed = PairedFiles(src=str(tmp_path / "z.gz"), tgt=plain.tgt)
    assert read(packed) == read(plain)
    assert packed.check().fingerprint == plain.check().fingerprint


@pytest.mark.parametrize("damage", ["cut", "flip", "checksum"])
def test_damaged_gzip_is_refused(tmp_path: Path, damage: str) -> None:
    data = bytearray(gzip.compress("".join(f"hello {number}\n" for number in range(3000)).encode()))
    if damage == "cut":
        del data[-100:]
    else:
        data[len(data) // 2 if damage == "flip" else -8] ^= 0xFF
    source = write_pair(tmp_path, bytes(data), b"A\n" * 3000)
    with pytest.raises(DataError, match=r"a\.en.*reading failed"):
        source.check()
    with pytest.raises(DataError, match=r"a\.en.*reading failed"):
        read(source)


def test_utf16_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.de: is UTF-16"):
        write_pair(tmp_path, b"a\n", "Ein Satz.\n".encode("utf-16")).check()


@pytest.mark.parametrize("start", ["<refset a='b'>\n", "\ufeff<?xml version='1.0'?>\n", "  <!DOCTYPE mteval>\n", "<srcset>\n", "<DATASET>\n"])
def test_test_sets_with_markup_are_refused_by_name(tmp_path: Path, start: str) -> None:
    """B16: but a sentence about markup is a sentence."""
    with pytest.raises(DataError, match=r"a\.en: is SGML or XML, not plain text"):
        write_pair(tmp_path, f"{start}<seg id='1'>One.</seg>\n".encode(), b"A\nB\n").check()
    assert write_pair(tmp_path, f"{start}One.\n".encode(), b"A\nB\n").check().num_pairs == 2
    assert write_pair(tmp_path, f"One.\n{start}".encode(), b"A\nB\n").check().num_pairs == 2


def test_missing_file(tmp_path: Path) -> None:
    source = write_pair(tmp_path, b"a\n", b"A\n")
    os.unlink(source.tgt)
    with pytest.raises(DataError, match=r"a\.de: cannot be read: No such file"):
        source.check()


def test_fingerprint_is_that_of_the_text(tmp_path: Path) -> None:
    first = write_pair(tmp_path, b"a\nb\n", b"A\nB\n").check().fingerprint
    assert write_pair(tmp_path, b"a\nb\n", b"A\nB\n").check().fingerprint == first
    assert write_pair(tmp_path, b"a\nb\n", b"A\nC\n").check().fingerprint != first
    assert write_pair(tmp_path, b"A\nB\n", b"a\nb\n").check().fingerprint != first


def test_a_pipe_is_not_read_by_check(tmp_path: Path) -> None:
    source = write_pair(tmp_path, b"", b"A\nB\n")
    os.unlink(source.src)
    os.mkfifo(source.src)
    writer = threading.Thread(target=lambda: Path(source.src).write_bytes(b"a\nb\n"))
    writer.start()
    record = source.check()
    assert (record.num_pairs, record.fingerprint) == (None, None)
    assert read(source) == [("a", "A"), ("b", "B")]
    writer.join()


# --- TSV --------------------------------------------------------------------------------------------------------------------------------


def test_tsv(tmp_path: Path) -> None:
    source = TsvFile(path=str(tmp_path / "a.tsv"))
    Path(source.path).write_bytes("\ufeffa\tA\r\n\nb \u2028c\tB\nd\t\n".encode())
    assert read(source) == [("a", "A"), ("", ""), ("b \u2028c", "B"), ("d", "")]
    assert source.check().num_pairs == 4


@pytest.mark.parametrize(("line", "what"), [("one column", "no tab"), ("a\tA\t0.9", "3 columns"), ("a\t\t", "3 columns")])
def test_tsv_refuses_other_columns(tmp_path: Path, line: str, what: str) -> None:
    source = TsvFile(path=str(tmp_path / "a.tsv"))
    Path(source.path).write_bytes(f"a\tA\n{line}\n".encode())
    with pytest.raises(DataError, match=rf"a\.tsv:2: has {what}, but must be a source and a target with a tab between"):
        read(source)


# --- beginning later --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then"), [(0, 0), (0, 3), (2, 0), (2, 3), (7, 0), (8, 0), (11, 0), (0, 20)])
@pytest.mark.parametrize("kind", ["pair", "tsv"])
def test_pairs_are_skipped_at_the_beginning_and_later(tmp_path: Path, kind: str, first: int, then: int) -> None:
    pairs = [(f"s{row}", f"t{row}") for row in range(8)]
    source: PairedFiles | TsvFile
    if kind == "pair":
        source = write_pair(tmp_path, "".join(f"{src}\n" for src, _ in pairs).encode(), "".join(f"{tgt}\n" for _, tgt in pairs).encode())
    else:
        source = TsvFile(path=str(tmp_path / "a.tsv"))
        Path(source.path).write_bytes("".join(f"{src}\t{tgt}\n" for src, tgt in pairs).encode())
    skip = Skip(num_left=first)
    rows = source.read(ReadCounts(), skip)
    assert next(rows, None) == (pairs[first] if first < 8 else None)
    if first < 8:
        skip.num_left = then
        assert list(rows) == pairs[first + 1 + then :]
    assert skip.num_left == max(0, first - 8 if first >= 8 else then - (7 - first)), "what is not there is left to the next source"


def test_sides_of_other_lengths_are_noticed_behind_what_was_skipped(tmp_path: Path) -> None:
    source = write_pair(tmp_path, b"a\nb\nc\n", b"A\nB\n")
    for count in (1, 2, 3, 9):
        with pytest.raises(DataError, match=r"a\.en has 3 lines and .*a\.de has 2;"):
            list(source.read(ReadCounts(), Skip(num_left=count)))


def test_the_beginning_of_a_file_is_looked_at_and_of_a_pipe_not(tmp_path: Path) -> None:
    source = write_pair(tmp_path, b"a\n" * 3, b"A\n")
    source.check_start()
    Path(source.tgt).write_bytes("Satz eins\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"a\.de: is UTF-16"):
        source.check_start()
    os.unlink(source.tgt)
    with pytest.raises(DataError, match=r"a\.de: cannot be read: No such file"):
        source.check_start()
    os.mkfifo(source.tgt)
    source.check_start()
    assert (is_pipe(*source.paths), is_pipe(source.src), is_pipe("-"), is_pipe()) == (True, False, True, False)


def test_faults_on_stdin_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\tA\nb\n")))
    source = TsvFile(path="-")
    assert source.check().fingerprint is None
    with pytest.raises(DataError, match=r"^stdin:2: has no tab"):
        read(source)
