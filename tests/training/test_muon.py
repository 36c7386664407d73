"""Muon against torch's own, and what it leaves to Adam."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.checkpoint.format import parameters_by_name
from mtkit.model.config import MODEL_PRESETS, ModelConfig
from mtkit.model.device import Precision
from mtkit.model.transformer import Transformer
from mtkit.training import muon
from mtkit.training.muon import Muon, orthogonalize
from mtkit.training.optim import OptimConfig, Optimizer, build_optimizer

MUON = OptimConfig(optimizer="muon")
SHAPES = ((8, 8), (8, 8), (12, 8), (8, 20), (24, 8))


def matrices_and_optimizer(config: OptimConfig, names: dict[str, tuple[int, ...]]) -> tuple[dict[str, torch.nn.Parameter], Optimizer]:
    torch.manual_seed(3)
    parameters = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in names.items()}
    return parameters, build_optimizer({parameter: name for name, parameter in parameters.items()}, config)


def take_step(optimizer: Optimizer, parameters: dict[str, torch.nn.Parameter], *, step: int, lr: float = 0.1) -> None:
    draw_gradients(parameters, step=step)
    optimizer.step(lr=lr)


def draw_gradients(parameters: dict[str, torch.nn.Parameter], *, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_it_does_what_torch_does(weight_decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "resolve_precision", lambda _name, _device: Precision(name="bf16", device_type="cpu"))  # as torch has it
    names: dict[str, tuple[int, ...]] = {f"encoder.{number}": shape for number, shape in enumerate(SHAPES)}
    ours, optimizer = matrices_and_optimizer(OptimConfig(optimizer="muon", weight_decay=weight_decay), {**names, "encoder.bias": (3,)})
    theirs = {name: torch.nn.Parameter(ours[name].detach().clone()) for name in names}
    reference = torch.optim.Muon(list(theirs.values()), momentum=0.95, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        take_step(optimizer, ours, step=step, lr=0.1 / (step + 1))
        draw_gradients(theirs, step=step)
        reference.param_groups[0]["lr"] = 0.1 / (step + 1)
        reference.step()
        for name in names:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    matrices = torch.randn(3, *shape)
    for matrix, result in zip(matrices, orthogonalize(matrices), strict=True):
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        inner = u.mT @ result @ v.mT
        assert inner.diagonal().min() > 0.6
        assert inner.diagonal().max() < 1.3
        torch.testing.assert_close(inner, torch.diag(inner.diagonal()), rtol=0, atol=1e-4)


def test_a_step_is_as_large_as_adams() -> None:
    for shape in ((32, 32), (16, 64), (64, 16)):
        parameters, optimizer = matrices_and_optimizer(MUON, {"encoder.w": shape, "b": (2,)})
        before = parameters["encoder.w"].detach().clone()
        take_step(optimizer, parameters, step=1, lr=0.5)
        rms = float((parameters["encoder.w"].detach() - before).pow(2).mean().sqrt())
        assert rms == pytest.approx(0.2 * 0.5, rel=0.2), shape


def test_stacked_projections_are_orthogonalized_one_by_one() -> None:
    stacked, optimizer = matrices_and_optimizer(MUON, {"decoder.self_attention.in_proj.weight": (24, 8), "b": (2,)})
    single, other = matrices_and_optimizer(MUON, {**{f"decoder.attention.{part}": (8, 8) for part in "qkv"}, "b": (2,)})
    with torch.no_grad():
        stacked["decoder.self_attention.in_proj.weight"].copy_(torch.cat([single[f"decoder.attention.{part}"] for part in "qkv"]))
    for step in range(3):
        take_step(optimizer, stacked, step=step)  # the same numbers, in the same order
        take_step(other, single, step=step)
    expected = torch.cat([single[f"decoder.attention.{part}"] for part in "qkv"])
    torch.testing.assert_close(stacked["decoder.self_attention.in_proj.weight"], expected, rtol=0, atol=1e-6)


def test_a_gradient_of_zero_moves_nothing_and_none_is_passed_over() -> None:
    parameters, optimizer = matrices_and_optimizer(MUON, {"encoder.a": (4, 4), "encoder.b": (4, 4), "c": (2,)})
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    parameters["encoder.a"].grad = torch.zeros(4, 4)
    optimizer.step(lr=0.1)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0)
    optimizer.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in parameters.values())
    optimizer.step(lr=0.1)
    assert set(optimizer.state) == {parameters["encoder.a"]}


@pytest.mark.parametrize("is_skipped", [True, False])
def test_a_step_that_is_skipped_changes_nothing(is_skipped: bool) -> None:
    parameters, optimizer = matrices_and_optimizer(MUON, {"encoder.a": (4, 4), "b": (2,)})
    before = [parameter.detach().clone() for parameter in parameters.values()]
    draw_gradients(parameters, step=1)
    optimizer.step(lr=0.1, skip=torch.tensor(is_skipped))
    assert [torch.equal(parameter, old) for parameter, old in zip(parameters.values(), before, strict=True)] == [is_skipped] * 2


@pytest.mark.parametrize("tying", ["three-way", "none"])
def test_which_parameters_of_a_model_it_takes(tying: Any) -> None:
    config = ModelConfig(d_model=8, ffn_dim=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, tie_embeddings=tying)
    model = Transformer(config, src_vocab_size=16, tgt_vocab_size=16)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(names, MUON)
    assert isinstance(optimizer, Muon)
    assert {name for parameter, name in names.items() if optimizer.owns(parameter)} == {
        "encoder.layers.0.self_attention.in_proj.weight",
        "encoder.layers.0.self_attention.out_proj.weight",
        "encoder.layers.0.feed_forward.in_proj.weight",
        "encoder.layers.0.feed_forward.out_proj.weight",
        "decoder.layers.0.self_attention.in_proj.weight",
        "decoder.layers.0.self_attention.out_proj.weight",
        "decoder.layers.0.cross_attention.q_proj.weight",
        "decoder.layers.0.cross_attention.kv_proj.weight",
        "decoder.layers.0.cross_attention.out_proj.weight",
        "decoder.layers.0.feed_forward.in_proj.weight",
        "decoder.layers.0.feed_forward.out_proj.weight",
    }
    assert len(optimizer.parameters) == len(names)
    assert set(optimizer.parameters) == set(names)


def test_every_preset_divides_into_blocks() -> None:
    for config in MODEL_PRESETS.values():
        with torch.device("meta"):
            model = Transformer(config, src_vocab_size=80, tgt_vocab_size=80)
        for name, parameter in model.named_parameters():
            if "attention." in name and parameter.ndim == 2:
                assert parameter.shape[0] % parameter.shape[1] == 0, name


def test_a_resumed_run_is_the_same_run(make_trainer: Any, tmp_path: Path) -> None:
    options = ("optim.optimizer=muon", "optim.lr=0.01", "checkpoint.every_steps=none")
    whole = make_trainer(tmp_path / "whole", *options, "training.max_steps=8")
    list(whole.train())
    parts = make_trainer(tmp_path / "parts", *options, "training.max_steps=4")
    list(parts.train())
    parts = make_trainer(tmp_path / "parts", *options, "training.max_steps=8")
    assert parts.state.step == 4
    list(parts.train())
    expected = parameters_by_name(whole.updater.model)
    for name, tensor in parameters_by_name(parts.updater.model).items():
        assert torch.equal(tensor, expected[name]), name
    losses = [float(trainer.state.scores["loss"]) for trainer in (whole, parts)]
    assert losses[0] == losses[1]
    assert math.isfinite(losses[0])
