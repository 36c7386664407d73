"""`mtkit train --stream --train -`: a run whose text comes through a pipe, killed and gone on with."""

import subprocess
import sys
from pathlib import Path

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


def test_a_killed_run_goes_on_when_the_text_is_piped_again(tmp_path: Path) -> None:
    write_pairs(tmp_path, {"train": 300, "dev": 8}, seed=5)
    (tmp_path / "config.toml").write_text(CONFIG)
    train, dev = ([tmp_path / f"{name}.{side}" for side in ("en", "de")] for name in ("train", "dev"))
    text = b"".join(b"\t".join(pair) + b"\n" for pair in zip(*(path.read_bytes().split(b"\n")[:-1] for path in train), strict=True))
    in_this_process("tokenizer", "train", *train, "--vocab-size", "300", "--output", tmp_path / "tokenizer")
    words: list[str | Path] = ["train", "--stream", "--train", "-", "--dev", *dev, "--tokenizer", tmp_path / "tokenizer"]
    words += ["--config", tmp_path / "config.toml", "--device", "cpu", "--threads", "1", "--output"]

    said = in_this_process(*words, tmp_path / "straight", data=text)
    assert "a stream of pairs" in said
    assert "finished: the stream ended" in said

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
    assert len({sha256_file(tmp_path / name / "model" / "model.safetensors") for name in ("straight", "killed")}) == 1
    in_this_process("translate", tmp_path / "killed", "--input", dev[0], "--output", tmp_path / "dev.hyp")
    assert (tmp_path / "dev.hyp").read_bytes().count(b"\n") == 8
