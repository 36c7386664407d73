"""Loss scaling."""

import pytest
import torch

from mtkit.errors import DivergedError
from mtkit.model.device import Precision
from mtkit.training.precision import GROWTH_INTERVAL, INITIAL_SCALE, SMALLEST_SCALE, LossScaler

FP16 = Precision(name="fp16", device_type="cuda")
BF16 = Precision(name="bf16", device_type="cpu")


def test_only_fp16_scales() -> None:
    scaler = LossScaler(BF16)
    gradient = torch.tensor([3.0])
    scaler.unscale([gradient])
    scaler.update(is_finite=False)
    assert scaler.scale == 1.0
    assert gradient.item() == 3.0
    assert scaler.state() == {}


def test_gradients_are_divided_by_the_scale() -> None:
    scaler = LossScaler(FP16)
    gradient = torch.tensor([INITIAL_SCALE * 0.25])
    scaler.unscale([gradient])
    assert gradient.item() == 0.25


def test_the_scale_halves_on_overflow_and_doubles_after_clean_updates() -> None:
    scaler = LossScaler(FP16)
    scaler.update(is_finite=False)
    assert scaler.scale == INITIAL_SCALE / 2
    for _ in range(GROWTH_INTERVAL - 1):
        scaler.update(is_finite=True)
    assert scaler.scale == INITIAL_SCALE / 2
    scaler.update(is_finite=True)
    assert scaler.scale == INITIAL_SCALE


def test_one_overflow_starts_the_count_anew() -> None:
    scaler = LossScaler(FP16)
    for _ in range(GROWTH_INTERVAL - 1):
        scaler.update(is_finite=True)
    scaler.update(is_finite=False)
    scaler.update(is_finite=True)
    assert scaler.scale == INITIAL_SCALE / 2


def test_the_floor_ends_the_run_with_advice() -> None:
    scaler = LossScaler(FP16)
    while scaler.scale > SMALLEST_SCALE:
        scaler.update(is_finite=False)
    with pytest.raises(DivergedError, match="gradients overflow at any scale") as error:
        scaler.update(is_finite=False)
    assert "optim.lr" in (error.value.hint or "")


def test_state_round_trip() -> None:
    scaler = LossScaler(FP16)
    scaler.update(is_finite=False)
    scaler.update(is_finite=True)
    other = LossScaler(FP16)
    other.restore(scaler.state())
    assert other.state() == scaler.state()
    other.restore({})
    assert other.scale == scaler.scale
