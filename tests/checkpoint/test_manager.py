"""Which checkpoints are seen, kept and removed."""

import json
from pathlib import Path

import pytest

from mtkit.checkpoint.manager import STATE_NAME, CheckpointConfig, CheckpointManager, Metric
from mtkit.errors import ArtefactError, ConfigError


def manager(directory: Path, *, keep_last: int = 2, keep_best: int = 1, metric: Metric = "bleu") -> CheckpointManager:
    return CheckpointManager(directory, config=CheckpointConfig(keep_last=keep_last, keep_best=keep_best), metric=metric)


def add(keeper: CheckpointManager, step: int, **scores: float) -> None:
    with keeper.write(step, config={}, inputs={}) as directory:
        (directory / STATE_NAME).write_text(json.dumps({"scores": scores}))
        (directory / "weights").write_bytes(bytes(100))


def steps(keeper: CheckpointManager) -> list[int]:
    return [checkpoint.step for checkpoint in keeper.stored()]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    keeper = manager(tmp_path)
    for step, bleu in ((1, 10.0), (2, 30.0), (3, 20.0), (4, 25.0), (5, 5.0)):
        add(keeper, step, bleu=bleu)
    assert steps(keeper) == [2, 4, 5]
    assert [checkpoint.step for checkpoint in keeper.best()] == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000002", "step-0000004", "step-0000005"]


def test_a_low_loss_is_good(tmp_path: Path) -> None:
    keeper = manager(tmp_path, keep_last=1, keep_best=2, metric="loss")
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 9.0)):
        add(keeper, step, loss=loss)
    assert steps(keeper) == [2, 3, 4]
    assert [checkpoint.step for checkpoint in keeper.best()] == [2, 3]


def test_without_validation_only_the_newest_are_kept(tmp_path: Path) -> None:
    keeper = manager(tmp_path)
    for step in (1, 2, 3):
        add(keeper, step)
    assert steps(keeper) == [2, 3]


def test_steps_sort_as_numbers(tmp_path: Path) -> None:
    keeper = manager(tmp_path, keep_last=3)
    for step in (9_999_999, 10_000_000, 5):
        add(keeper, step)
    assert steps(keeper) == [5, 9_999_999, 10_000_000]


def test_a_failed_write_leaves_the_old_ones_alone(tmp_path: Path) -> None:
    keeper = manager(tmp_path, keep_last=1)
    add(keeper, 1)

    def fail() -> None:
        with keeper.write(2, config={}, inputs={}) as directory:
            (directory / STATE_NAME).write_text("{}")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fail()
    assert steps(keeper) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000001"]


def test_foreign_and_half_written_things_are_ignored_and_only_leftovers_removed(tmp_path: Path) -> None:
    keeper = manager(tmp_path)
    add(keeper, 1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-0000002").mkdir()
    (tmp_path / "step-best").mkdir()
    (tmp_path / ".step-0000003.tmp-123-0011aabb").mkdir()
    assert steps(keeper) == [1]
    latest, damage = keeper.latest()
    assert latest is not None
    assert latest.step == 1
    assert damage == []
    keeper.remove_leftovers()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-0000001", "step-0000002", "step-best"]


def test_a_step_can_be_written_again_over_a_broken_directory(tmp_path: Path) -> None:
    keeper = manager(tmp_path)
    (tmp_path / "step-0000002").mkdir()
    add(keeper, 2, bleu=1.0)
    assert steps(keeper) == [2]


def test_a_step_that_is_written_again_is_there_once(tmp_path: Path) -> None:
    keeper = manager(tmp_path)
    add(keeper, 2)
    add(keeper, 2, bleu=1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000002"]
    assert keeper.stored()[0].scores == {"bleu": 1.0}


def test_damage_is_passed_over_newest_first(tmp_path: Path) -> None:
    keeper = manager(tmp_path)
    add(keeper, 1)
    add(keeper, 2)
    (tmp_path / "step-0000002" / "weights").write_bytes(bytes(99) + b"x")
    latest, damage = keeper.latest()
    assert latest is not None
    assert latest.step == 1
    assert "weights: its sha256 differs" in damage[0]
    (tmp_path / "step-0000001" / "weights").unlink()
    with pytest.raises(ArtefactError, match="every checkpoint is damaged"):
        keeper.latest()


def test_no_run_there(tmp_path: Path) -> None:
    assert manager(tmp_path / "nothing").latest() == (None, [])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keep_last": 0}, "keep_last must be at least 1, but is 0"),
        ({"keep_best": -1}, "keep_best must not be negative"),
        ({"every_steps": 0}, "every_steps must be at least 1"),
        ({"every_minutes": 0.0}, "every_minutes must be positive"),
    ],
)
def test_values_out_of_range(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointConfig(**values)
