"""A short run of `mtkit train` on the toy language, for the commands that need one."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtkit import config as codec
from mtkit.cli.app import app
from mtkit.config import dump_toml
from mtkit.training.config import TrainConfig
from tests.training.toy import TOY, write_toy_text


@pytest.fixture(scope="session")
def toy_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with train.en, train.de, dev.en, dev.de, and toy.toml."""
    directory = write_toy_text(tmp_path_factory.mktemp("toy"))
    lively = {**TOY, "optim": {"lr": 2e-2, "warmup_steps": 5}, "validation": {"every_steps": 8}}
    (directory / "toy.toml").write_text(dump_toml(codec.from_dict(TrainConfig, lively)))
    return directory


@pytest.fixture(scope="session")
def train_words(toy_text: Path) -> list[str]:
    """The words of `mtkit train` on the toy text, without --output."""
    names = [str(toy_text / name) for name in ("train.en", "train.de", "dev.en", "dev.de")]
    return ["train", "--train", *names[:2], "--dev", *names[2:], "--config", str(toy_text / "toy.toml"), "--device", "cpu", "--threads", "1"]


@pytest.fixture(scope="session")
def toy_run(train_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: checkpoints at steps 4, 8 and 12, the latter two validated. Not to be changed."""
    output = tmp_path_factory.mktemp("runs") / "toy"
    result = CliRunner().invoke(app, [*train_words, "--output", str(output), "--workers", "1"])
    assert result.exit_code == 0, result.output
    return output
