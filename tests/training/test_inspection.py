import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mtkit.artefacts import atomic_directory
from mtkit.data.corpus import parse_corpus
from mtkit.data.preprocess import PreprocessConfig, preprocess
from mtkit.data.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from mtkit.errors import ArtefactError
from mtkit.files import write_json
from mtkit.training.inspection import inspect_directory

NOUNS = (("dog", "Hund"), ("tree", "Baum"), ("forest", "Wald"), ("river", "Fluss"), ("table", "Tisch"), ("teacher", "Lehrer"), ("letter", "Brief"))
PAIRS = [(f"The {first[0]} sees a {second[0]}.", f"Der {first[1]} sieht den {second[1]}.") for first in NOUNS for second in NOUNS]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(PAIRS, TokenizerConfig(vocab_size=300))


def fill_model(directory: Path, tokenizer: Tokenizer) -> None:
    """The files of a model with two tensors of 12 and 5 values."""
    save_file({"a": np.zeros((3, 4), dtype=np.float32), "b": np.zeros(5, dtype=np.float32)}, directory / "model.safetensors")
    description = {
        "format": 1,
        "model": {"d_model": 4},
        "src_vocab_size": tokenizer.src_vocab_size,
        "tgt_vocab_size": tokenizer.tgt_vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "provenance": {"step": 30},
    }
    write_json(directory / "config.json", description)
    (directory / "tokenizer").mkdir()
    tokenizer.write_files(directory / "tokenizer")


def make_checkpoint(directory: Path, tokenizer: Tokenizer, *, step: int, bleu: float | None) -> None:
    with atomic_directory(directory / f"step-{step:07d}", kind="checkpoint", config={"seed": 1}, inputs={"shards": "abc"}) as temporary:
        fill_model(temporary, tokenizer)
        scores = {} if bleu is None else {"bleu": bleu}
        write_json(temporary / "state.json", {"format": 1, "step": step, "epoch": 2, "scores": scores, "best_value": 20.5, "best_step": 20})


def make_run(directory: Path, tokenizer: Tokenizer) -> Path:
    for step, bleu in ((10, None), (20, 20.5), (30, 19.0)):
        make_checkpoint(directory / "checkpoints", tokenizer, step=step, bleu=bleu)
    write_json(directory / "config.json", {"seed": 1, "model": {"d_model": 4}})
    records: list[dict[str, Any]] = [
        {"kind": "start", "step": 0, "world_size": 1},
        {"kind": "train", "step": 20, "loss": 4.0},
        {"kind": "valid", "step": 20, "bleu": 20.5},
        {"kind": "start", "step": 20, "world_size": 2},
        {"kind": "train", "step": 33, "loss": 3.5},
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"kind": "tra')
    return directory


def test_a_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tok")
    found = inspect_directory(tmp_path / "tok")
    assert found.kind == "tokenizer"
    assert found.facts["type"] == "unigram"
    assert found.facts["joint"] is True
    assert found.facts["src_vocab_size"] == found.facts["tgt_vocab_size"] == 300
    assert found.facts["tokenizer"] == tokenizer.fingerprint
    assert found.facts["trained_on"]["tokenizer.model"]["num_lines"] == 2 * len(PAIRS)
    assert found.config["vocab_size"] == 300
    assert set(found.files) == {"tokenizer.model", "tokenizer.json"}
    assert found.facts["num_bytes"] == sum(found.files.values()) == sum(path.stat().st_size for path in (tmp_path / "tok").glob("tok*"))


def test_a_shard_set(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name, pairs in (("train", PAIRS), ("dev", PAIRS[:7])):
        (tmp_path / f"{name}.en").write_text("".join(f"{src}\n" for src, _ in pairs))
        (tmp_path / f"{name}.de").write_text("".join(f"{tgt}\n" for _, tgt in pairs))
    corpora = {
        name: parse_corpus([str(tmp_path / f"{name}.en"), str(tmp_path / f"{name}.de")], src_lang=None, tgt_lang=None) for name in ("train", "dev")
    }
    config = PreprocessConfig()
    preprocess(corpora["train"], held_out={"dev": corpora["dev"]}, tokenizer=tokenizer, output=tmp_path / "shards", config=config)
    found = inspect_directory(tmp_path / "shards", verify="full")
    lengths = [len(ids) for ids in tokenizer.encode([src for src, _ in PAIRS], "src")]
    assert found.kind == "shards"
    assert found.facts["num_pairs"] == len(PAIRS)
    assert found.facts["num_src_tokens"] == sum(lengths)
    assert found.facts["mean_src_length"] == pytest.approx(sum(lengths) / len(PAIRS), abs=0.01)
    assert found.facts["max_src_length"] == max(lengths)
    assert found.facts["held_out"] == {"dev": 7}
    assert found.facts["tokenizer"] == tokenizer.fingerprint
    assert found.facts["report"]["num_read"] == len(PAIRS)
    json.dumps(found.to_json())


def test_a_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "model", kind="model", config={"model": {"d_model": 4}}, inputs={"checkpoints": ["x"]}) as temporary:
        fill_model(temporary, tokenizer)
    found = inspect_directory(tmp_path / "model")
    assert found.kind == "model"
    assert found.facts["num_parameters"] == 17
    assert found.facts["num_tensors"] == 2
    assert found.facts["dtypes"] == ["F32"]
    assert found.facts["precision"] == "fp32"
    assert found.config == {"model": {"d_model": 4}}
    assert found.facts["provenance"] == {"step": 30}
    assert found.inputs == {"checkpoints": ["x"]}
    assert found.fingerprint is not None


def test_a_checkpoint(tokenizer: Tokenizer, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tokenizer, step=20, bleu=20.5)
    found = inspect_directory(tmp_path / "step-0000020")
    assert found.kind == "checkpoint"
    assert found.facts["state"]["step"] == 20
    assert found.facts["state"]["scores"] == {"bleu": 20.5}
    assert found.facts["num_parameters"] == 17
    assert found.config == {"seed": 1}


def test_a_run(tokenizer: Tokenizer, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tokenizer)
    found = inspect_directory(run)
    assert found.kind == "run"
    assert found.config["model"] == {"d_model": 4}
    assert found.damage == []
    assert found.facts["checkpoints"] == {"step-0000010": {}, "step-0000020": {"bleu": 20.5}, "step-0000030": {"bleu": 19.0}}
    assert found.facts["latest_checkpoint"] == "step-0000030"
    assert (found.facts["step"], found.facts["epoch"], found.facts["best_step"]) == (30, 2, 20)
    assert found.facts["num_sessions"] == 2
    assert found.facts["last_recorded_step"] == 33
    assert found.facts["last_train"] == {"step": 33, "loss": 3.5}
    assert found.facts["last_valid"] == {"step": 20, "bleu": 20.5}
    assert found.facts["has_model"] is False
    assert "ended" not in found.facts

    with open(run / "metrics.jsonl", "a") as stream:
        stream.write('\n{"kind": "end", "step": 33, "reason": "max_steps"}\n')
    with atomic_directory(run / "model", kind="model") as temporary:
        fill_model(temporary, tokenizer)
    found = inspect_directory(run)
    assert found.facts["ended"] == "max_steps"
    assert found.facts["has_model"] is True


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    found = inspect_directory(tmp_path)
    assert found.kind == "run"
    assert found.facts["checkpoints"] == {}
    assert found.facts["last_recorded_step"] == 0


def test_a_damaged_part_of_a_run_is_named_and_the_rest_described(tokenizer: Tokenizer, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tokenizer)
    checkpoints = run / "checkpoints"
    (checkpoints / "step-0000010" / "MANIFEST.json").unlink()
    weights = checkpoints / "step-0000020" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (checkpoints / "step-0000030" / "model.safetensors").unlink()
    fast = inspect_directory(run)
    assert fast.facts["latest_checkpoint"] == "step-0000030"
    assert [line.split(": ")[0].removeprefix(f"{checkpoints}/") for line in fast.damage] == ["step-0000010", "step-0000030/model.safetensors"]
    full = inspect_directory(run, verify="full")
    assert any("step-0000020/model.safetensors: its sha256 differs" in line for line in full.damage)


def test_damage_is_an_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "model", kind="model") as temporary:
        fill_model(temporary, tokenizer)
    content = bytearray((tmp_path / "model" / "config.json").read_bytes())
    content[content.index(b"30")] = ord("4")
    (tmp_path / "model" / "config.json").write_bytes(content)
    assert inspect_directory(tmp_path / "model").facts["provenance"] == {"step": 40}
    with pytest.raises(ArtefactError, match="sha256 differs"):
        inspect_directory(tmp_path / "model", verify="full")
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(ArtefactError, match="config.json: is missing"):
        inspect_directory(tmp_path / "model")


def test_an_exchanged_tokenizer_is_an_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "model", kind="model") as temporary:
        fill_model(temporary, tokenizer)
        other = json.loads((temporary / "config.json").read_bytes())
        write_json(temporary / "config.json", {**other, "tokenizer": "0" * 64})
    with pytest.raises(ArtefactError, match="its tokenizer is not the one"):
        inspect_directory(tmp_path / "model")


def test_what_is_not_of_mtkit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "directory").mkdir()
    for name, message in (("missing", "does not exist"), ("file", "is a file"), ("directory", "has no MANIFEST.json and no checkpoints")):
        with pytest.raises(ArtefactError, match=message):
            inspect_directory(tmp_path / name)


def test_torch_is_not_needed() -> None:
    code = "import sys, mtkit.training.inspection; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
