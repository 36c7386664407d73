"""Runs that begin with the weights of another model."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit import config as codec
from mtkit.checkpoint.format import parameters_by_name, read_tensors
from mtkit.data.tokenizer import Tokenizer
from mtkit.distributed import World
from mtkit.errors import ArtefactError, ConfigError, ResourceError
from mtkit.training.config import TrainConfig
from mtkit.training.initial import open_initial
from mtkit.training.prepare import prepare_data, shards_directory
from mtkit.training.progress import read_metrics
from mtkit.training.session import open_session
from mtkit.training.signals import StopRequest
from mtkit.training.state import optimizer_tensors
from mtkit.training.trainer import Trainer
from tests.training.toy import TOY, toy_data


def config(data: codec.Tree, *overrides: str) -> TrainConfig:
    layers = [codec.Layer(name="toy", data={**TOY, "data": data}), codec.Layer(name="short", data={"training": {"max_steps": 4}})]
    return codec.resolve(TrainConfig, layers + [codec.Layer(name="test", data=codec.parse_override(text)) for text in overrides]).config


def opened(config: TrainConfig, output: Path, *, train: bool = False) -> tuple[Trainer, list[str]]:
    """A trainer at the start of a session, or at its end, and what was said."""
    said: list[str] = []
    with open_session(config, output, device_name="cpu", world=World(), num_workers=1, resume=True, stop=StopRequest(), say=said.append) as session:
        if train:
            list(session.train())
        return session, said


@pytest.fixture(scope="session")
def base(toy_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four updates; its weights differ from their moving average."""
    torch.set_num_threads(1)
    output = tmp_path_factory.mktemp("base") / "run"
    opened(config({"shards": str(toy_shards)}, "training.ema_decay=0.5"), output, train=True)
    return output


@pytest.fixture
def shards(toy_shards: Path) -> codec.Tree:
    return {"shards": str(toy_shards)}


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return parameters_by_name(trainer.updater.model)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("place", ["", "model", "checkpoints/step-0000004"])
def test_a_run_begins_with_the_weights_that_would_translate(place: str, base: Path, shards: codec.Tree, tmp_path: Path) -> None:
    model = base / place
    trainer, said = opened(config(shards, f"training.init_from={model}", "training.ema_decay=0.9", "model.dropout=0.0", "seed=5"), tmp_path / "run")
    expected = read_tensors(base / "model" / "model.safetensors")
    assert_equal(weights_of(trainer), expected)
    assert trainer.updater.ema is not None
    assert_equal(trainer.updater.ema, expected)
    assert not trainer.updater.optimizer.state
    assert (trainer.state.step, trainer.state.best_value) == (0, None)
    assert said == [f"beginning with the weights of {model if place else base / 'model'}"]


def test_the_optimizer_is_kept_where_that_is_asked_for(base: Path, shards: codec.Tree, tmp_path: Path) -> None:
    checkpoint = base / "checkpoints" / "step-0000004"
    trainer, _ = opened(config(shards, f"training.init_from={checkpoint}", "training.keep_optimizer=true"), tmp_path / "run")
    expected = read_tensors(checkpoint / "optimizer.safetensors")
    assert_equal(optimizer_tensors(trainer.updater.optimizer, trainer.updater.parameter_names), expected)
    with pytest.raises(ArtefactError, match="holds no optimizer to be kept, for it is no checkpoint") as error:
        open_initial(config(shards, f"training.init_from={base}", "training.keep_optimizer=true"))
    assert "checkpoints/step-" in (error.value.hint or "")
    with pytest.raises(ConfigError, match="step-0000004: holds the state of adam, but optim.optimizer is muon") as kind:
        open_initial(config(shards, f"training.init_from={checkpoint}", "training.keep_optimizer=true", "optim.optimizer=muon"))
    assert "--set optim.optimizer=adam" in (kind.value.hint or "")


def test_raw_text_is_encoded_with_the_tokenizer_of_the_model(base: Path, toy_text: Path, tmp_path: Path) -> None:
    text = Path(shutil.copytree(toy_text, tmp_path / "text"))
    for side, word in (("en", "eleven"), ("de", "elf")):
        (text / f"train.{side}").write_text((text / f"train.{side}").read_text() + f"{word}\n" * 40)
    options = (f"training.init_from={base}", "tokenizer.vocab_size=9999")
    trainer, said = opened(config(toy_data(text), *options), tmp_path / "run")
    assert said[0] == f"taking the tokenizer of {base / 'model'}"
    own = Tokenizer.read_files(base / "model" / "tokenizer").fingerprint
    assert Tokenizer.load(tmp_path / "run" / "data" / "tokenizer").fingerprint == own
    assert_equal(weights_of(trainer), read_tensors(base / "model" / "model.safetensors"))
    with pytest.raises(ConfigError, match="init_from"):
        prepare_data(config(toy_data(text), "tokenizer.vocab_size=44"), tmp_path / "run", num_workers=1, say=lambda _line: None)


def test_shards_of_another_tokenizer_are_refused(base: Path, toy_text: Path, tmp_path: Path) -> None:
    making = config(toy_data(toy_text), "tokenizer.vocab_size=43")
    prepare_data(making, tmp_path / "other", num_workers=1, say=lambda _line: None)
    other = shards_directory(making, tmp_path / "other")
    bad = config({"shards": str(other)}, f"training.init_from={base}")
    for call in (lambda: opened(bad, tmp_path / "run"), lambda: prepare_data(bad, tmp_path / "run", num_workers=1, say=lambda _line: None)):
        with pytest.raises(ArtefactError, match="the same ids stand for other pieces") as error:
            call()
        assert str(other) in error.value.message
        assert "--train and --dev" in (error.value.hint or "")


def test_a_model_that_was_exchanged_since_the_data_was_made_is_refused(base: Path, toy_text: Path, tmp_path: Path) -> None:
    text = toy_data(toy_text)
    other = tmp_path / "other"
    opened(config(text, "tokenizer.vocab_size=43"), other, train=True)
    model = shutil.copytree(base / "model", tmp_path / "model")
    tuned = config(text, f"training.init_from={model}")
    prepare_data(tuned, tmp_path / "run", num_workers=1, say=lambda _line: None)
    shutil.rmtree(model)
    shutil.copytree(other / "model", model)
    with pytest.raises(ArtefactError, match="the same ids stand for other pieces"):
        opened(tuned, tmp_path / "run")


def test_another_architecture_is_refused_before_any_work(base: Path, toy_text: Path, tmp_path: Path) -> None:
    bad = config(toy_data(toy_text), f"training.init_from={base}", "model.d_model=32", "model.norm=pre", "model.dropout=0.5")
    with pytest.raises(ConfigError, match="model.d_model: 16 -> 32; model.norm: 'post' -> 'pre'") as error:
        opened(bad, tmp_path / "run")
    assert error.value.hint == "Take the model as it is: --set model.d_model=16 --set model.norm=post"
    assert not (tmp_path / "run" / "data").exists()


@pytest.mark.parametrize(("place", "message"), [("nowhere", "does not exist"), ("data", "is not a model but of kind shards")])
def test_what_is_no_model(place: str, message: str, shards: codec.Tree, tmp_path: Path) -> None:
    path = shards["shards"] if place == "data" else tmp_path / place
    with pytest.raises(ArtefactError, match=message):
        open_initial(config(shards, f"training.init_from={path}"))


def test_a_resumed_run_does_not_begin_again(base: Path, toy_text: Path, tmp_path: Path) -> None:
    model = shutil.copytree(base / "model", tmp_path / "model")
    text = toy_data(toy_text)
    first, _ = opened(config(text, f"training.init_from={model}"), tmp_path / "run", train=True)
    shutil.rmtree(model)
    trainer, said = opened(config(text, f"training.init_from={model}", "training.max_steps=6"), tmp_path / "run")
    assert trainer.state.step == 4
    assert_equal(weights_of(trainer), weights_of(first))
    gone = f"warning: {model}: is not there; the run goes on without it"
    assert said == [gone, f"going on from {tmp_path / 'run' / 'checkpoints' / 'step-0000004'}"]
    with pytest.raises(ConfigError, match="training.init_from: "):
        opened(config(text), tmp_path / "run")


def test_without_a_model_nothing_is_opened(shards: codec.Tree) -> None:
    assert open_initial(config(shards)) is None


def test_the_weights_are_not_those_of_the_seed(base: Path, shards: codec.Tree, tmp_path: Path, make_trainer: Any) -> None:
    fresh = weights_of(make_trainer(tmp_path / "fresh"))
    trainer, _ = opened(config(shards, f"training.init_from={base}"), tmp_path / "run")
    assert any(not torch.equal(tensor, fresh[name]) for name, tensor in weights_of(trainer).items())


def test_a_stream_takes_the_tokenizer_of_the_model(base: Path, toy_text: Path, tmp_path: Path) -> None:
    stream = {**toy_data(toy_text), "stream": True}
    trainer, said = opened(config(stream, f"training.init_from={base}"), tmp_path / "run", train=True)
    assert said == [f"beginning with the weights of {base / 'model'}"]
    assert trainer.data.tokenizer.fingerprint == Tokenizer.load(base / "model").fingerprint
    making = config(toy_data(toy_text), "tokenizer.vocab_size=43")
    prepare_data(making, tmp_path / "other", num_workers=1, say=lambda _line: None)
    for data in (
        {**stream, "tokenizer": str(tmp_path / "other" / "data" / "tokenizer")},
        {**toy_data(toy_text), "tokenizer": str(tmp_path / "other" / "data" / "tokenizer")},
    ):
        with pytest.raises(ArtefactError, match="the same ids stand for other pieces"):
            opened(config(data, f"training.init_from={base}"), tmp_path / "refused")


def test_an_optimizer_that_is_kept_goes_on_from_the_weights_that_it_has_made(base: Path, shards: codec.Tree, tmp_path: Path) -> None:
    """The model's file of a run with a moving average holds the average."""
    checkpoint = base / "checkpoints" / "step-0000004"
    trainer, _ = opened(
        config(shards, f"training.init_from={checkpoint}", "training.keep_optimizer=true", "training.ema_decay=0.5"), tmp_path / "run"
    )
    assert_equal(weights_of(trainer), read_tensors(checkpoint / "trained.safetensors"))
    assert trainer.updater.ema is not None
    assert_equal(dict(trainer.updater.ema), read_tensors(checkpoint / "model.safetensors"))


def test_the_model_that_a_run_begins_with_is_what_it_has_to_beat(base: Path, shards: codec.Tree, tmp_path: Path) -> None:
    options = [f"training.init_from={base}", "optim.lr=3", "optim.warmup_steps=0", "checkpoint.keep_last=1", "validation.every_steps=2"]
    opened(config(shards, *options), tmp_path / "worse", train=True)
    records = read_metrics(tmp_path / "worse" / "metrics.jsonl")
    found = [(record["step"], record["is_best"]) for record in records if record["kind"] == "valid"]
    assert found == [(0, True), (2, False), (4, False)]
    assert records[-1]["handed_over"] == 0
    assert_equal(read_tensors(tmp_path / "worse" / "model" / "model.safetensors"), read_tensors(base / "model" / "model.safetensors"))
    forgotten = [*options, "checkpoint.keep_best=0"]
    opened(config(shards, *forgotten), tmp_path / "forgotten", train=True)
    assert read_metrics(tmp_path / "forgotten" / "metrics.jsonl")[-1]["handed_over"] == 4, (
        "the start is not kept then, and not said to be handed over"
    )
    opened(config(shards, f"training.init_from={base}", "training.max_steps=8"), tmp_path / "better", train=True)
    assert [record["handed_over"] for record in read_metrics(tmp_path / "better" / "metrics.jsonl") if record["kind"] == "end"] == [8]


def test_a_model_that_has_moved_is_not_needed_to_go_on(base: Path, toy_text: Path, tmp_path: Path) -> None:
    model = shutil.copytree(base / "model", tmp_path / "model")
    text = toy_data(toy_text)
    opened(config(text, f"training.init_from={model}"), tmp_path / "run", train=True)
    model.rename(tmp_path / "moved")
    for place in (tmp_path / "elsewhere", tmp_path / "run" / ".." / "model"):
        trainer, said = opened(config(text, f"training.init_from={place}"), tmp_path / "run")
        assert trainer.state.step == 4
        assert f"warning: {place}: is not there; the run goes on without it" in said


def test_a_model_that_does_not_fit_into_the_memory_is_told(shards: codec.Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("mtkit.training.initial.Transformer", refuse)
    with pytest.raises(ResourceError, match="the weights of the model do not fit into the memory of cpu") as error:
        opened(config(shards), tmp_path / "run")
    assert "model.d_model, now 16" in (error.value.hint or "")
