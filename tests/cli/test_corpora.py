from typing import Annotated

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from mtkit.cli.corpora import CORPUS_OPTIONS, MultiValueCommand, default_name, parse_test_sets, repeat_options
from mtkit.data.corpus import parse_corpus
from mtkit.errors import UsageError


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("--train a b", "--train=a --train=b"),
        ("--train a b --train c d", "--train=a --train=b --train=c --train=d"),
        ("--train=a b -o out", "--train=a --train=b -o out"),
        ("-o out --train a b --dev - d --quiet", "-o out --train=a --train=b --dev=- --dev=d --quiet"),
        ("--workers 2 x --train a", "--workers 2 x --train=a"),
        ("--trains a b", "--trains a b"),
        ("--train a -- --dev b", "--train=a -- --dev b"),
        ("--train a=b hf:x/y@z", "--train=a=b --train=hf:x/y@z"),
        ("", ""),
    ],
)
def test_options_are_repeated(args: str, expected: str) -> None:
    assert repeat_options(args.split(), CORPUS_OPTIONS) == expected.split()


@pytest.mark.parametrize("args", ["--train", "--train --dev a b", "--quiet --test -o out", "--dev a b --train -- c"])
def test_an_option_without_words_is_refused(args: str) -> None:
    with pytest.raises(UsageError, match="--(train|test) needs a corpus after it"):
        repeat_options(args.split(), CORPUS_OPTIONS)


@given(st.lists(st.lists(st.text(min_size=1).filter(lambda word: not word.startswith("-")), min_size=1), max_size=4))
def test_every_word_reaches_its_option(groups: list[list[str]]) -> None:
    args = [word for group in groups for word in ("--train", *group)]
    assert repeat_options(args, CORPUS_OPTIONS) == [f"--train={word}" for group in groups for word in group]


def test_the_command_hands_over_all_words() -> None:
    app = typer.Typer()
    got: list[list[str] | None] = []

    def command(
        train: Annotated[list[str], typer.Option("--train")],
        dev: Annotated[list[str] | None, typer.Option("--dev")] = None,
        number: Annotated[int, typer.Option("--number")] = 1,
    ) -> None:
        got.extend([train, dev, [str(number)]])

    app.command("run", cls=MultiValueCommand)(command)
    result = CliRunner().invoke(app, ["--train", "a", "b", "--number", "3", "--train", "c d", "--dev=e", "f"])
    assert result.exit_code == 0, result.output
    assert got == [["a", "b", "c d"], ["e", "f"], ["3"]]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["test.en", "test.de"], "test"),
        (["x/newstest2014.en.gz", "y/newstest2014.de.gz"], "newstest2014"),
        (["newstest2014-src.en", "newstest2014-ref.de"], "newstest2014"),
        (["en.txt", "de.txt"], "test"),
        (["a set.tsv"], "a-set"),
        (["wmt.22.parquet"], "wmt.22"),
        (["hf:wmt/wmt14:de-en"], "test"),
        (["hf:wmt/wmt14:de-en:validation"], "validation"),
        (["日本.tsv"], "test"),
    ],
)
def test_default_names(words: list[str], name: str) -> None:
    (source,) = parse_corpus(words, src_lang="en", tgt_lang="de", split="test").sources
    assert default_name(source) == name


def test_each_test_set_has_its_own_name() -> None:
    words = ["a.en", "a.de", "news=b.en", "b.de", "c.tsv", "hub=hf:x/y"]
    sets = parse_test_sets(words, src_lang="en", tgt_lang="de")
    assert {name: corpus.name for name, corpus in sets.items()} == {"a": "a.en a.de", "news": "b.en b.de", "c": "c.tsv", "hub": "hf:x/y::test"}
    assert parse_test_sets([], src_lang=None, tgt_lang=None) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.en", "a.de", "x/a.en", "x/a.de"], "two held-out sets would be named 'a'"),
        (["dev.en", "dev.de"], "two held-out sets would be named 'dev'"),
        (["a.en", "name=a.de"], "the name 'name' stands before the second file of a pair"),
        (["a.en"], "a.en has no partner"),
    ],
)
def test_test_sets_that_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_test_sets(words, src_lang=None, tgt_lang=None)
