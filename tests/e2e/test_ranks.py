"""`mtkit train --nproc 2` when one of its processes, or the one that launched them, is killed or hangs."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mtkit.checkpoint.format import load_model
from tests.e2e.test_signals import CONFIG, Result, Training, result_of
from tests.e2e.toy import write_small_shards

Start = Callable[..., Training]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that holds `shards` and `config.toml`."""
    place = tmp_path_factory.mktemp("ranks")
    write_small_shards(place, CONFIG)
    return place


@pytest.fixture
def start(shards: Path) -> Iterator[Start]:
    """Starts the training as two processes."""
    started: list[Training] = []

    def run(output: Path, *arguments: str) -> Training:
        data: list[str | Path] = ["--shards", shards / "shards", "--config", shards / "config.toml"]
        started.append(Training([*data, "--output", output, "--nproc", "2", *arguments], may_show_stacks=True))
        return started[-1]

    yield run
    for training in started:
        training.process.kill()


@pytest.fixture(scope="module")
def undisturbed(shards: Path) -> Training:
    """Two processes that trained to the end: the run `straight`, and what they printed as the file `stdout`."""
    data: list[str | Path] = ["--shards", shards / "shards", "--config", shards / "config.toml"]
    with open(shards / "stdout", "wb") as stdout:
        training = Training([*data, "--output", shards / "straight", "--nproc", "2", "--json"], stdout=stdout)
    assert training.end() == 0, training.text
    return training


@pytest.fixture(scope="module")
def straight(shards: Path, undisturbed: Training) -> Result:
    """What two processes come to that nothing disturbs."""
    return result_of(shards / "straight")


def ranks_of(training: Training) -> list[int]:
    pid = training.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_two_processes_train_one_model(shards: Path, undisturbed: Training) -> None:
    assert undisturbed.text.count("2 x cpu") == 1
    assert undisturbed.text.count("step 60  finished: ") == 1
    assert json.loads((shards / "stdout").read_bytes())["end"]["step"] == 60, "one process prints, not two"
    records = [json.loads(line) for line in (shards / "straight" / "metrics.jsonl").read_text("utf-8").split("\n")[:-1]]
    assert records[0]["world_size"] == 2
    steps = [(record["kind"], record["step"]) for record in records if record["kind"] != "train"]
    assert steps == [("start", 0), *[("valid", step) for step in (8, 16, 24, 32, 40, 48, 56, 60)], ("end", 60)]
    assert ("valid", load_model(shards / "straight").description.provenance["step"]) in steps


@pytest.mark.smoke
def test_a_killed_rank_restarts_all_from_the_last_checkpoint(start: Start, straight: Result, tmp_path: Path) -> None:
    """D4: to the bit; --no-resume is about the first start only."""
    training = start(tmp_path / "run", "--no-resume", "--max-restarts", "1")
    training.wait_for("step 20 ")
    os.kill(ranks_of(training)[1], signal.SIGKILL)
    assert training.end() == 0, training.text
    assert "a process was ended by signal 9; starting all 2 anew, for the 1. of 1 times" in training.text
    assert "going on from " in training.text
    assert result_of(tmp_path / "run") == straight


@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.parametrize("fault", ["kill@save:3/0", "kill@artefact.rename:4/0", "kill@valid:2/1", "kill@init:1/1"])
def test_a_rank_that_dies_in_some_phase_leaves_the_run_whole(
    start: Start, straight: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """D5: while saving, in the middle of it, in a validation, and before the first update."""
    monkeypatch.setenv("MTKIT_FAULT", fault)
    monkeypatch.setenv("MTKIT_ALLOW_FAULTS", "1")
    assert start(tmp_path / "run", "--max-restarts", "0").end() == 128 + signal.SIGKILL
    monkeypatch.delenv("MTKIT_FAULT")
    assert start(tmp_path / "run").end() == 0
    assert result_of(tmp_path / "run") == straight


@pytest.mark.slow
@pytest.mark.reliability
def test_two_ranks_stop_at_the_same_step_and_go_on(start: Start, straight: Result, tmp_path: Path) -> None:
    """D1: whichever of them a signal reaches first."""
    training = start(tmp_path / "run")
    training.wait_for("step 20 ")
    os.kill(ranks_of(training)[1], signal.SIGTERM)
    assert training.end() == 75, training.text
    assert start(tmp_path / "run").end() == 0
    assert result_of(tmp_path / "run") == straight


@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("oom@step:20/1", 0, "warning: step 20 did not fit into the memory and was made in halves"),
        ("oom@step:20/1,oom@step:21/1", 5, "update 20 does not fit into the memory of cpu"),
        ("oom@try:1/1", 5, "the largest batch does not fit into the memory of cpu"),
        ("oom@valid:2/1", 0, "warning: step 16 could not be validated, and the run goes on: OutOfMemoryError"),
    ],
)
def test_a_rank_that_runs_out_of_memory(
    start: Start, straight: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, code: int, message: str
) -> None:
    """C3, B55: all make the same update or end with the same error and advice, at once."""
    monkeypatch.setenv("MTKIT_FAULT", fault)
    monkeypatch.setenv("MTKIT_ALLOW_FAULTS", "1")
    training = start(tmp_path / "run")
    assert training.end() == code, training.text
    assert training.text.count(message) == (1 if code == 0 else 2), training.text
    assert training.text.count("Lower batch.max_tokens") == (0 if code == 0 else 2)
    assert "Traceback" not in training.text
    monkeypatch.delenv("MTKIT_FAULT")
    assert start(tmp_path / "run").end() == 0
    if code:
        assert result_of(tmp_path / "run") == straight


@pytest.mark.slow
@pytest.mark.reliability
def test_a_rank_that_hangs_is_found(start: Start, straight: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D6: the others give up after the time they were given, it shows where it stands, and the run can go on."""
    monkeypatch.setenv("MTKIT_FAULT", "hang@step:20/1")
    monkeypatch.setenv("MTKIT_ALLOW_FAULTS", "1")
    begin = time.monotonic()
    training = start(tmp_path / "run", "--timeout", "5")
    assert training.end() == 1, training.text
    assert time.monotonic() - begin < 150
    assert "Thread 0x" in training.text
    assert "in reach" in training.text
    monkeypatch.delenv("MTKIT_FAULT")
    assert start(tmp_path / "run").end() == 0
    assert result_of(tmp_path / "run") == straight


@pytest.mark.slow
@pytest.mark.reliability
def test_no_rank_outlives_a_launcher_that_was_killed(start: Start, straight: Result, tmp_path: Path) -> None:
    """D7: they save what there is."""
    training = start(tmp_path / "run")
    training.wait_for("step 20 ")
    ranks = ranks_of(training)
    training.kill(signal.SIGKILL)
    training.end()
    deadline = time.monotonic() + 10
    while any(map(is_alive, ranks)):
        assert time.monotonic() < deadline, "an orphan goes on"
        time.sleep(0.05)
    assert "stopped at step" in training.text
    assert start(tmp_path / "run").end() == 0
    assert result_of(tmp_path / "run") == straight


def test_a_save_that_fails_at_the_last_step_is_told_by_all(start: Start, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of the last step fails, and so does the second try, which only one process would have made: the others waited for ever."""
    monkeypatch.setenv("MTKIT_FAULT", "EIO@save:26+")
    monkeypatch.setenv("MTKIT_ALLOW_FAULTS", "1")
    training = start(tmp_path / "run")
    assert training.end() == 5, training.text
    assert "error: the state at step 60 could not be saved, 2 times in a row: " in training.text
