"""R-Drop: two passes of a batch through the model, each with its own dropout, are trained to agree (Liang et al. 2021, arXiv:2106.14448).

Shape letters: N target tokens of a batch, K those of one chunk, D model width, V target vocabulary, R >= V rows of the output matrix.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtkit.data.tokenizer import PAD_ID
from mtkit.model.device import can_compile
from mtkit.training.loss import add_product, chunk_size, pad_to_grid, product_dtype


class _PairedLinearCrossEntropy(torch.autograd.Function):
    """Makes the gradients in forward, chunk by chunk, as `loss._LinearCrossEntropy` does. Backward runs once, and only scales."""

    @staticmethod
    def forward(
        ctx: Any,
        first_ND: Tensor,
        second_ND: Tensor,
        weight_RD: Tensor,
        target_N: Tensor,
        vocab_size: int,
        epsilon: float,
        alpha: float,
        is_trained: bool,
    ) -> tuple[Tensor, Tensor]:
        device, dtype = first_ND.device, product_dtype(first_ND)
        ctx.num_tokens = len(target_N)
        target_N, first_ND, second_ND = pad_to_grid(target_N, first_ND, second_ND)
        chunk = chunk_size(len(target_N), device)
        with torch.autocast(device.type, enabled=False):
            hidden_NDs, weight_VD = (first_ND.to(dtype), second_ND.to(dtype)), weight_RD[:vocab_size].to(dtype)
            is_real_N1 = (target_N != PAD_ID)[:, None]
            hidden_grads = tuple(torch.empty(h_ND.shape, dtype=torch.float32, device=device) for h_ND in hidden_NDs)
            weight_grad = torch.zeros(weight_RD.shape, dtype=torch.float32, device=device)
            sums = torch.zeros(2, device=device)
            softmax_pair: Callable[..., tuple[Tensor, Tensor, Tensor]] = _compiled_softmax_pair() if device.type == "cuda" else _softmax_pair
            for rows in (slice(start, start + chunk) for start in range(0, len(target_N), chunk)):
                h_KDs = [h_ND[rows] * is_real_N1[rows] for h_ND in hidden_NDs]
                losses_2K, *grads_KV = softmax_pair(*(h_KD @ weight_VD.t() for h_KD in h_KDs), target_N[rows, None], epsilon, alpha)
                sums += (losses_2K * is_real_N1[rows, 0]).sum(dim=1)
                if not is_trained:
                    continue
                for hidden_grad, h_KD, grad_KV in zip(hidden_grads, h_KDs, grads_KV, strict=True):
                    hidden_grad[rows] = torch.mm(grad_KV, weight_VD).float() * is_real_N1[rows]
                    add_product(weight_grad[:vocab_size], grad_KV, h_KD)
        # Padding has the hidden vector 0, so it adds nothing to the gradient of the weight.
        ctx.gradients = (*hidden_grads, weight_grad)
        loss_sum, nll_sum = sums.unbind()
        ctx.mark_non_differentiable(nll_sum)
        return loss_sum, nll_sum

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        first_grad, second_grad, weight_grad = (gradient.mul_(gradients[0]) for gradient in ctx.gradients)
        del ctx.gradients
        return first_grad[: ctx.num_tokens], second_grad[: ctx.num_tokens], weight_grad, None, None, None, None, None


def _softmax_pair(first_KV: Tensor, second_KV: Tensor, y_K1: Tensor, epsilon: float, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and negative log-likelihood of each token, fp32 (2, K); the gradient of the loss for both logits, in their dtype.

    With p, q = softmax of the two logits, d = log p - log q and t the smoothed target, the sum of both divergences is  sum p d - sum q d,  and the
    gradient of the whole loss for the first logits is  p (1/2 + alpha/4 (1 + d - sum p d)) - alpha/4 q - t/2;  for the second the same with p and q
    exchanged, and so -d for d.
    """
    log_p_KV, log_q_KV = torch.log_softmax(first_KV.float(), dim=-1), torch.log_softmax(second_KV.float(), dim=-1)
    nll_K1 = -0.5 * (log_p_KV.gather(1, y_K1) + log_q_KV.gather(1, y_K1))
    mean_K1 = 0.5 * (log_p_KV.mean(-1, keepdim=True) + log_q_KV.mean(-1, keepdim=True))
    p_KV, q_KV = log_p_KV.exp(), log_q_KV.exp()
    d_KV = log_p_KV.sub_(log_q_KV)
    kl_p_K1, kl_q_K1 = torch.linalg.vecdot(p_KV, d_KV)[:, None], -torch.linalg.vecdot(q_KV, d_KV)[:, None]
    loss_K1 = (1.0 - epsilon) * nll_K1 - epsilon * mean_K1 + 0.25 * alpha * (kl_p_K1 + kl_q_K1)
    even = 0.5 * epsilon / p_KV.shape[1]
    on_target_K1 = torch.full_like(nll_K1, -0.5 * (1.0 - epsilon))
    grads = []
    for kl_K1, ours_KV, other_KV, sign in ((kl_p_K1, p_KV, q_KV, 1.0), (kl_q_K1, q_KV, p_KV, -1.0)):
        grad_KV = torch.add(0.5 + 0.25 * alpha * (1.0 - kl_K1), d_KV, alpha=sign * 0.25 * alpha)
        grads.append(grad_KV.mul_(ours_KV).sub_(other_KV, alpha=0.25 * alpha).sub_(even).scatter_add_(1, y_K1, on_target_K1))
    return torch.cat((loss_K1, nll_K1), dim=1).t(), grads[0].to(first_KV.dtype), grads[1].to(second_KV.dtype)


@functools.cache
def _compiled_softmax_pair() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """`_softmax_pair` as a GPU does it best."""
    return torch.compile(_softmax_pair) if can_compile() else _softmax_pair


def paired_cross_entropy(
    first_ND: Tensor, second_ND: Tensor, weight_RD: Tensor, target_N: Tensor, *, vocab_size: int, label_smoothing: float, alpha: float
) -> tuple[Tensor, Tensor]:
    """The loss of R-Drop, summed over tokens, in fp32: half of equation 3 of Liang et al., so that alpha 0 is the mean of two cross entropies.

    With p and q the distributions of the two passes:  (CE(p) + CE(q)) / 2 + alpha / 4 * (KL(p || q) + KL(q || p)).

    Args:
        first_ND: The decoder's output in the first pass, any floating dtype; in autocast, matrix products are in its dtype.
        second_ND: In the second.
        weight_RD: The output matrix.
        target_N: Piece ids, int64; `PAD_ID` counts for nothing.
        vocab_size: V: the rows of the matrix beyond it are padding.
        label_smoothing: Of the cross entropies, as in `loss.smoothed_cross_entropy`.
        alpha: How much agreement counts; 5 in the paper's translation experiments.

    Returns:
        Two scalars: the loss, which can be differentiated once, and the mean of the two negative log-likelihoods, which has no gradient.
    """
    is_trained = torch.is_grad_enabled() and (first_ND.requires_grad or weight_RD.requires_grad)
    apply = _PairedLinearCrossEntropy.apply
    loss_sum, nll_sum = apply(first_ND, second_ND, weight_RD, target_N, vocab_size, label_smoothing, alpha, is_trained)  # type: ignore[no-untyped-call]
    return loss_sum, nll_sum
