import re
from typing import Any

import pytest

from mtkit import config as codec
from mtkit.errors import ConfigError
from mtkit.model.config import MODEL_PRESETS
from mtkit.training.config import PRESETS, TrainConfig, preset, refused_changes, schedule_warning


def build(*overrides: str) -> TrainConfig:
    return codec.resolve(TrainConfig, [codec.Layer(name="test", data=codec.parse_override(text)) for text in overrides]).config


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_config(name: str) -> None:
    resolved = codec.resolve(TrainConfig, [preset(name)])
    assert resolved.config.model == MODEL_PRESETS[name]
    assert set(resolved.origins.values()) == {f"preset {name}"}


def test_there_is_a_preset_for_every_model() -> None:
    assert set(PRESETS) == set(MODEL_PRESETS)
    with pytest.raises(ConfigError, match="there is no preset 'huge'") as error:
        preset("huge")
    assert error.value.hint == "Presets: tiny, small, base, big, deep"


def test_the_defaults_are_the_paper_s_base_model() -> None:
    config = TrainConfig()
    assert codec.resolve(TrainConfig, [preset("base")]).config == config
    assert (config.training.max_steps, config.optim.warmup_steps, config.batch.batch_tokens) == (100_000, 4000, 25_000)
    assert (config.optim.beta1, config.optim.beta2, config.optim.eps, config.optim.label_smoothing) == (0.9, 0.98, 1e-9, 0.1)


def test_a_saved_config_gives_the_same_config_back() -> None:
    config = build("data.train=['a.en', 'a.de']", "training.max_tokens=5", "validation.search.beam_size=2", "training.ema_decay=0.99")
    assert codec.from_dict(TrainConfig, codec.to_dict(config)) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=-1"], "seed (test) must not be negative, but is -1"),
        (["data.weights=[1, 0.0]"], "data.weights (test) must all be above 0, but are [1.0, 0.0]"),
        (["data.temperature=0.5"], "data.temperature (test) must be at least 1, but is 0.5"),
        (["data.weights=[1]", "data.temperature=2"], "data.weights (test) and temperature exclude each other"),
        (["data.shards=s", "data.train=['d.en', 'd.de']"], "data.shards (test) and train exclude each other"),
        (["data.shards=s", "data.stream=true"], "data.shards (test) and stream or tokenizer exclude each other"),
        (["data.shards=s", "data.tokenizer=t"], "data.shards (test) and stream or tokenizer exclude each other"),
        (["data.stream=true", "data.weights=[1, 2]"], "data.stream (test) excludes weights and temperature"),
        (["data.stream=true", "data.temperature=2"], "data.stream (test) excludes weights and temperature"),
        (["batch.batch_tokens=0"], "batch.batch_tokens (test) must be at least 1, but is 0"),
        (["batch.max_tokens=0"], "batch.max_tokens (test) must be at least 1, but is 0"),
        (["training.max_epochs=0"], "training.max_epochs (test) must be positive, but is 0"),
        (["training.max_minutes=-0.5"], "training.max_minutes (test) must be positive, but is -0.5"),
        (["training.max_steps=none"], "training: max_steps, max_epochs, max_tokens or max_minutes must be given"),
        (["training.ema_decay=1"], "training.ema_decay (test) must be between 0 and 1, but is 1.0"),
        (["training.subword_alpha=0"], "training.subword_alpha (test) must be above 0 and at most 1000, but is 0.0"),
        (["training.subword_alpha=1001"], "training.subword_alpha (test) must be above 0 and at most 1000, but is 1001.0"),
        (["training.subword_alpha=0.1", "tokenizer.type=bpe"], "training.subword_alpha is 0.1, which needs tokenizer.type = unigram"),
        (["training.keep_optimizer=true"], "training.keep_optimizer (test) is true, which needs init_from"),
        (["optim.r_drop=1e300"], "optim.r_drop (test) must be at least 0 and at most 1e+06, but is 1e+300"),
        (["model.num_decoder_layers=513"], "model.num_decoder_layers (test) must be at most 512, but is 513"),
        (["optim.optimizer=sgd"], "optim.optimizer (test) must be one of adam, muon, but is 'sgd'"),
        (["training.log_every_steps=0"], "training.log_every_steps (test) must be at least 1"),
        (["training.max_skipped_in_row=0"], "training.max_skipped_in_row (test) must be at least 1"),
        (["validation.every_steps=0"], "validation.every_steps (test) must be at least 1, but is 0"),
        (["validation.every_minutes=0"], "validation.every_minutes (test) must be positive, but is 0.0"),
        (["validation.patience=0"], "validation.patience (test) must be at least 1, but is 0"),
        (["validation.translate=false"], "validation.metric is bleu, which needs translate = true"),
        (["validation.translate=false", "validation.metric=chrf"], "validation.metric (test) is chrf, which needs translate = true"),
        (["validation.metric=ter"], "validation.metric (test) must be one of loss, bleu, chrf, but is 'ter'"),
        (["optim.schedule=cosine", "training.max_steps=none", "training.max_epochs=3"], "optim.schedule = cosine needs training.max_steps"),
        (["training.max_steps=1.5"], "training.max_steps (test) must be a whole number or none, but is 1.5"),
        (["tokenizer.joint=false"], "model.tie_embeddings = three-way needs one vocabulary for both languages, but tokenizer.joint is false"),
    ],
)
def test_what_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(*overrides)
    assert error.value.message.startswith(message)


@pytest.mark.parametrize(
    "overrides",
    [
        ["validation.translate=false", "validation.metric=loss"],
        ["training.max_steps=none", "training.max_minutes=0.1"],
        ["tokenizer.joint=false", "model.tie_embeddings=decoder"],
        ["data.shards=somewhere", "data.dev=['d.en', 'd.de']"],
        ["tokenizer.joint=false", "data.shards=somewhere"],  # the tokenizer is that of the shards
        ["tokenizer.joint=false", "data.tokenizer=somewhere"],
        ["tokenizer.joint=false", "training.init_from=somewhere"],  # the tokenizer is that of the model
        ["tokenizer.type=bpe", "training.subword_alpha=0.1", "data.shards=somewhere"],
        ["training.keep_optimizer=true", "training.init_from=somewhere"],
        ["optim.schedule=linear"],
        ["validation.every_steps=none", "checkpoint.every_steps=none", "checkpoint.every_minutes=none"],
    ],
)
def test_what_is_not_refused(overrides: list[str]) -> None:
    build(*overrides)


def changes(*overrides: str, base: tuple[str, ...] = ()) -> list[str]:
    return refused_changes(codec.to_dict(build(*base)), build(*base, *overrides))


@pytest.mark.parametrize(
    "override",
    [
        "training.max_steps=200000",
        "training.max_epochs=3",
        "training.max_minutes=5",
        "training.max_tokens=100",
        "training.log_every_steps=1",
        "validation.every_steps=7",
        "validation.every_minutes=7",
        "validation.patience=3",
        "checkpoint.keep_last=1",
        "checkpoint.every_minutes=none",
        "data.train=['moved/a.en', 'moved/a.de']",
        "tokenizer.vocab_size=10",
        "preprocess.shard_pairs=100000",
    ],
)
def test_a_run_goes_on_with_another(override: str) -> None:
    assert changes(override) == []


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed=2", "seed: 1 -> 2"),
        ("data.weights=[3, 1]", "data.weights: none -> [3.0, 1.0]"),
        ("data.temperature=5", "data.temperature: none -> 5.0"),
        ("optim.lr=1e-3", "optim.lr: none -> 0.001"),
        ("model.dropout=0.2", "model.dropout: 0.1 -> 0.2"),
        ("batch.batch_tokens=100", "batch.batch_tokens: 25000 -> 100"),
        ("batch.max_tokens=100", "batch.max_tokens: 8192 -> 100"),
        ("training.ema_decay=0.9", "training.ema_decay: none -> 0.9"),
        ("training.precision=fp32", "training.precision: 'auto' -> 'fp32'"),
        ("training.subword_alpha=0.2", "training.subword_alpha: none -> 0.2"),
        ("training.init_from=model", "training.init_from: none -> 'model'"),
        ("optim.optimizer=muon", "optim.optimizer: 'adam' -> 'muon'"),
        ("validation.metric=chrf", "validation.metric: 'bleu' -> 'chrf'"),
        ("validation.search.beam_size=5", "validation.search.beam_size: 4 -> 5"),
    ],
)
def test_a_run_does_not_go_on_with_another(override: str, line: str) -> None:
    assert changes(override) == [line]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_last_step_is_part_of_a_schedule_that_ends_there(schedule: str) -> None:
    base = (f"optim.schedule={schedule}",)
    assert changes("training.max_steps=9", base=base) == ["training.max_steps: 100000 -> 9"]
    for other in ("training.max_epochs=3", "training.max_tokens=100", "training.max_minutes=1"):
        assert changes(other, base=base) == []


def test_options_that_are_younger_than_the_saved_config_were_at_their_defaults() -> None:
    old: dict[str, Any] = codec.to_dict(build("optim.r_drop=1", "validation.search.beam_size=5"))
    del old["optim"]["r_drop"], old["training"]["ema_decay"], old["validation"]["search"]["penalty"]
    assert refused_changes(old, build("validation.search.beam_size=5")) == []
    assert refused_changes(old, build("optim.r_drop=5")) == ["optim.r_drop: 0.0 -> 5.0", "validation.search.beam_size: 5 -> 4"]


def test_options_that_exist_no_more_are_named() -> None:
    old: dict[str, Any] = codec.to_dict(build())
    old["optim"]["momentum"] = 0.5
    assert refused_changes(old, build()) == ["optim.momentum: 0.5 -> none"]


@pytest.mark.parametrize(
    ("old", "new", "refused"),
    [
        ("zh", "none", ["data.tgt_lang: 'zh' -> none"]),
        ("de", "none", []),
        ("none", "de", []),
        ("zh", "zh-TW", []),
        ("none", "ja", ["data.tgt_lang: none -> 'ja'"]),
    ],
)
def test_a_language_may_change_where_bleu_stays_the_same(old: str, new: str, refused: list[str]) -> None:
    """Else the best so far would be compared with numbers of another tokenizer."""
    assert changes(f"data.tgt_lang={new}", base=(f"data.tgt_lang={old}",)) == refused


def test_what_has_nothing_to_do_with_the_schedule_may_change() -> None:
    assert changes("training.max_skipped_in_row=7", base=("optim.schedule=linear",)) == []


@pytest.mark.parametrize(
    ("overrides", "updates_per_epoch", "message"),
    [
        (["training.max_steps=3999"], None, "training.max_steps = 3999 ends the run after about 3999 updates, within the warm-up"),
        (["training.max_steps=4000"], None, None),
        (["training.max_epochs=10"], 399, "training.max_epochs = 10 ends the run after about 3990 updates, within the warm-up"),
        (["training.max_epochs=10"], None, None),
        (["training.max_tokens=25000"], None, "training.max_tokens = 25000 ends the run after about 1 updates, within the warm-up"),
        (["training.max_steps=none", "training.max_minutes=1"], 10, None),
        (["optim.schedule=linear", "training.max_epochs=10"], 8999, "training.max_steps = 100000, so that it ends high. .* to about 89990"),
        (["optim.schedule=linear", "training.max_epochs=10"], 9000, None),
        (["optim.schedule=inverse-sqrt", "training.max_epochs=10"], 8999, None),
        (["optim.schedule=cosine", "training.max_tokens=1000000000"], None, "about 40000 updates, but the learning rate falls to 0"),
    ],
)
def test_a_learning_rate_that_misses_its_peak_or_its_end(overrides: list[str], updates_per_epoch: int | None, message: str | None) -> None:
    found = schedule_warning(build(*overrides), updates_per_epoch=updates_per_epoch)
    assert (found is None) == (message is None)
    assert re.search(message or "", found or "")


def test_padding_does_not_count_for_a_limit_of_tokens() -> None:
    config = build("training.max_tokens=25000", "batch.batch_tokens=600", "optim.warmup_steps=45")
    assert schedule_warning(config, updates_per_epoch=None, padding_share=0.1) is None
    assert "after about 42 updates" in (schedule_warning(config, updates_per_epoch=None) or "")
