import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtkit import config as codec
from mtkit.distributed import World
from mtkit.errors import ArtefactError, ConfigError, DataError, MTKitError, UsageError
from mtkit.training.config import TrainConfig
from mtkit.training.prepare import prepare_data, shards_directory
from mtkit.training.session import open_session
from mtkit.training.signals import StopRequest
from mtkit.training.trainer import Trainer
from tests.training.toy import GERMAN, TOY, toy_data


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


@pytest.mark.parametrize(("name", "problem"), [("MANIFEST.json", "is not valid JSON"), ("notes.txt", "no MANIFEST.json")])
def test_something_else_in_the_place_of_the_model_is_refused_before_anything_is_done(
    data: codec.Tree, tmp_path: Path, name: str, problem: str
) -> None:
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    (model / name).write_text("mine")
    with pytest.raises(ArtefactError, match=f"model.*{problem}") as error:
        train(config(data), tmp_path / "run")
    assert "choose another output" in (error.value.hint or "")
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["model", name]
    (model / name).unlink()
    train(config(data), tmp_path / "run")


def test_another_config_is_refused_before_anything_is_done(data: codec.Tree, tmp_path: Path) -> None:
    train(config(data), tmp_path / "run")
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="model.dropout: 0.3 -> 0.2"), session(config(data, "model.dropout=0.2"), tmp_path / "run"):
        pass
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    train(config(data, "training.max_steps=5"), tmp_path / "run")


@pytest.mark.parametrize(
    ("data_keys", "override", "kind", "message"),
    [
        ({"train": ["nowhere.en", "nowhere.de"]}, "seed=1", DataError, "nowhere.en: cannot be read"),
        ({}, "data.dev=[]", UsageError, "no dev set was given"),
        ({}, "training.init_from=nowhere", ArtefactError, "nowhere: does not exist"),
        ({}, "tokenizer.vocab_size=3000", ConfigError, "vocab_size 3000 is too large"),
        ({"stream": True, "tokenizer": "nowhere"}, "seed=1", ArtefactError, "nowhere: is not a tokenizer"),
        ({"train": [], "dev": [], "shards": "nowhere"}, "seed=1", ArtefactError, "nowhere"),
        ({"train": [], "dev": [], "shards": "TOY"}, "batch.max_tokens=1", DataError, "none of the 120 training pairs fits"),
    ],
)
def test_what_cannot_begin_leaves_nothing(
    toy_text: Path, toy_shards: Path, tmp_path: Path, data_keys: codec.Tree, override: str, kind: type[MTKitError], message: str
) -> None:
    (tmp_path / "there").mkdir()
    places = {key: str(toy_shards) for key, value in data_keys.items() if value == "TOY"}
    bad = config({**toy_data(toy_text), **data_keys, **places}, override)
    for output in (tmp_path / "new" / "run", tmp_path / "there"):
        with pytest.raises(kind, match=message):
            train(bad, output)
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_what_is_refused_later_does_not_change_the_config_of_the_run(toy_text: Path, tmp_path: Path) -> None:
    text = toy_data(toy_text)
    train(config(text), tmp_path / "run")
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="was made from other text"), session(config(text, "tokenizer.vocab_size=43"), tmp_path / "run"):
        pass
    with session(config(text, "training.max_steps=9"), tmp_path / "run"):
        pass
    assert (tmp_path / "run" / "config.json").read_bytes() == before, "nothing was trained with the others"


TRANSLATE = ("validation.translate=true", "validation.metric=chrf")
CHINESE = "零一二三四五六七八九"


def test_a_language_for_which_bleu_cannot_be_computed_is_refused_before_any_work(
    toy_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "MeCab", None)
    monkeypatch.setitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", None)
    with pytest.raises(MTKitError, match="no validation could be scored: BLEU's tokenizer ja-mecab") as caught:
        train(config(toy_data(toy_text), "data.tgt_lang=ja", *TRANSLATE), tmp_path / "run")
    assert "sacrebleu[ja]" in (caught.value.hint or "")
    assert not (tmp_path / "run").exists()
    train(config(toy_data(toy_text), "data.tgt_lang=ja"), tmp_path / "run")  # validates by the loss


def test_text_without_spaces_whose_language_is_not_named_is_told(toy_text: Path, tmp_path: Path) -> None:
    """fairseq 4689: BLEU 0 of good Chinese, and the best checkpoint chosen by it."""
    text = Path(shutil.copytree(toy_text, tmp_path / "text"))
    for name in ("train.de", "dev.de"):
        lines = (text / name).read_text().split("\n")[:-1]
        (text / name).write_text("".join("".join(CHINESE[GERMAN.index(word)] for word in line.split()) + "\n" for line in lines))
    warnings = []
    for lang in ("none", "zh"):
        said = train(config(toy_data(text), f"data.tgt_lang={lang}", *TRANSLATE, "tokenizer.vocab_size=40"), tmp_path / lang)
        warnings.append([line for line in said if "written without spaces" in line])
    assert [len(lines) for lines in warnings] == [1, 0]
    assert "--tgt-lang zh" in warnings[0][0]


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
    named = Path(shutil.copytree(toy_shards, tmp_path / "named"))
    text = {**toy_data(toy_text), "stream": True, "tokenizer": str(named)}
    assert train(config(text), tmp_path / "run") == []
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints", "config.json", "metrics.jsonl", "model"]
    assert train(config(text, "training.max_steps=6"), tmp_path / "run") == [f"going on from {tmp_path / 'run' / 'checkpoints' / 'step-0000004'}"]
    shutil.rmtree(named)
    assert train(config(text, "training.max_steps=7"), tmp_path / "run") == [
        f"warning: {named}: no longer there; the run goes on with its own copy",
        f"going on from {tmp_path / 'run' / 'checkpoints' / 'step-0000006'}",
    ]
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
