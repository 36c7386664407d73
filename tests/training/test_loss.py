"""The loss against torch's own in float64, forward and gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mtkit.data.tokenizer import PAD_ID
from mtkit.training import loss as module
from mtkit.training.loss import smoothed_cross_entropy

N, D, V, R = 40, 12, 23, 32


def inputs(*, scale: float = 2.0, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """hidden_ND, weight_RD with rows that pad the vocabulary, and target_N without padding."""
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = (torch.randn(N, D, generator=generator) * scale).to(dtype).requires_grad_()
    weight_RD = torch.randn(R, D, generator=generator)
    weight_RD[V:] = 0.0
    return hidden_ND, weight_RD.requires_grad_(), torch.randint(PAD_ID + 1, V, (N,), generator=generator)


def exact(hidden_ND: Tensor, weight_RD: Tensor, target_N: Tensor, *, label_smoothing: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, negative log-likelihood and the loss's gradients of hidden and weight, by torch in float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden_ND, weight_RD))
    logits_NV = hidden @ weight[:V].T
    loss, nll = (
        functional.cross_entropy(logits_NV, target_N, label_smoothing=epsilon, reduction="sum", ignore_index=PAD_ID)
        for epsilon in (label_smoothing, 0.0)
    )
    return (loss.detach(), nll.detach(), *torch.autograd.grad(loss, (hidden, weight)))  # type: ignore[return-value]


def ours(hidden_ND: Tensor, weight_RD: Tensor, target_N: Tensor, *, label_smoothing: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, nll = smoothed_cross_entropy(hidden_ND, weight_RD, target_N, vocab_size=V, label_smoothing=label_smoothing)
    return (loss.detach(), nll, *torch.autograd.grad(loss, (hidden_ND, weight_RD)))  # type: ignore[return-value]


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], *, relative: float) -> None:
    """Each tensor differs by no more than this share of its greatest value."""
    for ours, exactly in zip(found, expected, strict=True):
        assert ours.isfinite().all()
        assert (ours.double() - exactly).abs().max() <= relative * exactly.abs().max()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("chunk", [7, 20, N, 512])
def test_equals_torch_in_float64(chunk: int, label_smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_CHUNK", chunk)
    hidden_ND, weight_RD, target_N = inputs()
    found = ours(hidden_ND, weight_RD, target_N, label_smoothing=label_smoothing)
    assert_close(found, exact(hidden_ND, weight_RD, target_N, label_smoothing=label_smoothing), relative=1e-6)
    assert not found[1].requires_grad


def chunk_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that fills with the number of tokens of each chunk."""
    seen: list[int] = []
    real = module._softmax_for

    def spy(z_KR: Tensor) -> Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]:
        seen.append(len(z_KR))
        return real(z_KR)

    monkeypatch.setattr(module, "_softmax_for", spy)
    return seen


@pytest.mark.parametrize(("num_tokens", "sizes"), [(40, [14, 14, 12]), (15, [15]), (16, [8, 8]), (1, [1])])
def test_chunks_are_about_equal_and_no_larger_than_the_limit(num_tokens: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_CHUNK", 15)
    seen = chunk_sizes(monkeypatch)
    hidden_ND, weight_RD, target_N = inputs()
    smoothed_cross_entropy(hidden_ND[:num_tokens], weight_RD, target_N[:num_tokens], vocab_size=V, label_smoothing=0.1)
    assert seen == sizes


def test_the_softmax_for_one_kernel_is_the_plain_one() -> None:
    z_KR, y_K1 = torch.randn(40, V) * 5.0, torch.randint(V, (40, 1))
    z_KR[:, -3:] = -torch.inf
    y_K1[0], y_K1[y_K1 >= V - 3] = z_KR[0].argmax(), 0
    expected = module._softmax_less_target(z_KR.clone(), y_K1, 0.1)
    for part, right in zip(module._softmax_less_target_in_one_pass(z_KR, y_K1, 0.1), expected, strict=True):
        torch.testing.assert_close(part, right, rtol=1e-5, atol=1e-6)


def test_half_precision_on_a_cpu_multiplies_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_CHUNK", 16)
    monkeypatch.setattr(module, "GRID", 8)
    seen = chunk_sizes(monkeypatch)
    hidden_ND, weight_RD, target_N = inputs()
    for num_tokens in (37, 33, 3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = ours(hidden_ND[:num_tokens], weight_RD, target_N[:num_tokens], label_smoothing=0.1)
        assert_close(found, exact(hidden_ND[:num_tokens], weight_RD, target_N[:num_tokens], label_smoothing=0.1), relative=2e-2)
    assert seen == [16, 16, 8, 16, 16, 8, 8]


def test_gradient_against_finite_differences() -> None:
    hidden_ND, weight_RD, target_N = inputs(scale=0.5)
    _, _, hidden_grad, weight_grad = ours(hidden_ND, weight_RD, target_N, label_smoothing=0.2)
    step = 1e-2
    for row, column in ((0, 3), (7, 0), (22, 11)):
        for tensor, gradient in ((hidden_ND, hidden_grad), (weight_RD, weight_grad)):
            around = []
            for sign in (1.0, -1.0):
                moved = tensor.detach().clone()
                moved[row, column] += sign * step
                pair = (moved, weight_RD) if tensor is hidden_ND else (hidden_ND, moved)
                around.append(float(smoothed_cross_entropy(*pair, target_N, vocab_size=V, label_smoothing=0.2)[0].detach()))
            assert (around[0] - around[1]) / (2 * step) == pytest.approx(float(gradient[row, column]), abs=2e-2)


def test_rows_that_pad_the_vocabulary_take_no_part() -> None:
    hidden_ND, weight_RD, target_N = inputs()
    expected = ours(hidden_ND, weight_RD, target_N, label_smoothing=0.1)
    assert (expected[3][V:] == 0).all()
    assert (expected[3][:V].abs().amax(1) > 0).all()
    with torch.no_grad():
        weight_RD[V:] = 3.0
    found = ours(hidden_ND, weight_RD, target_N, label_smoothing=0.1)
    for tensor, same in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor, same, rtol=0, atol=0)


@pytest.mark.parametrize("chunk", [7, 512])
def test_padding_counts_for_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_CHUNK", chunk)
    hidden_ND, weight_RD, target_N = inputs()
    target_N[torch.arange(N) % 3 == 0] = PAD_ID
    target_N[-9:] = PAD_ID  # a chunk without any token
    found = ours(hidden_ND, weight_RD, target_N, label_smoothing=0.1)
    assert_close(found, exact(hidden_ND, weight_RD, target_N, label_smoothing=0.1), relative=1e-6)
    assert (found[2][target_N == PAD_ID] == 0).all()


def test_only_padding_is_nothing() -> None:
    hidden_ND, weight_RD, target_N = inputs()
    found = ours(hidden_ND, weight_RD, torch.full_like(target_N, PAD_ID), label_smoothing=0.1)
    assert all((tensor == 0).all() for tensor in found)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_very_large_logits_stay_finite_and_right(label_smoothing: float) -> None:
    hidden_ND, weight_RD, target_N = inputs(scale=1e4)
    found = ours(hidden_ND, weight_RD, target_N, label_smoothing=label_smoothing)
    assert_close(found, exact(hidden_ND, weight_RD, target_N, label_smoothing=label_smoothing), relative=1e-5)


def test_a_certain_prediction_has_no_loss() -> None:
    weight_RD = torch.eye(8)
    hidden_ND = (1e4 * weight_RD[1:3]).requires_grad_()
    loss, nll = smoothed_cross_entropy(hidden_ND, weight_RD, torch.tensor([1, 2]), vocab_size=8, label_smoothing=0.0)
    torch.autograd.backward(loss)
    assert (float(loss.detach()), float(nll)) == (0.0, 0.0)
    assert hidden_ND.grad is not None
    assert (hidden_ND.grad == 0).all()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_gradient_is_made_where_none_is_wanted(context: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_ND, weight_RD, target_N = inputs()
    expected = ours(hidden_ND, weight_RD, target_N, label_smoothing=0.1)
    monkeypatch.setattr(module, "add_product", lambda *_: pytest.fail("made a gradient"))
    with context():
        loss, nll = smoothed_cross_entropy(hidden_ND, weight_RD, target_N, vocab_size=V, label_smoothing=0.1)
    assert torch.equal(loss, expected[0])
    assert torch.equal(nll, expected[1])


BF16 = 2.0**-8
"""Half of the distance from 1 to the next number, relative."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [7, 512])
def test_autocast_rounds_products_and_sums_in_float32(chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_CHUNK", chunk)
    hidden_ND, weight_RD, target_N = inputs(dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, nll = smoothed_cross_entropy(hidden_ND, weight_RD, target_N, vocab_size=V, label_smoothing=0.1)
    hidden_grad, weight_grad = torch.autograd.grad(loss, (hidden_ND, weight_RD))
    assert (loss.dtype, nll.dtype, hidden_grad.dtype, weight_grad.dtype) == (torch.float32, torch.float32, dtype, torch.float32)
    expected = exact(hidden_ND, weight_RD, target_N, label_smoothing=0.1)
    assert_close((loss.detach(), nll), expected[:2], relative=BF16 / 2)
    # Logits and their gradients are each rounded once, and so are both factors of each product.
    assert_close((hidden_grad, weight_grad), expected[2:], relative=5 * BF16)


@pytest.mark.parametrize("factor", [0.25, -3.0])
def test_the_gradient_is_scaled_by_what_arrives(factor: float) -> None:
    hidden_ND, weight_RD, target_N = inputs()
    _, _, *once = ours(hidden_ND, weight_RD, target_N, label_smoothing=0.1)
    loss, _ = smoothed_cross_entropy(hidden_ND, weight_RD, target_N, vocab_size=V, label_smoothing=0.1)
    for gradient, scaled in zip(once, torch.autograd.grad(loss * factor, (hidden_ND, weight_RD)), strict=True):
        torch.testing.assert_close(scaled, gradient * factor)


def test_the_gradient_accumulates_over_uses_of_a_matrix_and_over_calls() -> None:
    _, weight_RD, target_N = inputs()
    for _ in range(2):
        hidden_ND = functional.embedding(target_N, weight_RD) * 0.3  # as tied matrices are used
        loss, _ = smoothed_cross_entropy(hidden_ND, weight_RD, target_N.roll(1), vocab_size=V, label_smoothing=0.1)
        torch.autograd.backward(loss)
    doubled = weight_RD.detach().double().requires_grad_()
    logits_NV = functional.embedding(target_N, doubled) * 0.3 @ doubled[:V].T
    (expected,) = torch.autograd.grad(functional.cross_entropy(logits_NV, target_N.roll(1), label_smoothing=0.1, reduction="sum"), doubled)
    assert weight_RD.grad is not None
    assert_close((weight_RD.grad,), (2 * expected,), relative=1e-6)
