import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mtkit.artefacts import atomic_directory
from mtkit.cli import inspect
from mtkit.cli.app import app as mtkit_app
from mtkit.cli.app import global_options
from mtkit.data.tokenizer import TokenizerConfig, train_tokenizer
from mtkit.files import write_json

Run = Callable[..., Any]


@pytest.fixture
def run() -> Run:
    """Runs `mtkit inspect` with these arguments."""
    application = typer.Typer(cls=mtkit_app.info.cls)
    application.callback()(global_options)
    inspect.register(application)

    def invoke(*arguments: str, exit_code: int = 0) -> Any:
        result = CliRunner().invoke(application, ["inspect", *arguments])
        assert result.exit_code == exit_code, result.output
        return result

    return invoke


def lines_of(text: str) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in text.removesuffix("\n").split("\n"))
    return {name: value.strip() for name, value in pairs}


@pytest.fixture
def tokenizer_path(tmp_path: Path) -> Path:
    pairs = [(f"A dog {number}.", f"Ein Hund {number}.") for number in range(40)]
    train_tokenizer(pairs, TokenizerConfig(vocab_size=285, user_defined_symbols=("<a>", "<b>"))).save(tmp_path / "tok")
    return tmp_path / "tok"


def test_lines_for_people(run: Run, tokenizer_path: Path) -> None:
    result = run(str(tokenizer_path))
    found = lines_of(result.stdout)
    assert found["path"] == str(tokenizer_path)
    assert found["kind"] == "tokenizer"
    assert found["vocabulary"] == "285 pieces, shared by both sides, unigram"
    assert found["own symbols"] == "<a>, <b>"
    assert found["trained on"] == "80 of 80 lines"
    assert found["checked"] == "names and sizes of all files are right"
    assert lines_of(run(str(tokenizer_path), "--verify", "full").stdout)["checked"] == "the contents of all files are right"
    assert result.stderr == ""


def test_json(run: Run, tokenizer_path: Path) -> None:
    document = json.loads(run(str(tokenizer_path), "--json", "--verify", "full").stdout)
    assert document["kind"] == "tokenizer"
    assert document["verified"] == "full"
    assert document["facts"]["src_vocab_size"] == 285
    assert document["damage"] == []
    assert document["config"]["user_defined_symbols"] == ["<a>", "<b>"]
    assert document["files"]["tokenizer.model"] == (tokenizer_path / "tokenizer.model").stat().st_size


def test_damage_has_exit_code_4(run: Run, tokenizer_path: Path, tmp_path: Path) -> None:
    (tokenizer_path / "tokenizer.model").write_bytes(b"x")
    assert "tokenizer.model: has 1 bytes" in run(str(tokenizer_path), exit_code=4).stderr
    assert "does not exist" in run(str(tmp_path / "none"), exit_code=4).stderr


def test_a_damaged_run_is_described_all_the_same(run: Run, tmp_path: Path) -> None:
    for step in (1, 2):
        with atomic_directory(tmp_path / "checkpoints" / f"step-{step:07d}", kind="checkpoint") as temporary:
            write_json(temporary / "state.json", {"step": step, "scores": {"bleu": 1.5}})
            write_json(temporary / "extra.json", {})
    (tmp_path / "checkpoints" / "step-0000001" / "extra.json").unlink()
    result = run(str(tmp_path), exit_code=4)
    found = lines_of(result.stdout)
    assert found["kind"] == "run"
    assert found["checkpoints"] == "2: step-0000002, step-0000001"
    assert found["checked"] == "damaged in 1 place"
    assert "step-0000001/extra.json: is missing" in result.stderr
    assert "error: " in result.stderr


def test_control_characters_of_a_config_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "x", kind="other", config={"data": {"train": ["a\x1b[2Jb\nc"]}}) as temporary:
        write_json(temporary / "x.json", {})
    result = run(str(tmp_path / "x"))
    assert lines_of(result.stdout)["trained on"] == r"a\x1b[2Jb c"
