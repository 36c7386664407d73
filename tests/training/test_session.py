import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtkit import config as codec
from mtkit.distributed import World
from mtkit.errors import ArtefactError, ConfigError, MTKitError, UsageError
from mtkit.training.config import TrainConfig
from mtkit.training.prepare import prepare_data, shards_directory
from mtkit.training.session import open_session
from mtkit.training.signals import StopRequest
from mtkit.training.trainer import Trainer
from tests.training.toy import TOY, toy_data


def config(data: codec.Tree, *overrides: str) -> TrainConfig:
    layers = [codec.Layer(name="toy", data={**TOY, "data": data}), codec.Layer(name="short", data={"training": {"max_steps": 4}})]
    return codec.resolve(TrainConfig, layers + [codec.Layer(name="test", data=codec.parse_override(text)) for text in overrides]).config


@contextlib.contextmanager
def session(config: TrainConfig, output: Path, *, resume: bool = True, said: list[str] | None = None) -> Iterator[Trainer]:
    say = (said if said is not None else []).append
    with open_session(config, output, device_name="cpu", world=World(), num_workers=1, resume=resume, stop=StopRequest(), say=say) as opened:
        yield opened


def train(config: TrainConfig, output: Path, **options: Any) -> list[str]:
    """Train to the end; returns what was said."""
    said: list[str] = []
    with session(config, output, said=said, **options) as opened:
        for _ in opened.train():
            pass
    return said


def make_shards(config: TrainConfig, output: Path) -> Path:
    prepare_data(config, output, num_workers=1, say=lambda _line: None)
    return shards_directory(config, output)


@pytest.fixture
def data(toy_shards: Path, tmp_path: Path) -> codec.Tree:
    """Shards as a copy that a test may change."""
    return {"shards": str(shutil.copytree(toy_shards, tmp_path / "shards"))}


def test_from_text_to_a_model_and_on(toy_text: Path, tmp_path: Path) -> None:
    text = toy_data(toy_text)
    said = train(config(text), tmp_path / "run")
    assert said[0].startswith("training a tokenizer")
    assert (tmp_path / "run" / "model" / "MANIFEST.json").is_file()
    said = train(config(text, "training.max_steps=6"), tmp_path / "run")
    assert said == [f"going on from {tmp_path / 'run' / 'checkpoints' / 'step-0000004'}"], "the data is there already"
    with session(config(text, "training.max_steps=6"), tmp_path / "run") as opened:
        assert opened.state.step == 6
        assert opened.data.source.num_pairs == 120
        assert len(opened.data.dev.src_lines) == 15


def test_a_run_is_not_overwritten(data: codec.Tree, tmp_path: Path) -> None:
    train(config(data), tmp_path / "run", resume=False)
    before = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    with pytest.raises(UsageError, match="holds a run already") as error, session(config(data), tmp_path / "run", resume=False):
        pass
    assert "--no-resume" in (error.value.hint or "")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before


def test_another_config_is_refused_before_anything_is_done(data: codec.Tree, tmp_path: Path) -> None:
    train(config(data), tmp_path / "run")
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="model.dropout: 0.3 -> 0.2"), session(config(data, "model.dropout=0.2"), tmp_path / "run"):
        pass
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    train(config(data, "training.max_steps=5"), tmp_path / "run")


def test_other_data_under_the_same_name_is_refused(data: codec.Tree, toy_text: Path, tmp_path: Path) -> None:
    train(config(data), tmp_path / "run")
    text = Path(shutil.copytree(toy_text, tmp_path / "text"))
    for side, word in (("en", "one"), ("de", "eins")):
        (text / f"train.{side}").write_text((text / f"train.{side}").read_text() + word + "\n")
    other = make_shards(config(toy_data(text)), tmp_path / "other")
    shutil.rmtree(data["shards"])
    shutil.copytree(other, data["shards"])
    with (
        pytest.raises(ArtefactError, match="was trained on data with the fingerprint"),
        session(config(data, "training.max_steps=9"), tmp_path / "run"),
    ):
        pass


def test_two_sessions_exclude_each_other(data: codec.Tree, tmp_path: Path) -> None:
    with session(config(data), tmp_path / "run"):
        with pytest.raises(MTKitError, match="is in use by process"), session(config(data), tmp_path / "run"):
            pass
        with session(config(data), tmp_path / "another"):
            pass
    with session(config(data), tmp_path / "run"):
        pass


def test_leftovers_are_removed_and_damage_is_said(data: codec.Tree, tmp_path: Path) -> None:
    train(config(data, "checkpoint.every_steps=2"), tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / ".step-0000004.tmp-12-0123abcd").mkdir()
    (checkpoints / "my notes").mkdir()
    weights = checkpoints / "step-0000004" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x99")
    said: list[str] = []
    with session(config(data, "checkpoint.every_steps=2"), tmp_path / "run", said=said) as opened:
        assert opened.state.step == 2
    assert sorted(path.name for path in checkpoints.iterdir()) == ["my notes", "step-0000002", "step-0000004"]
    assert said[0].startswith("warning: passed over a damaged checkpoint: ")
    assert "step-0000004" in said[0]
    assert said[1] == f"going on from {checkpoints / 'step-0000002'}"


def test_one_matrix_for_two_vocabularies_of_one_size_is_refused(toy_text: Path, tmp_path: Path) -> None:
    separate = ("tokenizer.joint=false", "tokenizer.vocab_size=30", "model.tie_embeddings=decoder")
    shards = make_shards(config(toy_data(toy_text), *separate), tmp_path / "text")
    with session(config({"shards": str(shards)}, "model.tie_embeddings=decoder"), tmp_path / "tied-twice") as opened:
        model = opened.updater.model
        assert model.src_vocab_size == model.tgt_vocab_size == 30
    with (
        pytest.raises(ConfigError, match="model.tie_embeddings = three-way needs one vocabulary for both languages, but tokenizer.joint is false"),
        session(config({"shards": str(shards)}), tmp_path / "run"),
    ):
        pass
    with pytest.raises(ConfigError, match="tokenizer.joint is false"):
        config(toy_data(toy_text), "tokenizer.joint=false")


def test_a_stream_is_trained_on_and_gone_on_with(toy_text: Path, toy_shards: Path, tmp_path: Path) -> None:
    text = {**toy_data(toy_text), "stream": True, "tokenizer": str(toy_shards)}
    assert train(config(text), tmp_path / "run") == []
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints", "config.json", "metrics.jsonl", "model", "run.lock"]
    assert train(config(text, "training.max_steps=6"), tmp_path / "run") == [f"going on from {tmp_path / 'run' / 'checkpoints' / 'step-0000004'}"]
    with pytest.raises(ConfigError, match="data.stream: True -> False"), session(config(toy_data(toy_text)), tmp_path / "run"):
        pass
    for change in ("preprocess.filters.max_length=7", f"data.dev={[str(toy_text / 'train.en'), str(toy_text / 'train.de')]}"):
        with pytest.raises(ArtefactError, match="was trained on data with the fingerprint"), session(config(text, change), tmp_path / "run"):
            pass


def test_processes_that_do_not_agree_do_not_train(data: codec.Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D8."""
    monkeypatch.setattr("mtkit.training.session.all_gather_lines", lambda lines, *_: [lines, [lines[0], "f" * 64, lines[2]]])
    with pytest.raises(ConfigError, match="process 1 has another data than process 0"), session(config(data), tmp_path / "run"):
        pass
