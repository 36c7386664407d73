"""Fine-tuning through the command line: a model of the quickstart's language goes over to a dialect of it."""

import random
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mtkit.checkpoint.format import load_model
from mtkit.cli.app import app
from mtkit.files import read_lines
from mtkit.training.validate import DevSet, dev_loss
from recipes.quickstart.generate import Splits, generate, write

CONFIG = """
[tokenizer]
vocab_size = 1500

[model]
d_model = 96
ffn_dim = 192
num_heads = 4
num_encoder_layers = 1
num_decoder_layers = 1
norm = "pre"
dropout = 0.0

[optim]
lr = 4e-3
warmup_steps = 30
schedule = "linear"
label_smoothing = 0.0

[batch]
batch_tokens = 1024
max_tokens = 1024

[training]
precision = "fp32"

[validation]
translate = false
metric = "loss"
"""


def in_dialect(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs in which every third German word of five letters and more is replaced by another word, always the same for the same word."""

    def other(word: str) -> str:
        letters = word.rstrip(".?!,")
        if len(letters) < 5 or sum(map(ord, letters.lower())) % 3:
            return word
        mixed = list(letters.lower())
        random.Random(letters.lower()).shuffle(mixed)
        changed = "".join(mixed)
        return (changed.capitalize() if letters[0].isupper() else changed) + word[len(letters) :]

    return [(english, " ".join(map(other, german.split(" ")))) for english, german in pairs]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base/` and `dialect/`, each with training and dev text; no sentence is in both."""
    directory = tmp_path_factory.mktemp("text")
    splits = generate(train=6000, dev=200, test=1, seed=1)
    write(splits, directory / "base")
    other = generate(train=6000, dev=200, test=1, seed=2)
    seen = {english for english, _ in splits["train"]}
    dialect: Splits = {"train": [pair for pair in other["train"] if pair[0] not in seen][:1500], "dev": other["dev"], "test": []}
    write({name: in_dialect(pairs) for name, pairs in dialect.items()}, directory / "dialect")
    (directory / "config.toml").write_text(CONFIG)
    return directory


def train(text: Path, name: str, output: Path, *options: str, steps: int) -> Path:
    data = [f"{text / name / split}.{side}" for split in ("train", "dev") for side in ("en", "de")]
    words = ["train", "--quiet", "--train", *data[:2], "--dev", *data[2:], "--config", str(text / "config.toml"), "--output", str(output)]
    result = CliRunner().invoke(app, [*words, "--workers", "1", "--device", "cpu", "--set", f"training.max_steps={steps}", *options])
    assert result.exit_code == 0, result.output
    return output


def loss_per_character(text: Path, run: Path) -> float:
    """On the dev set of the dialect, in nats; unlike the loss per token it can be compared between tokenizers."""
    loaded = load_model(run)
    src_lines, tgt_lines = (read_lines(text / "dialect" / f"dev.{side}") for side in ("en", "de"))
    dev = DevSet(src_lines=src_lines, tgt_lines=tgt_lines)
    loss_sum, _ = dev_loss(loaded.model, loaded.tokenizer, dev, device=torch.device("cpu"), max_tokens=1024)
    return loss_sum / sum(map(len, tgt_lines))


@pytest.mark.slow
def test_a_fine_tuned_model_is_better_in_its_domain(text: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    base = train(text, "base", tmp_path / "base", steps=250)
    tuned = train(text, "dialect", tmp_path / "tuned", "--init-from", str(base), steps=80)
    scratch = train(text, "dialect", tmp_path / "scratch", steps=80)
    losses = {run.name: loss_per_character(text, run) for run in (base, tuned, scratch)}
    assert losses["tuned"] < losses["base"] - 0.3, losses
    assert losses["tuned"] < losses["scratch"] - 0.3, losses
