"""Label-smoothed cross entropy as a sum over target tokens.

Shape letters: B sentences, S source positions, T target positions, N real target tokens of a batch, D model width, V target vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mtkit.model.transformer import Transformer


class _SmoothedCrossEntropy(torch.autograd.Function):
    """Keeps the log-probabilities alone between forward and backward, and makes the gradient in their place. Backward runs once."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        log_probs_NV = logits_NV.log_softmax(dim=-1, dtype=torch.float32)
        nll_sum = -log_probs_NV.gather(1, target_N[:, None]).sum()
        loss_sum = (1.0 - epsilon) * nll_sum - epsilon * log_probs_NV.mean(dim=-1).sum()
        ctx.log_probs_NV = log_probs_NV  # nobody else holds it, so backward may write into it
        ctx.save_for_backward(target_N)
        ctx.epsilon = epsilon
        ctx.mark_non_differentiable(nll_sum)
        return loss_sum, nll_sum

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (target_N,) = ctx.saved_tensors
        gradient_NV: Tensor = ctx.log_probs_NV.exp_()
        del ctx.log_probs_NV
        gradient_NV -= ctx.epsilon / gradient_NV.shape[1]
        gradient_NV.scatter_add_(1, target_N[:, None], torch.full(target_N.shape, ctx.epsilon - 1.0, device=target_N.device)[:, None])
        return gradient_NV.mul_(gradients[0]), None, None


def smoothed_cross_entropy(logits_NV: Tensor, target_N: Tensor, *, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Cross entropy against the smoothed target distribution, summed over tokens, in fp32.

    With smoothing e, the target distribution is 1 - e on the target plus e / V on every piece (Szegedy et al. 2016; Vaswani et al. 2017, section
    5.4), so with z the logits and y the target:  loss = -(1 - e) log p_y - e mean(log p)  for  log p = z - logsumexp(z).

    Args:
        logits_NV: Unnormalized scores, any floating dtype.
        target_N: Piece ids, int64.
        label_smoothing: e, from 0 up to but not including 1.

    Returns:
        Two scalars: the smoothed loss, and the plain negative log-likelihood, which has no gradient.
    """
    loss_sum, nll_sum = _SmoothedCrossEntropy.apply(logits_NV, target_N, label_smoothing)  # type: ignore[no-untyped-call]
    return loss_sum, nll_sum


class Objective(nn.Module):
    """The model together with its loss, as one module: what data-parallel training wraps.

    Args:
        model: The model to train.
        label_smoothing: e of `smoothed_cross_entropy`.
    """

    def __init__(self, model: Transformer, *, label_smoothing: float) -> None:
        super().__init__()
        self.model = model
        self._label_smoothing = label_smoothing

    def forward(self, src_BS: Tensor, src_mask_BS: Tensor, tgt_in_BT: Tensor, tgt_out_BT: Tensor, tgt_mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and negative log-likelihood of a batch, each summed over its real target tokens.

        Only real tokens are projected to the vocabulary: padding costs nothing there.
        """
        memory_BSD = self.model.encode(src_BS, src_mask_BS)
        hidden_BTD = self.model.decode(tgt_in_BT, memory_BSD, src_mask_BS, tgt_mask_BT)
        logits_NV = self.model.logits(hidden_BTD[tgt_mask_BT])
        return smoothed_cross_entropy(logits_NV, tgt_out_BT[tgt_mask_BT], label_smoothing=self._label_smoothing)
