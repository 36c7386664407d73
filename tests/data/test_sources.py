import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtkit.data.sources import HubDataset, PairedFiles, ReadCounts, RecordFile, TsvFile, clean_text
from mtkit.errors import DataError, MTKitError
from mtkit.files import MAX_LINE_BYTES

Pairs = list[tuple[str, str]]


def write_pair(directory: Path, src: bytes, tgt: bytes) -> PairedFiles:
    (directory / "a.en").write_bytes(src)
    (directory / "a.de").write_bytes(tgt)
    return PairedFiles(src=str(directory / "a.en"), tgt=str(directory / "a.de"))


def read(source: PairedFiles | TsvFile | RecordFile | HubDataset) -> Pairs:
    return list(source.read(ReadCounts()))


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
    pairs = list(source.read(counts))
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


@pytest.mark.parametrize(("line", "columns"), [("no tab", 1), ("a\tA\t0.9", 3), ("a\t\t", 3)])
def test_tsv_refuses_other_columns(tmp_path: Path, line: str, columns: int) -> None:
    source = TsvFile(path=str(tmp_path / "a.tsv"))
    Path(source.path).write_bytes(f"a\tA\n{line}\n".encode())
    with pytest.raises(DataError, match=rf"a\.tsv:2: has {columns} columns, but must have 2"):
        read(source)


# --- records ----------------------------------------------------------------------------------------------------------------------------

RECORDS: list[dict[str, str | None]] = [
    {"de": "Hallo", "en": "Hello"},
    {"de": "Zwei\nZeilen\r\n", "en": "Two\u2028lines"},
    {"de": None, "en": "\ufeffnull"},
    {"de": "a\rb", "en": "\n"},
]
PAIRS = [("Hello", "Hallo"), ("Two\u2028lines", "Zwei Zeilen"), ("null", ""), ("", "a b")]


def write_records(path: Path, records: list[Any]) -> RecordFile:
    if path.suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({"id": list(range(len(records))), "translation": pa.array(records)}), path)
    else:
        data = "".join(json.dumps({"id": 0, "translation": record}) + "\n" for record in records).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return RecordFile(path=str(path), src_lang="en", tgt_lang="de")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_records_in_both_formats_give_the_same_pairs(tmp_path: Path, name: str) -> None:
    source = write_records(tmp_path / name, RECORDS)
    assert read(source) == PAIRS
    assert source.check().num_pairs == len(PAIRS)
    swapped = RecordFile(path=source.path, src_lang="de", tgt_lang="en")
    assert read(swapped) == [(tgt, src) for src, tgt in PAIRS]
    assert swapped.check().fingerprint != source.check().fingerprint


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_language_that_is_not_there(tmp_path: Path, name: str) -> None:
    source = write_records(tmp_path / name, [{"de": "Hallo", "fr": "Salut"}])
    with pytest.raises(DataError, match=rf"{name}.*has no .*'en'"):
        read(source)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not a JSON record"),
        ("[]", "is not a JSON record"),
        ('{"text": "x"}', "has no 'translation'"),
        ('{"translation": "x"}', "is not a JSON record"),
        ('{"translation": {"en": 3, "de": "x"}}', "the translation holds something else than text"),
        ("[" * 200_000, "is not a JSON record"),
    ],
)
def test_json_lines_of_another_schema(tmp_path: Path, line: str, message: str) -> None:
    source = write_records(tmp_path / "a.jsonl", [{"de": "Hallo", "en": "Hello"}])
    with open(source.path, "a") as stream:
        stream.write(f"\n{line}\n")  # a blank line between records is nothing
    with pytest.raises(DataError, match=rf"a\.jsonl:3: {message}"):
        read(source)


def test_half_a_surrogate_pair_in_json_is_mended(tmp_path: Path) -> None:
    source = write_records(tmp_path / "a.jsonl", [])
    Path(source.path).write_bytes(rb'{"translation": {"en": "a\ud800b", "de": "\ud83d\ude00"}}' + b"\n")
    counts = ReadCounts()
    assert list(source.read(counts)) == [("a\ufffd\ufffd\ufffdb", "\U0001f600")]
    assert counts.num_bad_utf8 == 1


def test_parquet_of_another_schema(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    source = write_records(tmp_path / "a.parquet", RECORDS)
    parquet.write_table(pa.table({"en": ["a"]}), source.path)
    with pytest.raises(DataError, match="has no column 'translation', but"):
        read(source)
    parquet.write_table(pa.table({"translation": ["a"]}), source.path)
    with pytest.raises(DataError, match="has no language 'en'; it has none"):
        read(source)
    parquet.write_table(pa.table({"translation": [{"en": 1, "de": 2}]}), source.path)
    with pytest.raises(DataError, match="'en' holds int64, not text"):
        read(source)


def test_damaged_parquet(tmp_path: Path) -> None:
    source = write_records(tmp_path / "a.parquet", RECORDS)
    Path(source.path).write_bytes(Path(source.path).read_bytes()[:-10])
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as parquet"):
        source.check()


def test_clean_text_cuts_like_a_line_reader() -> None:
    counts = ReadCounts()
    assert clean_text("é" * MAX_LINE_BYTES, counts) == "é" * (MAX_LINE_BYTES // 2)
    assert counts == ReadCounts(num_cut=1)


# --- data sets --------------------------------------------------------------------------------------------------------------------------


def hub(dataset: str, **values: Any) -> HubDataset:
    return HubDataset(**{"dataset": dataset, "config": None, "split": "train", "revision": None, "src_lang": "en", "tgt_lang": "de", **values})


@pytest.fixture
def hub_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local directory in the layout of the hub, and an empty cache."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    directory = tmp_path / "wmt"
    directory.mkdir()
    write_records(directory / "train.parquet", RECORDS)
    write_records(directory / "validation.parquet", RECORDS[:1])
    return directory


def test_local_data_set(hub_directory: Path) -> None:
    source = hub(str(hub_directory))
    assert source.check().num_pairs == 4
    assert read(source) == PAIRS
    validation = hub(str(hub_directory), split="validation")
    assert read(validation) == PAIRS[:1]
    assert validation.check().fingerprint != source.check().fingerprint == hub(str(hub_directory)).check().fingerprint
    with pytest.raises(DataError, match=r"hf:.*wmt::train: has no language 'fr'"):
        read(hub(str(hub_directory), src_lang="fr"))
    with pytest.raises(DataError, match=r"hf:.*wmt::test: cannot be loaded: Unknown split"):
        hub(str(hub_directory), split="test").check()
    with pytest.raises(DataError, match=r"hf:.*wmt:nope:train: cannot be loaded: .*nope"):
        hub(str(hub_directory), config="nope").check()


def test_revision_and_split_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(*arguments: Any, **options: Any) -> Any:
        calls.append((arguments, options))
        return datasets.Dataset.from_list([{"translation": record} for record in RECORDS])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = hub("wmt/wmt14", config="de-en", split="validation", revision="abc123")
    assert source.name == "hf:wmt/wmt14:de-en:validation@abc123"
    assert read(source) == PAIRS
    assert calls == [(("wmt/wmt14", "de-en"), {"split": "validation", "revision": "abc123"})]


def test_hub_out_of_reach_is_no_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_arguments: Any, **_options: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(MTKitError, match=r"hf:wmt/wmt14::train: the hub cannot be reached.*no route") as caught:
        hub("wmt/wmt14").check()
    assert caught.value.exit_code == 1
