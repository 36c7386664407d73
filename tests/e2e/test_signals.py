"""`mtkit train` and signals: what is saved, the exit codes, and that a run which was killed anywhere ends with the weights of one that was not."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from mtkit.files import sha256_file
from tests.e2e.toy import mtkit_environment, run_mtkit, write_pairs

pytestmark = pytest.mark.reliability

CONFIG = """
seed = 3
[tokenizer]
vocab_size = 300
[model]
d_model = 16
ffn_dim = 32
num_heads = 2
num_encoder_layers = 1
num_decoder_layers = 1
dropout = 0.3
[optim]
lr = 3e-3
warmup_steps = 5
[batch]
batch_tokens = 300
max_tokens = 150
[training]
max_steps = 60
log_every_steps = 1
precision = "fp32"
[validation]
every_steps = 8
[validation.search]
beam_size = 1
max_length_constant = 5
[checkpoint]
every_steps = 3
keep_last = 2
"""

TRAINING = "parameters on"
"""What the first line of a session says when training begins."""


class Training:
    """`mtkit train` in a process of its own; its messages are collected as they come."""

    def __init__(self, arguments: Sequence[str | Path], *, may_show_stacks: bool = False, stdout: IO[bytes] | int = subprocess.DEVNULL) -> None:
        self._may_show_stacks = may_show_stacks
        command = [sys.executable, "-m", "mtkit", "train", *map(str, arguments), "--threads", "1", "--workers", "1"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, env=mtkit_environment(), start_new_session=True
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.decode())
                self._changed.notify_all()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_for(self, words: str) -> None:
        """Wait until a message holds these words."""
        with self._changed:
            assert self._changed.wait_for(lambda: words in self.text, timeout=120), self.text

    def kill(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for the end of the process, and of all that hold its stderr; returns its exit code."""
        code = self.process.wait(120)
        self._reader.join(60)
        assert not self._reader.is_alive(), "a child goes on"
        assert self.process.stderr is not None
        self.process.stderr.close()
        assert self._may_show_stacks or "Traceback" not in self.text, self.text
        return code


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a run ends with: sha256 of its weights and of the state of its optimizer, and what it has recorded by step."""

    model: str
    optimizer: str
    records: list[tuple[str, int, float]]


def result_of(run: Path) -> Result:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").split("\n")[:-1]]
    return Result(
        model=sha256_file(run / "model" / "model.safetensors"),
        optimizer=sha256_file(run / "checkpoints" / "step-0000060" / "optimizer.safetensors"),
        records=[(record["kind"], record["step"], record["loss"]) for record in records if record["kind"] in ("train", "valid")],
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("signals")
    write_pairs(directory, {"train": 300, "dev": 8}, seed=5)
    (directory / "config.toml").write_text(CONFIG, "utf-8")
    return directory


Start = Callable[..., Training]


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    """Starts the training on the raw text; more data may be given."""
    started: list[Training] = []

    def run(output: Path, *arguments: str | Path) -> Training:
        data: list[str | Path] = ["--train", place / "train.en", place / "train.de", "--dev", place / "dev.en", place / "dev.de"]
        started.append(Training([*data, "--config", place / "config.toml", "--output", output, *arguments]))
        return started[-1]

    yield run
    for training in started:  # those that a failed test has left
        training.process.kill()


@dataclass(frozen=True, kw_only=True, slots=True)
class Straight:
    """The run that nothing has disturbed, and the seconds from its first message to its end."""

    result: Result
    seconds: float


@pytest.fixture(scope="module")
def straight(place: Path) -> Straight:
    data: list[str | Path] = ["--train", place / "train.en", place / "train.de", "--dev", place / "dev.en", place / "dev.de"]
    training = Training([*data, "--config", place / "config.toml", "--output", place / "straight"])
    training.wait_for("\n")
    begin = time.monotonic()
    assert training.end() == 0
    return Straight(result=result_of(place / "straight"), seconds=time.monotonic() - begin)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 75),
        (signal.SIGINT, 130),
        pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 75, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_the_run_and_the_same_command_goes_on(
    start: Start, straight: Straight, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    training = start(tmp_path / "run")
    training.wait_for("step 20 ")
    training.kill(number)
    assert training.end() == code
    step = int(training.text.rsplit("stopped at step ", 1)[1].split(";")[0])
    assert 20 <= step < 60
    assert "Run the same command again to go on." in training.text
    run_mtkit("inspect", tmp_path / "run", "--verify", "full")
    again = start(tmp_path / "run")
    assert again.end() == 0
    assert f"going on from {tmp_path / 'run' / 'checkpoints' / f'step-{step:07d}'}" in again.text
    assert result_of(tmp_path / "run") == straight.result


def test_a_signal_during_the_preparation_of_the_data_ends_it_at_once(start: Start, tmp_path: Path) -> None:
    """B62: nothing is lost, so nothing has to be waited for."""
    write_pairs(tmp_path, {"large": 20_000}, seed=1)
    training = start(tmp_path / "run", "--train", tmp_path / "large.en", tmp_path / "large.de")
    training.wait_for("training a tokenizer")
    training.kill(signal.SIGTERM)
    assert training.end() == 75
    assert TRAINING not in training.text


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_two_signals_end_the_run_without_waiting(start: Start, straight: Straight, tmp_path: Path, number: signal.Signals) -> None:
    """B62: what was saved before is whole."""
    training = start(tmp_path / "run")
    training.wait_for("step 12  saved")
    training.kill(signal.SIGSTOP)  # so that both signals are there before it can react to the first
    training.kill(number)
    training.kill(signal.SIGUSR1)
    training.kill(signal.SIGCONT)
    assert training.end() in (128 + number, 128 + signal.SIGUSR1)
    assert start(tmp_path / "run").end() == 0
    assert result_of(tmp_path / "run") == straight.result


def kill_at_random(start: Start, run: Path, *, num_kills: int, seconds: float, seed: int) -> None:
    """Kill the training so many times, each time at a random moment of the first half of what is a whole run, then let it end."""
    rng = random.Random(seed)
    while num_kills:
        training = start(run)
        training.wait_for("\n")
        time.sleep(rng.uniform(0.0, seconds / 2))
        training.kill(signal.SIGKILL)
        if training.end() == 0:
            return
        num_kills -= 1
    assert start(run).end() == 0


@pytest.mark.smoke
@pytest.mark.parametrize("seed", [1])
def test_a_run_that_was_killed_ends_as_if_it_was_not(start: Start, straight: Straight, tmp_path: Path, seed: int) -> None:
    """B45, B46, B47, B50: wherever it was, the data, the learning rate, the records and the weights go on, to the bit."""
    kill_at_random(start, tmp_path / "run", num_kills=3, seconds=straight.seconds, seed=seed)
    assert result_of(tmp_path / "run") == straight.result
    assert not list((tmp_path / "run").rglob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 52 if "MTKIT_NIGHTLY" in os.environ else 7))
def test_a_run_that_was_killed_often_ends_as_if_it_was_not(start: Start, straight: Straight, tmp_path: Path, seed: int) -> None:
    kill_at_random(start, tmp_path / "run", num_kills=4, seconds=straight.seconds, seed=seed)
    assert result_of(tmp_path / "run") == straight.result


def test_only_one_process_trains_in_a_directory(start: Start, tmp_path: Path) -> None:
    training = start(tmp_path / "run")
    training.wait_for(TRAINING)
    os.kill(training.process.pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        second = start(tmp_path / "run")
        assert second.end() == 1
        assert f"is in use by process {training.process.pid} on " in second.text
        assert time.monotonic() - begin < 30
    finally:
        os.kill(training.process.pid, signal.SIGCONT)
        training.kill(signal.SIGTERM)
    assert training.end() == 75, "the first one is none the worse for it"
