import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtkit import config as codec
from mtkit.artefacts import atomic_directory
from mtkit.errors import ArtefactError, ConfigError, MTKitError, UsageError
from mtkit.training.config import TrainConfig
from mtkit.training.run import RunDirectory

HOLDER = """
import sys, time
from pathlib import Path
from mtkit.training.run import RunDirectory
with RunDirectory(path=Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def config(**changes: object) -> TrainConfig:
    return codec.from_dict(TrainConfig, changes)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    run = RunDirectory(path=tmp_path / "new" / "run")
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(run.path)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(MTKitError, match=f"is in use by process {holder.pid} on {os.uname().nodename}\n") as error, run.lock():
                pass
            assert str(error.value).startswith(str(run.path))
            assert error.value.exit_code == 1
        finally:
            holder.send_signal(signal.SIGKILL)
    with run.lock():
        assert (run.path / "run.lock").read_text() == f"process {os.getpid()} on {os.uname().nodename}\n"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_a_lock_that_cannot_be_written_names_the_run(tmp_path: Path) -> None:
    (tmp_path / "run.lock").symlink_to("/dev/full")
    with pytest.raises(MTKitError, match=f"{tmp_path}: cannot be written"), RunDirectory(path=tmp_path).lock():
        pass


def test_a_run_where_none_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(MTKitError, match=f"^{place}: cannot be written: "), RunDirectory(path=place).lock():
            pass


def test_the_lock_is_let_go_when_the_block_fails(tmp_path: Path) -> None:
    run = RunDirectory(path=tmp_path)
    with pytest.raises(ZeroDivisionError), run.lock():
        raise ZeroDivisionError
    with run.lock():
        pass


def test_a_lock_is_no_matter_of_the_name_alone(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("process 1 on elsewhere\n")  # left by a process that was killed
    with RunDirectory(path=tmp_path).lock():
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_where_nothing_was_begun_nothing_is_left(tmp_path: Path, fails: bool) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    for place in (tmp_path / "new" / "run", tmp_path / "mine", tmp_path / "mine" / "run"):
        with contextlib.suppress(ZeroDivisionError), RunDirectory(path=place).lock():
            assert (place / "run.lock").exists()
            _ = 1 / (0 if fails else 1)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["mine", "mine/notes.txt"]
    with RunDirectory(path=tmp_path / "run").lock():
        (tmp_path / "run" / "metrics.jsonl").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_directory_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with RunDirectory(path=tmp_path / "run").lock():
        pass
    assert list((tmp_path / "run").iterdir()) == []


def test_the_lock_of_one_that_has_just_ended_is_not_taken_for_the_present_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is removed between the opening of it and the locking."""
    lock = fcntl.flock
    opened: list[int] = []

    def flock(stream: Any, operation: int) -> None:
        if not opened:
            (tmp_path / "run.lock").unlink()
        opened.append(os.fstat(stream.fileno()).st_ino)
        lock(stream, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunDirectory(path=tmp_path).lock():
        assert len(opened) == 2
        assert (tmp_path / "run.lock").stat().st_ino == opened[1]
        with pytest.raises(MTKitError, match="is in use by process"), RunDirectory(path=tmp_path).lock():
            pass


def test_a_new_run_saves_its_config(tmp_path: Path) -> None:
    run = RunDirectory(path=tmp_path)
    assert not run.has_checkpoints()
    run.save_config(config(seed=1))
    run.require_fitting(config(seed=2))  # nothing was trained with the first
    run.save_config(config(seed=2))
    assert codec.from_dict(TrainConfig, json.loads((tmp_path / "config.json").read_text())) == config(seed=2)


def test_a_run_that_has_begun_keeps_what_shapes_it(tmp_path: Path) -> None:
    run = RunDirectory(path=tmp_path)
    run.save_config(config(seed=1))
    (run.checkpoints / "step-0000010").mkdir(parents=True)
    assert run.has_checkpoints()
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="holds a run with another config: model.dropout: 0.1 -> 0.3; seed: 1 -> 2") as error:
        run.require_fitting(config(seed=2, model={"dropout": 0.3}, training={"max_steps": 9}))
    assert error.value.exit_code == 2
    assert "another --output" in (error.value.hint or "")
    assert (tmp_path / "config.json").read_bytes() == before
    run.require_fitting(config(seed=1, training={"max_steps": 9}))
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize("name", [".step-0000010.tmp-12-0123abcd", "notes.txt"])
def test_other_things_beside_checkpoints_are_no_run(tmp_path: Path, name: str) -> None:
    run = RunDirectory(path=tmp_path)
    (run.checkpoints / name).mkdir(parents=True)
    assert not run.has_checkpoints()


def test_where_things_are(tmp_path: Path) -> None:
    run = RunDirectory(path=tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in (run.checkpoints, run.metrics, run.model)] == ["checkpoints", "metrics.jsonl", "model"]


def test_what_a_killed_process_has_left_is_removed_with_the_lock_and_nothing_else(tmp_path: Path) -> None:
    """A11: not before, as the other one may be at work; what mtkit has not made stays."""
    (tmp_path / ".model.tmp-12-0123abcd").mkdir()
    (tmp_path / ".model.tmp-12-0123abcd" / "model.safetensors").touch()
    for name in (
        ".config.json.tmp-12-0123abcd",
        ".metrics.jsonl.tmp-12-0123abcd",
        ".notes.tmp-12-0123abcd",
        ".model.tmp-mine",
        "model.tmp-12-0123abcd",
    ):
        (tmp_path / name).touch()
    with RunDirectory(path=tmp_path).lock():
        left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".model.tmp-mine", ".notes.tmp-12-0123abcd", "model.tmp-12-0123abcd", "run.lock"]


def test_half_written_data_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    """Killed at the moment when the shards were complete but for their name, it left them for ever beside those that were made anew."""
    (tmp_path / "data" / ".shards.tmp-12-0123abcd").mkdir(parents=True)
    (tmp_path / "data" / ".shards.tmp-12-0123abcd" / ".report.json.tmp-12-0123abcd").write_text("{")
    (tmp_path / "data" / ".tokenizer.tmp-12-0123abcd").mkdir()
    (tmp_path / "data" / ".source.json.tmp-12-0123abcd").write_text("{")
    (tmp_path / "data" / ".shards.tmp-mine").mkdir()
    (tmp_path / "data" / "tokenizer").mkdir()
    with RunDirectory(path=tmp_path).lock():
        assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [".shards.tmp-mine", "tokenizer"]


def files_below(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"name": "my-project"}'),
        ("config.json", "[]"),
        ("config.json", '{"data": 1, "model": 2, "training": 3}'),
        ("config.json", '{"model": {}, "src_vocab_size": 8, "tokenizer": "0123"}'),  # of a model
        ("metrics.jsonl", "{}"),
        ("data/tokenizer/tokenizer.model", "x"),
        ("data/shards/shards.json", "{}"),
    ],
)
def test_what_no_run_has_made_is_not_taken_for_its_own(tmp_path: Path, name: str, text: str) -> None:
    place = tmp_path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    with pytest.raises(ArtefactError, match="is in the way: a run has a file or directory of this name") as error:
        RunDirectory(path=tmp_path).require_fitting(config())
    assert str(tmp_path / name).startswith(error.value.message.partition(":")[0])
    assert files_below(tmp_path) == {name: text.encode()}


def test_what_a_run_does_not_use_may_lie_beside_it(tmp_path: Path) -> None:
    for name in ("train.log", "data/corpus.en", "slurm-1.out", "data/shards.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    RunDirectory(path=tmp_path).require_fitting(config())
    (tmp_path / "data" / "shards").mkdir()
    RunDirectory(path=tmp_path).require_fitting(config(data={"shards": "somewhere"}))  # it makes none then
    (tmp_path / "data" / "source.json").write_text("{}")  # a run has made them
    RunDirectory(path=tmp_path).require_fitting(config())


def test_a_model_is_not_replaced_where_its_run_cannot_go_on(tmp_path: Path) -> None:
    run = RunDirectory(path=tmp_path)
    run.save_config(config())
    with atomic_directory(run.model, kind="model", config={}, inputs={}) as place:
        (place / "weights").write_bytes(b"x")
    before = files_below(tmp_path)
    with pytest.raises(ArtefactError, match="is the model of a run whose checkpoints are gone") as error:
        run.require_fitting(config())
    assert "--init-from" in (error.value.hint or "")
    with pytest.raises(UsageError, match="holds a run already"):
        run.require_new()
    assert files_below(tmp_path) == before
    (run.checkpoints / "step-0000010").mkdir(parents=True)
    run.require_fitting(config())


def test_the_model_that_a_run_began_with_may_be_spelt_otherwise_or_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(path=tmp_path / "run")
    for name in ("model", "other", "run"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    run.save_config(config(training={"init_from": "model"}))
    (run.checkpoints / "step-0000010").mkdir(parents=True)
    for spelling in ("model", str(tmp_path / "model"), "./other/../model", "gone"):
        run.require_fitting(config(training={"init_from": spelling}))
    for other in ("other", None):
        with pytest.raises(ConfigError, match="training.init_from: 'model' -> "):
            run.require_fitting(config(training={"init_from": other}))


def test_what_a_run_began_with_stays_in_its_config(tmp_path: Path) -> None:
    run = RunDirectory(path=tmp_path)
    run.save_config(config(training={"init_from": "model"}))
    run.save_config(config(training={"init_from": "other"}))  # nothing was trained from the first
    (run.checkpoints / "step-0000010").mkdir(parents=True)
    run.save_config(config(training={"init_from": "gone", "max_steps": 7}))
    saved = json.loads((tmp_path / "config.json").read_text())["training"]
    assert (saved["init_from"], saved["max_steps"]) == ("other", 7)
