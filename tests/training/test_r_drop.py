"""The loss of R-Drop against torch's own operations in float64, forward and gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mtkit.data.tokenizer import PAD_ID
from mtkit.training import loss as loss_module
from mtkit.training import r_drop
from mtkit.training.loss import smoothed_cross_entropy
from mtkit.training.r_drop import paired_cross_entropy

N, D, V, R = 40, 12, 23, 32
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(dtype: torch.dtype = torch.float32) -> Inputs:
    """Two hidden_ND, weight_RD with rows that pad the vocabulary, and target_N, of which some are padding."""
    generator = torch.Generator().manual_seed(1)
    first_ND, second_ND = ((torch.randn(N, D, generator=generator) * 2).to(dtype).requires_grad_() for _ in range(2))
    weight_RD = torch.randn(R, D, generator=generator)
    weight_RD[V:] = 5.0  # would be the likeliest pieces
    target_N = torch.randint(PAD_ID + 1, V, (N,), generator=generator)
    target_N[[3, 20, 39]] = PAD_ID
    return first_ND, second_ND, weight_RD.requires_grad_(), target_N


def exact(tensors: Inputs, *, epsilon: float, alpha: float) -> tuple[Tensor, ...]:
    """Loss, negative log-likelihood, and the loss's gradients of both hidden tensors and the weight."""
    first, second, weight = (tensor.detach().double().requires_grad_() for tensor in tensors[:3])
    target_N = tensors[3]
    logits = [hidden @ weight[:V].T for hidden in (first, second)]
    loss, nll = (
        sum(functional.cross_entropy(z, target_N, label_smoothing=smoothing, reduction="sum", ignore_index=PAD_ID) for z in logits) / 2
        for smoothing in (epsilon, 0.0)
    )
    log_p, log_q = (functional.log_softmax(z[target_N != PAD_ID], dim=-1) for z in logits)
    for left, right in ((log_p, log_q), (log_q, log_p)):
        loss = loss + alpha / 4 * functional.kl_div(left, right, log_target=True, reduction="sum")
    assert isinstance(loss, Tensor)
    return loss.detach(), torch.as_tensor(nll).detach(), *torch.autograd.grad(loss, (first, second, weight))


def ours(tensors: Inputs, *, epsilon: float, alpha: float) -> tuple[Tensor, ...]:
    first_ND, second_ND, weight_RD, target_N = tensors
    loss, nll = paired_cross_entropy(first_ND, second_ND, weight_RD, target_N, vocab_size=V, label_smoothing=epsilon, alpha=alpha)
    return loss.detach(), nll, *torch.autograd.grad(loss, tensors[:3])


@pytest.mark.parametrize(("epsilon", "alpha"), [(0.0, 1.0), (0.1, 5.0), (0.3, 0.0)])
@pytest.mark.parametrize("chunk", [7, 512])
def test_equals_torch_in_float64(chunk: int, epsilon: float, alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CPU_CHUNK", chunk)
    tensors = inputs()
    for found, expected in zip(ours(tensors, epsilon=epsilon, alpha=alpha), exact(tensors, epsilon=epsilon, alpha=alpha), strict=True):
        assert (found.double() - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_without_agreement_it_is_the_mean_of_two_cross_entropies() -> None:
    first_ND, second_ND, weight_RD, target_N = inputs()
    found = paired_cross_entropy(first_ND, second_ND, weight_RD, target_N, vocab_size=V, label_smoothing=0.1, alpha=0.0)
    each = [smoothed_cross_entropy(hidden, weight_RD, target_N, vocab_size=V, label_smoothing=0.1) for hidden in (first_ND, second_ND)]
    for index in range(2):
        torch.testing.assert_close(found[index], (each[0][index] + each[1][index]) / 2)


def test_autocast_keeps_gradients_near_those_of_fp32() -> None:
    expected = ours(inputs(), epsilon=0.1, alpha=5.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ours(inputs(), epsilon=0.1, alpha=5.0)
    for half, whole in zip(found, expected, strict=True):
        assert half.dtype == torch.float32
        assert (half - whole).abs().max() <= 0.03 * whole.abs().max()


def test_half_precision_on_a_cpu_multiplies_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CPU_CHUNK", 16)
    monkeypatch.setattr(loss_module, "GRID", 8)
    seen: list[int] = []
    real = r_drop._softmax_pair

    def spy(first_KV: Tensor, *rest: Any) -> Any:
        seen.append(len(first_KV))
        return real(first_KV, *rest)

    monkeypatch.setattr(r_drop, "_softmax_pair", spy)
    tensors = inputs()
    for num_tokens in (N, N - 1):
        some = (tensors[0][:num_tokens], tensors[1][:num_tokens], tensors[2], tensors[3][:num_tokens])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = ours(some, epsilon=0.1, alpha=5.0)
        for half, whole in zip(found, exact(some, epsilon=0.1, alpha=5.0), strict=True):
            assert half.shape == whole.shape
            assert (half.double() - whole).abs().max() <= 0.03 * whole.abs().max()
    assert set(seen) == {16, 8}
    assert len(seen) == 2 * -(-N // 16)


def test_no_gradient_is_made_where_none_is_asked_for() -> None:
    first_ND, second_ND, weight_RD, target_N = inputs()
    with torch.no_grad():
        loss, _ = paired_cross_entropy(first_ND, second_ND, weight_RD, target_N, vocab_size=V, label_smoothing=0.1, alpha=5.0)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, ours(inputs(), epsilon=0.1, alpha=5.0)[0])
