"""Pools of raw text: the pairs that shards of the same text hold, from any place on, at the cost of reading forward."""

import gzip
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtkit.data.corpus import Corpus, parse_corpus
from mtkit.data.filters import FilterConfig
from mtkit.data.pools import Pool
from mtkit.data.preprocess import PreprocessConfig, preprocess
from mtkit.data.shards import ShardSet
from mtkit.data.sources import PairedFiles, ReadCounts, Skip, TextPair
from mtkit.data.stream import StreamPools
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import DataError
from mtkit.files import decode_line

POOL_ROWS = 30
PAIRS = 100

Kind = Callable[[Path], Corpus]


@pytest.fixture(autouse=True)
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 rows are four pools, and a block does not fill one."""
    monkeypatch.setattr("mtkit.data.order.POOL_PAIRS", POOL_ROWS)
    monkeypatch.setattr("mtkit.data.blocks.BLOCK_PAIRS", 8)
    monkeypatch.setattr("mtkit.data.stream.HEAD_ROWS", 5)


@pytest.fixture
def text(tmp_path: Path, make_pairs: Any, write_corpus: Any) -> Path:
    """train.en and train.de of 100 pairs, of which 3, 50 and 51 have an empty side; the same as train.tsv."""
    pairs = [("", pair[1]) if number in (3, 50, 51) else pair for number, pair in enumerate(make_pairs(PAIRS))]
    write_corpus(pairs)
    (tmp_path / "train.tsv").write_bytes("".join(f"{src}\t{tgt}\n" for src, tgt in pairs).encode())
    return tmp_path


def files(text: Path) -> Corpus:
    return parse_corpus([str(text / "train.en"), str(text / "train.de")])


def tsv(text: Path) -> Corpus:
    return parse_corpus([str(text / "train.tsv")])


def gz(text: Path) -> Corpus:
    (text / "train.tsv.gz").write_bytes(gzip.compress((text / "train.tsv").read_bytes()))
    return parse_corpus([str(text / "train.tsv.gz")])


def two_corpora(text: Path) -> Corpus:
    lines = (text / "train.tsv").read_bytes().split(b"\n")[:-1]
    for name, part in (("a", lines[:37]), ("b", lines[37:])):
        (text / f"{name}.tsv").write_bytes(b"".join(line + b"\n" for line in part))
    return parse_corpus([str(text / "a.tsv"), str(text / "b.tsv")])


def parquet(text: Path) -> Corpus:
    import pyarrow as pa
    from pyarrow import parquet as writer

    pairs = [line.split("\t") for line in (text / "train.tsv").read_text().split("\n")[:-1]]
    records = [{"en": src, "de": tgt} for src, tgt in pairs]
    writer.write_table(pa.table({"translation": pa.array(records)}), text / "train.parquet", row_group_size=9)
    return parse_corpus([str(text / "train.parquet")], src_lang="en", tgt_lang="de")


def hub(text: Path) -> Corpus:
    parquet(text)
    (text / "set").mkdir(exist_ok=True)
    os.replace(text / "train.parquet", text / "set" / "train.parquet")
    corpus = parse_corpus([f"hf:{text / 'set'}"], src_lang="en", tgt_lang="de", stream=True)
    assert corpus.sources[0].is_streamed  # type: ignore[union-attr]
    return corpus


KINDS = [files, tsv, gz, two_corpora, parquet, hub]


@pytest.fixture
def stream(tokenizer: Tokenizer) -> Callable[..., StreamPools]:
    def make(corpus: Corpus, **filters: Any) -> StreamPools:
        return StreamPools(corpus, tokenizer=tokenizer, filters=FilterConfig(**filters))

    return make


def epoch_of(source: StreamPools, epoch: int = 0) -> Iterator[Pool]:
    number = 0
    while True:
        pool = source.read(epoch, number)
        yield pool
        if pool.is_last:
            return
        number = pool.number + 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_pools_hold_what_shards_hold(text: Path, tokenizer: Tokenizer, stream: Any, kind: Kind) -> None:
    preprocess(files(text), held_out={}, tokenizer=tokenizer, output=text / "shards", config=PreprocessConfig())
    shards = ShardSet.open(text / "shards")
    source = stream(kind(text))
    assert (source.num_pairs, source.num_epochs) == (None, None)
    for epoch in (0, 1):
        pools = list(epoch_of(source, epoch))
        assert [(pool.epoch, pool.number, pool.is_last) for pool in pools] == [(epoch, number, number == 3) for number in range(4)]
        rows = [index for pool in pools for index in pool.indices.tolist()]
        assert rows == [row for row in range(PAIRS) if row not in (3, 50, 51)]
        assert [len(pool) for pool in pools] == [29, 28, 30, 10]
        assert [ids for pool in pools for row in range(len(pool)) for ids in (pool.src(row).tolist(), pool.tgt(row).tolist())] == [
            ids for row in range(shards.num_pairs) for ids in (shards.src(row).tolist(), shards.tgt(row).tolist())
        ]
        assert pools[0].src_ids.dtype == shards.src(0).dtype


@pytest.mark.parametrize("kind", KINDS)
def test_from_any_place_on_it_is_the_same(text: Path, stream: Any, kind: Kind) -> None:
    corpus = kind(text)
    digests = [pool.digest() for pool in epoch_of(stream(corpus))]
    assert len(set(digests)) == 4
    for start in range(4):
        source = stream(corpus)
        assert [source.read(7, number).digest() for number in range(start, 4)] == digests[start:]
    wandering = stream(corpus)
    for epoch, number in ((0, 2), (0, 2), (0, 0), (0, 3), (1, 1), (1, 3), (0, 1)):
        pool = wandering.read(epoch, number)
        assert (pool.epoch, pool.number, pool.digest()) == (epoch, number, digests[number])


def test_reading_goes_forward_and_skips_without_decoding(text: Path, stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    decoded: list[bytes] = []
    real_read = PairedFiles.read

    def read(self: PairedFiles, counts: ReadCounts, skip: Skip) -> Iterator[TextPair]:
        opened.append(self.name)
        return real_read(self, counts, skip)

    def decode(raw: bytes) -> tuple[str, bool]:
        decoded.append(raw)
        return decode_line(raw)

    monkeypatch.setattr(PairedFiles, "read", read)
    monkeypatch.setattr("mtkit.files.decode_line", decode)
    source = stream(files(text))
    list(epoch_of(source))
    assert (len(opened), len(decoded)) == (1, 2 * PAIRS)
    decoded.clear()
    source.read(1, 3)
    assert (len(opened), len(decoded)) == (2, 2 * (PAIRS - 3 * POOL_ROWS)), "an epoch begins the files anew, and skipped lines stay bytes"


def test_a_pool_of_which_nothing_is_left_is_passed_over(text: Path, stream: Any, make_pairs: Any, write_corpus: Any) -> None:
    def corpus(*kept: range) -> Corpus:
        rows = {row for part in kept for row in part}
        return write_corpus([pair if row in rows else ("", "") for row, pair in enumerate(make_pairs(PAIRS))], name="gaps")  # type: ignore[no-any-return]

    source = stream(corpus(range(65, 70), range(92, 93)))
    assert [(pool.number, len(pool), pool.is_last) for pool in epoch_of(source)] == [(2, 5, False), (3, 1, True)]
    for number in (2, 1, 0):
        assert source.read(5, number).number == stream(corpus(range(65, 70))).read(0, number).number == 2
    last = stream(corpus(range(5, 6)))
    assert last.read(0, 0).is_last, "empty pools at the end do not count"
    with pytest.raises(DataError, match=r"gaps\.en .*gaps\.de: none of 100 pairs is left after filtering \(empty 100\)"):
        stream(corpus()).read(0, 0)


def test_filters_hold_and_duplicates_are_found_within_a_pool(text: Path, stream: Any, write_corpus: Any) -> None:
    pairs = (
        [("one house", "ein Haus"), ("a river", "ein Fluss"), ("one house", "ein Haus"), ("a letter", "ein Brief")] * 10
        + [("a b c d e f g h " * 5, "ab")] * 5
        + [("same", "same")]
    )
    corpus = write_corpus(pairs, name="odd")
    pools = list(epoch_of(stream(corpus, drop_duplicates=True, drop_identical=True, max_length=15)))
    assert [pool.indices.tolist() for pool in pools] == [[0, 1, 3], [30, 31, 33]]
    with pytest.raises(DataError, match=r"none of 46 pairs is left after filtering \(too_long 45, identical 1\)"):
        stream(corpus, drop_identical=True, max_length=1).read(0, 0)


def fill(pipe: Path, data: bytes) -> threading.Thread:
    thread = threading.Thread(target=lambda: pipe.write_bytes(data))
    thread.start()
    return thread


@pytest.fixture
def pipe(text: Path) -> Path:
    os.mkfifo(text / "pipe.tsv")
    return text / "pipe.tsv"


def test_a_pipe_is_read_once(text: Path, stream: Any, pipe: Path) -> None:
    data = (text / "train.tsv").read_bytes()
    digests = [pool.digest() for pool in epoch_of(stream(tsv(text)))]
    for start in range(4):
        thread = fill(pipe, data)
        source = stream(parse_corpus([str(pipe)]))
        assert source.num_epochs == 1
        assert [pool.digest() for pool in (source.read(0, number) for number in (0, 0, *range(start, 4)))][2:] == digests[start:]
        thread.join()
        with pytest.raises(ValueError, match="lies before what was read from a pipe"):
            source.read(1, 0)


def test_empty_pools_of_a_pipe_are_passed_over_once(text: Path, stream: Any, pipe: Path) -> None:
    thread = fill(pipe, b"\t\n" * 70 + (text / "train.tsv").read_bytes())
    source = stream(parse_corpus([str(pipe)]))
    assert [source.read(0, number).number for number in (0, 1, 2, 3)] == [2, 2, 2, 3]
    thread.join()


def test_a_pipe_that_ends_before_the_run_goes_on(text: Path, stream: Any, pipe: Path) -> None:
    thread = fill(pipe, b"\n".join((text / "train.tsv").read_bytes().split(b"\n")[:40]) + b"\n")
    source = stream(parse_corpus([str(pipe)]))
    with pytest.raises(DataError, match=r"pipe\.tsv: ends before pair 61, where the run goes on") as error:
        source.read(0, 2)
    assert "whole text" in (error.value.hint or "")
    thread.join()
    (text / "empty.tsv").touch()
    with pytest.raises(DataError, match=r"empty\.tsv: is empty"):
        stream(parse_corpus([str(text / "empty.tsv")])).read(0, 0)


@pytest.mark.parametrize("change", ["first row", "later row", "tokenizer", "filters", "swapped"])
def test_the_fingerprint_is_that_of_the_data(text: Path, tokenizer: Tokenizer, other_tokenizer: Tokenizer, stream: Any, change: str) -> None:
    first = stream(files(text)).fingerprint
    assert stream(files(text)).fingerprint == first
    for side in ("en", "de"):
        os.rename(text / f"train.{side}", text / f"moved.{side}")
    moved = parse_corpus([str(text / "moved.en"), str(text / "moved.de")])
    assert stream(moved).fingerprint == first
    source: StreamPools | None = None
    if change == "tokenizer":
        source = StreamPools(moved, tokenizer=other_tokenizer, filters=FilterConfig())
    elif change == "filters":
        source = stream(moved, max_length=99)
    elif change == "swapped":
        source = stream(parse_corpus([str(text / "moved.de"), str(text / "moved.en")]))
    else:
        lines = (text / "moved.en").read_text().split("\n")
        lines[0 if change == "first row" else 80] += " more"
        (text / "moved.en").write_text("\n".join(lines))
    assert (source or stream(moved)).fingerprint != first


def test_faults_of_the_text_are_those_of_preprocessing(text: Path, stream: Any) -> None:
    with pytest.raises(DataError, match=r"missing\.tsv: cannot be read"):
        stream(parse_corpus([str(text / "train.tsv"), str(text / "missing.tsv")]))
    (text / "utf16.tsv").write_bytes("a sentence\tein Satz\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"utf16\.tsv: is UTF-16"):
        stream(parse_corpus([str(text / "train.tsv"), str(text / "utf16.tsv")]))
    lines = (text / "train.tsv").read_bytes().split(b"\n")
    (text / "bad.tsv").write_bytes(b"\n".join([*lines[:70], b"no tab", *lines[70:]]))
    bad = stream(parse_corpus([str(text / "bad.tsv")]))
    bad.read(0, 0)
    with pytest.raises(DataError, match=r"bad\.tsv:71: has no tab"):
        list(epoch_of(bad))
    with open(text / "train.de", "ab") as file:
        file.write(b"one more\n")
    unequal = stream(files(text))
    assert unequal.read(0, 1).number == 1
    with pytest.raises(DataError, match=r"train\.en has 100 lines and .*train\.de has 101"):
        unequal.read(0, 3)
    with pytest.raises(DataError, match=r"train\.en has 100 lines and .*train\.de has 101"):
        stream(files(text)).read(0, 5)


def test_bytes_that_are_not_utf8_are_mended(text: Path, stream: Any, tokenizer: Tokenizer) -> None:
    (text / "latin.tsv").write_bytes(b"caf\xe9 house\tKaf\xe9 Haus\n" * 3)
    pool = stream(parse_corpus([str(text / "latin.tsv")])).read(0, 0)
    assert tokenizer.decode([pool.src(0).tolist()], "src") == ["caf\ufffd house"]


def test_a_stream_that_was_closed_stops_reading(text: Path, stream: Any) -> None:
    source = stream(files(text))
    source.read(0, 0)
    source.close()
    with pytest.raises(ValueError, match="was closed"):
        source.read(0, 1)


def test_memory_is_bounded_by_a_pool(text: Path, stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0
    real = PairedFiles.read

    def read(self: PairedFiles, counts: ReadCounts, skip: Skip) -> Iterator[TextPair]:
        nonlocal taken
        for pair in real(self, counts, skip):
            taken += 1
            yield pair

    monkeypatch.setattr(PairedFiles, "read", read)
    source = stream(files(text))
    assert taken <= 5, "its head"
    source.read(0, 0)
    assert POOL_ROWS < taken <= POOL_ROWS + 8, "one block ahead tells whether the epoch goes on"
    assert np.array_equal(source.read(0, 0).indices, source.read(0, 0).indices)
