import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mtkit.cli import preprocess
from mtkit.cli.app import app as mtkit_app
from mtkit.cli.app import global_options
from mtkit.cli.preprocess import describe, find_warnings
from mtkit.data.preprocess import PreprocessReport
from mtkit.data.shards import ShardSet
from mtkit.data.tokenizer import TokenizerConfig, train_tokenizer
from tests.helpers import REPOSITORY

Run = Callable[..., Any]

WORDS = ("eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben")
PAIRS = [(f"{a} and {b} {number}", f"{a} und {b} {number}") for number, (a, b) in enumerate((a, b) for a in WORDS for b in WORDS)]


@pytest.fixture(autouse=True)
def in_directory_with_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train_tokenizer(PAIRS, TokenizerConfig(vocab_size=290)).save(tmp_path / "tok")
    for name, pairs in (("train", PAIRS), ("more", PAIRS[:3]), ("dev", PAIRS[3:5]), ("test", PAIRS[5:8])):
        for side, suffix in enumerate(("en", "de")):
            (tmp_path / f"{name}.{suffix}").write_bytes("".join(f"{pair[side]}\n" for pair in pairs).encode())


@pytest.fixture
def run() -> Run:
    """Runs `mtkit preprocess` with these arguments, here and in one process."""
    application = typer.Typer(cls=mtkit_app.info.cls)
    application.callback()(global_options)
    preprocess.register(application)

    def invoke(*arguments: str, input: str | None = None, exit_code: int = 0) -> Any:
        result = CliRunner().invoke(application, ["preprocess", *arguments], input=input)
        assert result.exit_code == exit_code, result.output
        return result

    return invoke


TRAIN = ("--train", "train.en", "train.de")
BASE = (*TRAIN, "--tokenizer", "tok", "--output", "out")


def test_shards_from_several_corpora(run: Run) -> None:
    result = run(*BASE, "--train", "more.en", "more.de", "--dev", "dev.en", "dev.de", "--test", "test.en", "test.de", "news=more.en", "more.de")
    assert result.stdout == ""
    shards = ShardSet.open(Path("out"))
    assert shards.num_pairs == len(PAIRS) + 3
    assert shards.held_out_names == ("dev", "test", "news")
    assert shards.held_out("test") == ([src for src, _ in PAIRS[5:8]], [tgt for _, tgt in PAIRS[5:8]])
    assert "52 of 52 pairs" in result.stderr


def test_settings_come_from_file_and_flags(run: Run) -> None:
    Path("c.toml").write_text("[preprocess.filters]\ndrop_duplicates = true\nmax_length = 7\n[model]\nd_model = 512\n")
    Path("flat.toml").write_text("[filters]\ndrop_duplicates = true\nmax_length = 7\n")
    for name in ("c.toml", "flat.toml"):
        result = run(
            *BASE[:-1], name[:-5], "--train", "more.en", "more.de", "--config", name, "--set", "filters.max_length=none", "--json", "--quiet"
        )
        report = json.loads(result.stdout)
        assert report["dropped"] == {"empty": 0, "nonprinting": 0, "length_ratio": 0, "duplicate": 3}
        assert report["num_pairs"] == len(PAIRS)
        assert report["output"] == name[:-5]
        assert result.stderr == ""


def test_records_need_languages(run: Run) -> None:
    Path("a.jsonl").write_text("".join(json.dumps({"translation": {"en": src, "de": tgt}}) + "\n" for src, tgt in PAIRS))
    run("--train", "a.jsonl", "--tokenizer", "tok", "-o", "out", exit_code=2)
    run("--train", "a.jsonl", "--tokenizer", "tok", "-o", "out", "--src-lang", "en", "--tgt-lang", "de")
    run(*BASE[:-1], "same")
    assert ShardSet.open(Path("out")).fingerprint == ShardSet.open(Path("same")).fingerprint


def test_a_data_set_gives_each_set_its_split(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local directory in the layout of the hub stands for `hf:wmt/wmt14:de-en`."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    Path("wmt").mkdir()
    for split, pairs in (("train", PAIRS), ("validation", PAIRS[3:5]), ("test", PAIRS[5:8])):
        data = "".join(json.dumps({"translation": {"en": src, "de": tgt}}) + "\n" for src, tgt in pairs)
        Path("wmt", f"{split}.jsonl").write_text(data)
    hub = f"hf:{tmp_path / 'wmt'}"
    run("--train", hub, "--dev", hub, "--test", hub, "--tokenizer", "tok", "-o", "out", "--src-lang", "en", "--tgt-lang", "de")
    run(*BASE[:-1], "same", "--dev", "dev.en", "dev.de", "--test", "test.en", "test.de")
    assert ShardSet.open(Path("out")).fingerprint == ShardSet.open(Path("same")).fingerprint


def test_one_side_may_be_stdin(run: Run) -> None:
    run("--train", "-", "train.de", "--tokenizer", "tok", "-o", "out", input=Path("train.en").read_text())
    run(*BASE[:-1], "same")
    assert ShardSet.open(Path("out")).fingerprint == ShardSet.open(Path("same")).fingerprint


def test_a_second_run_does_nothing(run: Run) -> None:
    run(*BASE)
    before = Path("out").stat().st_mtime_ns
    assert "1 of 1 shards were there already" in run(*BASE).stderr
    assert Path("out").stat().st_mtime_ns == before
    assert "exists already and was made otherwise: filters.max_length: 250 -> 9" in run(*BASE, "--set", "filters.max_length=9", exit_code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        ((*TRAIN, "-o", "out"), 2, "mtkit tokenizer train train.en train.de --output tokenizer"),
        ((*BASE, "--dev", "--quiet"), 2, "--dev needs a corpus after it"),
        ((*BASE, "--train", "more.en"), 2, "more.en has no partner"),
        ((*BASE, "--train", "more.en", "none.de"), 3, "none.de: cannot be read: No such file"),
        ((*BASE, "--train", "more.en", "dev.de"), 3, "more.en has 3 lines and dev.de has 2"),
        ((*BASE, "--dev", "dev.de", "dev.en"), 2, "dev goes from .de to .en"),
        ((*BASE, "--src-lang", "de", "--tgt-lang", "en"), 2, "in the wrong order for de to en"),
        ((*BASE, "--set", "filters.max_lenght=9"), 2, "Did you mean filters.max_length?"),
        ((*BASE, "--set", "shard_pairs=0"), 2, "shard_pairs (--set shard_pairs=0) must be at least 1"),
        ((*TRAIN, "--tokenizer", "train.en", "-o", "out"), 4, "train.en: is not a tokenizer"),
        ((*BASE, "--workers", "0"), 2, "--workers"),
        (BASE[3:], 2, "--train"),
    ],
)
def test_mistakes_are_explained(run: Run, arguments: tuple[str, ...], exit_code: int, message: str) -> None:
    result = run(*arguments, exit_code=exit_code)
    assert message in result.output
    assert "Traceback" not in result.output
    assert not Path("out").exists()
    assert not list(Path().glob(".*partial"))


REPORT = PreprocessReport(
    num_read=1000,
    num_pairs=990,
    dropped={"empty": 10, "too_long": 0},
    num_src_tokens=9000,
    num_tgt_tokens=9000,
    num_src_unknown=90,
    num_tgt_unknown=91,
    num_bad_utf8=2,
    num_cut=0,
    num_shards=2,
    held_out={"dev": 7},
)


def test_the_report_tells_off_from_none() -> None:
    lines = [line.split() for line in describe(REPORT, output=Path("out"), seconds=1.0)]
    assert ["empty", "10"] in lines
    assert ["too", "long", "0"] in lines
    assert ["duplicate", "off"] in lines
    assert ["dev", "set", "7"] in lines


def test_warnings() -> None:
    warnings = find_warnings(REPORT)
    assert len(warnings) == 2
    assert warnings[0].startswith("2 lines hold bytes that are not UTF-8")
    assert warnings[1].startswith("1.0% of the target tokens are unknown")


def test_progress_is_a_line_now_and_then(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess, "_LINE_INTERVAL_S", 0.0)
    assert f"{len(PAIRS)} pairs done" in run(*BASE).stderr
    assert "pairs done" not in run(*BASE[:-1], "quiet", "--quiet").stderr


INTERRUPTED = """
import os, signal
from mtkit.data import blocks, preprocess
from mtkit.cli import preprocess as command
from mtkit.cli.app import app

write_shards = preprocess._without_duplicates

def interrupt(results, *arguments, **options):
    for number, block in enumerate(write_shards(results, *arguments, **options)):
        if number == 3:
            os.killpg(0, signal.SIGINT)
        yield block

if __name__ == "__main__":
    preprocess._without_duplicates = interrupt
    blocks.BLOCK_PAIRS, blocks.SERIAL_BLOCKS = 8, 1
    command.register(app)
    app()
"""


def test_ctrl_c_ends_all_processes_quietly() -> None:
    Path("interrupted.py").write_text(INTERRUPTED)
    result = subprocess.run(
        [sys.executable, "interrupted.py", "preprocess", *BASE, "--workers", "2", "--set", "shard_pairs=16"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        check=False,
        start_new_session=True,
        timeout=60,  # all processes hold stderr, so this ends when all of them have
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, b"", b"error: interrupted\n")
    assert not Path("out").exists()


def test_stdin_is_read_once(run: Run) -> None:
    result = run("--train", "-", "--dev", "-", "--tokenizer", "tok", "-o", "out", exit_code=2)
    assert "stdin (-) can stand for one text only" in result.stderr
