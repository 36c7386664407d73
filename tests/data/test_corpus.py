import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from mtkit.data.corpus import Corpus, ReadCounts, Source, check_directions, parse_corpus
from mtkit.data.records import HubDataset, RecordFile
from mtkit.data.sources import PairedFiles, TsvFile
from mtkit.errors import DataError, UsageError


def pair(src: str, tgt: str) -> PairedFiles:
    return PairedFiles(src=src, tgt=tgt)


def hub(dataset: str, config: str | None, split: str = "train", revision: str | None = None) -> HubDataset:
    return HubDataset(dataset=dataset, config=config, split=split, revision=revision, src_lang="en", tgt_lang="de")


@pytest.mark.parametrize(
    ("words", "sources"),
    [
        (["a.en", "a.de"], [pair("a.en", "a.de")]),
        (["a.en", "a.de", "b.en.gz", "b.de.gz"], [pair("a.en", "a.de"), pair("b.en.gz", "b.de.gz")]),
        (["-", "a.de"], [pair("-", "a.de")]),
        (["-"], [TsvFile(path="-")]),
        (["a.en", "a.de", "-", "a.tsv"], [pair("a.en", "a.de"), TsvFile(path="-"), TsvFile(path="a.tsv")]),
        (["a.tsv", "b.en", "b.de", "c.tsv.gz"], [TsvFile(path="a.tsv"), pair("b.en", "b.de"), TsvFile(path="c.tsv.gz")]),
        (["a.jsonl"], [RecordFile(path="a.jsonl", src_lang="en", tgt_lang="de")]),
        (["a.parquet", "a.jsonl.gz"], [RecordFile(path=path, src_lang="en", tgt_lang="de") for path in ("a.parquet", "a.jsonl.gz")]),
        (["hf:wmt/wmt14:de-en"], [hub("wmt/wmt14", "de-en")]),
        (["hf:wmt/wmt14:de-en@0123abc"], [hub("wmt/wmt14", "de-en", revision="0123abc")]),
        (["hf:wmt/wmt14:de-en:train[:1%]@refs/pr/1"], [hub("wmt/wmt14", "de-en", "train[:1%]", "refs/pr/1")]),
        (["hf:me/mine"], [hub("me/mine", None)]),
        (["hf:me/mine::test"], [hub("me/mine", None, "test")]),
    ],
)
def test_words_become_sources(words: list[str], sources: list[Source]) -> None:
    assert parse_corpus(words, src_lang="en", tgt_lang="de") == Corpus(sources=tuple(sources))


def test_the_default_split_is_the_callers() -> None:
    corpus = parse_corpus(["hf:me/mine", "hf:me/mine::train"], src_lang="en", tgt_lang="de", split="validation")
    assert corpus.sources == (hub("me/mine", None, "validation"), hub("me/mine", None, "train"))


@pytest.mark.parametrize(
    ("words", "languages", "message"),
    [
        ([], ("en", "de"), "no corpus was given"),
        (["a.en"], ("en", "de"), "a.en has no partner"),
        (["a.en", "a.de", "b.en"], ("en", "de"), "b.en has no partner"),
        (["a.en", "hf:x/y"], ("en", "de"), "a.en has no partner: hf:x/y, which follows it, holds both sides"),
        (["a.en", "a.tsv"], ("en", "de"), "a.en has no partner: a.tsv"),
        (["-", "-"], ("en", "de"), "stdin cannot be both sides"),
        (["a.de", "a.en.gz"], ("en", "de"), "in the wrong order for en to de"),
        (["a.jsonl"], (None, "de"), "a.jsonl holds texts by language"),
        (["hf:x/y"], ("en", None), "hf:x/y holds texts by language"),
        (["hf:x/y"], ("en", "en"), "both 'en'"),
        (["hf:"], ("en", "de"), "hf: does not name a data set"),
        (["hf:x/y@"], ("en", "de"), "hf:x/y@ does not name a data set"),
    ],
)
def test_words_that_are_no_corpus(words: Sequence[str], languages: tuple[str | None, str | None], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_corpus(words, src_lang=languages[0], tgt_lang=languages[1])


def test_sources_are_read_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_bytes(b"a\n\xff\n")
    (tmp_path / "a.de").write_bytes(b"A\nB\n")
    (tmp_path / "b.tsv").write_bytes(b"c\tC\n\xff\tD\n")
    corpus = parse_corpus([str(tmp_path / name) for name in ("a.en", "a.de", "b.tsv")])
    counts = ReadCounts()
    assert list(corpus.pairs(counts=counts)) == [("a", "A"), ("\ufffd", "B"), ("c", "C"), ("\ufffd", "D")]
    assert counts.num_bad_utf8 == 2
    assert [record.num_pairs for record in corpus.check()] == [2, 2]
    assert list(corpus.pairs()) == list(corpus.pairs())
    (tmp_path / "b.tsv").unlink()
    with pytest.raises(DataError, match=r"b\.tsv"):
        corpus.check()


def test_directions_must_agree() -> None:
    train = parse_corpus(["train.en", "train.de.gz", "more.en", "more.de"])
    check_directions({"train": train, "dev": parse_corpus(["dev.en", "dev.de"]), "other": parse_corpus(["src.txt", "ref.txt"])})
    with pytest.raises(UsageError, match=r"dev goes from \.de to \.en \(dev\.de dev\.en\), but train goes from \.en to \.de"):
        check_directions({"train": train, "dev": parse_corpus(["dev.de", "dev.en"])})
