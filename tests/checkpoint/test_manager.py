"""Which checkpoints are seen, kept and removed."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtkit.artefacts import MANIFEST_NAME
from mtkit.checkpoint.manager import STATE_NAME, CheckpointConfig, CheckpointManager, Metric, StoredCheckpoint, clean_up, evenly_spaced
from mtkit.errors import ArtefactError, ConfigError
from tests.helpers import REPOSITORY


def manager(directory: Path, *, keep_last: int = 2, keep_best: int = 1, metric: Metric = "bleu") -> CheckpointManager:
    return CheckpointManager(directory, config=CheckpointConfig(keep_last=keep_last, keep_best=keep_best), metric=metric)


def add(keeper: CheckpointManager, step: int, **scores: float) -> None:
    with keeper.write(step, config={}, inputs={}) as directory:
        (directory / STATE_NAME).write_text(json.dumps({"scores": scores}))
        (directory / "weights").write_bytes(bytes(100))
        (directory / "tokenizer").mkdir()
        (directory / "tokenizer" / "model").write_bytes(b"m")


def steps(keeper: CheckpointManager) -> list[int]:
    return [checkpoint.step for checkpoint in keeper.stored()]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    keeper = manager(tmp_path)
    for step, bleu in ((1, 10.0), (2, 30.0), (3, 20.0), (4, 25.0), (5, 5.0)):
        add(keeper, step, bleu=bleu)
    assert steps(keeper) == [2, 4, 5]
    assert [checkpoint.step for checkpoint in keeper.ranked(keeper.stored())] == [2, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000002", "step-0000004", "step-0000005"]


def test_a_low_loss_is_good(tmp_path: Path) -> None:
    keeper = manager(tmp_path, keep_last=1, keep_best=2, metric="loss")
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 9.0)):
        add(keeper, step, loss=loss)
    assert steps(keeper) == [2, 3, 4]
    assert [checkpoint.step for checkpoint in keeper.ranked(keeper.stored())] == [2, 3, 4]


def test_where_the_metric_is_equal_the_loss_tells_what_is_better(tmp_path: Path) -> None:
    keeper = manager(tmp_path, keep_last=1, keep_best=2)
    for step, loss in ((1, 6.0), (2, 4.0), (3, 5.0), (4, 5.0)):
        add(keeper, step, bleu=0.0, loss=loss)
    assert [checkpoint.step for checkpoint in keeper.ranked(keeper.stored())] == [2, 3, 4]


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
    (tmp_path / ".trash-.step-0000003.tmp-123-0011aabb").mkdir()
    (tmp_path / ".step-0000003.tmp-mine").mkdir()
    assert steps(keeper) == [1]
    latest, damage = keeper.latest()
    assert latest is not None
    assert latest.step == 1
    assert damage == []
    clean_up(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".step-0000003.tmp-mine",
        "notes.txt",
        "step-0000001",
        "step-0000002",
        "step-best",
    ]


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


def test_damaged_checkpoints_do_not_crowd_out_those_written_after_them(tmp_path: Path) -> None:
    """A7: a run that went on from before the damage keeps what it saves."""
    keeper = manager(tmp_path, keep_last=1, keep_best=0)
    add(keeper, 1)
    (tmp_path / "step-0000001").rename(tmp_path / "aside")
    add(keeper, 4)
    (tmp_path / "step-0000004" / "weights").write_bytes(bytes(99) + b"x")
    (tmp_path / "aside").rename(tmp_path / "step-0000001")
    add(keeper, 2)
    latest, _ = keeper.latest()
    assert latest is not None
    assert latest.step == 2
    assert steps(keeper) == [2, 4]


KILLED_SCRIPT = """
import json, os, sys
from pathlib import Path
from mtkit import faults
from mtkit.checkpoint.manager import STATE_NAME, CheckpointConfig, CheckpointManager, clean_up

root = Path(sys.argv[1])
os.fsync = lambda descriptor: None  # not power, but a process is lost here

def keeper(place):
    return CheckpointManager(place, config=CheckpointConfig(keep_last=1, keep_best=1), metric="bleu")

def save(place, step, content, **scores):
    with keeper(place).write(step, config={}, inputs={}) as directory:
        (directory / STATE_NAME).write_text(json.dumps({"scores": scores}))
        (directory / "weights").write_bytes(content)

def train(place):
    save(place, 2, b"new 2", bleu=1.0)
    save(place, 3, b"3")
    save(place, 3, b"3", bleu=2.0)

outcomes, number = [], 0
while not outcomes or outcomes[-1][0] != 0:
    number += 1
    place = root / str(number)
    save(place, 1, b"1")
    save(place, 2, b"2")
    child = os.fork()
    if child == 0:
        faults.arm({"MTKIT_FAULT": f"kill@*:{number}", "MTKIT_ALLOW_FAULTS": "1"})
        train(place)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    clean_up(place)
    latest, damage = keeper(place).latest()
    outcomes.append((status, latest and latest.step, damage, sorted(os.listdir(place))))
    train(place)
    assert sorted(os.listdir(place)) == ["step-0000003"], number
json.dump(outcomes, sys.stdout)
"""


@pytest.mark.smoke
def test_a_kill_at_any_point_of_saving_leaves_the_newest_checkpoint(tmp_path: Path) -> None:
    """A2: also where a checkpoint replaces one of its own step and is the only one that is kept."""
    result = subprocess.run(
        [sys.executable, "-c", KILLED_SCRIPT, str(tmp_path)], capture_output=True, check=False, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    )
    assert result.returncode == 0, result.stderr.decode()
    *killed, (last_status, *_) = json.loads(result.stdout)
    assert len(killed) > 25
    assert last_status == 0
    assert {status for status, *_ in killed} == {9}
    newest = [step for _, step, *_ in killed]
    assert newest == sorted(newest)
    assert set(newest) == {2, 3}
    assert not any(damage for _, _, damage, _ in killed)
    assert not [name for *_, names in killed for name in names if name.startswith(".")]


def numbers(directory: Path) -> dict[str, int]:
    return {entry.name: entry.stat().st_ino for entry in directory.iterdir()}


class Disk:
    """What a loss of power would leave of a directory, if the system had written nothing yet that it need not have written.

    Attributes:
        names: By the number of a directory: the names in it when it was last made durable, and their numbers.
        data: By the number of a file: its bytes when it was last made durable.
    """

    def __init__(self, root: Path, held: contextlib.ExitStack) -> None:
        self.root = root
        self._held = held
        self.names: dict[int, dict[str, int]] = {}
        self.data: dict[int, bytes] = {}
        self.remember(root)

    def remember(self, path: Path) -> None:
        """A file or directory is durable from now on, as it is."""
        self._held.callback(os.close, os.open(path, os.O_RDONLY))  # so that its number stays its own when it is removed
        number = path.stat().st_ino
        if path.is_dir():
            self.names[number] = numbers(path)
        else:
            self.data[number] = path.read_bytes()

    def image(self, place: Path, *, keeps_names: bool, filler: bytes) -> None:
        """Make in `place` what the next start would find.

        Args:
            place: A new directory.
            keeps_names: Whether the names were written all the same, as a journal may do, and only the data was not.
            filler: What is found where data was not written.
        """
        kinds = {path.stat().st_ino: path.is_dir() for path in [self.root, *self.root.rglob("*")]}
        now = {path.stat().st_ino: numbers(path) for path in [self.root, *self.root.rglob("*")] if path.is_dir()}

        def make(number: int, path: Path) -> None:
            if kinds.get(number, number in self.names):
                path.mkdir()
                for name, inner in (now.get(number, {}) if keeps_names else self.names.get(number, {})).items():
                    make(inner, path / name)
            else:
                path.write_bytes(self.data.get(number, filler))

        make(self.root.stat().st_ino, place)


@pytest.fixture
def held() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.smoke
def test_a_loss_of_power_at_any_point_leaves_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: contextlib.ExitStack
) -> None:
    """A3: names and bytes that were not made durable are lost, or only the bytes are."""
    root = tmp_path / "disk"
    root.mkdir()
    disk, announced = Disk(root, held), [0]
    found: list[int] = []
    rename, replace = os.rename, os.replace

    def crash() -> None:
        for keeps_names, filler in ((False, b""), (True, b""), (True, bytes(50))):
            place = tmp_path / f"image-{len(found)}"
            disk.image(place, keeps_names=keeps_names, filler=filler)
            after = manager(place / "run" / "checkpoints", keep_last=1)
            with pytest.MonkeyPatch.context() as undone:
                undone.setattr(os, "fsync", lambda _descriptor: None)
                undone.setattr(os, "rename", rename)
                undone.setattr(os, "replace", replace)
                clean_up(after.directory)
            latest, _ = after.latest() if announced[0] else (None, [])
            step = latest.step if latest else 0
            assert step >= announced[0], sorted(path.relative_to(place).as_posix() for path in place.rglob("*"))
            found.append(step)

    def fsync_and_remember(descriptor: int) -> None:
        crash()
        disk.remember(Path(f"/proc/self/fd/{descriptor}").resolve())

    def rename_after_crash(old: Path, new: Path) -> None:
        crash()
        rename(old, new)

    def replace_after_crash(old: Path, new: Path) -> None:
        crash()
        replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync_and_remember)
    monkeypatch.setattr(os, "rename", rename_after_crash)
    monkeypatch.setattr(os, "replace", replace_after_crash)
    keeper = manager(root / "run" / "checkpoints", keep_last=1)
    for step in (1, 2, 3, 3):
        add(keeper, step, bleu=float(step))
        announced[0] = step
        crash()
    assert set(found) == {0, 1, 2, 3}
    assert len(found) > 100


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


@pytest.mark.parametrize("score", ["null", '"x"', "[]", "1" + "0" * 400])
def test_a_score_that_is_no_number_is_damage(tmp_path: Path, score: str) -> None:
    keeper = manager(tmp_path)
    add(keeper, 1)
    add(keeper, 2)
    (tmp_path / "step-0000002" / STATE_NAME).write_text(f'{{"scores": {{"bleu": {score}}}}}')
    assert steps(keeper) == [1]
    assert "step-0000002: its MANIFEST.json or state.json is missing" in keeper.latest()[1][0]


def test_a_checkpoint_without_a_manifest_is_told_and_not_lost(tmp_path: Path) -> None:
    keeper = manager(tmp_path)
    add(keeper, 1)
    add(keeper, 2)
    (tmp_path / "step-0000002" / MANIFEST_NAME).unlink()
    latest, damage = keeper.latest()
    assert latest is not None
    assert latest.step == 1
    assert "step-0000002: its MANIFEST.json or state.json is missing" in damage[0]
    add(keeper, 2)
    clean_up(tmp_path)
    assert any(path.name.startswith("step-0000002.damaged-") for path in tmp_path.iterdir())
    for path in tmp_path.glob("step-000000?"):
        (path / MANIFEST_NAME).unlink()
    with pytest.raises(ArtefactError, match="every checkpoint is damaged"):
        keeper.latest()


def stored(*steps: int) -> list[StoredCheckpoint]:
    return [StoredCheckpoint(path=Path(f"step-{step:07d}"), step=step, scores={}) for step in steps]


@pytest.mark.parametrize(
    ("steps", "every_steps", "expected"),
    [
        ((10, 20, 30, 40, 41), 10, [10, 20, 30, 40]),  # stopped just behind one
        ((10, 20, 30, 36), 10, [10, 20, 30, 36]),  # the end of a run
        ((20, 31, 40, 52, 60), 20, [20, 40, 60]),  # by the time too
        ((3, 7), 10, [7]),
        ((0, 10, 20), 10, [10, 20]),  # before the first update
        ((3, 7, 41), None, [3, 7, 41]),
        ((), 10, []),
    ],
)
def test_checkpoints_that_are_evenly_spaced(steps: tuple[int, ...], every_steps: int | None, expected: list[int]) -> None:
    assert [checkpoint.step for checkpoint in evenly_spaced(stored(*steps), every_steps)] == expected


def test_what_the_time_has_saved_does_not_crowd_out_what_can_be_averaged(tmp_path: Path) -> None:
    keeper = CheckpointManager(tmp_path, config=CheckpointConfig(every_steps=10, keep_last=3, keep_best=0), metric="loss")
    seen = []
    for step in (4, 8, 10, 14, 18, 20, 24, 28, 30, 34, 38, 40, 42):
        add(keeper, step)
        seen.append(steps(keeper))
    assert seen[4] == [10, 14, 18], "as many as were asked for, whatever they are"
    assert seen[-2:] == [[20, 30, 40], [20, 30, 40, 42]], "and the newest of all besides"
    alone = CheckpointManager(tmp_path / "alone", config=CheckpointConfig(every_steps=10, keep_last=1, keep_best=0), metric="loss")
    for step in (10, 12):
        add(alone, step)
    assert steps(alone) == [12]
