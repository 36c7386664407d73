"""What a run puts on disk: which model it hands over, and what its checkpoints say of themselves. (Resuming: test_trainer.py.)"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mtkit.artefacts import read_manifest, verify_directory
from mtkit.checkpoint.format import load_model, parameters_by_name
from mtkit.errors import ArtefactError
from mtkit.training.state import TrainState
from mtkit.training.trainer import Trainer

MakeTrainer = Callable[..., Trainer]


def save(trainer: Trainer, step: int, **scores: float) -> None:
    """Write a checkpoint whose weights all equal its step."""
    with torch.no_grad():
        for parameter in trainer.updater.parameter_names:
            parameter.fill_(float(step))
    state = TrainState(step=step)
    if scores:
        state.record_validation(scores, metric="loss")
    trainer.store.save(state, trainer.updater, world_size=1)


def handed_over(trainer: Trainer) -> tuple[float, int]:
    step, damage = trainer.store.hand_over()
    assert damage == []
    assert load_model(trainer._run.model).description.provenance["step"] == step
    loaded = load_model(trainer._run.model)
    value = next(iter(parameters_by_name(loaded.model).values())).flatten()[0].item()
    return value, loaded.description.provenance["step"]


def test_the_best_checkpoint_is_handed_over(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        save(trainer, step, loss=loss)
    assert handed_over(trainer) == (2.0, 2)
    save(trainer, 4, loss=0.5)
    assert handed_over(trainer) == (4.0, 4), "the earlier model is replaced"


def test_the_best_is_handed_over_where_none_is_kept_for_being_the_best(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "checkpoint.keep_best=0")
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        save(trainer, step, loss=loss)
    assert handed_over(trainer) == (2.0, 2)


def test_the_next_best_is_handed_over_and_the_damaged_one_told(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0)):
        save(trainer, step, loss=loss)
    weights = trainer.store.manager.directory / "step-0000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x99")
    step, (line,) = trainer.store.hand_over()
    assert step == 3
    assert "step-0000002" in line
    assert load_model(trainer._run.model).description.provenance["step"] == 3


def test_without_results_the_last_one_is_handed_over(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    for step in (1, 2):
        save(trainer, step)
    assert handed_over(trainer) == (2.0, 2)


def test_a_checkpoint_tells_its_data_and_passes_a_full_check(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    save(trainer, 1, loss=2.0)
    path = trainer.store.manager.stored()[0].path
    verify_directory(path, kind="checkpoint", level="full")
    manifest = read_manifest(path)
    assert manifest.inputs == {"data": trainer.data.fingerprint, "world_size": 1, "torch": torch.__version__}
    assert manifest.config["seed"] == trainer.config.seed
    assert load_model(path).description.provenance["scores"] == {"loss": 2.0}


def test_a_result_of_another_step_is_not_told_as_this_ones(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    state = TrainState(step=1)
    state.record_validation({"loss": 2.0}, metric="loss")
    state.step = 2
    trainer.store.save(state, trainer.updater, world_size=1)
    assert trainer.store.manager.stored()[0].scores == {}
    assert load_model(trainer.store.manager.stored()[0].path).description.provenance["scores"] == {}


def test_another_model_is_refused_with_the_difference(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    save(make_trainer(tmp_path), 1)
    with pytest.raises(ArtefactError, match="holds another model: ffn_dim: 32 -> 48"):
        make_trainer(tmp_path, "model.ffn_dim=48")


@pytest.mark.parametrize(
    ("was_packed", "is_packed", "position", "warning"),
    [
        (True, False, 0, "the run goes on with padded batches instead of packed ones: it is not bit-exact"),
        (
            False,
            True,
            4,
            "the run goes on with packed batches instead of padded ones: it is not bit-exact, and the pool of pairs in which it stopped",
        ),
        (True, True, 4, None),
        (None, True, 4, None),  # a former mtkit did not note it
    ],
)
def test_another_layout_of_the_batches_is_told(
    make_trainer: MakeTrainer, tmp_path: Path, was_packed: bool | None, is_packed: bool, position: int, warning: str | None
) -> None:
    trainer = make_trainer(tmp_path)
    trainer.store.save(TrainState(step=1, epoch=1, pool=2, position=position, is_packed=was_packed), trainer.updater, world_size=1)
    found = [line.split(" is dealt anew: ")[0] for line in trainer.store.find(world_size=1, is_packed=is_packed)[1]]
    assert found == ([] if warning is None else [warning])
