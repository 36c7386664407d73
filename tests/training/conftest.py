"""A toy language pair, small enough to train on in a second: digit words are translated word by word and the order is reversed."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit import config as codec
from mtkit.distributed import World
from mtkit.model.device import Precision
from mtkit.training.config import TrainConfig
from mtkit.training.prepare import open_shards, prepare_data
from mtkit.training.run import RunDirectory
from mtkit.training.signals import StopRequest
from mtkit.training.trainer import Place, Trainer

ENGLISH = "zero one two three four five six seven eight nine".split()
GERMAN = "null eins zwei drei vier fünf sechs sieben acht neun".split()

TOY: codec.Tree = {
    "tokenizer": {"vocab_size": 44, "byte_fallback": False},
    "model": {"d_model": 16, "ffn_dim": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "dropout": 0.3},
    "optim": {"lr": 3e-3, "warmup_steps": 5},
    "batch": {"batch_tokens": 120, "max_tokens": 120},
    "training": {"max_steps": 12, "precision": "fp32", "log_every_steps": 4},
    "validation": {"every_steps": None, "translate": False, "metric": "loss"},
    "checkpoint": {"every_steps": 4, "every_minutes": None, "keep_last": 20},
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def toy_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with train.en, train.de, dev.en and dev.de."""
    directory = tmp_path_factory.mktemp("toy")
    rng = random.Random(7)
    for name, count in (("train", 120), ("dev", 15)):
        sentences = [[rng.randrange(10) for _ in range(rng.randint(1, 9))] for _ in range(count)]
        (directory / f"{name}.en").write_text("".join(" ".join(ENGLISH[digit] for digit in digits) + "\n" for digits in sentences))
        (directory / f"{name}.de").write_text("".join(" ".join(GERMAN[digit] for digit in reversed(digits)) + "\n" for digits in sentences))
    return directory


@pytest.fixture(scope="session")
def toy_shards(toy_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy text as shards."""
    output = tmp_path_factory.mktemp("toy-run")
    tree: codec.Tree = {
        **TOY,
        "data": {"train": [str(toy_text / "train.en"), str(toy_text / "train.de")], "dev": [str(toy_text / "dev.en"), str(toy_text / "dev.de")]},
    }
    return prepare_data(codec.from_dict(TrainConfig, tree), output, num_workers=1, say=lambda _line: None)


MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def make_trainer(toy_shards: Path) -> MakeTrainer:
    """Builds a trainer on the toy shards: `make_trainer(directory, "optim.lr=1e-3", ...)`, resumed if the directory holds a run."""

    def make(directory: Path, *overrides: str, world: World | None = None, stop: StopRequest | None = None, **extra: Any) -> Trainer:
        config = codec.resolve(
            TrainConfig,
            [
                codec.Layer(name="toy", data=TOY),
                codec.Layer(name="shards", data={"data": {"shards": str(toy_shards)}}),
                *(codec.Layer(name="test", data=codec.parse_override(text)) for text in overrides),
            ],
        ).config
        shards, dev = open_shards(toy_shards)
        place = Place(device=torch.device("cpu"), precision=Precision(name="fp32", device_type="cpu"), world=world or World())
        directory.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(config, shards=shards, dev=dev, run=RunDirectory(path=directory), place=place, stop=stop or StopRequest(), **extra)
        trainer.resume()
        return trainer

    return make
