"""The loss against torch's own, forward and gradient."""

import pytest
import torch
from torch.nn import functional

from mtkit.training.loss import smoothed_cross_entropy


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.7])
def test_equals_torch_forward_and_gradient(label_smoothing: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits_NV = (torch.randn(40, 23, generator=generator) * 4).requires_grad_()
    target_N = torch.randint(0, 23, (40,), generator=generator)
    loss, nll = smoothed_cross_entropy(logits_NV, target_N, label_smoothing=label_smoothing)
    (loss * 0.3).backward()
    ours, logits_NV.grad = logits_NV.grad, None
    expected = functional.cross_entropy(logits_NV, target_N, label_smoothing=label_smoothing, reduction="sum")
    (expected * 0.3).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(nll, functional.cross_entropy(logits_NV, target_N, reduction="sum").detach(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ours, logits_NV.grad, rtol=1e-5, atol=1e-6)


def test_gradcheck_against_finite_differences() -> None:
    logits_NV = torch.randn(3, 5, dtype=torch.float32, generator=torch.Generator().manual_seed(2)).requires_grad_()
    target_N = torch.tensor([0, 4, 2])
    loss, _ = smoothed_cross_entropy(logits_NV, target_N, label_smoothing=0.2)
    loss.backward()
    assert logits_NV.grad is not None
    step = 1e-2
    for row in range(3):
        for column in range(5):
            shift = torch.zeros(3, 5)
            shift[row, column] = step
            upper, _ = smoothed_cross_entropy(logits_NV.detach() + shift, target_N, label_smoothing=0.2)
            lower, _ = smoothed_cross_entropy(logits_NV.detach() - shift, target_N, label_smoothing=0.2)
            assert ((upper - lower) / (2 * step)).item() == pytest.approx(logits_NV.grad[row, column].item(), abs=2e-3)


def test_half_precision_logits_are_summed_in_fp32() -> None:
    logits_NV = torch.randn(64, 1000, generator=torch.Generator().manual_seed(3)).bfloat16()
    target_N = torch.arange(64)
    loss, _ = smoothed_cross_entropy(logits_NV, target_N, label_smoothing=0.1)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(
        loss, functional.cross_entropy(logits_NV.float(), target_N, label_smoothing=0.1, reduction="sum"), rtol=1e-5, atol=1e-3
    )


def test_huge_logits_stay_finite() -> None:
    logits_NV = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    loss, _ = smoothed_cross_entropy(logits_NV, torch.tensor([2]), label_smoothing=0.0)
    loss.backward()
    assert loss.item() == 2e4
    assert logits_NV.grad is not None
    assert torch.isfinite(logits_NV.grad).all()
