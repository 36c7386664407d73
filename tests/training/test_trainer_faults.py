"""Runs that cannot save, that are killed while they save, and that run out of memory: nothing is lost, and the end is that of an undisturbed run."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from mtkit import faults
from mtkit.artefacts import MANIFEST_NAME, verify_directory
from mtkit.data.loader import Batch
from mtkit.distributed import World
from mtkit.errors import ResourceError, StoppedError
from mtkit.training.progress import Record, read_metrics
from mtkit.training.signals import StopRequest
from mtkit.training.state import read_state
from mtkit.training.step import UpdateBatch
from mtkit.training.trainer import Trainer
from tests.helpers import REPOSITORY
from tests.training.test_trainer import consume, fingerprint, run_until

MakeTrainer = Callable[..., Trainer]

POINTS = ["save", "metrics", *(f"atomic.{step}" for step in ("write", "fsync", "rename", "dirsync"))]
POINTS += ["artefact.fsync", "artefact.rename", "artefact.dirsync"]


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    faults.arm({})


def arm(text: str) -> None:
    faults.arm({"MTKIT_FAULT": text, "MTKIT_ALLOW_FAULTS": "1"})


def collect(trainer: Trainer, records: list[Record], *, after_step: int, fault: str) -> None:
    """Train, with a fault from the checkpoint of a step on."""
    for record in trainer.train():
        records.append(record)
        if record["kind"] == "checkpoint" and record["step"] == after_step:
            arm(fault)


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The fingerprint of the undisturbed run, once it is made."""
    return {}


@pytest.mark.smoke
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("point", POINTS)
def test_a_save_that_fails_is_told_and_tried_again(
    make_trainer: MakeTrainer, tmp_path: Path, point: str, error: str, expected: dict[str, str]
) -> None:
    """A8: the checkpoint before it is as it was, and the run ends as if nothing had been."""
    if not expected:
        straight = make_trainer(tmp_path / "straight")
        consume(straight)
        expected["fingerprint"] = fingerprint(straight)
    trainer = make_trainer(tmp_path / "run")
    records: list[Record] = []
    collect(trainer, records, after_step=4, fault=f"{error}@{point}:1")
    told = [record for record in records if record["kind"] == "unsaved"]
    if point == "metrics":
        assert not told, "what cannot be written now is written a moment later"
    else:
        assert [record["step"] for record in told] == [8]
        assert {"ENOSPC": "No space left", "EIO": "Input/output error"}[error] in told[0]["reason"]
    saved = [record["step"] for record in records if record["kind"] == "checkpoint"]
    assert (saved[0], saved[-1]) == (4, 12)
    assert fingerprint(trainer) == expected["fingerprint"]
    for checkpoint in trainer.store.manager.stored():
        verify_directory(checkpoint.path, level="full")
    assert not list((tmp_path / "run").rglob(".*"))
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_bytes().decode().split("\n")[:-1]]
    assert steps == [0, 4, 8, 12, 12, 12]


def test_three_failed_saves_in_a_row_end_the_run(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A8: with the code for missing resources; what was saved before is there to go on from."""
    trainer = make_trainer(tmp_path, "checkpoint.every_steps=2")
    records: list[Record] = []
    with pytest.raises(ResourceError, match=r"the state at step 8 could not be saved, 3 times in a row: .*No space left") as error:
        collect(trainer, records, after_step=2, fault="ENOSPC@artefact.fsync:1+")
    assert error.value.exit_code == 5
    assert [record["step"] for record in records if record["kind"] == "unsaved"] == [4, 6]
    faults.arm({})
    again = make_trainer(tmp_path, "checkpoint.every_steps=2")
    assert again.state.step == 2
    consume(again)
    straight = make_trainer(tmp_path / "straight")
    consume(straight)
    assert fingerprint(again) == fingerprint(straight)


def test_a_success_between_failures_starts_the_count_anew(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "checkpoint.every_steps=2")
    arm("EIO@save:1,EIO@save:2,EIO@save:4,EIO@save:5")
    kinds = [(record["kind"], record["step"]) for record in consume(trainer) if record["kind"] in ("checkpoint", "unsaved")]
    assert kinds[:5] == [("unsaved", 2), ("unsaved", 4), ("checkpoint", 6), ("unsaved", 8), ("unsaved", 10)]


def test_the_last_save_must_not_fail(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Nothing would come after it."""
    trainer = make_trainer(tmp_path, "validation.every_steps=none", "checkpoint.every_steps=none")
    arm("EIO@save:1+")
    with pytest.raises(ResourceError, match="the state at step 12 could not be saved"):
        consume(trainer)


@pytest.mark.parametrize("is_main", [True, False])
def test_no_process_leaves_before_the_last_checkpoint_is_written(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_main: bool
) -> None:
    """D1, D5: else a launcher would end the one that writes, because another has ended."""
    done: list[str] = []
    stop = StopRequest()
    trainer = make_trainer(tmp_path, "checkpoint.every_steps=none", stop=stop)
    monkeypatch.setattr(trainer.store, "save", lambda *_args, **_options: done.append("saved"))

    def meet(values: Sequence[float], *_: Any) -> list[float]:
        done.append("met")
        return list(values)

    monkeypatch.setattr("mtkit.training.trainer.all_reduce_sums", meet)
    trainer.place = dataclasses.replace(trainer.place, world=World() if is_main else World(rank=1, local_rank=1, size=2))
    stop.request(interrupted=False)
    trainer._stopping = True
    with pytest.raises(StoppedError):
        list(trainer._finish())
    assert done == (["saved", "met"] if is_main else ["met"])


def test_a_save_does_not_begin_where_the_space_is_too_small(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1000))
    with pytest.raises(ResourceError, match=r"could not be saved.*needs .* MB .* and 0.0 MB are free"):
        consume(trainer)
    assert os.listdir(tmp_path / "checkpoints") == []


def test_a_disk_that_fails_while_old_checkpoints_are_removed_stops_nothing(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "checkpoint.keep_last=1", "checkpoint.keep_best=0")
    arm("EIO@retention.rename:1")
    assert not [record for record in consume(trainer) if record["kind"] == "unsaved"]
    assert os.listdir(tmp_path / "checkpoints") == ["step-0000012"]


def test_a_damaged_checkpoint_is_not_handed_over(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A7: the model is made of the next best that is whole."""
    run_until(make_trainer(tmp_path, "validation.every_steps=4"), 8)
    trainer = make_trainer(tmp_path, "validation.every_steps=4")
    best = trainer.store.manager.ranked(trainer.store.manager.stored())[0].path / "model.safetensors"
    best.write_bytes(best.read_bytes()[:-1] + b"\x99")
    trainer.store.hand_over()
    verify_directory(tmp_path / "model", level="full")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() != best.read_bytes()


@pytest.mark.smoke
@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "another step's"])
def test_any_damage_to_the_newest_checkpoint_leads_to_the_one_before(make_trainer: MakeTrainer, tmp_path: Path, damage: str) -> None:
    """A7: whichever file of it is damaged; it is named."""
    run_until(make_trainer(tmp_path), 8)
    older, newest = (tmp_path / "checkpoints" / f"step-000000{step}" for step in (4, 8))
    store = make_trainer(tmp_path).store
    names = [path.relative_to(newest) for path in newest.rglob("*") if path.is_file() and path.name != MANIFEST_NAME]
    assert len(names) == 7
    for name in names:
        whole = (newest / name).read_bytes()
        changed = {"cut": whole[: len(whole) // 2], "flipped": flipped(whole), "another step's": (older / name).read_bytes()}.get(damage)
        if changed == whole:
            continue
        (newest / name).unlink()
        if changed is not None:
            (newest / name).write_bytes(changed)
        checkpoint, warnings = store.find(world_size=1, is_packed=False)
        assert checkpoint is not None
        assert checkpoint.step == 4
        assert str(newest) in warnings[0]
        assert name.name in warnings[0]
        (newest / name).write_bytes(whole)
    checkpoint, warnings = store.find(world_size=1, is_packed=False)
    assert checkpoint is not None
    assert (checkpoint.step, warnings) == (8, [])


def flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


def killed_at_each_point(toy_shards: Path, root: Path, *, first: int, stride: int) -> dict[str, object]:
    script = REPOSITORY / "tests" / "training" / "killed.py"
    result = subprocess.run(
        [sys.executable, str(script), str(toy_shards), str(root), str(first), str(stride)],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr.decode()
    outcome: dict[str, object] = json.loads(result.stdout)
    return outcome


@pytest.mark.smoke
def test_a_run_that_is_killed_while_it_saves_ends_as_if_it_was_not(toy_shards: Path, tmp_path: Path) -> None:
    """A1, A2: some points of saving, validating, logging and handing over, and the very bits of what comes out."""
    outcome = killed_at_each_point(toy_shards, tmp_path, first=8, stride=23)
    assert (outcome["lost"], outcome["last"]) == ([], True)
    assert int(str(outcome["killed"])) >= 6


@pytest.mark.slow
@pytest.mark.reliability
def test_a_run_that_is_killed_at_any_point_ends_as_if_it_was_not(toy_shards: Path, tmp_path: Path) -> None:
    """A1, A2: each point."""
    outcome = killed_at_each_point(toy_shards, tmp_path, first=1, stride=1)
    assert (outcome["lost"], outcome["last"]) == ([], True)
    assert int(str(outcome["killed"])) >= 120


# --- validation -------------------------------------------------------------------------------------------------------------------------

VALIDATING = ("validation.every_steps=4", "validation.translate=true", "validation.metric=bleu", "checkpoint.every_steps=3")


def records_of(run: Path) -> list[tuple[str, int, float | None]]:
    return [(record["kind"], record["step"], record.get("loss")) for record in read_metrics(run / "metrics.jsonl") if record["kind"] != "start"]


@pytest.mark.smoke
@pytest.mark.parametrize("fault", ["EIO@valid:2", "oom@valid:2", "oom@valid.translate:2"])
def test_a_validation_that_fails_is_told_and_the_run_goes_on(make_trainer: MakeTrainer, tmp_path: Path, fault: str) -> None:
    """C8: its result is missing and not 0, what is best and how long ago is as it was, the state is saved, and the traceback can be read."""
    arm(fault)
    trainer = make_trainer(tmp_path / "run", *VALIDATING)
    records = consume(trainer)
    assert [record["step"] for record in records if record["kind"] == "valid"] == [4, 12]
    told = [record for record in records if record["kind"] == "unvalidated"]
    assert [record["step"] for record in told] == [8]
    assert told[0]["reason"].startswith({"E": "OSError: ", "o": "OutOfMemoryError: "}[fault[0]])
    assert "faults.py" in told[0]["traceback"]
    assert [(kind, step) for kind, step, _ in records_of(tmp_path / "run") if kind != "train"] == [
        ("valid", 4),
        ("unvalidated", 8),
        ("valid", 12),
        ("end", 12),
    ]
    state = read_state(tmp_path / "run" / "checkpoints" / "step-0000008")
    assert (state.scores_step, state.best_step, state.num_bad_validations, state.is_validation_due) == (4, 4, 0, False)
    assert {checkpoint.step: set(checkpoint.scores) for checkpoint in trainer.store.manager.stored()}[8] == set()
    assert trainer.store.manager.ranked(trainer.store.manager.stored())[0].step in (4, 12)
    straight = make_trainer(tmp_path / "straight", *VALIDATING)
    consume(straight)
    assert fingerprint(trainer) == fingerprint(straight)


def test_a_validation_that_fails_at_the_end_is_made_up_for_by_the_same_command(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    arm("EIO@valid:1")
    records = consume(make_trainer(tmp_path, "validation.every_steps=none"))
    assert [record["kind"] for record in records][-3:] == ["unvalidated", "checkpoint", "end"]
    verify_directory(tmp_path / "model", level="full")
    records = consume(make_trainer(tmp_path, "validation.every_steps=none"))
    assert [record["kind"] for record in records] == ["valid", "checkpoint", "end"]
    assert consume(make_trainer(tmp_path, "validation.every_steps=none"))[0]["resumed"]


@pytest.mark.smoke
@pytest.mark.parametrize("max_steps", [12, 8])
def test_a_signal_in_a_validation_leaves_it_to_the_next_session(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_steps: int
) -> None:
    """B47, B62: it does not wait for the dev set; the records have no gap and nothing twice. In the middle of the run, and at its end."""
    overrides = (*VALIDATING, f"training.max_steps={max_steps}")
    straight = make_trainer(tmp_path / "straight", *overrides)
    consume(straight)
    stop = StopRequest()
    trainer = make_trainer(tmp_path / "run", *overrides, stop=stop)
    number = iter(range(1, 10))

    def reach(point: str) -> None:
        if point == "valid.translate" and next(number) == 2:
            stop.request(interrupted=True)

    with monkeypatch.context() as patched:
        patched.setattr(faults, "reach", reach)
        with pytest.raises(StoppedError, match="stopped at step 8") as error:
            consume(trainer)
    assert error.value.exit_code == 130
    assert read_state(tmp_path / "run" / "checkpoints" / "step-0000008").is_validation_due
    again = make_trainer(tmp_path / "run", *overrides)
    consume(again)
    assert fingerprint(again) == fingerprint(straight)
    assert again.state.best_step == straight.state.best_step
    assert records_of(tmp_path / "run") == records_of(tmp_path / "straight")


# --- out of memory ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_an_update_that_does_not_fit_is_made_in_halves(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """C3: without dropout it is the same update, and its shape is told."""
    overrides = ("model.dropout=0", "batch.max_tokens=60")
    straight = make_trainer(tmp_path / "straight", *overrides)
    consume(straight)
    trainer = make_trainer(tmp_path / "run", *overrides)
    arm("oom@step:6")
    records = consume(trainer)
    told = [record for record in records if record["kind"] == "split"]
    assert [record["step"] for record in told] == [6]
    assert all(rows * columns <= 60 for rows, columns in told[0]["shapes"])
    losses = [
        [record["loss"] for record in read_metrics(tmp_path / name / "metrics.jsonl") if record["kind"] == "train"] for name in ("run", "straight")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_the_largest_batch_runs_first(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C3: a lack of memory shows before the first update, and nothing is left of the trial."""
    trainer = make_trainer(tmp_path, "batch.max_tokens=50")
    shapes: list[list[int]] = []
    real = trainer.updater.accumulate

    def accumulate(batch: UpdateBatch) -> tuple[Tensor, Tensor]:
        shapes.append([micro_batch.tgt_in_BT.numel() for micro_batch in batch.micro_batches if isinstance(micro_batch, Batch)])
        return real(batch)

    monkeypatch.setattr(trainer.updater, "accumulate", accumulate)
    consume(trainer)
    first, *others = shapes
    assert len(first) == 1
    assert len(others) == 12
    largest, _ = trainer.largest_batch()
    assert isinstance(largest, Batch)
    assert first[0] == largest.tgt_in_BT.numel()

    arm("oom@try:1")
    with pytest.raises(ResourceError, match="the largest batch does not fit into the memory of cpu") as error:
        consume(make_trainer(tmp_path / "other", "batch.max_tokens=50"))
    assert "Lower batch.max_tokens, now 50" in str(error.value.hint)
    assert not (tmp_path / "other" / "checkpoints").exists()


def test_an_error_of_another_kind_is_not_tried_again(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)
    tried = []

    def accumulate(batch: UpdateBatch) -> tuple[Tensor, Tensor]:
        tried.append(batch)
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(trainer.updater, "accumulate", accumulate)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        consume(trainer)
    assert len(tried) == 1
