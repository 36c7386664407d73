"""The loop: a resumed run equals a straight one bit for bit, limits and validation are kept, bad numbers never reach the weights."""

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtkit.checkpoint.format import load_model, parameters_by_name
from mtkit.data.loader import load_batch
from mtkit.data.shards import ShardSet
from mtkit.distributed import World
from mtkit.errors import ArtefactError, DivergedError, ResourceError, StoppedError
from mtkit.training.progress import read_metrics
from mtkit.training.signals import StopRequest
from mtkit.training.state import optimizer_tensors, read_state
from mtkit.training.step import update_batches
from mtkit.training.trainer import Trainer
from tests.training.toy import shards_of

MakeTrainer = Callable[..., Trainer]

ACCUMULATING = ("batch.max_tokens=50",)
WITH_EMA = ("training.ema_decay=0.9",)
DRAWN = ("training.subword_alpha=0.9",)


def fingerprint(trainer: Trainer) -> str:
    """Of the weights, the optimizer's state and the moving average, to the bit."""
    digest = hashlib.sha256()
    updater = trainer.updater
    parts: list[dict[str, Tensor]] = [
        parameters_by_name(updater.model),
        optimizer_tensors(updater.optimizer, updater.parameter_names),
        updater.ema or {},
    ]
    for tensors in parts:
        for name, tensor in sorted(tensors.items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def consume(trainer: Trainer) -> list[dict[str, Any]]:
    return [dict(record) for record in trainer.train()]


def run_until(trainer: Trainer, stop_at: int) -> None:
    """Train until the checkpoint of a step is on disk, then drop everything, as a kill would."""
    for record in trainer.train():
        if record["kind"] == "checkpoint" and record["step"] == stop_at:
            return
    raise AssertionError(f"no checkpoint at step {stop_at}")


def data_record(path: Path) -> list[tuple[int, int]]:
    return [(record["step"], record["tgt_tokens"]) for record in read_metrics(path / "metrics.jsonl") if record["kind"] == "train"]


@pytest.mark.parametrize("overrides", [(), ACCUMULATING, WITH_EMA, DRAWN], ids=["plain", "accumulating", "ema", "drawn"])
def test_resume_equals_the_straight_run(make_trainer: MakeTrainer, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """One run, killed three times: where it does not go on as it was, its end differs."""
    common = (*overrides, "checkpoint.every_steps=2", "training.log_every_steps=2")
    straight = make_trainer(tmp_path / "straight", *common)
    consume(straight)
    resumed = make_trainer(tmp_path / "resumed", *common)
    for stop_at in (2, 6, 10):  # an epoch of the toy data has fewer than ten updates, so the last place is in the second epoch
        run_until(resumed, stop_at)
        resumed = make_trainer(tmp_path / "resumed", *common)
        assert resumed.state.step == stop_at
    consume(resumed)
    assert fingerprint(resumed) == fingerprint(straight)
    assert resumed.state.epoch == straight.state.epoch >= 1
    assert data_record(tmp_path / "resumed") == data_record(tmp_path / "straight")


def test_corpora_with_weights_are_drawn_by_them(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardSet, "corpora", (100, 20))
    pool = make_trainer(tmp_path / "mixed", "data.weights=[1, 3]").feed.source.read(0, 0)
    assert (len(pool), int((pool.indices < 100).sum())) == (120, 30)


@pytest.mark.parametrize(("stops", "mix"), [((3, 8), ()), ((8,), ("data.weights=[1, 1]",))])
def test_resume_within_and_between_pools_equals_the_straight_run(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: tuple[int, ...], mix: tuple[str, ...]
) -> None:
    monkeypatch.setattr("mtkit.data.order.POOL_PAIRS", 50)  # three pools
    monkeypatch.setattr(ShardSet, "corpora", (100, 20))
    common = ("checkpoint.every_steps=1", "training.log_every_steps=1", "training.max_steps=15", *mix)
    straight = make_trainer(tmp_path / "straight", *common)
    consume(straight)
    places = [read_state(checkpoint.path) for checkpoint in straight.store.manager.stored()]
    assert {(state.epoch, state.pool, state.position > 0) for state in places} > {(0, pool, inside) for pool in (1, 2) for inside in (True, False)}
    for stop_at in stops:  # stopped by a limit in the middle, then killed
        consume(make_trainer(tmp_path / "resumed", *common, f"training.max_steps={stop_at}"))
        run_until(make_trainer(tmp_path / "resumed", *common), stop_at + 2)
    resumed = make_trainer(tmp_path / "resumed", *common)
    assert resumed.state.step == stops[-1] + 2
    consume(resumed)
    assert fingerprint(resumed) == fingerprint(straight)
    assert resumed.state.epoch == straight.state.epoch == 1
    assert data_record(tmp_path / "resumed") == data_record(tmp_path / "straight")


def test_dropout_is_on_and_a_seed_changes_the_run(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    results = []
    for name, override in (("a", "seed=1"), ("b", "seed=2"), ("c", "model.dropout=0.0"), ("d", "seed=1")):
        trainer = make_trainer(tmp_path / name, override, "training.max_steps=2")
        consume(trainer)
        results.append(fingerprint(trainer))
    assert results[0] == results[3]
    assert len(set(results)) == 3


def gradients(trainer: Trainer, world: World) -> dict[str, Tensor]:
    """The gradient of the first update, summed over the given world's processes one after the other."""
    planned = trainer.feed.plan(0, 0)
    total: dict[str, Tensor] = {}
    for rank in range(world.size):
        share = World(rank=rank, local_rank=rank, size=world.size)
        trainer.updater.accumulate(next(update_batches(planned.pool, planned.plan, world=share, seed=trainer.config.seed)))
        for parameter, name in trainer.updater.parameter_names.items():
            assert parameter.grad is not None
            total[name] = total.get(name, torch.zeros_like(parameter)) + parameter.grad
        trainer.updater.optimizer.zero_grad()
    return total


def test_processes_together_have_the_gradient_of_one(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    # Four micro-batches of one update on one process, on two, on three (where one of them idles in the second round), and on four.
    overrides = ("batch.batch_tokens=120", "batch.max_tokens=30")
    one = gradients(make_trainer(tmp_path, *overrides), World())
    for size in (2, 3, 4):
        several = gradients(make_trainer(tmp_path, *overrides), World(size=size))
        for name, gradient in one.items():
            torch.testing.assert_close(several[name], gradient, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_one_large_batch(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "batch.batch_tokens=120", "batch.max_tokens=30", "model.dropout=0.0")
    split = gradients(trainer, World())
    plan = trainer.feed.plan(0, 0).plan
    indices = torch.cat([torch.from_numpy(group.copy()) for group in plan.update(0)]).numpy()
    batch: Any = load_batch(shards_of(trainer), indices)
    logits_BTV = trainer.updater.model(batch.src_BS, batch.src_mask_BS, batch.tgt_in_BT, batch.tgt_mask_BT)
    loss = torch.nn.functional.cross_entropy(logits_BTV[batch.tgt_mask_BT], batch.tgt_out_BT[batch.tgt_mask_BT], label_smoothing=0.1)
    loss.backward()
    for parameter, name in trainer.updater.parameter_names.items():
        assert parameter.grad is not None
        torch.testing.assert_close(split[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("training.max_steps=5", "max_steps = 5"),
        ("training.max_epochs=1", "max_epochs = 1"),
        ("training.max_tokens=300", "max_tokens = 300"),
    ],
)
def test_limits(make_trainer: MakeTrainer, tmp_path: Path, limit: str, reason: str) -> None:
    trainer = make_trainer(tmp_path, "training.max_steps=50", limit)
    records = consume(trainer)
    assert records[-1]["kind"] == "end"
    assert reason in records[-1]["reason"]
    kinds = [record["kind"] for record in records]
    assert "valid" in kinds, "the end is always validated"
    assert trainer.store.manager.stored()[-1].step == trainer.state.step, "and saved"
    assert load_model(tmp_path).model.num_parameters() == trainer.updater.model.num_parameters()


@pytest.mark.parametrize("pool_pairs", [120, 50, 7])
def test_an_epoch_has_every_pair_once(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool_pairs: int) -> None:
    monkeypatch.setattr("mtkit.data.order.POOL_PAIRS", pool_pairs)
    trainer = make_trainer(tmp_path, "training.max_epochs=2", "training.max_steps=none")
    consume(trainer)
    assert (trainer.state.epoch, trainer.state.pool, trainer.state.position) == (2, 0, 0)
    assert trainer.state.num_tgt_tokens == 2 * int((shards_of(trainer).tgt_lengths + 1).sum())


def test_time_limit_by_the_clock(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    ticks = iter(range(10_000))
    trainer = make_trainer(tmp_path, "training.max_steps=none", "training.max_minutes=1", clock=lambda: float(next(ticks)) * 5.0)
    records = consume(trainer)
    assert "max_minutes = 1 reached" in records[-1]["reason"]
    assert trainer.state.elapsed_s >= 60.0


def test_the_time_that_checkpoints_take_is_recorded(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    trainer = make_trainer(tmp_path, clock=lambda: now[0])
    real = trainer.store.save

    def save(*args: Any, **options: Any) -> None:
        now[0] += 2.0
        real(*args, **options)

    monkeypatch.setattr(trainer.store, "save", save)
    seconds = [(record["elapsed_s"], record["saving_s"]) for record in consume(trainer) if record["kind"] == "train"]
    assert seconds == [(0.0, 0.0), (2.0, 2.0), (4.0, 4.0)]
    assert make_trainer(tmp_path).state.saving_s == 6.0, "over all sessions, up to the save itself, the fourth"


def test_a_finished_run_started_again_does_nothing_and_says_so(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    consume(make_trainer(tmp_path, "training.max_steps=4"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    records = consume(make_trainer(tmp_path, "training.max_steps=4"))
    assert [record["kind"] for record in records] == ["end"]
    assert records[0]["resumed"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("last", ["checkpoint", "valid", "hand over", "end"])
def test_a_run_that_was_killed_after_its_last_update_is_completed(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """B47: whether before the last validation, after it, or before the model was handed over; and so is one whose model was removed."""
    common = ("training.max_steps=4", "checkpoint.every_steps=4")
    trainer = make_trainer(tmp_path / "killed", *common)
    if last == "hand over":
        monkeypatch.setattr(trainer.store, "hand_over", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            consume(trainer)
    elif last == "end":
        consume(trainer)
        shutil.rmtree(tmp_path / "killed" / "model")
    else:
        next(record for record in trainer.train() if (record["kind"], record["step"]) == (last, 4))
    assert not (tmp_path / "killed" / "model").exists()
    again = make_trainer(tmp_path / "killed", *common)
    assert again.finished() is not None
    assert consume(again)[-1] == {
        "kind": "end",
        "step": 4,
        "reason": "training.max_steps = 4 reached",
        "handed_over": 4,
        "elapsed_s": pytest.approx(0, abs=60),
    }
    straight = make_trainer(tmp_path / "straight", *common)
    consume(straight)
    for name in ("killed", "straight"):
        kinds = [record["kind"] for record in read_metrics(tmp_path / name / "metrics.jsonl") if record["kind"] != "start"]
        assert kinds == ["train", "valid", "end"]
    tensors = [parameters_by_name(load_model(tmp_path / name).model) for name in ("killed", "straight")]
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())
    assert [record["kind"] for record in consume(make_trainer(tmp_path / "killed", *common))] == ["end"]


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_its_records_anew(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    common = ("training.max_steps=4", "checkpoint.every_steps=4", "training.log_every_steps=1")
    next(record for record in make_trainer(tmp_path, *common).train() if record["step"] == 2)
    consume(make_trainer(tmp_path, *common))
    steps = [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl") if record["kind"] == "train"]
    assert steps == [1, 2, 3, 4]


def test_a_higher_limit_goes_on(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    consume(make_trainer(tmp_path / "a", "training.max_steps=6"))
    trainer = make_trainer(tmp_path / "a", "training.max_steps=9")
    consume(trainer)
    straight = make_trainer(tmp_path / "b", "training.max_steps=9")
    consume(straight)
    assert fingerprint(trainer) == fingerprint(straight)
    assert load_model(tmp_path / "a").description.provenance["step"] == 9


def test_early_stopping_counts_validations_without_a_new_best(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "optim.lr=1e-30", "validation.every_steps=2", "validation.patience=2", "training.max_steps=50")
    records = consume(trainer)
    assert trainer.state.step == 6, "best at 2, then two without a better one"
    assert "no better loss in 2 validations" in records[-1]["reason"]
    again = make_trainer(tmp_path, "optim.lr=1e-30", "validation.every_steps=2", "validation.patience=2", "training.max_steps=50")
    assert "no better loss" in (again.finished() or "")


def test_validation_results_are_in_the_checkpoint_that_follows_them(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    overrides = ("validation.every_steps=3", "checkpoint.every_steps=3", "training.max_steps=9")
    trainer = make_trainer(tmp_path, *overrides)
    run_until(trainer, 6)
    again = make_trainer(tmp_path, *overrides)
    assert again.state.scores_step == 6
    assert again.state.best_value == trainer.state.best_value
    consume(again)
    steps = [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl") if record["kind"] == "valid"]
    assert steps == [3, 6, 9]
    assert [set(checkpoint.scores) for checkpoint in again.store.manager.stored()] == [{"loss", "ppl"}] * 3


def test_the_validated_loss_is_the_mean_over_the_dev_tokens(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "training.max_steps=3")
    records = consume(trainer)
    model, tokenizer, dev = trainer.updater.model.eval(), trainer.data.tokenizer, trainer.data.dev
    total, count = 0.0, 0
    for src, tgt in zip(dev.src_lines, dev.tgt_lines, strict=True):
        src_ids, tgt_ids = tokenizer.encode([src], "src")[0], tokenizer.encode([tgt], "tgt")[0]
        src_BS = torch.tensor([[*src_ids, 3]])
        with torch.no_grad():
            logits_TV = model(src_BS, torch.ones_like(src_BS, dtype=torch.bool), torch.tensor([[2, *tgt_ids]]))[0]
        total += float(torch.nn.functional.cross_entropy(logits_TV, torch.tensor([*tgt_ids, 3]), reduction="sum"))
        count += len(tgt_ids) + 1
    valid = next(record for record in records if record["kind"] == "valid")
    assert valid["loss"] == pytest.approx(total / count, rel=1e-5)
    assert valid["ppl"] == pytest.approx(math.exp(total / count), rel=1e-5)


def test_the_moving_average_is_validated_and_handed_over(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "training.ema_decay=0.5", "training.max_steps=4")
    consume(trainer)
    assert trainer.updater.ema is not None
    handed = parameters_by_name(load_model(tmp_path).model)
    for name, average in trainer.updater.ema.items():
        torch.testing.assert_close(handed[name], average, rtol=0, atol=0)
    assert any(not torch.equal(handed[name], tensor) for name, tensor in parameters_by_name(trainer.updater.model).items())


def poison(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, bad_updates: set[int]) -> None:
    """Make the gradient of some updates infinite."""
    real, count = trainer.updater.accumulate, iter(range(10_000))

    def accumulate(batch: Any) -> Any:
        result = real(batch)
        if next(count) in bad_updates:
            next(iter(trainer.updater.parameter_names)).grad.fill_(math.inf)  # type: ignore[union-attr]
        return result

    monkeypatch.setattr(trainer.updater, "accumulate", accumulate)


@pytest.mark.smoke
def test_a_bad_gradient_never_reaches_the_weights(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, "training.max_steps=6")
    poison(trainer, monkeypatch, {1, 3})
    consume(trainer)
    assert trainer.state.num_skipped == 2
    assert trainer.state.step == 6
    assert all(torch.isfinite(tensor).all() for tensor in parameters_by_name(trainer.updater.model).values())
    assert trainer.state.position + 7 * trainer.state.epoch >= 8, "skipped batches are consumed"


def test_a_skipped_update_changes_nothing(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, "training.max_steps=50", "training.ema_decay=0.9", "training.max_skipped_in_row=3")
    with trainer.feed.prefetch(trainer.feed.plan(0, 0), position=0) as batches:
        trainer.updater.run(next(batches).batch, lr=1e-3)  # so that the optimizer has a state
    before = fingerprint(trainer)
    poison(trainer, monkeypatch, set(range(50)))
    with pytest.raises(DivergedError, match="3 updates in a row"):
        consume(trainer)
    assert fingerprint(trainer) == before
    assert trainer.state.step == 0
    report = json.loads((tmp_path / "diverged.json").read_text())
    assert (report["epoch"], report["pool"], report["position"]) == (0, 0, 2)
    assert sorted(number for batch in report["pairs"] for number in batch)


def test_the_report_of_a_divergence_names_pairs_of_the_corpus(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.data.order.POOL_PAIRS", 25)
    trainer = make_trainer(tmp_path, "batch.batch_tokens=60", "batch.max_tokens=30", "training.max_skipped_in_row=8")
    seen: list[Any] = []
    real = trainer.updater.run

    def run(batch: Any, **options: Any) -> Any:
        seen.append(batch)
        return dataclasses.replace(real(batch, **options), is_applied=False)

    monkeypatch.setattr(trainer.updater, "run", run)
    with pytest.raises(DivergedError, match="8 updates in a row"):
        consume(trainer)
    report = json.loads((tmp_path / "diverged.json").read_text())
    assert report["pool"] > 0
    for batch, pairs in zip(seen[-1].micro_batches, report["pairs"], strict=True):
        expected: Any = load_batch(shards_of(trainer), np.array(pairs))
        assert torch.equal(batch.src_BS, expected.src_BS)
        assert torch.equal(batch.tgt_in_BT, expected.tgt_in_BT)


def test_out_of_memory_says_what_to_lower(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B55: an error like any other, so that the launcher ends the other processes."""
    trainer = make_trainer(tmp_path, "batch.max_tokens=50")
    real = trainer.updater.accumulate

    def accumulate(batch: Any) -> Any:
        if trainer.state.step == 5:
            tried.append(len(batch.micro_batches))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(batch)

    tried: list[int] = []
    monkeypatch.setattr(trainer.updater, "accumulate", accumulate)
    with pytest.raises(ResourceError, match="update 6 does not fit") as error:
        consume(trainer)
    assert "Lower batch.max_tokens, now 50" in str(error.value.hint)
    assert error.value.exit_code == 5
    assert len(tried) == 2
    assert tried[0] < tried[1] <= 2 * tried[0]
    assert make_trainer(tmp_path, "batch.max_tokens=50").state.step == 4


def test_a_request_to_stop_saves_after_the_update(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    stop = StopRequest()
    trainer = make_trainer(tmp_path / "a", "training.log_every_steps=1", "checkpoint.every_steps=none", stop=stop)

    def stop_at_3() -> Iterator[None]:
        for record in trainer.train():
            if record["step"] == 3:
                stop.request(interrupted=False)
            yield

    with pytest.raises(StoppedError, match="stopped at step 3") as error:
        list(stop_at_3())
    assert error.value.exit_code == 75
    again = make_trainer(tmp_path / "a", "training.log_every_steps=1", "checkpoint.every_steps=none")
    assert again.state.step == 3
    consume(again)
    straight = make_trainer(tmp_path / "b")
    consume(straight)
    assert fingerprint(again) == fingerprint(straight)


def test_other_data_is_refused(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_until(make_trainer(tmp_path), 4)
    monkeypatch.setattr(ShardSet, "fingerprint", "f" * 64)
    with pytest.raises(ArtefactError, match="was trained on data with the fingerprint"):
        make_trainer(tmp_path)


def test_another_world_size_is_allowed_and_said(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    run_until(make_trainer(tmp_path), 4)
    trainer = make_trainer(tmp_path)
    trainer.place = type(trainer.place)(device=trainer.place.device, precision=trainer.place.precision, world=World(size=2))
    _, warnings = trainer.resume()
    assert "2 processes instead of 1: it is not bit-exact" in warnings[0]


def test_another_layout_of_the_batches_is_allowed_and_said(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_until(make_trainer(tmp_path), 4)
    assert make_trainer(tmp_path).resume()[1] == []
    monkeypatch.setattr("mtkit.training.trainer.can_pack", lambda *_: True)
    _, (warning,) = make_trainer(tmp_path, "training.compile_layers=false").resume()
    assert "packed batches instead of padded ones" in warning


def test_a_damaged_checkpoint_is_passed_over_and_named(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    run_until(make_trainer(tmp_path), 8)
    newest = tmp_path / "checkpoints" / "step-0000008" / "optimizer.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(bytes(data))
    trainer = make_trainer(tmp_path)
    assert trainer.state.step == 4
    _, warnings = trainer.resume()
    assert "step-0000008" in warnings[0]
    consume(trainer)
    straight = make_trainer(tmp_path / "b")
    consume(straight)
    assert fingerprint(trainer) == fingerprint(straight)


def test_segmentations_are_drawn_anew_for_each_epoch(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    options = ("training.subword_alpha=0.1", "batch.batch_tokens=40", "batch.max_tokens=40")
    trainer, plain = make_trainer(tmp_path / "drawn", *options), make_trainer(tmp_path / "plain")
    tokenizer = trainer.data.tokenizer
    found = []
    for epoch in (0, 1):
        planned = trainer.feed.plan(epoch, 0)
        pool, expected = planned.pool, plain.feed.plan(epoch, 0).pool
        np.testing.assert_array_equal(pool.indices, expected.indices)
        rows = range(len(pool))
        drawn, stored = ([pairs.tgt(row).tolist() for row in rows] for pairs in (pool, expected))
        assert tokenizer.decode(drawn, "tgt") == tokenizer.decode(stored, "tgt")
        assert len(pool.src_ids) > len(expected.src_ids)
        for group in (group for number in range(planned.plan.num_updates) for group in planned.plan.update(number)):
            assert len(group) * (int(pool.src_lengths[group].max()) + 1) <= 40, "batches are planned by the lengths that were drawn"
        found.append({int(index): pool.src(row).tolist() for row, index in enumerate(pool.indices)})
    assert found[0] != found[1]


def test_the_interval_of_validations_goes_on_over_sessions(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A run that is always stopped before the interval is over would never be validated."""
    now, limits = [0.0], ("validation.every_minutes=1", "checkpoint.every_steps=none")

    def train(until: int) -> None:
        stop = StopRequest()
        trainer = make_trainer(tmp_path, *limits, stop=stop, clock=lambda: now[0])
        real = trainer.updater.run

        def run(*args: Any, **options: Any) -> Any:
            now[0] += 15.0
            if trainer.state.step + 1 == until:
                stop.request(interrupted=False)
                options["extra"] = (1.0, *options["extra"][1:])
            return real(*args, **options)

        trainer.updater.run = run  # type: ignore[method-assign]
        with pytest.raises(StoppedError):
            consume(trainer)

    for until in (2, 4, 6, 8):
        train(until)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().split("\n")[:-1]]
    assert [record["step"] for record in records if record["kind"] == "valid"] == [5]


def test_the_time_of_a_run_never_goes_back(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the last validation counts as well."""
    now = [0.0]

    def validate(*_args: Any, **_options: Any) -> dict[str, float]:
        now[0] += 7.0
        return {"loss": 1.0, "ppl": 2.7}

    monkeypatch.setattr("mtkit.training.trainer.validate", validate)
    common = ("validation.every_steps=4", "training.log_every_steps=1")
    consume(make_trainer(tmp_path, *common, "training.max_steps=8", clock=lambda: now[0]))
    assert make_trainer(tmp_path, *common).state.elapsed_s == 14.0
    consume(make_trainer(tmp_path, *common, clock=lambda: now[0]))
    times = [
        record["elapsed_s"]
        for record in (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().split("\n")[:-1])
        if "elapsed_s" in record
    ]
    assert times == sorted(times)


def test_the_last_update_of_an_epoch_is_told_as_its_own(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "training.max_epochs=2", "training.max_steps=none", "training.log_every_steps=1")
    epochs = [record["epoch"] for record in consume(trainer) if record["kind"] == "train"]
    assert epochs == [0] * (len(epochs) // 2) + [1] * (len(epochs) // 2)
