"""Attention weights against the formula, on both sides of the length at which the way of computing changes."""

import math

import pytest
import torch
from torch import Tensor

from mtkit.model.softmax import LARGEST_EXPONENT, SHORT_ROW, attention_weights

B, H, T = 3, 2, 5
SCALE = 0.37


def causal_and_padding(num_keys: int) -> Tensor:
    """B1TS, with at least one key for every query."""
    mask = torch.rand(B, 1, T, num_keys) < 0.7
    mask[..., 0] = True
    return mask


def formula(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((scores * SCALE).masked_fill(~mask, -math.inf), dim=-1)


@pytest.mark.parametrize("num_keys", [1, 2, 13, 16, SHORT_ROW - 1, SHORT_ROW, 70])
def test_values_and_gradients_are_those_of_the_formula(num_keys: int) -> None:
    scores = (torch.randn(B, H, T, num_keys, dtype=torch.float64) * 4.0).requires_grad_()
    mask = causal_and_padding(num_keys)
    ours, expected = attention_weights(scores, mask, scale=SCALE), formula(scores, mask)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    weight = torch.randn_like(expected)
    (our_grad,), (grad,) = (torch.autograd.grad((out * weight).sum(), scores) for out in (ours, expected))
    torch.testing.assert_close(our_grad, grad, rtol=1e-10, atol=1e-12)
    assert (our_grad.masked_select(~mask.expand_as(our_grad)) == 0).all()


@pytest.mark.parametrize("shift", [0.0, 500.0, -500.0])
@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_large_scores_stay_exact(shift: float, spread: float) -> None:
    scores = (torch.randn(B, H, T, 9) * spread + shift) / SCALE
    mask = causal_and_padding(9)
    torch.testing.assert_close(attention_weights(scores, mask, scale=SCALE), formula(scores, mask), rtol=1e-4, atol=1e-6)


def test_up_to_the_limit_nothing_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "softmax", lambda *_args, **_kwargs: pytest.fail("took the way for large scores"))
    scores = torch.full((1, 1, 2, SHORT_ROW - 1), LARGEST_EXPONENT)
    scores[:, :, 1] = -LARGEST_EXPONENT
    weights = attention_weights(scores, torch.ones(1, 1, 1, SHORT_ROW - 1, dtype=torch.bool), scale=1.0)
    torch.testing.assert_close(weights, torch.full_like(weights, 1.0 / (SHORT_ROW - 1)))


@pytest.mark.parametrize("num_keys", [6, SHORT_ROW + 6])
def test_a_query_without_keys_gets_finite_numbers(num_keys: int) -> None:
    scores = torch.randn(B, H, T, num_keys, requires_grad=True)
    mask = torch.ones(B, 1, T, num_keys, dtype=torch.bool)
    mask[1, :, 2] = False
    weights = attention_weights(scores, mask, scale=SCALE)
    torch.autograd.backward(weights.square().sum())
    assert weights.isfinite().all()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


def test_nan_is_not_hidden() -> None:
    scores = torch.randn(1, 1, 2, 4)
    scores[0, 0, 1, 2] = math.nan
    assert attention_weights(scores, torch.ones(1, 1, 1, 4, dtype=torch.bool), scale=SCALE)[0, 0, 1].isnan().all()


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_nothing_to_attend_to(shape: tuple[int, ...]) -> None:
    assert attention_weights(torch.zeros(shape), torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, 1, shape[3]), scale=1.0).shape == shape


@pytest.mark.parametrize(("num_keys", "is_short"), [(SHORT_ROW - 1, True), (SHORT_ROW, False)])
def test_short_rows_do_not_take_the_slow_kernel(num_keys: int, is_short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    real = torch.softmax

    def spy(scores: Tensor, dim: int) -> Tensor:
        calls.append(scores)
        return real(scores, dim=dim)

    monkeypatch.setattr(torch, "softmax", spy)
    attention_weights(torch.randn(1, 1, 2, num_keys), torch.ones(1, 1, 1, num_keys, dtype=torch.bool), scale=1.0)
    assert bool(calls) != is_short
