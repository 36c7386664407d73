from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mtkit.artefacts import read_manifest
from mtkit.checkpoint.format import load_model
from mtkit.cli.app import app
from tests.decoding.builders import random_model, save, tiny_tokenizer


def export(*words: object, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["export", *map(str, words)])
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    return result


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "model", random_model(4), tiny_tokenizer())


def test_a_model_becomes_an_export(model_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "exported"
    result = export(model_dir, "--format", "ctranslate2", "--output", output)
    num_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    assert result.stderr == f"exported {model_dir} to {output}: {num_bytes / 1e6:.1f} MB, int8\n"
    manifest = read_manifest(output, kind="ctranslate2")
    assert manifest.config["tokenizer"] == load_model(model_dir).description.tokenizer
    assert manifest.config["precision"] == "int8"


def test_without_a_format_it_is_a_smaller_model(model_dir: Path, tmp_path: Path) -> None:
    assert export(model_dir, "-o", tmp_path / "small").stderr.endswith("MB, int8\n")
    assert read_manifest(tmp_path / "small", kind="model").config["precision"] == "int8"
    assert load_model(tmp_path / "small").description.provenance == load_model(model_dir).description.provenance


def test_a_run_stands_for_its_model_and_the_precision_is_passed_on(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(model_dir)
    assert export(tmp_path / "run", "--format", "ctranslate2", "-o", tmp_path / "small", "--precision", "bf16", "--quiet").stderr == ""
    assert read_manifest(tmp_path / "small").config["precision"] == "bf16"


@pytest.mark.parametrize(
    ("words", "exit_code", "message"),
    [
        (["MODEL", "--format", "onnx"], 2, "'onnx' is not one of 'mtkit', 'ctranslate2'"),
        (["MODEL", "--format", "ctranslate2", "--precision", "int4"], 2, "Invalid value for '--precision'"),
        (["MODEL/nowhere", "--format", "ctranslate2"], 4, "nowhere: does not exist"),
    ],
)
def test_what_is_refused(model_dir: Path, tmp_path: Path, words: list[str], exit_code: int, message: str) -> None:
    result = export(*[word.replace("MODEL", str(model_dir)) for word in words], "--output", tmp_path / "exported", exit_code=exit_code)
    assert message in result.stderr
    assert not (tmp_path / "exported").exists()


def test_a_damaged_model_is_not_exported(model_dir: Path, tmp_path: Path) -> None:
    damaged = save(tmp_path / "model", random_model(4), tiny_tokenizer())
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x99")
    assert "its sha256 differs" in export(damaged, "--format", "ctranslate2", "-o", tmp_path / "exported", exit_code=4).stderr
    assert not (tmp_path / "exported").exists()


def test_what_is_there_is_not_overwritten(model_dir: Path, tmp_path: Path) -> None:
    export(model_dir, "--format", "ctranslate2", "-o", tmp_path / "exported")
    again = export(model_dir, "--format", "ctranslate2", "-o", tmp_path / "exported", "--precision", "fp32", exit_code=1)
    assert "exported: exists already" in again.stderr
    assert "exported: exists already" in export(tmp_path / "none", "-o", tmp_path / "exported", exit_code=1).stderr  # known before the work
    assert read_manifest(tmp_path / "exported").config["precision"] == "int8"
