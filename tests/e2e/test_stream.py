"""Text that comes through a pipe: a run that was killed goes on when it comes again, and Ctrl-C does not wait for a pipe that is silent."""

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.files import sha256_file
from tests.e2e.toy import mtkit_environment, run_mtkit, write_pairs

CONFIG = """
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
batch_tokens = 100
max_tokens = 100
[training]
precision = "fp32"
[validation]
translate = false
metric = "loss"
[checkpoint]
every_steps = 2
"""


def in_this_process(*words: str | Path, data: bytes = b"", exit_code: int = 0) -> str:
    """Run a command where torch is loaded already; returns what it said."""
    torch.set_num_threads(1)
    result = CliRunner().invoke(app, [str(word) for word in words], input=data)
    assert result.exit_code == exit_code, result.output
    return result.stderr


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """A text as TSV, the words of a command that trains on it up to `--output`, and the run that nothing has disturbed."""

    text: bytes
    words: list[str | Path]
    straight: Path


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Stream:
    place = tmp_path_factory.mktemp("stream")
    write_pairs(place, {"train": 300, "dev": 8}, seed=5)
    (place / "config.toml").write_text(CONFIG)
    train, dev = ([place / f"{name}.{side}" for side in ("en", "de")] for name in ("train", "dev"))
    text = b"".join(b"\t".join(pair) + b"\n" for pair in zip(*(path.read_bytes().split(b"\n")[:-1] for path in train), strict=True))
    in_this_process("tokenizer", "train", *train, "--vocab-size", "300", "--output", place / "tokenizer")
    words: list[str | Path] = ["train", "--stream", "--train", "-", "--dev", *dev, "--tokenizer", place / "tokenizer"]
    words += ["--config", place / "config.toml", "--device", "cpu", "--threads", "1", "--output"]
    said = in_this_process(*words, place / "straight", data=text)
    assert "a stream of pairs" in said
    assert "finished: the stream ended" in said
    return Stream(text=text, words=words, straight=place / "straight")


def test_a_killed_run_goes_on_when_the_text_is_piped_again(stream: Stream, tmp_path: Path) -> None:
    text, words = stream.text, stream.words
    command = [sys.executable, "-m", "mtkit", *map(str, words), str(tmp_path / "killed")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=mtkit_environment()) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(text)
        process.stdin.close()
        assert any(b"step 6  saved" in line for line in process.stderr)
        process.kill()
    assert not (tmp_path / "killed" / "model").exists()
    other = b"".join(line + b"\n" for line in reversed(text.split(b"\n")[:-1]))
    assert "was trained on data with the fingerprint" in in_this_process(*words, tmp_path / "killed", data=other, exit_code=4)
    again = run_mtkit(*words, tmp_path / "killed", data=text)
    assert "going on from" in again.stderr.decode()
    assert len({sha256_file(run / "model" / "model.safetensors") for run in (stream.straight, tmp_path / "killed")}) == 1
    in_this_process("translate", tmp_path / "killed", "--input", words[5], "--output", tmp_path / "dev.hyp")
    assert (tmp_path / "dev.hyp").read_bytes().count(b"\n") == 8


@pytest.mark.reliability
@pytest.mark.parametrize("num_lines", [0, 3])
@pytest.mark.parametrize("command", ["translate", "train"])
def test_ctrl_c_does_not_wait_for_a_silent_pipe(stream: Stream, tmp_path: Path, command: str, num_lines: int) -> None:
    """B62, E6: it ends at once and without a traceback, before the first line as well as after some."""
    words = [*stream.words, tmp_path / "run"] if command == "train" else ["translate", stream.straight, "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mtkit", *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=mtkit_environment(),
        start_new_session=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"".join(line + b"\n" for line in stream.text.split(b"\n")[:num_lines]))
        process.stdin.flush()
        if command == "train":
            while not (tmp_path / "run" / "run.lock").exists():
                time.sleep(0.05)
            time.sleep(0.3)
        else:
            process.stderr.readline()  # what computes
            for _ in range(num_lines):
                process.stdout.readline()
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        code = process.wait(20)
        assert (code, time.monotonic() - begin < 5) == (130, True)
        text = process.stderr.read().decode()
    assert text.endswith({"translate": "error: interrupted\n", "train": "run the same command again to go on\n"}[command]), text
    assert "Traceback" not in text
