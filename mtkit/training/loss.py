"""Label-smoothed cross entropy as a sum over target tokens, together with the projection to the vocabulary.

Shape letters: N target tokens of a batch, K those of one chunk, D model width, V target vocabulary, R >= V rows of the output matrix.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mtkit.data.tokenizer import PAD_ID
from mtkit.model.device import GRID, can_compile, needs_grid
from mtkit.native import training as native

CPU_CHUNK = 512
"""Target tokens whose logits exist at once on a CPU: so few that they stay in its cache and that their memory is used again and again."""

CUDA_CHUNK = 8192
"""The same on a GPU, where larger matrix products are faster."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Makes the gradients in forward, chunk by chunk, so that the logits of one chunk alone are in memory. Backward runs once, and only scales."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_RD: Tensor, target_N: Tensor, vocab_size: int, epsilon: float, is_trained: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = product_dtype(hidden_ND)
        ctx.num_tokens = len(target_N)
        target_N, hidden_ND = pad_to_grid(target_N, hidden_ND)
        chunk = chunk_size(len(target_N), hidden_ND.device)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            return _forward(ctx, hidden_ND.to(dtype), weight_RD.to(dtype), target_N, vocab_size, epsilon, is_trained, chunk)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden_grad, weight_grad = ctx.gradients
        del ctx.gradients
        return hidden_grad[: ctx.num_tokens].mul_(gradients[0]), weight_grad.mul_(gradients[0]), None, None, None, None


def _forward(
    ctx: Any, hidden_ND: Tensor, weight_RD: Tensor, target_N: Tensor, vocab_size: int, epsilon: float, is_trained: bool, chunk: int
) -> tuple[Tensor, Tensor]:
    """The two sums, and in `ctx` the gradients of the first, if `is_trained`.

    With z = h W^T, p = softmax(z), e = epsilon and y the target, the loss of a token is  lse(z) - (1 - e) z_y - e mean(z)  and its gradient with
    respect to z is  p - e / V  everywhere, less 1 - e at y. Neither mean(z) = h mean(W)^T nor the part -e / V of the gradient needs a pass over z.
    """
    device = hidden_ND.device
    mean_weight_D = weight_RD[:vocab_size].sum(dim=0, dtype=torch.float32) / vocab_size
    is_real_N = target_N != PAD_ID
    hidden_grad = torch.empty(hidden_ND.shape, dtype=torch.float32, device=device)
    weight_grad = torch.zeros(weight_RD.shape, dtype=torch.float32, device=device)
    hidden_sum_D = torch.zeros(weight_RD.shape[1], device=device)
    loss_sum, nll_sum = torch.zeros((), device=device), torch.zeros((), device=device)
    buffer_KR = torch.empty(chunk, weight_RD.shape[0], dtype=weight_RD.dtype, device=device)
    for start in range(0, len(target_N), chunk):
        h_KD, y_K1, is_real_K1 = hidden_ND[start : start + chunk], target_N[start : start + chunk, None], is_real_N[start : start + chunk, None]
        z_KR = torch.mm(h_KD, weight_RD.t(), out=buffer_KR[: len(h_KD)])
        z_KR[:, vocab_size:] = -torch.inf
        grad_KR, lse_K1, target_z_K1 = _softmax_for(z_KR)(z_KR, y_K1, epsilon)
        mean_z_K1 = (h_KD.float() @ mean_weight_D)[:, None]
        loss_sum += torch.where(is_real_K1, lse_K1 - (1.0 - epsilon) * target_z_K1 - epsilon * mean_z_K1, 0.0).sum()
        nll_sum += torch.where(is_real_K1, lse_K1 - target_z_K1, 0.0).sum()
        if not is_trained:
            continue
        hidden_grad[start : start + chunk] = (torch.mm(grad_KR, weight_RD).float() - epsilon * mean_weight_D) * is_real_K1
        real_h_KD = h_KD * is_real_K1
        add_product(weight_grad, grad_KR, real_h_KD)
        hidden_sum_D += real_h_KD.sum(dim=0, dtype=torch.float32)
    weight_grad[:vocab_size] -= epsilon / vocab_size * hidden_sum_D
    ctx.gradients = hidden_grad, weight_grad
    ctx.mark_non_differentiable(nll_sum)
    return loss_sum, nll_sum


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product with x: that of autocast where it is on."""
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


def pad_to_grid(target_N: Tensor, *hidden_NDs: Tensor) -> list[Tensor]:
    """Target tokens and the hidden vectors that predict them, with padding up to a size of the grid where products are of few sizes."""
    unused = -len(target_N) % GRID if needs_grid(target_N.device) else 0
    if not unused:
        return [target_N, *hidden_NDs]
    return [functional.pad(target_N, (0, unused), value=PAD_ID), *(functional.pad(hidden_ND, (0, 0, 0, unused)) for hidden_ND in hidden_NDs)]


def chunk_size(num_tokens: int, device: torch.device) -> int:
    """Tokens whose logits exist at once, such that all chunks of a batch are about equal, where that costs nothing."""
    if needs_grid(device):
        return CPU_CHUNK
    num_chunks = max(1, -(-num_tokens // (CPU_CHUNK if device.type == "cpu" else CUDA_CHUNK)))
    return -(-num_tokens // num_chunks)


def add_product(total_RD: Tensor, grad_KR: Tensor, hidden_KD: Tensor) -> None:
    """total += gradᵀ·hidden, in fp32 from chunk to chunk."""
    if grad_KR.dtype == total_RD.dtype:
        total_RD.addmm_(grad_KR.t(), hidden_KD)
    else:
        total_RD += torch.mm(grad_KR.t(), hidden_KD)


def _softmax_less_target(z_KR: Tensor, y_K1: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(z), less 1 - epsilon at the target, in the dtype of z; and in fp32, as columns, log-sum-exp of z and the target's z."""
    z32_KR = z_KR.float()
    target_z_K1, max_K1 = z32_KR.gather(1, y_K1), z32_KR.amax(dim=-1, keepdim=True)
    p_KR = torch.softmax(z32_KR, dim=-1, out=z32_KR)
    # log p = z - lse, also for the largest z, whose p is at least 1 / V: this saves a second pass of exponentials.
    lse_K1 = max_K1 - p_KR.amax(dim=-1, keepdim=True).log()
    return p_KR.to(z_KR.dtype).scatter_(1, y_K1, ((target_z_K1 - lse_K1).exp() - (1.0 - epsilon)).to(z_KR.dtype)), lse_K1, target_z_K1


def _softmax_less_target_by_kernel(z_KR: Tensor, y_K1: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same on a CPU with kernels, in the memory of z."""
    lse_K, target_z_K = native.softmax_less_target_(z_KR, y_K1[:, 0], epsilon)
    return z_KR, lse_K[:, None], target_z_K[:, None]


def _softmax_less_target_in_one_pass(z_KR: Tensor, y_K1: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same, in operations that torch can compile into a single kernel."""
    z32_KR = z_KR.float()
    lse_K1 = torch.logsumexp(z32_KR, dim=-1, keepdim=True)
    is_target_KR = torch.arange(z_KR.shape[1], device=z_KR.device) == y_K1
    return ((z32_KR - lse_K1).exp() - (1.0 - epsilon) * is_target_KR).to(z_KR.dtype), lse_K1, z32_KR.gather(1, y_K1)


def _softmax_for(z_KR: Tensor) -> Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]:
    """`_softmax_less_target` as it is fastest for these logits."""
    if native.fits_softmax(z_KR):
        return _softmax_less_target_by_kernel
    return _fused_softmax() if z_KR.is_cuda and z_KR.dtype.itemsize == 2 else _softmax_less_target


@functools.cache
def _fused_softmax() -> Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]:
    """`_softmax_less_target` as a GPU does it best. Packed batches have one number of tokens; for padded ones torch makes a kernel for any."""
    return torch.compile(_softmax_less_target_in_one_pass) if can_compile() else _softmax_less_target


def smoothed_cross_entropy(
    hidden_ND: Tensor, weight_RD: Tensor, target_N: Tensor, *, vocab_size: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Cross entropy of softmax(hidden·weightᵀ) against the smoothed target distribution, summed over tokens, in fp32.

    With smoothing e, the target distribution is 1 - e on the target plus e / V on every piece (Szegedy et al. 2016; Vaswani et al. 2017, section
    5.4), so with z the logits and y the target:  loss = -(1 - e) log p_y - e mean(log p)  for  log p = z - logsumexp(z).

    Args:
        hidden_ND: The decoder's output, any floating dtype; in autocast, matrix products are in its dtype.
        weight_RD: The output matrix.
        target_N: Piece ids, int64; `PAD_ID` counts for nothing.
        vocab_size: V: the rows of the matrix beyond it are padding.
        label_smoothing: e, from 0 up to but not including 1.

    Returns:
        Two scalars: the smoothed loss, which can be differentiated once, and the plain negative log-likelihood, which has no gradient.
    """
    # Asked for here: in the function's forward gradients are always off, and its `needs_input_grad` does not heed no_grad.
    is_trained = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_RD.requires_grad)
    apply = _LinearCrossEntropy.apply
    loss_sum, nll_sum = apply(hidden_ND, weight_RD, target_N, vocab_size, label_smoothing, is_trained)  # type: ignore[no-untyped-call]
    return loss_sum, nll_sum
