import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mtkit.benchmark.data import measure
from mtkit.checkpoint.format import load_model
from mtkit.cli.app import app
from mtkit.cli.bench import _show
from mtkit.evaluation.metrics import corpus_scores

TINY = ("--updates", "2", "--warmup", "1", "--repeats", "2", "--device", "cpu", "--threads", "1")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.benchmark.train.matmul_flops_per_s", lambda *_: 1e12)


def bench(*words: object, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["bench", *map(str, words)])
    assert result.exit_code == exit_code, result.output
    return result


def overrides(toy_run: Path) -> list[str]:
    """`--set` for the toy model, whose config is saved with the run."""
    model = json.loads((toy_run / "config.json").read_text())["model"]
    pairs = {
        **{f"model.{key}": value for key, value in model.items()},
        "batch.batch_tokens": 200,
        "batch.max_tokens": 100,
        "tokenizer.vocab_size": 44,
    }
    return [word for key, value in pairs.items() for word in ("--set", f"{key}={value}")]


def test_train_on_generated_and_on_real_data(toy_run: Path) -> None:
    for words in ([], ["--shards", toy_run / "data" / "shards"]):
        # One repeat: the product of two medians would not be a number of tokens.
        result = bench("train", *overrides(toy_run), *TINY, "--mean-length", "10", "--repeats", "1", "--json", *words)
        report: dict[str, Any] = json.loads(result.stdout)
        assert result.stderr == ""
        speed = report["tgt_tokens_per_s"]
        assert speed["lowest"] <= speed["median"] <= speed["highest"]
        assert (speed["repeats"], report["updates"], report["warmup_updates"]) == (1, 2, 1)
        per_update = speed["median"] * report["seconds_per_update"]
        assert per_update <= 200 + 1e-6, "real tokens: at most what an update may hold"
        assert per_update > 200 * 0.5
        assert report["parameters"] == load_model(toy_run).model.num_parameters()
        assert report["utilization"] == pytest.approx(report["achieved_flops_per_s"] / report["matmul_flops_per_s"])
        assert report["machine"]["threads"] == 1


def test_translate(toy_run: Path, toy_text: Path) -> None:
    words = ["translate", toy_run, "--src", toy_text / "dev.en", "--device", "cpu", "--threads", "1", "--repeats", "2", "--beam-size", "2"]
    report = json.loads(bench(*words, "--ref", toy_text / "dev.de", "--json").stdout)
    assert report["sentences"] == 15
    seconds = 15 / report["sentences_per_s"]["median"]
    assert report["tgt_tokens_per_s"]["median"] * seconds == pytest.approx(15 * report["mean_tgt_tokens"])
    assert 0 <= report["bleu"] <= 100
    assert 0 < report["tokenizer_share"] < 1
    short = json.loads(bench(*words, "--set", "max_length_ratio=0", "--set", "max_length_constant=1", "--json").stdout)
    assert (short["mean_tgt_tokens"], short["bleu"]) == (1.0, None)
    text = bench(*words)
    assert text.stdout == ""
    assert "sentences_per_s              " in text.stderr


def test_the_language_picks_the_tokenizer_of_bleu(toy_run: Path, toy_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    languages: list[str | None] = []

    def spy(*texts: Any, target_lang: str | None, **options: Any) -> Any:
        languages.append(target_lang)
        return corpus_scores(*texts, target_lang=target_lang, **options)

    monkeypatch.setattr("mtkit.benchmark.translate.corpus_scores", spy)
    words = ["translate", toy_run, "--src", toy_text / "dev.en", "--ref", toy_text / "dev.de", "--device", "cpu", "--threads", "1", "--repeats", "1"]
    bench(*words)
    bench(*words, "--tgt-lang", "zh")
    assert languages == [None, "zh"]


def test_preprocess(toy_run: Path, toy_text: Path) -> None:
    words = ["preprocess", "--src", toy_text / "train.en", "--tgt", toy_text / "train.de", "--tokenizer", toy_run / "data" / "tokenizer"]
    report = json.loads(bench(*words, "--workers", "1", "--repeats", "1", "--json").stdout)
    assert (report["workers"], report["pairs"], report["lines_per_s"]["repeats"]) == (1, 120, 1)
    num_bytes = sum((toy_text / name).stat().st_size for name in ("train.en", "train.de"))
    assert report["mb_per_s"] / report["lines_per_s"]["median"] == pytest.approx(num_bytes / 1e6 / 240)


def test_preprocess_on_generated_text(toy_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def measure(files: tuple[Path, Path], tokenizer: Any, **options: Any) -> list[Any]:
        seen.append((*[file.read_text().count("\n") for file in files], tokenizer.src_vocab_size, options))
        return []

    monkeypatch.setattr("mtkit.benchmark.preprocess.bench_preprocess", measure)
    monkeypatch.setattr("mtkit.cores.num_cores", lambda: 3)
    bench("preprocess", "--pairs", "50000", "--tokenizer", toy_run / "data" / "tokenizer", "--repeats", "1")
    assert seen == [(50_000, 50_000, 44, {"workers": [1, 3], "repeats": 1})]


@pytest.mark.slow
def test_the_least_generated_text_suffices_for_the_default_tokenizer() -> None:
    report = json.loads(bench("preprocess", "--pairs", "50000", "--workers", "1", "--repeats", "1", "--json").stdout)
    assert report["pairs"] == 50_000


@pytest.mark.parametrize(
    ("words", "exit_code", "message"),
    [
        (["preprocess", "--src", "TEXT/train.en"], 2, "--src and --tgt go together"),
        (["preprocess", "--src", "TEXT/train.en", "--tgt", "TEXT/train.de"], 2, "vocab_size 8000 is too large for the text"),
        (["preprocess", "--pairs", "3000"], 2, "Invalid value for '--pairs'"),
        (["train", "--preset", "huge"], 2, "there is no preset 'huge'"),
        (["train", "--set", "model.width=5"], 2, "unknown key model.width"),
        (["train", "--shards", "TEXT"], 4, "TEXT"),
        (["translate", "RUN", "--src", "TEXT/dev.en", "--ref", "TEXT/train.de"], 2, "dev.en has 15 lines, but TEXT/train.de has 120"),
        (["translate", "TEXT", "--src", "TEXT/dev.en"], 4, "holds no model"),
        (["translate", "RUN", "--src", "TEXT/nowhere"], 3, "nowhere"),
        (["translate", "RUN", "--src", "/dev/null"], 3, "/dev/null: is empty"),
        (["translate", "RUN", "--src", "TEXT/dev.en", "--set", "beam=3"], 2, "unknown key beam\nDid you mean beam_size?"),
    ],
)
def test_mistakes(toy_run: Path, toy_text: Path, words: list[str], exit_code: int, message: str) -> None:
    def fill(word: str) -> str:
        return word.replace("TEXT", str(toy_text)).replace("RUN", str(toy_run))

    result = bench(*map(fill, words), exit_code=exit_code)
    assert fill(message) in result.stderr
    assert "Traceback" not in result.stderr


def test_shares_are_percentages_and_seconds_are_not() -> None:
    assert _show("padding_share", 0.0815) == "8.15%"
    assert _show("utilization", 0.5) == "50.00%"
    assert _show("seconds_per_update", 0.4712) == "0.4712"
    assert _show("peak_memory_mb", 1092.4) == "1,092"


def test_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.benchmark.data._in_new_process", measure)
    words = ["data", "--pairs", 2000, "--mean-length", 8, "--pools", 1]
    report = json.loads(bench(*words, "--dir", tmp_path / "kept", "--json").stdout)
    assert (report["pairs"], report["pools"], report["resumed_is_equal"]) == (2000, 1, True)
    assert report["first_batch_s"] > 0
    assert report["packed"]["pairs_per_s"] > 0
    assert (tmp_path / "kept" / "shards.json").is_file()
    assert "resumed_is_equal" in bench(*words).stderr


def test_a_flag_of_translate_wins_over_set(toy_run: Path, toy_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):  # noqa: N818
        pass

    seen = []

    def load(*_arguments: Any, search: Any, **_options: Any) -> None:
        seen.append(search.beam_size)
        raise Stop

    monkeypatch.setattr("mtkit.decoding.loading.load_translator", load)
    words = ["bench", "translate", str(toy_run), "--src", str(toy_text / "dev.en")]
    for more in (["--beam-size", "1", "--set", "beam_size=6"], ["--set", "beam_size=6"], []):
        assert isinstance(CliRunner().invoke(app, [*words, *more]).exception, Stop)
    assert seen == [1, 6, 4]
    assert "--set beam_sice=1: unknown key" in CliRunner().invoke(app, [*words, "--set", "beam_sice=1"]).output
