"""A toy language pair, small enough to train on in a second: digit words are translated word by word and the order is reversed."""

import random
from pathlib import Path

from mtkit import config as codec
from mtkit.data.shards import ShardSet
from mtkit.training.trainer import Trainer

ENGLISH = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
GERMAN = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]

TOY: codec.Tree = {
    "tokenizer": {"vocab_size": 44, "byte_fallback": False},
    "model": {"d_model": 16, "ffn_dim": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "dropout": 0.3},
    "optim": {"lr": 3e-3, "warmup_steps": 5},
    "batch": {"batch_tokens": 120, "max_tokens": 120},
    "training": {"max_steps": 12, "precision": "fp32", "log_every_steps": 4},
    "validation": {"every_steps": None, "translate": False, "metric": "loss"},
    "checkpoint": {"every_steps": 4, "every_minutes": None, "keep_last": 20},
}


def write_toy_text(directory: Path) -> Path:
    """Write train.en, train.de, dev.en and dev.de."""
    rng = random.Random(7)
    for name, count in (("train", 120), ("dev", 15)):
        sentences = [[rng.randrange(10) for _ in range(rng.randint(1, 9))] for _ in range(count)]
        (directory / f"{name}.en").write_text("".join(" ".join(ENGLISH[digit] for digit in digits) + "\n" for digits in sentences))
        (directory / f"{name}.de").write_text("".join(" ".join(GERMAN[digit] for digit in reversed(digits)) + "\n" for digits in sentences))
    return directory


def toy_data(text: Path) -> codec.Tree:
    """The `data` part of a config that trains on this text."""
    return {"train": [str(text / "train.en"), str(text / "train.de")], "dev": [str(text / "dev.en"), str(text / "dev.de")]}


def shards_of(trainer: Trainer) -> ShardSet:
    """The shards that a trainer's config names."""
    assert trainer.config.data.shards is not None
    return ShardSet.open(Path(trainer.config.data.shards))
