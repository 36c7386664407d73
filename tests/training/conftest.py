"""Trainers on the toy language of `toy.py`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit import config as codec
from mtkit.distributed import World
from mtkit.model.device import Precision
from mtkit.training.config import TrainConfig
from mtkit.training.prepare import open_data, prepare_data, shards_directory
from mtkit.training.run import RunDirectory
from mtkit.training.signals import StopRequest
from mtkit.training.trainer import Place, Trainer
from tests.training.toy import TOY, toy_data, write_toy_text


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def toy_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with train.en, train.de, dev.en and dev.de."""
    return write_toy_text(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def toy_shards(toy_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy text as shards."""
    output = tmp_path_factory.mktemp("toy-run")
    tree: codec.Tree = {**TOY, "data": toy_data(toy_text)}
    config = codec.from_dict(TrainConfig, tree)
    prepare_data(config, output, num_workers=1, say=lambda _line: None)
    return shards_directory(config, output)


MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def make_trainer(toy_shards: Path) -> MakeTrainer:
    """Builds a trainer on the toy shards: `make_trainer(directory, "optim.lr=1e-3", ...)`, resumed if the directory holds a run.

    With `data` it trains on what this part of the config names.
    """

    def make(
        directory: Path,
        *overrides: str,
        data: codec.Tree | None = None,
        world: World | None = None,
        stop: StopRequest | None = None,
        **extra: Any,
    ) -> Trainer:
        config = codec.resolve(
            TrainConfig,
            [
                codec.Layer(name="toy", data=TOY),
                codec.Layer(name="data", data={"data": data or {"shards": str(toy_shards)}}),
                *(codec.Layer(name="test", data=codec.parse_override(text)) for text in overrides),
            ],
        ).config
        place = Place(device=torch.device("cpu"), precision=Precision(name="fp32", device_type="cpu"), world=world or World())
        directory.mkdir(parents=True, exist_ok=True)
        opened = open_data(config, directory)
        trainer = Trainer(config, data=opened, run=RunDirectory(path=directory), place=place, stop=stop or StopRequest(), **extra)
        trainer.resume()
        return trainer

    return make
