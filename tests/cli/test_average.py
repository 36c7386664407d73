import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from mtkit.checkpoint.format import load_model, parameters_by_name
from mtkit.checkpoint.manager import list_checkpoints
from mtkit.cli.app import app


def average(*words: object, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["average", *map(str, words)])
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    return result


def is_mean_of(output: Path, run: Path, steps: list[int]) -> bool:
    weights = [parameters_by_name(load_model(run / "checkpoints" / f"step-{step:07d}").model) for step in steps]
    found = parameters_by_name(load_model(output).model)
    return all(torch.equal(tensor, torch.stack([entry[name].double() for entry in weights]).mean(dim=0).float()) for name, tensor in found.items())


def test_the_last_ones(toy_run: Path, tmp_path: Path) -> None:
    result = average(toy_run, "--last", 2, "--output", tmp_path / "model")
    assert result.stderr == f"averaged step-0000008, step-0000012 into {tmp_path / 'model'}\n"
    assert is_mean_of(tmp_path / "model", toy_run, [8, 12])
    assert not is_mean_of(tmp_path / "model", toy_run, [4, 8, 12])
    assert load_model(tmp_path / "model").description.provenance["averaged"] == [8, 12]


@pytest.mark.parametrize(("metric", "step"), [("bleu", 4), ("loss", 8), ("chrf", 12)])
def test_the_best_one(toy_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, step: int) -> None:
    results = {4: {"bleu": 30.0, "loss": 9.0, "chrf": 1.0}, 8: {"bleu": 1.0, "loss": 1.0, "chrf": 2.0}, 12: {"bleu": 2.0, "loss": 5.0, "chrf": 50.0}}
    stored = [replace(checkpoint, scores=results[checkpoint.step]) for checkpoint in list_checkpoints(toy_run / "checkpoints")]
    monkeypatch.setattr("mtkit.checkpoint.manager.scan_checkpoints", lambda _directory: (stored, []))
    average(toy_run, "--best", 1, "--metric", metric, "-o", tmp_path / "model", "--quiet")
    assert is_mean_of(tmp_path / "model", toy_run, [step])


def test_named_ones_and_a_model_that_translates(toy_run: Path, toy_text: Path, tmp_path: Path) -> None:
    names = [toy_run / "checkpoints" / f"step-{step:07d}" for step in (4, 12)]
    assert average(*names, "--output", tmp_path / "model", "--quiet").stderr == ""
    assert is_mean_of(tmp_path / "model", toy_run, [4, 12])
    words = ["translate", str(tmp_path / "model"), "--input", str(toy_text / "dev.en"), "--output", str(tmp_path / "out"), "--quiet"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert (tmp_path / "out").read_text().count("\n") == 15


@pytest.mark.parametrize(
    ("words", "exit_code", "message"),
    [
        (["RUN"], 2, "is a run: say which of its checkpoints to average\nAdd --last 5, or --best 5."),
        (["RUN/model", "RUN"], 2, "is a run: say which of its checkpoints to average\nName checkpoints, such as "),
        (["RUN", "--last", "4"], 2, "4 checkpoints were asked for, but there are 3"),
        (["RUN", "--best", "3"], 2, "3 checkpoints with a validation result for bleu were asked for, but there are 2"),
        (["RUN", "--best", "1", "--metric", "ter"], 2, "--metric must be bleu, chrf or loss, but is ter"),
        (["RUN", "--last", "1", "--best", "1"], 2, "--last and --best exclude each other"),
        (["RUN", "RUN", "--last", "1"], 2, "--last and --best take one run directory, but 2 paths were given"),
        (["RUN/nowhere", "--last", "1"], 4, "nowhere: does not exist\nGive the directory of a run"),
        (["RUN/checkpoints", "--best", "1"], 4, "checkpoints: is no run: it has no checkpoints"),
        (["RUN/nowhere"], 4, "nowhere"),
        (["RUN/data/shards"], 4, "shards"),
        (["RUN", "--last", "0"], 2, "Invalid value for '--last'"),
        ([], 2, "Missing argument"),
    ],
)
def test_what_is_refused(toy_run: Path, tmp_path: Path, words: list[str], exit_code: int, message: str) -> None:
    result = average(*[word.replace("RUN", str(toy_run)) for word in words], "--output", tmp_path / "model", exit_code=exit_code)
    assert message in result.stderr
    assert not (tmp_path / "model").exists()


def test_a_damaged_checkpoint_is_not_averaged(toy_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(toy_run, tmp_path / "run")
    weights = run / "checkpoints" / "step-0000008" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x99")
    assert "model.safetensors" in average(run, "--last", 2, "--output", tmp_path / "model", exit_code=4).stderr
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("step", "words", "is_refused"),
    [(12, ["--last", "1"], True), (8, ["--last", "1"], False), (8, ["--last", "2"], True), (4, ["--last", "3"], True), (8, ["--best", "1"], True)],
)
@pytest.mark.parametrize("name", ["MANIFEST.json", "state.json"])
def test_an_unreadable_checkpoint_is_not_passed_over(toy_run: Path, tmp_path: Path, step: int, words: list[str], is_refused: bool, name: str) -> None:
    run = shutil.copytree(toy_run, tmp_path / "run")
    damaged = run / "checkpoints" / f"step-{step:07d}"
    (damaged / name).write_bytes((damaged / name).read_bytes()[:-20])
    result = average(run, *words, "--output", tmp_path / "model", exit_code=4 if is_refused else 0)
    assert (f"{damaged}: is damaged, and may be one" in result.stderr) == is_refused
    assert (tmp_path / "model").exists() != is_refused


def test_a_model_that_is_there_is_not_overwritten(toy_run: Path, tmp_path: Path) -> None:
    average(toy_run, "--last", 1, "--output", tmp_path / "model")
    assert "exists already" in average(toy_run, "--last", 2, "--output", tmp_path / "model", exit_code=1).stderr
    assert "exists already" in average(tmp_path / "none", "--output", tmp_path / "model", exit_code=1).stderr  # known before the work
    assert is_mean_of(tmp_path / "model", toy_run, [12])


def test_what_a_stop_has_saved_is_not_averaged(toy_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(toy_run, tmp_path / "run"))
    every = json.loads((run / "config.json").read_text())["checkpoint"]["every_steps"]
    newest = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())
    shutil.copytree(run / "checkpoints" / f"step-{newest:07d}", run / "checkpoints" / f"step-{newest + 1:07d}")
    assert newest % every == 0
    assert every > 2
    average(run, "--last", "2", "--output", tmp_path / "average")
    assert load_model(tmp_path / "average").description.provenance["averaged"] == [newest - every, newest]
    (run / "config.json").unlink()
    average(run, "--last", "2", "--output", tmp_path / "all")
    assert len(load_model(tmp_path / "all").description.provenance["averaged"]) == 2


@pytest.mark.parametrize(("step", "last", "is_refused"), [(2, "3", False), (6, "2", False), (13, "2", False), (16, "2", True)])
def test_only_damage_to_what_would_be_averaged_matters(toy_run: Path, tmp_path: Path, step: int, last: str, is_refused: bool) -> None:
    run = Path(shutil.copytree(toy_run, tmp_path / "run"))
    damaged = run / "checkpoints" / f"step-{step:07d}"
    shutil.copytree(run / "checkpoints" / "step-0000004", damaged)
    (damaged / "MANIFEST.json").write_text("{")
    result = average(run, "--last", last, "--output", tmp_path / "model", exit_code=4 if is_refused else 0)
    assert (f"{damaged}: is damaged, and may be one" in result.stderr) == is_refused
