import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from mtkit.checkpoint.format import parameters_by_name, read_tensors, write_tensors
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import ArtefactError
from mtkit.files import write_json
from mtkit.training.optim import OptimConfig, Optimizer, build_optimizer
from mtkit.training.state import TrainState, optimizer_tensors, read_state, restore_optimizer

FULL = TrainState(
    step=12,
    epoch=3,
    pool=6,
    position=4,
    micro_per_update=6,
    pool_digest="5d" * 32,
    is_packed=True,
    num_tgt_tokens=567,
    num_skipped=2,
    num_skipped_in_row=1,
    elapsed_s=8.25,
    saving_s=0.5,
    best_value=3.5,
    best_loss=3.25,
    best_step=8,
    num_bad_validations=1,
    scores={"loss": 3.75},
    scores_step=12,
    last_validation_s=3.0,
    is_validation_due=True,
    scaler={"scale": 1024.0, "num_clean": 3.0},
)


def test_every_field_survives(tmp_path: Path) -> None:
    assert all(getattr(FULL, field.name) != getattr(TrainState(), field.name) for field in dataclasses.fields(TrainState)), "else nothing is tested"
    for state in (FULL, TrainState()):
        write_json(tmp_path / "state.json", state.to_json())
        assert read_state(tmp_path) == state


def test_a_checkpoint_shows_scores_of_its_own_step_only() -> None:
    state = dataclasses.replace(FULL, step=16)
    assert FULL.to_json()["scores"] == {"loss": 3.75}
    assert state.to_json()["scores"] == {}
    assert TrainState.from_json(json.loads(json.dumps(state.to_json())), path=Path("state.json")).scores == {"loss": 3.75}


@pytest.mark.parametrize(("metric", "values", "best"), [("loss", [3.0, 2.0, 2.5, 2.0], 2), ("bleu", [3.0, 2.0, 4.5, 4.5], 3)])
def test_the_best_and_the_wait_since(metric: Any, values: list[float], best: int) -> None:
    state = TrainState()
    found = []
    for step, value in enumerate(values, start=1):
        state.step = step
        found.append(state.record_validation({metric: value}, metric=metric))
    assert found == [step in (1, best) for step in (1, 2, 3, 4)]
    assert (state.best_step, state.best_value) == (best, values[best - 1])
    assert state.num_bad_validations == 4 - best
    assert state.scores_step == 4


def test_a_state_from_before_an_equal_metric_was_decided_by_the_loss() -> None:
    value = FULL.to_json()
    del value["best_loss"]
    state = TrainState.from_json(value, path=Path("state.json"))
    assert (state.best_value, state.best_loss) == (3.5, None)
    assert state.record_validation({"bleu": 3.5, "loss": 9.0}, metric="bleu"), "whatever the loss was, it is known from now on"


def test_where_the_metric_is_equal_the_loss_tells_what_is_better() -> None:
    """marian-dev 382: BLEU 0 at the start of a run is no reason to stop it, nor to keep its first weights as the best."""
    state = TrainState()
    found = []
    for step, (bleu, loss) in enumerate([(0.0, 6.0), (0.0, 5.0), (0.0, 5.5), (1.0, 7.0), (0.0, 4.0)], start=1):
        state.step = step
        found.append(state.record_validation({"bleu": bleu, "loss": loss}, metric="bleu"))
    assert found == [True, True, False, True, False]
    assert (state.best_step, state.best_value, state.best_loss, state.num_bad_validations) == (4, 1.0, 7.0, 1)


def test_a_validation_without_the_metric_is_neither_good_nor_bad() -> None:
    state = TrainState()
    assert not state.record_validation({"loss": 1.0}, metric="bleu")
    assert (state.best_step, state.num_bad_validations) == (None, 0)
    assert state.scores == {"loss": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "has format 1, this mtkit reads format 2"),
        ({"position": None}, "is not the state of a training run: KeyError"),
        ("all", "is not the state of a training run: TypeError"),
    ],
)
def test_a_state_that_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    value: Any = FULL.to_json()
    if change == "all":
        value = [value]
    elif change == {"position": None}:
        del value["position"]
    else:
        value |= change
    write_json(tmp_path / "state.json", value)
    with pytest.raises(ArtefactError, match=message):
        read_state(tmp_path)


def optimizer_of(shape: tuple[int, ...], *, num_updates: int, kind: Literal["adam", "muon"] = "adam") -> tuple[Optimizer, dict[torch.Tensor, str]]:
    torch.manual_seed(1)
    names: dict[torch.Tensor, str] = {torch.nn.Parameter(torch.randn(shape)): "encoder.a", torch.nn.Parameter(torch.randn(2)): "b"}
    optimizer = build_optimizer(names, OptimConfig(optimizer=kind))
    for _ in range(num_updates):
        for parameter in names:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step(lr=0.1)
    return optimizer, names


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("adam", {f"{key}/{name}" for key in ("exp_avg", "exp_avg_sq", "step") for name in ("encoder.a", "b")}),
        ("muon", {"momentum_buffer/encoder.a", "exp_avg/b", "exp_avg_sq/b", "step/b"}),
    ],
)
def test_the_optimizer_goes_on_as_if_it_had_never_stopped(kind: Any, keys: set[str], tmp_path: Path) -> None:
    optimizer, names = optimizer_of((3, 4), num_updates=5, kind=kind)
    write_tensors(tmp_path / "optimizer.safetensors", optimizer_tensors(optimizer, names))
    assert set(read_tensors(tmp_path / "optimizer.safetensors")) == keys
    fresh, fresh_names = optimizer_of((3, 4), num_updates=0, kind=kind)
    restore_optimizer(fresh, fresh_names, tmp_path / "optimizer.safetensors")
    for parameter, other in zip(fresh_names, names, strict=True):
        with torch.no_grad():
            parameter.copy_(other)
        parameter.grad = other.grad = torch.full_like(parameter, 0.5)
    fresh.step(lr=0.1)
    optimizer.step(lr=0.1)
    for parameter, other in zip(fresh_names, names, strict=True):
        torch.testing.assert_close(parameter, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_an_optimizer_before_its_first_update_has_no_state(kind: Any, tmp_path: Path) -> None:
    optimizer, names = optimizer_of((3, 4), num_updates=0, kind=kind)
    write_tensors(tmp_path / "optimizer.safetensors", optimizer_tensors(optimizer, names))
    restore_optimizer(optimizer, names, tmp_path / "optimizer.safetensors")
    assert not optimizer.state


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.safetensors"
    optimizer, names = optimizer_of((3, 5), num_updates=1)
    tensors = optimizer_tensors(optimizer, names)
    write_tensors(path, tensors)
    with pytest.raises(ArtefactError, match=r"exp_avg/encoder.a has the shape \[3, 5\], and \[3, 4\] is needed"):
        restore_optimizer(*optimizer_of((3, 4), num_updates=0), path)
    with pytest.raises(ArtefactError, match="holds a tensor that the model lacks: 'exp_avg/encoder.a'"):
        restore_optimizer(*optimizer_of((3, 5), num_updates=0, kind="muon"), path)
    del tensors["exp_avg_sq/b"]
    write_tensors(path, tensors)
    with pytest.raises(ArtefactError, match="has no tensor exp_avg_sq/b"):
        restore_optimizer(*optimizer_of((3, 5), num_updates=0), path)


def test_the_files_of_a_checkpoint(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "training.max_steps=2", "training.ema_decay=0.5")
    list(trainer.train())
    path = trainer.store.manager.stored()[-1].path
    assert {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} == {
        "MANIFEST.json",
        "README.md",
        "config.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer.model",
        "trained.safetensors",
    }
    trained, average = read_tensors(path / "trained.safetensors"), read_tensors(path / "model.safetensors")
    for name, tensor in parameters_by_name(trainer.updater.model).items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=0)
        torch.testing.assert_close(average[name], trainer.updater.ema[name], rtol=0, atol=0)
    assert Tokenizer.read_files(path / "tokenizer").src_vocab_size == 44


def test_a_result_that_is_not_finite_is_no_result_and_can_be_saved() -> None:
    state = TrainState(step=3)
    assert not state.record_validation({"loss": math.nan, "ppl": math.inf, "bleu": 1.5}, metric="loss")
    assert state.scores == {"bleu": 1.5}
    assert (state.best_value, state.num_bad_validations) == (None, 1)
    json.dumps(state.to_json(), allow_nan=False)
    assert state.record_validation({"loss": 2.0}, metric="loss")


def test_a_state_from_before_pools_had_a_digest_is_read() -> None:
    value = FULL.to_json()
    del value["pool_digest"]
    assert TrainState.from_json(value, path=Path("state.json")) == dataclasses.replace(FULL, pool_digest=None)
