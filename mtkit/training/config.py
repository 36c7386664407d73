"""The whole config of a training run, and the presets.

Each part is owned by the module that uses it; here they are put together under the names that a TOML file uses.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mtkit import config as codec
from mtkit.checkpoint.manager import CheckpointConfig, Metric
from mtkit.data.preprocess import PreprocessConfig
from mtkit.data.subword import MAX_ALPHA
from mtkit.data.tokenizer import TokenizerConfig
from mtkit.decoding.lines import SearchConfig
from mtkit.errors import ConfigError
from mtkit.evaluation.metrics import tokenizer_for
from mtkit.model.config import MODEL_PRESETS, ModelConfig
from mtkit.training.optim import OptimConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the sentence pairs come from."""

    train: tuple[str, ...] = ()
    """Source and target file, several pairs one after the other; or TSV, parquet, JSON-lines files, `hf:NAME:CONFIG`, or `-`, TSV on stdin.
    Empty = `shards`."""
    dev: tuple[str, ...] = ()
    """The dev set in the same form; with `shards`, instead of theirs."""
    shards: str | None = None
    """A directory that `mtkit preprocess` wrote; None = made from `train` and `dev`."""
    stream: bool = False
    """Encode the text of `train` while training goes on, without shards. It needs a tokenizer, and pools are shuffled, not the whole text."""
    tokenizer: str | None = None
    """Directory of the tokenizer that encodes `train`, or of a model, shard set or run that holds it. None = learnt from the text, or that of
    `init_from`."""
    src_lang: str | None = None
    """Source language code; chooses the side of a data set with named columns, and names the model."""
    tgt_lang: str | None = None
    """Target language code; also chooses the tokenizer of BLEU."""
    weights: tuple[float, ...] | None = None
    """How much of each corpus of the training data is drawn, in their order, above 0; only the ratios count. None = all pairs equally."""
    temperature: float | None = None
    """Draw from a corpus of n pairs in proportion to n^(1 / temperature), at least 1 (Arivazhagan et al. 2019): the more, the more evenly.
    None = all pairs equally, as 1."""

    def __post_init__(self) -> None:
        if self.weights is not None and self.temperature is not None:
            raise ConfigError("weights and temperature exclude each other: both say how much of each corpus is drawn")
        if self.weights is not None and not all(0 < weight < math.inf for weight in self.weights):
            raise ConfigError(f"weights must all be above 0, but are {list(self.weights)}", hint="Leave out a corpus that is not to be used.")
        if self.temperature is not None and not 1 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be at least 1, but is {self.temperature}")
        if self.shards is not None and self.train:
            raise ConfigError("shards and train exclude each other: shards are made of the training text")
        if self.shards is not None and (self.stream or self.tokenizer is not None):
            raise ConfigError("shards and stream or tokenizer exclude each other: shards are encoded already")
        if self.stream and (self.weights is not None or self.temperature is not None):
            raise ConfigError(
                "stream excludes weights and temperature: several corpora are streamed one after the other", hint="Make shards of them."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """How much goes into one update."""

    batch_tokens: int = 25_000
    """Target tokens of one update over all devices, padding included. The paper's 25,000 source and 25,000 target tokens."""
    max_tokens: int = 8192
    """Positions of either side, padding included, that one device holds at once; what does not fit is accumulated over several passes."""

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, but is {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """How long and how to train. The first limit that is reached ends the run."""

    max_steps: int | None = 100_000
    """Updates; None = no limit."""
    max_epochs: int | None = None
    """Passes over the data; None = no limit."""
    max_tokens: int | None = None
    """Target tokens; None = no limit."""
    max_minutes: float | None = None
    """Wall-clock minutes, over all sessions of the run; None = no limit."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of the matrix products. `auto` = bf16 where the hardware is fast at it, else fp32."""
    compile_layers: bool = True
    """Let torch compile the layers for a GPU, which takes a minute at the start. Has no effect elsewhere, or where there is no C compiler."""
    ema_decay: float | None = None
    """Decay per update of a moving average of the weights, which is then validated and saved as the model; at the start, where t updates are fewer,
    (1 + t) / (10 + t). None = none."""
    subword_alpha: float | None = None
    """Segment the text anew in each epoch, drawn by the probabilities of the unigram tokenizer to the power of this, above 0, at most 1000; None =
    always the best segmentation. 0.1 to 0.5 is usual (Kudo 2018); less is more varied."""
    init_from: str | None = None
    """Model directory or checkpoint whose weights the run begins with, for fine-tuning; None = random weights."""
    keep_optimizer: bool = False
    """Begin with the optimizer state of the checkpoint `init_from` too, instead of a fresh one. The learning rate starts over all the same."""
    log_every_steps: int = 100
    """Updates between two lines of progress."""
    max_skipped_in_row: int = 10
    """Updates in a row with a non-finite gradient after which the run gives up."""

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_epochs", "max_tokens", "max_minutes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive, but is {value}")
        if self.max_steps is self.max_epochs is self.max_tokens is self.max_minutes is None:
            raise ConfigError("max_steps, max_epochs, max_tokens or max_minutes must be given, or the run would never end")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(f"ema_decay must be between 0 and 1, but is {self.ema_decay}")
        if self.subword_alpha is not None and not 0 < self.subword_alpha <= MAX_ALPHA:
            raise ConfigError(f"subword_alpha must be above 0 and at most {MAX_ALPHA:g}, but is {self.subword_alpha}")
        if self.keep_optimizer and self.init_from is None:
            raise ConfigError("keep_optimizer is true, which needs init_from, the checkpoint that holds the optimizer")
        for name in ("log_every_steps", "max_skipped_in_row"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, but is {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig:
    """When and how the dev set is used."""

    every_steps: int | None = 1000
    """Updates between two validations; None = only by time and at the end."""
    every_minutes: float | None = None
    """Minutes between two validations; None = only by steps and at the end."""
    translate: bool = True
    """Translate the dev set, for BLEU and chrF; otherwise only loss and perplexity are measured."""
    metric: Metric = "bleu"
    """What the best checkpoint and early stopping go by: `loss`, `bleu` or `chrf`; where it is equal, as BLEU 0 is at the start, by the loss."""
    patience: int | None = None
    """Validations in a row without a new best after which the run ends; None = no early stopping."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """How the dev set is translated; the defaults are those of `mtkit translate`."""

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(f"every_steps must be at least 1, but is {self.every_steps}")
        if self.every_minutes is not None and self.every_minutes <= 0:
            raise ConfigError(f"every_minutes must be positive, but is {self.every_minutes}")
        if self.patience is not None and self.patience < 1:
            raise ConfigError(f"patience must be at least 1, but is {self.patience}")
        if self.metric != "loss" and not self.translate:
            raise ConfigError(f"metric is {self.metric}, which needs translate = true")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything that shapes a run; saved as `config.json` beside what it makes."""

    seed: int = 1
    """Of the initial weights, the data order and dropout."""
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    preprocess: PreprocessConfig = field(default_factory=PreprocessConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    training: LoopConfig = field(default_factory=LoopConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed must not be negative, but is {self.seed}")
        if self.data.shards is self.data.tokenizer is self.training.init_from is None:  # else there is a tokenizer already
            require_tying_fits(self.model, joint=self.tokenizer.joint)
            if self.training.subword_alpha is not None and self.tokenizer.type != "unigram":
                raise ConfigError(f"training.subword_alpha is {self.training.subword_alpha}, which needs tokenizer.type = unigram")
        if self.optim.schedule in ("linear", "cosine") and self.training.max_steps is None:
            raise ConfigError(f"optim.schedule = {self.optim.schedule} needs training.max_steps, the update where the learning rate reaches 0")


def require_tying_fits(model: ModelConfig, *, joint: bool) -> None:
    """Refuse one embedding matrix for two vocabularies, also where these happen to be of one size.

    Args:
        model: The architecture.
        joint: Whether the tokenizer has one vocabulary for both sides.

    Raises:
        ConfigError: It has two, and all three matrices are tied.
    """
    if model.tie_embeddings == "three-way" and not joint:
        raise ConfigError(
            "model.tie_embeddings = three-way needs one vocabulary for both languages, but tokenizer.joint is false",
            hint="Set model.tie_embeddings = decoder, or use a joint tokenizer.",
        )


def schedule_warning(config: TrainConfig, *, updates_per_epoch: int | None, padding_share: float = 0.0) -> str | None:
    """What is odd about the learning rate of a run: a peak or an end that it never reaches; None if all is well.

    Args:
        config: Of the run.
        updates_per_epoch: None = not known.
        padding_share: Of an update: `training.max_tokens` does not count it, `batch.batch_tokens` does.
    """
    limits, optim = config.training, config.optim
    ends = {"training.max_steps": limits.max_steps}
    if limits.max_epochs is not None and updates_per_epoch is not None:
        ends["training.max_epochs"] = limits.max_epochs * updates_per_epoch
    if limits.max_tokens is not None:
        ends["training.max_tokens"] = math.ceil(limits.max_tokens / (config.batch.batch_tokens * (1.0 - padding_share)))
    known = {name: end for name, end in ends.items() if end is not None}
    if not known:
        return None
    name = min(known, key=lambda name: known[name])
    end, value = known[name], getattr(limits, name.removeprefix("training."))
    if end < optim.warmup_steps:
        return (
            f"{name} = {value} ends the run after about {end} updates, within the warm-up: the learning rate never reaches its peak. "
            f"Lower optim.warmup_steps, now {optim.warmup_steps}"
        )
    if optim.schedule in ("linear", "cosine") and limits.max_steps is not None and end < 0.9 * limits.max_steps:
        return (
            f"{name} = {value} ends the run after about {end} updates, but the learning rate falls to 0 at training.max_steps = {limits.max_steps}, "
            f"so that it ends high. Set training.max_steps to about {end}"
        )
    return None


MAY_CHANGE_ON_RESUME: tuple[str, ...] = (
    "data.train",
    "data.dev",
    "data.shards",
    "data.tokenizer",
    "data.src_lang",
    "data.tgt_lang",
    "tokenizer.",
    "preprocess.",
    "training.max_",
    "training.log_every_steps",
    "training.compile_layers",
    "validation.every_",
    "validation.patience",
    "checkpoint.",
)
"""Keys, or beginnings of keys, that may differ when a run goes on. Data, and what it was made with, is compared by its fingerprint."""


def refused_changes(old: Mapping[str, Any], new: TrainConfig) -> list[str]:
    """The differences between a saved config and a new one with which the same run cannot go on, one line each.

    An option that is younger than the saved config stands there at its default, which therefore has to be what was done before there was a choice.
    """
    completed = _completed(old, codec.to_dict(TrainConfig()))
    refused = []
    if new.optim.schedule in ("linear", "cosine"):  # the learning rate depends on the last step there
        refused.append("training.max_steps")
    if tokenizer_for(completed["data"]["tgt_lang"]) != tokenizer_for(new.data.tgt_lang):  # BLEU from here on would be another number
        refused.append("data.tgt_lang")
    changes = codec.differences(completed, codec.to_dict(new))
    return [line for line in changes if line.startswith(tuple(refused)) or not line.startswith(MAY_CHANGE_ON_RESUME)]


def _completed(tree: Mapping[str, Any], defaults: codec.Tree) -> codec.Tree:
    """A config as nested dicts, with the defaults of what it lacks."""
    nested = {key: _completed(tree[key], value) for key, value in defaults.items() if isinstance(value, dict) and isinstance(tree.get(key), Mapping)}
    return {**defaults, **tree, **nested}


_TINY: codec.Tree = {
    "tokenizer": {"vocab_size": 8000},
    "optim": {"lr": 5e-3, "warmup_steps": 2000},
    "batch": {"batch_tokens": 4096, "max_tokens": 4096},
    "training": {"max_steps": 8000},
    "validation": {"every_steps": 500},
    "checkpoint": {"every_steps": 500, "keep_last": 10},
}
_SMALL: codec.Tree = {
    "tokenizer": {"vocab_size": 16000},
    "optim": {"lr": 1e-3, "warmup_steps": 4000},
    "batch": {"batch_tokens": 8192, "max_tokens": 8192},
    "training": {"max_steps": 50_000},
}
_BASE: codec.Tree = {}
_BIG: codec.Tree = {"training": {"max_steps": 300_000}, "checkpoint": {"keep_last": 20}}
_DEEP: codec.Tree = {"optim": {"lr": 1e-3, "warmup_steps": 4000}}

_AROUND_THE_MODEL: Mapping[str, codec.Tree] = {"tiny": _TINY, "small": _SMALL, "base": _BASE, "big": _BIG, "deep": _DEEP}

PRESETS: Mapping[str, codec.Tree] = {name: {**tree, "model": codec.to_dict(MODEL_PRESETS[name])} for name, tree in _AROUND_THE_MODEL.items()}
"""Partial configs by name: the model and what is known to train it well."""


def preset(name: str) -> codec.Layer:
    """The layer of a preset.

    Raises:
        ConfigError: There is none of this name.
    """
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}", hint=f"Presets: {', '.join(PRESETS)}")
    return codec.Layer(name=f"preset {name}", data=PRESETS[name])
