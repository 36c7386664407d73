"""A run that is stopped or killed anywhere and goes on is the run that was not; with another number of processes, it is so by its data."""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mtkit import config as codec
from mtkit.data.shards import ShardSet
from mtkit.distributed import World
from mtkit.errors import StoppedError
from mtkit.training.progress import read_metrics
from mtkit.training.signals import StopRequest
from mtkit.training.trainer import Trainer
from tests.helpers import run_on_two_ranks
from tests.training import worlds
from tests.training.test_trainer import fingerprint
from tests.training.toy import TOY

MakeTrainer = Callable[..., Trainer]

NUM_STEPS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """A run and the place where it is interrupted.

    Attributes:
        overrides: Of its config.
        pool_pairs: Pairs of a pool, of 120; small enough that the run goes through several epochs.
        stop_at: Its update.
        is_killed: It loses what came after its last checkpoint; or else it is told to stop.
    """

    overrides: tuple[str, ...]
    pool_pairs: int
    stop_at: int
    is_killed: bool


def either(*choices: str) -> st.SearchStrategy[str]:
    return st.sampled_from(choices)


SITUATIONS = st.builds(
    Situation,
    overrides=st.tuples(
        either("batch.max_tokens=240", "batch.max_tokens=80"),  # one micro-batch or three
        either("training.ema_decay=none", "training.ema_decay=0.9"),
        either("training.subword_alpha=none", "training.subword_alpha=0.5"),
        either("validation.patience=none", "validation.patience=1"),
        either("optim.lr=3e-3", "optim.lr=1.0"),  # the latter stops early where there is patience
        either("optim.optimizer=adam", "optim.optimizer=muon"),
    ),
    pool_pairs=st.sampled_from([120, 40]),
    stop_at=st.integers(1, NUM_STEPS),
    is_killed=st.booleans(),
)
COMMON = ("batch.batch_tokens=240", f"training.max_steps={NUM_STEPS}", "training.log_every_steps=1", "validation.every_steps=2")


def interrupt(trainer: Trainer, stop: StopRequest, situation: Situation) -> None:
    try:
        for record in trainer.train():
            if record["kind"] == "train" and record["step"] == situation.stop_at:
                if situation.is_killed:
                    return
                stop.request(interrupted=False)
    except StoppedError:
        return


def outcome(trainer: Trainer, run: Path) -> list[Any]:
    """All that must not depend on the interruption: weights, optimizer, moving average, state, the batches that would come next, the records."""
    state = dataclasses.asdict(trainer.state)
    del state["elapsed_s"], state["saving_s"]
    planned = trainer.feed.plan(trainer.state.epoch, trainer.state.pool)
    batches = [
        [planned.pool.indices[group].tolist() for group in planned.plan.update(position)]
        for position in range(trainer.state.position, planned.plan.num_updates)
    ]
    names = ("kind", "step", "epoch", "loss", "ppl", "lr", "is_best", "tgt_tokens", "reason")
    records = [[record.get(name) for name in names] for record in read_metrics(run / "metrics.jsonl") if record["kind"] != "start"]
    return [fingerprint(trainer), state, batches, records]


def holds(make_trainer: MakeTrainer, root: Path, situation: Situation) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mtkit.data.order.POOL_PAIRS", situation.pool_pairs)
        patched.setattr(os, "fsync", lambda _descriptor: None)  # a process is lost here, not power
        runs = []
        for name in ("straight", "interrupted"):
            run = root / f"{len(os.listdir(root))}-{name}"
            overrides = (*COMMON, *situation.overrides, "checkpoint.every_steps=3", "checkpoint.keep_last=1", "checkpoint.keep_best=1")
            if name == "interrupted":
                stop = StopRequest()
                interrupt(make_trainer(run, *overrides, stop=stop), stop, situation)
            trainer = make_trainer(run, *overrides)
            for _ in trainer.train():
                pass
            runs.append(outcome(trainer, run))
        assert runs[0] == runs[1]


# Making a failing example smaller would take minutes.
ANYWHERE = settings(deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate), suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.smoke
@settings(ANYWHERE, max_examples=8)
@given(situation=SITUATIONS)
def test_an_interrupted_run_is_the_straight_one_to_the_bit(make_trainer: MakeTrainer, tmp_path: Path, situation: Situation) -> None:
    """A4, B45, B46, B47."""
    holds(make_trainer, tmp_path, situation)


@pytest.mark.slow
@pytest.mark.reliability
@settings(ANYWHERE, max_examples=1000 if "MTKIT_NIGHTLY" in os.environ else 60)
@given(situation=SITUATIONS)
def test_an_interrupted_run_is_the_straight_one_to_the_bit_in_more_situations(
    make_trainer: MakeTrainer, tmp_path: Path, situation: Situation
) -> None:
    """A4, B45, B46, B47."""
    holds(make_trainer, tmp_path, situation)


# --- another number of processes --------------------------------------------------------------------------------------------------------


def train_on_two(tree: codec.Tree, run: Path, output: Path) -> list[dict[str, Any]]:
    run_on_two_ranks("tests.training.worlds", json.dumps(tree), run, output)
    return [json.loads((output / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.smoke
def test_no_pair_is_lost_or_doubled_when_the_number_of_processes_changes(toy_shards: Path, tmp_path: Path) -> None:
    """A5: one process, then two, then one, each time in the middle of an epoch; an update of two has another number of micro-batches."""
    run = tmp_path / "run"
    run.mkdir()
    tree: dict[str, Any] = {**TOY, "data": {"shards": str(toy_shards)}, "batch": {"batch_tokens": 90, "max_tokens": 90}}

    def until(**limits: int) -> codec.Tree:
        return {**tree, "training": {"precision": "fp32", "max_steps": None, **limits}}

    first = worlds.train(until(max_steps=3), run, World())
    second = train_on_two(until(max_steps=14), run, tmp_path)
    third = worlds.train(until(max_epochs=3), run, World())
    assert (first["micro_per_update"], second[0]["micro_per_update"], third["micro_per_update"]) == (1, 2, 1)
    assert first["within"]
    assert second[0]["within"]
    assert [result["warnings"] for result in (first, *second, third)] == [
        [],
        *[["the run goes on with 2 processes instead of 1: it is not bit-exact"]] * 2,
        ["the run goes on with 1 processes instead of 2: it is not bit-exact"],
    ]
    assert all(result["seen"] for result in second)
    seen = Counter(tuple(ids) for result in (first, *second, third) for ids in result["seen"])
    shards = ShardSet.open(toy_shards)
    pairs = Counter((*shards.tgt(index).tolist(), 3) for index in range(shards.num_pairs))
    assert seen == Counter({ids: 3 * count for ids, count in pairs.items()})
