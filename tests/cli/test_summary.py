"""What a person reads about each kind of directory."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mtkit.artefacts import atomic_directory
from mtkit.cli.app import app
from mtkit.cli.summary import summarize
from mtkit.files import write_json
from mtkit.training.inspection import Inspection, inspect_directory

SCREEN_LINES = 22
SCREEN_COLUMNS = 100


def summary(path: Path) -> dict[str, str]:
    rows = summarize(inspect_directory(path))
    assert len(rows) <= SCREEN_LINES
    assert len({name for name, _ in rows}) == len(rows)
    assert all(len(value) <= SCREEN_COLUMNS or str(path.parent) in value or "/" in value for _, value in rows)
    return dict(rows)


def mtkit(*words: object) -> None:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output


def test_a_run_tells_where_it_stands(toy_run: Path) -> None:
    found = summary(toy_run)
    assert found["kind"] == "run"
    assert found["state"] == "finished: training.max_steps = 12 reached"
    assert re.fullmatch(r"step 12 of 12, epoch 1, [\d,]+ target tokens, \d+s", found["progress"])
    assert re.fullmatch(r"loss [\d.]+  ppl [\d.]+  [\d,]+ tokens/s at step 12", found["training"])
    assert re.fullmatch(r"BLEU [\d.]+  chrF [\d.]+  loss [\d.]+  ppl [\d.]+ at step 12", found["dev set"])
    assert re.fullmatch(r"BLEU [\d.]+ at step (8|12)", found["best"])
    assert found["checkpoints"] == "3: step-0000012, step-0000008, step-0000004"
    assert found["model"] == str(toy_run / "model")
    assert re.fullmatch(r"[\d,]+ in fp32 on 1 x cpu", found["parameters"])
    assert found["architecture"] == "1 + 1 layers, width 16, feed-forward 32, 2 heads, post-norm, relu"
    assert found["vocabulary"] == "44 pieces, shared by both sides"
    assert found["trained on"].endswith("train.de")
    assert found["pairs"] == "120, 9 updates per epoch"
    assert found["checked"] == "names and sizes of all files are right"


def test_models_tell_what_they_are_and_where_they_come_from(toy_run: Path, tmp_path: Path) -> None:
    mtkit("average", toy_run, "--last", "2", "--output", tmp_path / "average")
    mtkit("export", tmp_path / "average", "--output", tmp_path / "small")
    checkpoint = toy_run / "checkpoints" / "step-0000008"
    found = {name: summary(path) for name, path in {"average": tmp_path / "average", "small": tmp_path / "small", "checkpoint": checkpoint}.items()}
    parameters = found["average"]["parameters"].removesuffix(" in fp32")
    assert found["small"]["parameters"] == f"{parameters} in int8", "its scales are no parameters"
    assert found["checkpoint"]["parameters"] == f"{parameters} in fp32"
    assert all(rows["vocabulary"] == "44 pieces, shared by both sides" for rows in found.values())
    assert all(rows["architecture"].startswith("1 + 1 layers, width 16") for rows in found.values())
    assert found["average"]["origin"] == found["small"]["origin"] == "average of the checkpoints at steps 8, 12"
    assert "dev set" not in found["average"]
    assert found["checkpoint"]["origin"] == "checkpoint at step 8"
    assert found["checkpoint"]["progress"].startswith("step 8 of 12, epoch ")
    assert found["checkpoint"]["dev set"].startswith("BLEU ")
    assert summary(toy_run / "model")["kind"] == "model"
    assert re.fullmatch(r"[\d.]+ (kB|MB) in 5 files", found["average"]["size"])
    assert re.fullmatch("[0-9a-f]{16}", found["average"]["fingerprint"])


def test_data_and_its_tokenizer(toy_run: Path) -> None:
    found = summary(toy_run / "data" / "shards")
    assert found["pairs"] == "120 in 1 shard"
    assert re.fullmatch(r"[\d,]+ tokens, [\d.]+ a sentence, \d+ the longest", found["source"])
    assert found["dropped"] == "none"
    assert found["held out"] == "dev 15"
    assert found["made from"].endswith("train.de")
    found = summary(toy_run / "data" / "tokenizer")
    assert found["vocabulary"] == "44 pieces, shared by both sides, unigram"
    assert found["normalization"] == "nfkc"
    assert found["trained on"] == "240 of 240 lines"


def test_what_is_of_no_known_kind(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "x", kind="other", config={"model": 3, "provenance": [1]}) as temporary:
        write_json(temporary / "x.json", {})
    assert list(summary(tmp_path / "x")) == ["path", "kind", "size", "checked", "fingerprint", "written by"]


@pytest.mark.parametrize(
    "value", [None, 3, "text", [], ["a"], {}, {"d_model": []}, {"train": "x"}, {"config": 1}, {"bleu": "x"}, 1e300, float("nan")]
)
def test_a_config_of_any_content_is_survived(value: Any) -> None:
    keys = ("model", "data", "training", "validation", "provenance", "averaged", "step", "scores", "precision")
    config = dict.fromkeys(keys, value) | {"provenance": dict.fromkeys(keys, value)}
    for kind in ("model", "checkpoint", "ctranslate2"):
        state = dict.fromkeys(("step", "epoch", "num_tgt_tokens", "best_value", "best_step"), value)
        facts = {
            "num_parameters": 1,
            "joint": False,
            "src_vocab_size": value,
            "tgt_vocab_size": value,
            "provenance": config["provenance"],
            "state": state,
        }
        assert summarize(Inspection(path=Path("x"), kind=kind, verified="fast", facts=facts, config=config))
    facts = {"checkpoints": {}, "has_model": False, "last_train": value, "last_valid": value, "last_start": value}
    assert summarize(Inspection(path=Path("x"), kind="run", verified="fast", facts=facts, config=config, damage=["a"]))
