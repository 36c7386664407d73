"""The loop on streams: a resumed run equals a straight one bit for bit, a stream ends when its text does, and other text is noticed."""

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mtkit import config as codec
from mtkit.checkpoint.format import load_model
from mtkit.data.shards import ShardSet
from mtkit.errors import ArtefactError, DataError, StoppedError
from mtkit.training.signals import StopRequest
from mtkit.training.trainer import Trainer
from tests.training.test_trainer import DRAWN, consume, data_record, fingerprint, run_until
from tests.training.toy import toy_data

MakeTrainer = Callable[..., Trainer]


def stream_data(toy_text: Path, toy_shards: Path, place: Path, kind: str) -> codec.Tree:
    """The `data` part of a config that streams the toy text: from files, from a pipe that is filled anew for each reader, or as a data set."""
    place.mkdir(exist_ok=True)
    sides = [(toy_text / f"train.{side}").read_text().split("\n")[:-1] for side in ("en", "de")]
    pairs = list(zip(*sides, strict=True))
    data: codec.Tree = {**toy_data(toy_text), "stream": True, "tokenizer": str(toy_shards)}
    if kind == "pipe":
        data["train"] = [str(place / "pipe.tsv")]
        (place / "pipe.tsv").unlink(missing_ok=True)
        os.mkfifo(place / "pipe.tsv")
        text = "".join(f"{src}\t{tgt}\n" for src, tgt in pairs)
        threading.Thread(target=fill, args=(place / "pipe.tsv", text.encode()), daemon=True).start()
    elif kind == "hub":
        (place / "set").mkdir(exist_ok=True)
        records = (json.dumps({"translation": {"en": src, "de": tgt}}) for src, tgt in pairs)
        (place / "set" / "train.jsonl").write_text("".join(f"{record}\n" for record in records))
        data |= {"train": [f"hf:{place / 'set'}"], "src_lang": "en", "tgt_lang": "de"}
    return data


def fill(pipe: Path, text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.write_bytes(text)


@pytest.fixture
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy text is three pools."""
    monkeypatch.setattr("mtkit.data.order.POOL_PAIRS", 50)
    monkeypatch.setattr("mtkit.data.stream.HEAD_ROWS", 10)


@pytest.mark.usefixtures("small_pools")
@pytest.mark.parametrize("overrides", [(), DRAWN], ids=["plain", "drawn"])
@pytest.mark.parametrize(("kind", "stops"), [("files", (2, 6, 13)), ("pipe", (2, 5)), ("hub", (6, 13))])
def test_a_resumed_stream_equals_the_straight_run(
    make_trainer: MakeTrainer,
    toy_text: Path,
    toy_shards: Path,
    tmp_path: Path,
    kind: str,
    stops: tuple[int, ...],
    overrides: tuple[str, ...],
) -> None:
    """One run, killed some times: where it does not go on as it was, its end differs."""
    # An epoch has about ten updates, so that the latest place is in the second one.
    common = (*overrides, "checkpoint.every_steps=1", "training.log_every_steps=1", "training.max_steps=16")

    def make(name: str) -> Trainer:
        return make_trainer(tmp_path / name, *common, data=stream_data(toy_text, toy_shards, tmp_path / "data", kind))

    straight = make("straight")
    assert straight.config.model.dropout > 0
    records = consume(straight)
    assert records[-1]["reason"] == ("the stream ended" if kind == "pipe" else "training.max_steps = 16 reached")
    assert [records[0][name] for name in ("pairs", "updates_per_epoch", "length_correlation")] == [None] * 3
    assert straight.state.epoch == 1
    resumed = make("resumed")
    for stop_at in stops:
        run_until(resumed, stop_at)
        resumed = make("resumed")
        assert resumed.state.step == stop_at
    consume(resumed)
    assert fingerprint(resumed) == fingerprint(straight)
    assert data_record(tmp_path / "resumed") == data_record(tmp_path / "straight")
    assert load_model(tmp_path / "resumed").tokenizer.fingerprint == ShardSet.open(toy_shards).tokenizer.fingerprint


@pytest.mark.usefixtures("small_pools")
def test_epochs_of_a_stream_end_where_the_text_does(make_trainer: MakeTrainer, toy_text: Path, toy_shards: Path, tmp_path: Path) -> None:
    data = stream_data(toy_text, toy_shards, tmp_path / "data", "files")
    trainer = make_trainer(tmp_path / "run", "training.max_epochs=2", "training.max_steps=none", data=data)
    assert "max_epochs = 2 reached" in consume(trainer)[-1]["reason"]
    assert (trainer.state.epoch, trainer.state.pool, trainer.state.position) == (2, 0, 0)
    tgt_lines = (toy_text / "train.de").read_text().split("\n")[:-1]
    assert trainer.state.num_tgt_tokens == 2 * sum(len(row) + 1 for row in trainer.data.tokenizer.encode(tgt_lines, "tgt"))


@pytest.mark.parametrize("last", ["checkpoint", "valid"])
def test_a_stream_that_ended_before_the_run_was_killed(
    make_trainer: MakeTrainer, toy_text: Path, toy_shards: Path, tmp_path: Path, last: str
) -> None:
    def make() -> Trainer:
        data = stream_data(toy_text, toy_shards, tmp_path / "data", "pipe")
        return make_trainer(tmp_path / "run", "training.max_steps=none", "training.max_tokens=99999", "checkpoint.every_steps=1", data=data)

    first = make()
    next(record for record in first.train() if record["kind"] == last and first.state.epoch == 1)
    assert not (tmp_path / "run" / "model").exists()
    assert consume(make())[-1]["reason"] == "the stream ended"
    assert (tmp_path / "run" / "model").exists()
    assert [record["kind"] for record in consume(make())] == ["end"]


@pytest.mark.usefixtures("small_pools")
@pytest.mark.parametrize("row", [3, 70])
def test_a_stream_of_other_text_is_refused(make_trainer: MakeTrainer, toy_text: Path, toy_shards: Path, tmp_path: Path, row: int) -> None:
    text = Path(shutil.copytree(toy_text, tmp_path / "text"))
    data = stream_data(text, toy_shards, tmp_path / "data", "files")
    options = ("checkpoint.every_steps=1", "training.max_steps=16")
    trainer = make_trainer(tmp_path / "run", *options, data=data)
    next(record for record in trainer.train() if record["kind"] == "checkpoint" and trainer.state.pool == 1 and trainer.state.position)
    consume(make_trainer(Path(shutil.copytree(tmp_path / "run", tmp_path / "same")), *options, data=data))
    lines = (text / "train.en").read_text().split("\n")
    lines[row] = lines[row][::-1]
    (text / "train.en").write_text("\n".join(lines))
    message = "was trained on data with the fingerprint" if row < 10 else "stopped in the middle of pool 1 of epoch 0, which now holds other pairs"
    with pytest.raises(ArtefactError, match=message):
        consume(make_trainer(tmp_path / "run", *options, data=data))


def test_a_pair_that_no_batch_can_hold_is_dropped_from_a_stream(
    make_trainer: MakeTrainer, toy_text: Path, toy_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtkit.data.order.POOL_PAIRS", 120)
    text = Path(shutil.copytree(toy_text, tmp_path / "text"))
    for side, word in (("en", "one "), ("de", "eins ")):
        with open(text / f"train.{side}", "a") as file:
            file.write(word * 40 + "\n")
    trainer = make_trainer(tmp_path / "run", "batch.max_tokens=30", "batch.batch_tokens=30", data=stream_data(text, toy_shards, tmp_path, "files"))
    pool = trainer.feed.plan(0, 0).pool
    assert pool.is_last, "a pool of its own would have no batch"
    assert len(pool) == 120


@pytest.mark.smoke
@pytest.mark.usefixtures("small_pools")
@pytest.mark.parametrize("num_lines", [20, 110], ids=["before the first pool", "within the run"])
def test_ctrl_c_does_not_wait_for_a_silent_pipe(make_trainer: MakeTrainer, toy_text: Path, toy_shards: Path, tmp_path: Path, num_lines: int) -> None:
    """B62: what was done is saved, and the same text from its beginning goes on."""
    place, silence = tmp_path / "data", threading.Event()
    data = stream_data(toy_text, toy_shards, place, "files")
    sides = [(toy_text / f"train.{side}").read_text().split("\n") for side in ("en", "de")]
    text = "".join(f"{src}\t{tgt}\n" for src, tgt in list(zip(*sides, strict=True))[:num_lines])
    os.mkfifo(place / "silent.tsv")

    def fill_and_wait() -> None:
        with open(place / "silent.tsv", "w") as pipe:
            pipe.write(text)
            pipe.flush()
            silence.wait(60)

    writer = threading.Thread(target=fill_and_wait)
    writer.start()
    options = ("checkpoint.every_steps=none", "training.log_every_steps=1", "training.max_steps=none", "training.max_epochs=1")
    with StopRequest().listen() as stop:
        trainer = make_trainer(tmp_path / "run", *options, data={**data, "train": [str(place / "silent.tsv")]}, stop=stop)
        asked: list[float] = []

        def ask() -> None:
            asked.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Timer(1.5, ask).start()
        with pytest.raises(StoppedError) as error:
            consume(trainer)
    assert time.monotonic() - asked[0] < 3.0
    silence.set()
    writer.join()
    assert error.value.exit_code == 130
    assert [checkpoint.step for checkpoint in trainer.store.manager.stored()] == ([] if num_lines == 20 else [trainer.state.step])
    assert (trainer.state.step > 0) == (num_lines == 110)
    if num_lines == 110:
        again = make_trainer(tmp_path / "run", *options, data=stream_data(toy_text, toy_shards, place, "pipe"))
        assert again.state.step == trainer.state.step
        consume(again)
        straight = make_trainer(tmp_path / "straight", *options, data=stream_data(toy_text, toy_shards, place, "pipe"))
        consume(straight)
        assert fingerprint(again) == fingerprint(straight)


@pytest.mark.usefixtures("small_pools")
def test_what_was_learnt_before_a_bad_row_is_saved(make_trainer: MakeTrainer, toy_text: Path, toy_shards: Path, tmp_path: Path) -> None:
    sides = [(toy_text / f"train.{side}").read_text().split("\n")[:-1] for side in ("en", "de")]
    rows = [f"{src}\t{tgt}\n" for src, tgt in zip(*sides, strict=True)]
    rows[110] = "one\ttwo\tthree\n"
    (tmp_path / "bad.tsv").write_text("".join(rows))
    data = {**toy_data(toy_text), "stream": True, "tokenizer": str(toy_shards), "train": [str(tmp_path / "bad.tsv")]}
    trainer = make_trainer(tmp_path / "run", "checkpoint.every_steps=none", "training.max_steps=100", data=data)
    with pytest.raises(DataError, match=r"bad.tsv:111: has 3 columns") as error:
        consume(trainer)
    assert trainer.state.step > 2
    assert f"The state at step {trainer.state.step} is saved" in str(error.value)
    assert [checkpoint.step for checkpoint in trainer.store.manager.stored()] == [trainer.state.step]
