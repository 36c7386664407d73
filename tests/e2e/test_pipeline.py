"""From raw text to a BLEU score through the command line, on a language that must be learnt, and whether the numbers on the way agree."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mtkit.checkpoint.format import load_model
from mtkit.cli.app import app
from mtkit.evaluation.metrics import corpus_scores
from mtkit.files import read_lines
from mtkit.training.progress import read_metrics
from tests.e2e.toy import SIZES, Pipeline


def mtkit(*arguments: str | Path, data: bytes | None = None) -> bytes:
    """A command in this process, which saves its start-up."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=data)
    assert result.exit_code == 0, result.output
    return result.stdout_bytes


def scores_of(document: dict[str, Any]) -> dict[str, float]:
    return {entry["metric"]: entry["score"] for entry in document["systems"][0]["scores"]}


def test_the_language_is_learnt(pipeline: Pipeline) -> None:
    assert pipeline.scores["num_sentences"] == SIZES["test"]
    assert scores_of(pipeline.scores)["bleu"] >= 90
    src, ref = pipeline.parallel("test")
    untrained = corpus_scores(read_lines(src), [read_lines(ref)], metrics=("bleu",))
    assert untrained[0].value < 1, "it cannot be had by copying"


@pytest.mark.parametrize("command", ["train", "average", "translate"])
def test_the_compiler_of_torch_is_not_imported(pipeline: Pipeline, command: str) -> None:
    """It costs every start several seconds and 70 MB, and does nothing on a CPU; many functions of torch import it in passing."""
    imported = (pipeline.root / f"{command}.imports").read_text("utf-8")
    assert " torch\n" in imported
    assert "torch._dynamo" not in imported


def test_every_artefact_is_whole(pipeline: Pipeline) -> None:
    checkpoints = sorted((pipeline.run / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step-0000300", "step-0000350", "step-0000400", "step-0000450"]
    kinds = {
        pipeline.tokenizer: "tokenizer",
        pipeline.shards: "shards",
        pipeline.run: "run",
        pipeline.run / "model": "model",
        pipeline.average: "model",
        **dict.fromkeys(checkpoints, "checkpoint"),
    }
    for path, kind in kinds.items():
        found = json.loads(mtkit("inspect", path, "--verify", "full", "--json"))
        assert (found["kind"], found["verified"], found["damage"]) == (kind, "full", [])
    assert list(pipeline.root.rglob(".*")) == [], "nothing half-written is left"


@pytest.mark.parametrize("step", [300, 450])
def test_the_validated_scores_are_those_of_translate_and_score(pipeline: Pipeline, step: int, tmp_path: Path) -> None:
    """B61, B63: to the last digit, on a checkpoint that still makes mistakes and on the last one."""
    record = next(entry for entry in read_metrics(pipeline.run / "metrics.jsonl") if entry["kind"] == "valid" and entry["step"] == step)
    checkpoint = pipeline.run / "checkpoints" / f"step-{step:07d}"
    src, ref = pipeline.parallel("dev")
    mtkit("translate", checkpoint, "--input", src, "--output", tmp_path / "hyp", "--quiet")
    scores = scores_of(json.loads(mtkit("score", "--ref", ref, tmp_path / "hyp", "--tgt-lang", "de", "--bootstrap", "0", "--json")))
    assert (scores["bleu"], scores["chrf"]) == (record["bleu"], record["chrf"])
    assert step == 450 or record["bleu"] < 99, "a perfect score would show little"
    forced = json.loads(mtkit("score", "--model", checkpoint, "--src", src, "--tgt", ref, "--json"))
    assert record["loss"] == pytest.approx(-forced["log_prob"] / forced["num_tokens"], rel=1e-5)


def test_scoring_a_translation_gives_the_score_it_was_chosen_by(pipeline: Pipeline, tmp_path: Path) -> None:
    """B41: with every line of the test set, a blank one among them."""
    sources = [*read_lines(pipeline.text / "test.en"), ""]
    (tmp_path / "src").write_bytes("".join(f"{line}\n" for line in sources).encode())
    objects = [json.loads(line) for line in mtkit("translate", pipeline.average, "--input", tmp_path / "src", "--json").decode().split("\n")[:-1]]
    assert [item["text"] for item in objects[:-1]] == read_lines(pipeline.hypothesis)
    (tmp_path / "tgt").write_bytes("".join(f"{item['text']}\n" for item in objects).encode())
    pairs = json.loads(mtkit("score", "--model", pipeline.average, "--src", tmp_path / "src", "--tgt", tmp_path / "tgt", "--json"))["pairs"]
    tokenizer = load_model(pipeline.average).tokenizer
    num_compared = 0
    for item, pair in zip(objects[:-1], pairs[:-1], strict=True):
        best = item["hypotheses"][0]
        if best["finished"] and tokenizer.encode([best["text"]], "tgt") == [tokenizer.piece_ids(best["tokens"], "tgt")]:
            assert pair["log_prob"] == pytest.approx(best["log_prob"], abs=1e-4)
            assert pair["num_tokens"] == len(best["tokens"]) + 1
            num_compared += 1
    assert num_compared >= 95
    assert pairs[-1]["num_tokens"] == 1, "an empty translation is its end alone"
    assert -100 < pairs[-1]["log_prob"] < 0


def test_n_best_in_both_formats(pipeline: Pipeline) -> None:
    data = b"One two.\n\nFive six seven eight.\n"
    rows = [line.split("\t") for line in mtkit("translate", pipeline.average, "--n-best", "3", data=data).decode().split("\n")[:-1]]
    objects = [json.loads(line) for line in mtkit("translate", pipeline.average, "--n-best", "3", "--json", data=data).decode().split("\n")[:-1]]
    assert [row[:2] for row in rows] == [[line, rank] for line in "123" for rank in "123"]
    assert rows[3:6] == [["2", rank, "", ""] for rank in "123"]
    for number, item in enumerate(objects):
        assert item["line"] == number + 1
        expected = [[f"{hypothesis['score']:.6f}", hypothesis["text"]] for hypothesis in item["hypotheses"]]
        assert [row[2:] for row in rows[3 * number : 3 * number + 3]] == (expected or [["", ""]] * 3)
        assert item["text"] == (item["hypotheses"][0]["text"] if item["hypotheses"] else "")
    assert [rows[0][3], rows[6][3]] == ["Zwei eins.", "Acht sieben sechs fünf."]


def test_a_model_directory_is_all_that_is_needed(pipeline: Pipeline, tmp_path: Path) -> None:
    shutil.copytree(pipeline.average, tmp_path / "copy")
    assert mtkit("translate", tmp_path / "copy", data=b"One two.\n") == b"Zwei eins.\n"
    assert mtkit("tokenizer", "decode", tmp_path / "copy", data=mtkit("tokenizer", "encode", tmp_path / "copy", data=b"One two.\n")) == b"One two.\n"


def test_no_file_can_hold_code(pipeline: Pipeline) -> None:
    """B44: neither a pickle nor the zip file that torch makes of one, under no name."""
    files = [path for path in pipeline.root.rglob("*") if path.is_file() and pipeline.text not in path.parents]
    assert {path.suffix for path in files} >= {".json", ".safetensors", ".model", ".src", ".jsonl"}
    for path in files:
        assert path.suffix not in (".pt", ".pth", ".bin", ".pkl", ".ckpt", ".npy", ".npz")
        assert not path.read_bytes().startswith((b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")), path


def test_the_tokenizer_goes_along_byte_for_byte(pipeline: Pipeline) -> None:
    """B52: one tokenizer from the first command to the last."""
    places = [pipeline.shards, pipeline.run / "model", pipeline.average, *(pipeline.run / "checkpoints").iterdir()]
    model = (pipeline.tokenizer / "tokenizer.model").read_bytes()
    assert all((place / "tokenizer" / "tokenizer.model").read_bytes() == model for place in places)
