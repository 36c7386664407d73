import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from mtkit.data.records import HubDataset, RecordFile, clean_text
from mtkit.data.sources import ReadCounts, Skip
from mtkit.errors import DataError, MTKitError
from mtkit.files import MAX_LINE_BYTES

Pairs = list[tuple[str, str]]


def read(source: RecordFile | HubDataset) -> Pairs:
    return list(source.read(ReadCounts(), Skip()))


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
        ('{"translation": null}', "its translation is null"),
        ('{"translation": {"en": "' + "x" * (5 << 20) + '", "de": "x"}}', "is longer than 4194304 bytes"),
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
    assert list(source.read(counts, Skip())) == [("a\ufffd\ufffd\ufffdb", "\U0001f600")]
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


# --- streams ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(("first", "then"), [(0, 0), (1, 0), (0, 2), (3, 0), (4, 0), (6, 0)])
def test_records_are_skipped_at_the_beginning_and_later(tmp_path: Path, name: str, first: int, then: int) -> None:
    source = write_records(tmp_path / name, RECORDS)
    source.check_start()
    skip = Skip(num_left=first)
    rows = source.read(ReadCounts(), skip)
    assert next(rows, None) == (PAIRS[first] if first < 4 else None)
    if first < 4:
        skip.num_left = then
        assert list(rows) == PAIRS[first + 1 + then :]
    assert skip.num_left == max(0, first - 4)


def test_a_streamed_data_set_is_not_downloaded(hub_directory: Path) -> None:
    source = hub(str(hub_directory), is_streamed=True)
    source.check_start()
    assert read(source) == PAIRS
    for count in range(7):
        skip = Skip(num_left=count)
        assert list(source.read(ReadCounts(), skip)) == PAIRS[count:]
        assert skip.num_left == max(0, count - 4)
    assert not list(hub_directory.parent.rglob("*.arrow"))
    with pytest.raises(DataError, match=r"hf:.*wmt::test: cannot be loaded: .*split"):
        hub(str(hub_directory), split="test", is_streamed=True).check_start()


def test_a_hub_that_is_lost_while_streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    class Lost:
        column_names = None

        def with_format(self, _kind: str) -> Any:
            return self

        def iter(self, **_options: Any) -> Any:
            raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_arguments, **_options: Lost())
    with pytest.raises(MTKitError, match=r"hf:wmt/wmt14::train: reading failed: reset by peer") as caught:
        read(hub("wmt/wmt14", is_streamed=True))
    assert caught.value.exit_code == 1
