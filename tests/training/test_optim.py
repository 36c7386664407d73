"""The learning rate against the paper's formula, and the optimizer against torch's reference."""

import math

import pytest
import torch

from mtkit.errors import ConfigError
from mtkit.training.optim import OptimConfig, build_optimizer, learning_rate, state_shapes


@pytest.mark.parametrize("step", [1, 10, 3999, 4000, 4001, 100_000])
def test_the_papers_schedule(step: int) -> None:
    expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)  # Vaswani et al. 2017, equation 3
    assert learning_rate(OptimConfig(), step, d_model=512, max_steps=None) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("inverse-sqrt", 400, 0.01 * math.sqrt(100 / 400)),
        ("constant", 999, 0.01),
        ("linear", 100, 0.01),
        ("linear", 600, 0.005),
        ("linear", 1100, 0.0),
        ("linear", 5000, 0.0),
        ("cosine", 100, 0.01),
        ("cosine", 600, 0.005),
        ("cosine", 350, 0.01 * 0.5 * (1 + math.cos(math.pi / 4))),
        ("cosine", 1100, 0.0),
        ("constant", 50, 0.005),
    ],
)
def test_schedules_by_hand(schedule: str, step: int, expected: float) -> None:
    config = OptimConfig(lr=0.01, schedule=schedule, warmup_steps=100)  # type: ignore[arg-type]
    assert learning_rate(config, step, d_model=7, max_steps=1100) == pytest.approx(expected, abs=1e-12)


def test_no_warm_up_starts_at_the_peak() -> None:
    config = OptimConfig(lr=0.01, warmup_steps=0)
    assert learning_rate(config, 1, d_model=4, max_steps=None) == 0.01
    assert learning_rate(config, 4, d_model=4, max_steps=None) == 0.005


def test_a_decay_to_zero_needs_an_end() -> None:
    with pytest.raises(ConfigError, match=r"optim\.schedule = cosine needs training\.max_steps"):
        learning_rate(OptimConfig(schedule="cosine", warmup_steps=1), 5, d_model=4, max_steps=None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0.0}, "lr must be positive, but is 0.0"),
        ({"warmup_steps": -1}, "warmup_steps must not be negative"),
        ({"warmup_steps": 0}, "lr is required when warmup_steps is 0"),
        ({"beta2": 1.0}, "beta2 must be at least 0 and less than 1, but is 1.0"),
        ({"label_smoothing": 1.0}, "label_smoothing must be"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative"),
        ({"clip_norm": 0.0}, "clip_norm must be positive"),
    ],
)
def test_values_out_of_range(values: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimConfig(**values)  # type: ignore[arg-type]


def test_adam_by_hand() -> None:
    weight = torch.tensor([2.0], requires_grad=True)
    config = OptimConfig()
    optimizer = build_optimizer({weight: "w"}, config)
    mean = square = 0.0
    expected = 2.0
    for step in range(1, 5):
        gradient = 0.5 * step
        weight.grad = torch.tensor([gradient])
        optimizer.step(lr=0.1)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.98 * square + 0.02 * gradient**2
        expected -= 0.1 * (mean / (1 - 0.9**step)) / (math.sqrt(square / (1 - 0.98**step)) + 1e-9)
        assert weight.item() == pytest.approx(expected, rel=1e-5)


def test_weight_decay_is_decoupled() -> None:
    weight = torch.tensor([2.0], requires_grad=True)
    optimizer = build_optimizer({weight: "w"}, OptimConfig(weight_decay=0.5))
    weight.grad = torch.tensor([0.0])
    optimizer.step(lr=0.1)
    assert weight.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5))


def test_the_shapes_of_the_state() -> None:
    names = {torch.zeros(4, 2, requires_grad=True): "encoder.w", torch.zeros(3, requires_grad=True): "b"}
    adam = {f"{key}/b": torch.Size([3]) for key in ("exp_avg", "exp_avg_sq")} | {"step/b": torch.Size()}
    expected = {
        "adam": adam | {f"{key}/encoder.w": torch.Size([4, 2]) for key in ("exp_avg", "exp_avg_sq")} | {"step/encoder.w": torch.Size()},
        "muon": adam | {"momentum_buffer/encoder.w": torch.Size([4, 2])},
    }
    for kind, shapes in expected.items():
        optimizer = build_optimizer(names, OptimConfig(optimizer=kind))  # type: ignore[arg-type]
        assert state_shapes(optimizer, names) == shapes
        for parameter in names:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(lr=0.1)
        assert {
            f"{key}/{names[parameter]}": value.shape for parameter, entries in optimizer.state.items() for key, value in entries.items()
        } == shapes
