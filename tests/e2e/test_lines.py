"""The text rules of every command that reads text, on the model of the shared run. What single commands' own tests hold is not repeated here."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from mtkit import files
from mtkit.artefacts import read_manifest
from mtkit.cli.app import app
from mtkit.data.shards import ShardSet
from mtkit.data.tokenizer import Tokenizer
from mtkit.decoding import windows
from mtkit.files import is_blank, read_lines
from tests.e2e.toy import SIZES, Pipeline, mtkit_environment, run_mtkit

Run = Callable[..., Result]

ODD = b"one\xe2\x80\xa8two\xc2\x85three\x0bfour\x0cfive\x1csix \x00 \xef\xbb\xbfseven"
"""One line, whatever it holds."""

GZIP_MAGIC = b"\x1f\x8b"
"""A file that begins so is not text."""

LINE = st.lists(
    st.sampled_from(
        [b"one", b" two", b"\r", b"\xff", b"\xed\xa0\x80", b"\xe2\x80\xa8", b"\xc2\x85", b"\x0b", b"\x00", b"\t", b"\xef\xbb\xbf", b"<s>"]
    )
).map(b"".join) | st.binary(max_size=20).map(lambda data: data.replace(b"\n", b""))
TEXT = (
    st.tuples(st.lists(LINE, max_size=5), st.booleans())
    .map(lambda parts: b"\n".join(parts[0]) + b"\n" * parts[1])
    .filter(lambda data: not data.startswith(GZIP_MAGIC))
)
ANY_BYTES = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def num_lines(text: bytes) -> int:
    return text.count(b"\n") + (text != b"" and not text.endswith(b"\n"))


def spoil(text: bytes) -> bytes:
    """The same lines by the rules: with byte-order marks in lines 1 and 7 and somewhere inside, ends as on Windows, and none after the last."""
    lines = text.removesuffix(b"\n").split(b"\n")
    assert len(lines) > 7
    mark = b"\xef\xbb\xbf"
    lines[0], lines[2], lines[6] = mark + lines[0], lines[2][:3] + mark + lines[2][3:], mark + lines[6]
    return b"\r\n".join(lines)


@pytest.fixture
def mtkit() -> Run:
    """Runs a command in this process."""

    def run(*arguments: str | Path, data: bytes | None = None, exit_code: int = 0) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=data)
        assert result.exit_code == exit_code, result.output
        return result

    return run


# --- spoiled text is the same text ------------------------------------------------------------------------------------------------------


@pytest.fixture
def spoiled(pipeline: Pipeline, tmp_path: Path) -> Path:
    """A directory with the texts of the shared run, spoiled."""
    for path in pipeline.text.iterdir():
        (tmp_path / path.name).write_bytes(spoil(path.read_bytes()))
    return tmp_path


def test_tokenizer_and_shards_are_those_of_the_clean_text(mtkit: Run, pipeline: Pipeline, spoiled: Path) -> None:
    """B02, B13: line ends of Windows and byte-order marks change nothing, not a byte of the tokenizer."""
    train, dev = (spoiled / "train.en", spoiled / "train.de"), (spoiled / "dev.en", spoiled / "dev.de")
    mtkit("tokenizer", "train", *train, "--config", pipeline.root / "config.toml", "--output", spoiled / "tokenizer")
    assert Tokenizer.load(spoiled / "tokenizer").fingerprint == Tokenizer.load(pipeline.tokenizer).fingerprint
    corpora = ("--train", *train, "--dev", *dev, "--workers", "1")
    mtkit("preprocess", *corpora, "--tokenizer", spoiled / "tokenizer", "--output", spoiled / "shards")
    assert ShardSet.open(spoiled / "shards").fingerprint == ShardSet.open(pipeline.shards).fingerprint


def test_translations_and_scores_are_those_of_the_clean_text(mtkit: Run, pipeline: Pipeline, spoiled: Path) -> None:
    """B02, B13: in a file and in a pipe."""
    mtkit("translate", pipeline.average, "--input", spoiled / "test.en", "--output", spoiled / "hyp", "--quiet")
    assert (spoiled / "hyp").read_bytes() == pipeline.hypothesis.read_bytes()
    assert mtkit("translate", pipeline.average, data=(spoiled / "test.en").read_bytes()).stdout_bytes == pipeline.hypothesis.read_bytes()
    (spoiled / "spoiled.de").write_bytes(spoil(pipeline.hypothesis.read_bytes()))
    scored = json.loads(mtkit("score", "--ref", spoiled / "test.de", spoiled / "spoiled.de", "--bootstrap", "0", "--json").stdout)
    assert scored["systems"][0]["scores"] == pipeline.scores["systems"][0]["scores"]
    forced = [
        json.loads(mtkit("score", "--model", pipeline.average, "--src", root / "test.en", "--tgt", root / "test.de", "--json").stdout)["pairs"]
        for root in (pipeline.text, spoiled)
    ]
    assert forced[0] == forced[1]


def test_a_config_may_begin_with_a_byte_order_mark(mtkit: Run, pipeline: Pipeline, tmp_path: Path) -> None:
    """B13: in every command that takes a config."""
    config = tmp_path / "config.toml"
    settings = (pipeline.root / "config.toml").read_bytes() + b"[preprocess]\nshard_pairs = 10\n"
    config.write_bytes(b"\xef\xbb\xbf" + settings.replace(b"\n", b"\r\n"))
    assert "warmup_steps = 50" in mtkit("train", "--config", config, "--print-config").stdout
    mtkit("tokenizer", "train", *pipeline.parallel("train"), "--config", config, "--output", tmp_path / "tokenizer")
    corpus = ("--train", *pipeline.parallel("dev"), "--workers", "1")
    mtkit("preprocess", *corpus, "--config", config, "--tokenizer", tmp_path / "tokenizer", "--output", tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.src"))) == SIZES["dev"] // 10


# --- any bytes --------------------------------------------------------------------------------------------------------------------------


@ANY_BYTES
@given(hyp=TEXT, ref=TEXT)
def test_score_takes_any_bytes_and_counts_their_lines(mtkit: Run, tmp_path: Path, hyp: bytes, ref: bytes) -> None:
    """B01, B02, B15: the number of sentences is that of line feeds, and texts of other lengths are refused with both numbers."""
    (tmp_path / "hyp").write_bytes(hyp)
    (tmp_path / "ref").write_bytes(ref)
    result = CliRunner().invoke(app, ["score", "--ref", str(tmp_path / "ref"), str(tmp_path / "hyp"), "--force", "--bootstrap", "0", "--json"])
    counts = (num_lines(hyp), num_lines(ref))
    if 0 in counts:
        assert (result.exit_code, "is empty" in result.stderr) == (3, True)
    elif counts[0] != counts[1]:
        assert result.exit_code == 3
        if not set(b"<{") & set(hyp + ref):  # of markup and records it is told that they are such
            assert f"hyp has {counts[0]} lines, " in result.stderr
            assert f"ref has {counts[1]}" in result.stderr
    else:
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["num_sentences"] == counts[0]


@ANY_BYTES
@given(src=TEXT, tgt=TEXT)
def test_a_model_scores_any_bytes_line_by_line(mtkit: Run, pipeline: Pipeline, tmp_path: Path, src: bytes, tgt: bytes) -> None:
    """B30, B41: blank lines and lines of nothing usable among them have finite scores."""
    (tmp_path / "src").write_bytes(src)
    (tmp_path / "tgt").write_bytes(tgt)
    arguments = ["score", "--model", str(pipeline.average), "--src", str(tmp_path / "src"), "--tgt", str(tmp_path / "tgt"), "--json"]
    result = CliRunner().invoke(app, arguments)
    if num_lines(src) != num_lines(tgt) or not src:
        assert result.exit_code == 3
        return
    pairs = json.loads(result.stdout)["pairs"]
    assert len(pairs) == num_lines(src)
    assert all(pair["num_tokens"] >= 1 and -1e5 < pair["log_prob"] < 0 for pair in pairs)


@ANY_BYTES
@given(text=TEXT)
def test_a_tokenizer_is_trained_on_any_bytes(mtkit: Run, tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    """B07, B15: whatever the text holds is in the vocabulary that is loaded again, and round trips."""
    root = tmp_path_factory.mktemp("any")
    (root / "text").write_bytes(b"good words to train on\n" * 3 + text)
    options = ["--vocab-size", "300", "--type", "bpe", "--set", "normalization=identity", "--quiet"]
    result = CliRunner().invoke(app, ["tokenizer", "train", str(root / "text"), "--output", str(root / "t"), *options])
    if result.exit_code == 2:  # too little text for so many pieces, or too many characters
        assert "possible size is" in result.stderr
        return
    assert result.exit_code == 0, result.output
    tokenizer = Tokenizer.load(root / "t")
    lines = read_lines(root / "text")
    expected = [line.replace("\u2581", " ") if not is_blank(line) else "" for line in lines]
    assert tokenizer.decode(tokenizer.encode(lines, "src"), "src") == expected
    tokenizer.save(root / "again")
    assert read_manifest(root / "again").fingerprint == read_manifest(root / "t").fingerprint


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", b""),
        (b"\n", b"\n"),
        (b"\r\n \n\t\n\xef\xbb\xbf\n", b"\n\n\n\n"),
        (b"\nOne two.", b"\nZwei eins.\n"),
        (b"One two.\n\n", b"Zwei eins.\n\n"),
        (b"One two.\n \nTwo three.", b"Zwei eins.\n\nDrei zwei.\n"),
        (b"\xe3\x80\x80\nOne two.\n", b"\nZwei eins.\n"),
    ],
)
def test_blank_lines_stay_where_they_are(mtkit: Run, pipeline: Pipeline, tmp_path: Path, data: bytes, expected: bytes) -> None:
    """B03, B09: first, last, only, of odd white space, no final line feed, nothing at all; from a pipe and from a file."""
    assert mtkit("translate", pipeline.average, data=data).stdout_bytes == expected
    (tmp_path / "in").write_bytes(data)
    assert mtkit("translate", pipeline.average, "--input", tmp_path / "in").stdout_bytes == expected
    n_best = mtkit("translate", pipeline.average, "--n-best", "2", data=data).stdout_bytes
    assert n_best.count(b"\n") == 2 * expected.count(b"\n")


def test_a_blank_side_takes_its_partner_along(mtkit: Run, pipeline: Pipeline, tmp_path: Path) -> None:
    """B03, B09, B17: pairs are dropped, never sides; the pairs after a blank line are all there."""
    src = [b"one", b"", b"three", b" ", b"five", b"six", b"\xe3\x80\x80", b"\xef\xbb\xbf", b"nine", b"zero"]
    tgt = [b"eins", b"zwei", b"drei", b"vier", b"", b"sechs", b"sieben", b"acht", b"\t", b"null"]
    (tmp_path / "a.en").write_bytes(b"\n".join(src))
    (tmp_path / "a.de").write_bytes(b"\n".join(tgt) + b"\n")
    arguments = ("--tokenizer", pipeline.tokenizer, "--output", tmp_path / "shards", "--workers", "1", "--json")
    report = json.loads(mtkit("preprocess", "--train", tmp_path / "a.en", tmp_path / "a.de", *arguments).stdout)
    assert (report["num_read"], report["num_pairs"], report["dropped"]["empty"]) == (10, 4, 6)
    shards = ShardSet.open(tmp_path / "shards")
    decode = shards.tokenizer.decode
    sides = [decode([shards.src(index).tolist() for index in range(4)], "src"), decode([shards.tgt(index).tolist() for index in range(4)], "tgt")]
    assert list(zip(*sides, strict=True)) == [("one", "eins"), ("three", "drei"), ("six", "sechs"), ("zero", "null")]


# --- lines of any length ----------------------------------------------------------------------------------------------------------------


def test_over_long_lines_do_not_end_or_thin_the_output(mtkit: Run, pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B04: just the limit, one token more, no space at all, and longer than can be read at once."""
    most = 1 << 16
    for module in (files, windows):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", most)
    limit, more = map(len, Tokenizer.load(pipeline.tokenizer).encode(["One two three", "One two three."], "src"))
    assert more == limit + 1
    endless = b"one " * (most // 4 + 9)
    lines = [b"One two.", b"One two three", b"One two three.", b"x" * 50_000, endless, b"Two three."]
    result = mtkit("translate", pipeline.average, "--set", f"max_source_length={limit}", "--quiet", data=b"\n".join(lines))
    translations = result.stdout.removesuffix("\n").split("\n")
    assert len(translations) == len(lines)
    assert (translations[0], translations[-1]) == ("Zwei eins.", "Drei zwei.")
    assert all(translations)
    assert [number for number in range(1, 7) if f"stdin:{number}: the source has" in result.stderr] == [3, 4, 5]
    assert "stdin: 1 lines are too long to be read whole" in result.stderr
    (tmp_path / "in").write_bytes(b"\n".join(lines))
    refs = ("--ref", tmp_path / "in", tmp_path / "in", "--metrics", "bleu", "--bootstrap", "0")
    assert f"in: 1 lines are longer than {most} bytes and were cut there" in mtkit("score", *refs).stderr


# --- in any locale ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [b"caf\xe9", pytest.param(b"gr\xc3\xb6\xc3\x9fe", marks=pytest.mark.slow)], ids=["not utf-8", "utf-8"])
def test_names_and_texts_in_the_least_capable_locale(pipeline: Pipeline, tmp_path: Path, name: bytes) -> None:
    """B15: every command, with bad bytes in the text and in the names of the files, as it is with UTF-8."""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    source, target = tmp_path / os.fsdecode(name + b".en"), tmp_path / os.fsdecode(name + b".de")
    source.write_bytes((pipeline.text / "dev.en").read_bytes() + b"caf\xe9\n\xed\xa0\x80\n" + ODD)
    target.write_bytes((pipeline.text / "dev.de").read_bytes() + b"caf\xe9\nf\xc3\xbcnf\n" + ODD)
    corpus = ("--train", source, target, "--dev", source, target, "--workers", "1")
    run_mtkit("tokenizer", "train", source, target, "--vocab-size", "330", "--output", tmp_path / "tokenizer", environment=locale)
    run_mtkit("preprocess", *corpus, "--tokenizer", tmp_path / "tokenizer", "--output", tmp_path / "shards", "--json", environment=locale)
    assert ShardSet.open(tmp_path / "shards").held_out("dev")[1][-2:] == ["fünf", read_lines(target)[-1]]
    assert b"train" in run_mtkit("inspect", tmp_path / "shards", "--json", environment=locale).stdout
    outputs = []
    for environment in (locale, None):
        translated = run_mtkit("translate", pipeline.average, "--input", source, "--output", "-", environment=environment)
        assert b"2 lines hold bytes that are not UTF-8" in translated.stderr
        scored = run_mtkit("score", "--ref", target, "-", "--bootstrap", "0", data=translated.stdout, environment=environment)
        outputs.append((translated.stdout, scored.stdout))
    assert outputs[0] == outputs[1]
    assert "ü".encode() in outputs[0][0]


# --- files of another kind --------------------------------------------------------------------------------------------------------------

SGML = """<refset setid="newstest2014" srclang="any" trglang="de">
<doc sysid="ref" docid="1">
<seg id="1">Eins zwei.</seg>
<seg id="2">Drei vier.</seg>
</doc>
</refset>
"""
XML = "\ufeff<?xml version='1.0' encoding='utf-8'?>\n<dataset id='x'><doc><src lang='en'><p><seg id='1'>One two.</seg></p></src></doc></dataset>\n"


@pytest.mark.parametrize("text", [SGML, XML], ids=["sgml", "xml"])
def test_test_sets_with_markup_are_told_from_text(mtkit: Run, pipeline: Pipeline, tmp_path: Path, text: str) -> None:
    """B16: also where the numbers of lines differ, as they mostly do."""
    path = tmp_path / "newstest.de.sgm"
    path.write_text(text, "utf-8")
    (tmp_path / "hyp").write_bytes(b"Eins zwei.\nDrei vier.\nEins.\n")
    refused = [
        mtkit("score", "--ref", path, tmp_path / "hyp", exit_code=3),
        mtkit("score", "--ref", tmp_path / "hyp", path, exit_code=3),
        mtkit("score", "--ref", path, path, exit_code=3),
        mtkit("score", "--model", pipeline.average, "--src", path, "--tgt", tmp_path / "hyp", exit_code=3),
        mtkit("preprocess", "--train", path, path, "--tokenizer", pipeline.tokenizer, "--output", tmp_path / "shards", exit_code=3),
        mtkit("train", "--train", *pipeline.parallel("dev"), "--dev", path, path, "--output", tmp_path / "run", exit_code=3),
    ]
    for result in refused:
        assert f"{path}: is SGML or XML, not plain text" in result.stderr
        assert result.stdout == ""
    assert not (tmp_path / "shards").exists()
    translated = mtkit("translate", pipeline.average, "--input", path)
    assert f"{path}: looks like SGML or XML" in translated.stderr
    assert len(translated.stdout_bytes.split(b"\n")) == text.count("\n") + 1
    warned = mtkit("score", "--model", pipeline.average, "--src", path, "--tgt", path)
    assert "its tags are scored as text" in warned.stderr


# --- while the producer waits -----------------------------------------------------------------------------------------------------------


def test_each_line_is_answered_before_the_next_is_written(pipeline: Pipeline) -> None:
    """B06: with the default search and output buffered as for users, in both formats; a blank line too."""
    for options in ([], ["--json"]):
        command = [sys.executable, "-m", "mtkit", "translate", str(pipeline.average), "--threads", "1", *options]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=mtkit_environment(), bufsize=0
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.closing(process.stdin):
                for line in (b"One two.\n", b"\n", b"Two three four.\n"):
                    process.stdin.write(line)
                    assert process.stdout.readline().endswith(b"\n"), "pytest's time limit would end a wait for ever"
            assert process.wait(60) == 0
