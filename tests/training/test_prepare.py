import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from mtkit import config as codec
from mtkit.artefacts import MANIFEST_NAME
from mtkit.data.corpus import parse_corpus
from mtkit.data.preprocess import PreprocessConfig, preprocess
from mtkit.data.shards import ShardSet
from mtkit.data.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from mtkit.errors import ArtefactError, ConfigError, DataError, UsageError
from mtkit.training import prepare
from mtkit.training.config import TrainConfig
from mtkit.training.prepare import open_data, pair_order, prepare_data, shards_directory, stored_dev_set
from tests.training.toy import TOY, toy_data


def config(text: Path, *overrides: str) -> TrainConfig:
    layers = [codec.Layer(name="toy", data={**TOY, "data": toy_data(text)})]
    return codec.resolve(TrainConfig, layers + [codec.Layer(name="test", data=codec.parse_override(override)) for override in overrides]).config


def make(text: Path, output: Path, *overrides: str) -> list[str]:
    """Prepare the data; returns what was said."""
    said: list[str] = []
    prepare_data(config(text, *overrides), output, num_workers=1, say=said.append)
    return said


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.fixture
def text(toy_text: Path, tmp_path: Path) -> Path:
    """The toy text as a copy that a test may change."""
    return Path(shutil.copytree(toy_text, tmp_path / "text"))


def append(path: Path, line: str) -> None:
    path.write_text(path.read_text() + line + "\n")


def test_text_becomes_a_tokenizer_and_shards(text: Path, tmp_path: Path) -> None:
    said = make(text, tmp_path / "run")
    assert said[0] == "training a tokenizer of 44 pieces"
    assert "120" in said[-1]
    shards = ShardSet.open(tmp_path / "run" / "data" / "shards")
    dev = stored_dev_set(shards)
    assert shards.num_pairs == 120
    assert shards.tokenizer.src_vocab_size == 44
    assert shards.tokenizer.fingerprint == Tokenizer.load(tmp_path / "run" / "data" / "tokenizer").fingerprint
    src_lines, tgt_lines = ((text / f"train.{side}").read_text().split("\n")[:-1] for side in ("en", "de"))
    assert shards.tokenizer.decode([shards.src(5).tolist()], "src") == [src_lines[5]]
    assert shards.tokenizer.decode([shards.tgt(5).tolist()], "tgt") == [tgt_lines[5]]
    assert list(dev.src_lines) == (text / "dev.en").read_text().split("\n")[:-1]
    assert list(dev.tgt_lines) == (text / "dev.de").read_text().split("\n")[:-1]


def test_the_second_time_nothing_is_written(text: Path, tmp_path: Path) -> None:
    make(text, tmp_path / "run")
    before = snapshot(tmp_path / "run")
    assert make(text, tmp_path / "run") == []
    assert snapshot(tmp_path / "run") == before


def test_a_moved_file_is_the_same_text(text: Path, tmp_path: Path) -> None:
    make(text, tmp_path / "run")
    before = snapshot(tmp_path / "run")
    text.rename(tmp_path / "elsewhere")
    assert make(tmp_path / "elsewhere", tmp_path / "run") == []
    assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("change", "override", "difference"),
    [
        ("train.de", "seed=1", "train.de holds other text"),
        ("dev.en", "seed=1", "dev.en holds other text"),
        (None, "tokenizer.vocab_size=43", "tokenizer.vocab_size: 44 -> 43"),
        (None, "preprocess.filters.max_length=5", "preprocess.filters.max_length: "),
        (None, "data.src_lang=en", "languages: "),
    ],
)
def test_other_text_or_settings_do_not_pass_for_the_old(text: Path, tmp_path: Path, change: str | None, override: str, difference: str) -> None:
    make(text, tmp_path / "run")
    before = snapshot(tmp_path / "run")
    if change is not None:
        append(text / change, "drei")
    with pytest.raises(ConfigError, match="was made from other text or with another config: ") as error:
        make(text, tmp_path / "run", override)
    assert difference in error.value.message
    assert "; " not in error.value.message, "one difference, one line"
    assert snapshot(tmp_path / "run") == before


def test_sides_that_change_places_are_other_text(text: Path, tmp_path: Path) -> None:
    make(text, tmp_path / "run")
    swapped = [f"data.{name}=['{text}/{name}.de', '{text}/{name}.en']" for name in ("train", "dev")]
    with pytest.raises(ConfigError, match="train: "):
        make(text, tmp_path / "run", *swapped)


def test_what_an_unfinished_attempt_left_is_used_for_the_same_text_only(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(prepare, "preprocess", stop)
        with pytest.raises(KeyboardInterrupt):
            make(text, tmp_path / "run")
    directory = tmp_path / "run" / "data"
    first = (directory / "tokenizer" / MANIFEST_NAME).read_bytes()
    assert not (directory / "shards").exists()
    same = make(text, shutil.copytree(tmp_path / "run", tmp_path / "same"))
    assert not any(line.startswith("training a tokenizer") for line in same)
    assert (tmp_path / "same" / "data" / "tokenizer" / MANIFEST_NAME).read_bytes() == first
    for _ in range(30):
        append(text / "train.en", "eleven twelve")
        append(text / "train.de", "zwölf elf")
    other = make(text, tmp_path / "run")
    assert other[0].startswith("training a tokenizer")
    assert (directory / "tokenizer" / MANIFEST_NAME).read_bytes() != first
    make(text, tmp_path / "fresh")
    assert ShardSet.open(directory / "shards").fingerprint == ShardSet.open(tmp_path / "fresh" / "data" / "shards").fingerprint
    assert make(text, tmp_path / "run") == []


def test_shards_that_are_named_are_used_as_they_are(toy_shards: Path, tmp_path: Path) -> None:
    named = codec.from_dict(TrainConfig, {"data": {"shards": str(toy_shards)}})
    prepare_data(named, tmp_path / "run", num_workers=1, say=lambda _line: None)
    assert shards_directory(named, tmp_path / "run") == toy_shards
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "kind", "message"),
    [
        ("data.train=[]", UsageError, "no training data was given"),
        ("data.dev=[]", UsageError, "no dev set was given"),
        ("data.train=['nowhere.en', 'nowhere.de']", DataError, "nowhere.en"),
        ("data.dev=['nowhere.en', 'nowhere.de']", DataError, "nowhere.en"),
        ("tokenizer.vocab_size=3000", ConfigError, "vocab_size"),
    ],
)
def test_what_cannot_be_prepared(text: Path, tmp_path: Path, override: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make(text, tmp_path / "run", override)
    make(text, tmp_path / "run")


def test_source_and_target_of_other_lengths(text: Path, tmp_path: Path) -> None:
    append(text / "train.en", "one")
    with pytest.raises(DataError, match=r"train\.en.*train\.de"):
        make(text, tmp_path / "run")
    assert not (tmp_path / "run").exists(), "before a tokenizer is trained"


def shard_set(text: Path, output: Path, *, dev: bool = True) -> Path:
    held_out = {"dev": parse_corpus([str(text / "dev.en"), str(text / "dev.de")])} if dev else {}
    train = parse_corpus([str(text / "train.en"), str(text / "train.de")])
    tokenizer = Tokenizer.load(output.parent / "run" / "data" / "tokenizer")
    preprocess(train, held_out=held_out, tokenizer=tokenizer, output=output, config=PreprocessConfig())
    return output


def test_shards_without_a_usable_dev_set_are_refused(text: Path, tmp_path: Path) -> None:
    make(text, tmp_path / "run")
    with pytest.raises(ArtefactError, match="holds no dev set"):
        stored_dev_set(ShardSet.open(shard_set(text, tmp_path / "without", dev=False)))
    (text / "dev.en").write_text("one\n \n\n")
    (text / "dev.de").write_text("eins\nzwei\n\n")
    dev = stored_dev_set(ShardSet.open(shard_set(text, tmp_path / "blank")))
    assert (list(dev.src_lines), list(dev.tgt_lines)) == (["one"], ["eins"]), "a blank side takes the other one with it"


def test_the_description_of_the_source_is_complete(text: Path, tmp_path: Path) -> None:
    make(text, tmp_path / "run", "data.src_lang=en")
    source = json.loads((tmp_path / "run" / "data" / "source.json").read_text())
    assert source["files"].keys() == {str(text / f"{name}.{side}") for name in ("train", "dev") for side in ("en", "de")}
    assert all(len(fingerprint) == 64 for fingerprint in source["files"].values())
    assert source["languages"] == ["en", None]


def two_corpora(text: Path) -> str:
    """The toy text and a second corpus, its first 30 pairs; gives the config key for both."""
    for side in ("en", "de"):
        (text / f"more.{side}").write_text("".join(f"{line}\n" for line in (text / f"train.{side}").read_text().split("\n")[:30]))
    return f"data.train={[str(text / name) for name in ('train.en', 'train.de', 'more.en', 'more.de')]}"


@pytest.mark.parametrize(
    ("override", "shares"),
    [("data.weights=[1, 3]", (0.25, 0.75)), ("data.temperature=2", (2 / 3, 1 / 3)), ("data.temperature=1", (0.8, 0.2))],
)
def test_corpora_are_drawn_by_their_weights(text: Path, tmp_path: Path, override: str, shares: tuple[float, ...]) -> None:
    key = two_corpora(text)
    make(text, tmp_path / "run", key, override)
    shards = ShardSet.open(tmp_path / "run" / "data" / "shards")
    assert shards.corpora == (120, 30)
    assert pair_order(config(text, key), shards) is None
    order = pair_order(config(text, key, override), shards)
    assert order is not None
    pool = order.pool(0, 0)
    assert np.mean(pool < 120) == pytest.approx(shares[0], abs=1 / 150)
    assert len(pool) == 150


def test_weights_that_do_not_fit_are_refused(text: Path, tmp_path: Path) -> None:
    key = two_corpora(text)
    with pytest.raises(ConfigError, match=r"data\.weights has 3 numbers, but data\.train is made of 2 corpora"):
        make(text, tmp_path / "run", key, "data.weights=[1, 2, 3]")
    assert not (tmp_path / "run" / "data").exists()
    make(text, tmp_path / "run", key)
    shards = ShardSet.open(tmp_path / "run" / "data" / "shards")
    with pytest.raises(ConfigError, match=r"data\.weights has 1 numbers, but .*shards is made of 2 corpora"):
        pair_order(config(text, key, "data.weights=[1]"), shards)
    with pytest.raises(ConfigError, match=r"too little would be drawn from corpus 1 of 2: .* 0\.15 pairs in a pool"):
        pair_order(config(text, key, "data.weights=[1, 999]"), shards)


def test_a_corpus_of_which_nothing_is_left_is_refused(text: Path, tmp_path: Path) -> None:
    key = two_corpora(text)
    (text / "more.en").write_text("\n" * 30)
    make(text, tmp_path / "run", key)
    shards = ShardSet.open(tmp_path / "run" / "data" / "shards")
    assert shards.corpora == (120, 0)
    with pytest.raises(ConfigError, match="nothing is left of corpus 2 of 2"):
        pair_order(config(text, key, "data.weights=[1, 1]"), shards)


def test_text_from_a_pipe_is_refused_before_it_is_read(text: Path, tmp_path: Path) -> None:
    os.mkfifo(text / "pipe.en")
    with pytest.raises(UsageError, match=r"pipe\.en .*train\.de: is a pipe, which can be read only once") as caught:
        make(text, tmp_path / "run", f"data.train={[str(text / 'pipe.en'), str(text / 'train.de')]}")
    assert "mtkit preprocess" in (caught.value.hint or "")
    assert "--stream --tokenizer DIR" in (caught.value.hint or "")
    assert not (tmp_path / "run" / "data").exists()


def test_a_tokenizer_that_is_named_is_used(text: Path, tmp_path: Path) -> None:
    make(text, tmp_path / "first", "tokenizer.vocab_size=43")
    for number, place in enumerate(("tokenizer", "shards")):
        option = f"data.tokenizer={tmp_path / 'first' / 'data' / place}"
        said = make(text, tmp_path / f"run{number}", option)
        assert not any(line.startswith("training a tokenizer") for line in said)
        shards = ShardSet.open(tmp_path / f"run{number}" / "data" / "shards")
        assert shards.tokenizer.src_vocab_size == 43
        assert make(text, tmp_path / f"run{number}", option) == []
    make(text, tmp_path / "other", "tokenizer.vocab_size=42")
    with pytest.raises(ConfigError, match=r"tokenizer\.fingerprint: "):
        make(text, tmp_path / "run0", f"data.tokenizer={tmp_path / 'other' / 'data' / 'tokenizer'}")


def test_a_tokenizer_or_text_that_is_gone_is_not_missed_once_the_shards_are_there(text: Path, toy_shards: Path, tmp_path: Path) -> None:
    named = Path(shutil.copytree(toy_shards, tmp_path / "named"))
    option = f"data.tokenizer={named}"
    make(text, tmp_path / "run", option)
    shutil.rmtree(named)
    assert make(text, tmp_path / "run", option) == [f"warning: {named}: no longer there; the run goes on with its own copy"]
    with pytest.raises(ArtefactError, match="named: is not a tokenizer and holds none: it does not exist"):
        make(text, tmp_path / "new", option)
    (text / "train.en").unlink()
    (said,) = make(text, tmp_path / "run", option)
    assert said.startswith(f"warning: {text / 'train.en'} {named}: no longer there")
    append(text / "dev.en", "one")
    append(text / "dev.de", "eins")
    with pytest.raises(ConfigError, match=r" config: dev: \S+dev\.en holds other text; dev: \S+dev\.de holds other text\n"):
        make(text, tmp_path / "run", option)
    with pytest.raises(DataError, match=r"train\.en: cannot be read: No such file"):
        make(text, tmp_path / "new", f"data.tokenizer={toy_shards}")


def test_text_of_another_name_that_is_not_there_is_not_taken_for_the_old(text: Path, tmp_path: Path) -> None:
    make(text, tmp_path / "run")
    with pytest.raises(ConfigError, match="train: nowhere.en holds other text"):
        make(text, tmp_path / "run", f"data.train=['nowhere.en', '{text}/train.de']")


@pytest.mark.parametrize("is_named_first", [False, True])
def test_a_tokenizer_of_another_kind_is_one_difference(text: Path, toy_shards: Path, tmp_path: Path, is_named_first: bool) -> None:
    named, learnt = (f"data.tokenizer={toy_shards}",), ()
    make(text, tmp_path / "run", *(named if is_named_first else learnt))
    with pytest.raises(ConfigError) as caught:
        make(text, tmp_path / "run", *(learnt if is_named_first else named))
    given = f"'given, {Tokenizer.load(toy_shards).fingerprint[:16]}'"
    change = f"{given} -> 'learnt from the text'" if is_named_first else f"'learnt from the text' -> {given}"
    assert caught.value.message.endswith(f" config: tokenizer: {change}")


def test_a_tokenizer_that_was_learnt_is_no_copy_of_one_that_is_named(text: Path, tmp_path: Path) -> None:
    make(text, tmp_path / "run")
    with pytest.raises(ArtefactError, match="nowhere: is not a tokenizer and holds none: it does not exist"):
        make(text, tmp_path / "run", "data.tokenizer=nowhere")


@pytest.mark.parametrize(
    ("spoil", "override"),
    [
        ("one eins\n", "data.train=['TEXT/bad.tsv']"),
        ("one\t\n" * 40, "data.train=['TEXT/bad.tsv']"),
        ("one\teins\n" * 40 + "two zwei\n", "data.dev=['TEXT/bad.tsv']"),
        ("", "tokenizer.vocab_size=3000"),
    ],
)
@pytest.mark.parametrize("is_named", [False, True])
def test_unusable_text_leaves_nothing_behind(text: Path, toy_shards: Path, tmp_path: Path, spoil: str, override: str, is_named: bool) -> None:
    (text / "bad.tsv").write_text(spoil)
    named = [f"data.tokenizer={toy_shards}"] if is_named and spoil else []
    (tmp_path / "run").mkdir()
    with pytest.raises((ConfigError, DataError)):
        make(text, tmp_path / "run", override.replace("TEXT", str(text)), *named)
    assert list((tmp_path / "run").rglob("*")) == []


@pytest.fixture
def streamed(text: Path, toy_shards: Path) -> tuple[str, ...]:
    """Overrides for a stream of the toy text."""
    return "data.stream=true", f"data.tokenizer={toy_shards}"


def test_of_a_stream_nothing_is_made(text: Path, tmp_path: Path, toy_shards: Path, streamed: tuple[str, ...]) -> None:
    assert make(text, tmp_path / "run", *streamed) == []
    assert not (tmp_path / "run").exists()
    data, shards = (
        open_data(config(text, *streamed), tmp_path / "run"),
        open_data(codec.from_dict(TrainConfig, {**TOY, "data": {"shards": str(toy_shards)}}), tmp_path),
    )
    assert (list(data.dev.src_lines), list(data.dev.tgt_lines)) == (list(shards.dev.src_lines), list(shards.dev.tgt_lines))
    assert data.tokenizer.fingerprint == shards.tokenizer.fingerprint
    pool, expected = data.source.read(0, 0), shards.source.read(0, 0)
    assert np.array_equal(pool.src_ids, expected.src_ids)
    assert np.array_equal(pool.tgt_ids, expected.tgt_ids)


def test_a_dev_set_of_the_other_direction_is_refused_before_any_work(text: Path, tmp_path: Path, streamed: tuple[str, ...]) -> None:
    swapped = f"data.dev=['{text}/dev.de', '{text}/dev.en']"
    for overrides in ((swapped,), (swapped, *streamed)):
        with pytest.raises(UsageError, match=r"dev goes from \.de to \.en .*, but the training corpus goes from \.en to \.de"):
            make(text, tmp_path / "run", *overrides)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", ["train", "dev", "tokenizer", "filters", "nothing"])
def test_the_fingerprint_of_a_stream_covers_all_of_its_data(
    text: Path, tmp_path: Path, other_tokenizer: Path, streamed: tuple[str, ...], change: str
) -> None:
    first = open_data(config(text, *streamed), tmp_path).fingerprint
    options = streamed
    if change in ("train", "dev"):
        (text / f"{change}.en").write_text("two " + (text / f"{change}.en").read_text())
    elif change == "tokenizer":
        options = (*streamed, f"data.tokenizer={other_tokenizer}")
    elif change == "filters":
        options = (*streamed, "preprocess.filters.max_length=9")
    assert (open_data(config(text, *options), tmp_path).fingerprint == first) == (change == "nothing")


@pytest.fixture(scope="session")
def other_tokenizer(toy_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("other")
    make(toy_text, output, "tokenizer.vocab_size=41")
    return output / "data" / "tokenizer"


def test_what_cannot_be_streamed(text: Path, tmp_path: Path, streamed: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="a stream needs a tokenizer") as error:
        make(text, tmp_path / "run", streamed[0])
    assert "mtkit tokenizer train" in (error.value.hint or "")
    with pytest.raises(UsageError, match="stdin cannot be both the training text and the dev set"):
        make(text, tmp_path / "run", *streamed, "data.train=['-']", "data.dev=['-']")
    named = config(text, *streamed, "data.train=['-']")
    with pytest.raises(UsageError, match="stdin: is a pipe, which one process only can read, but each of the 2 reads the whole stream"):
        prepare_data(named, tmp_path / "run", num_workers=1, world_size=2, say=lambda _line: None)
    prepare_data(config(text, *streamed), tmp_path / "run", num_workers=1, world_size=2, say=lambda _line: None)
    (text / "dev.en").write_text("\n" * 15)
    with pytest.raises(DataError, match=r"dev\.en .*dev\.de: holds no pair with text on both sides, so there is no dev set"):
        open_data(config(text, *streamed), tmp_path / "run")


def test_a_tokenizer_is_not_needed_twice_for_a_pipe(text: Path, tmp_path: Path, toy_shards: Path) -> None:
    os.mkfifo(text / "pipe.tsv")
    pairs = zip(*((text / f"train.{side}").read_text().split("\n")[:-1] for side in ("en", "de")), strict=True)
    writer = threading.Thread(target=(text / "pipe.tsv").write_text, args=("".join(f"{src}\t{tgt}\n" for src, tgt in pairs),))
    writer.start()
    make(text, tmp_path / "run", f"data.train=['{text / 'pipe.tsv'}']", f"data.tokenizer={toy_shards}")
    writer.join()
    assert ShardSet.open(tmp_path / "run" / "data" / "shards").num_pairs == 120


def test_a_dev_set_without_text_is_refused_before_any_work(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "train_tokenizer", lambda *_: pytest.fail("trained a tokenizer"))
    (text / "dev.en").write_text("\n" * 15)
    with pytest.raises(DataError, match=r"dev\.en .*dev\.de: holds no pair with text on both sides, so there is no dev set"):
        make(text, tmp_path / "run")
    assert not (tmp_path / "run" / "data").exists()


def test_a_tokenizer_of_an_unfinished_attempt_can_be_named_as_the_one_to_take(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(prepare, "preprocess", lambda *_args, **_options: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make(text, tmp_path / "run")
    place = tmp_path / "run" / "data" / "tokenizer"
    learnt = Tokenizer.load(place).fingerprint
    make(text, tmp_path / "run", f"data.tokenizer={place}")
    assert ShardSet.open(tmp_path / "run" / "data" / "shards").tokenizer.fingerprint == Tokenizer.load(place).fingerprint == learnt


def test_a_dev_set_that_is_named_stands_for_that_of_the_shards(text: Path, tmp_path: Path) -> None:
    make(text, tmp_path / "run")
    (text / "new.en").write_text("one two\n\nthree\n")
    (text / "new.de").write_text("zwei eins\nnull\ndrei\n")
    named = {"dev": [str(text / "new.en"), str(text / "new.de")]}
    found = {}
    for name, data in (
        ("stored", {"shards": str(tmp_path / "run" / "data" / "shards")}),
        ("named", {"shards": str(tmp_path / "run" / "data" / "shards"), **named}),
        ("without", {"shards": str(shard_set(text, tmp_path / "without", dev=False)), **named}),
    ):
        one = codec.resolve(TrainConfig, [codec.Layer(name="toy", data={**TOY, "data": data})]).config
        prepare_data(one, tmp_path / "other", num_workers=1, say=lambda _line: None)
        found[name] = open_data(one, tmp_path / "other")
    assert len(found["stored"].dev.src_lines) == 15
    for name in ("named", "without"):
        assert list(zip(found[name].dev.src_lines, found[name].dev.tgt_lines, strict=True)) == [("one two", "zwei eins"), ("three", "drei")]
    assert found["stored"].fingerprint != found["named"].fingerprint, "another dev set, other results: not the same run"
    pipe = {"shards": str(tmp_path / "without"), "dev": ["-"]}
    with pytest.raises(UsageError, match="a dev set beside shards cannot be a pipe"):
        prepare_data(codec.resolve(TrainConfig, [codec.Layer(name="toy", data={**TOY, "data": pipe})]).config, tmp_path, num_workers=1, say=print)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused_before_the_text_is_encoded(text: Path, tmp_path: Path) -> None:
    pairs = list(parse_corpus([str(text / "train.en"), str(text / "train.de")]).pairs())
    for name, settings, override, message in (
        ("separate", {"joint": False, "vocab_size": 30}, "seed=1", "three-way needs one vocabulary"),
        ("bpe", {"type": "bpe", "vocab_size": 44}, "training.subword_alpha=0.1", "needs a unigram tokenizer, but this one is of type bpe"),
    ):
        train_tokenizer(pairs, TokenizerConfig(byte_fallback=False, **settings)).save(tmp_path / name)
        with pytest.raises(ConfigError, match=message):
            make(text, tmp_path / "run", f"data.tokenizer={tmp_path / name}", override)
        assert not (tmp_path / "run" / "data" / "shards").exists()
