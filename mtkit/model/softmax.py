"""Attention weights of short rows on a CPU. torch's softmax takes one row at a time, and a row of fewer numbers than fit into a register takes it ten
times as long as one that fits; these take the whole tensor at a time.

Shapes: B sentences, T queries, S keys, H heads.
"""

from typing import Any

import torch
from torch import Tensor

SHORT_ROW = 32
"""Keys below which the whole tensor at a time is faster."""

LARGEST_EXPONENT = 40.0
"""Scores up to this magnitude need no maximum taken off before the exponential: neither it nor a sum of it leaves the range of fp32."""


class _ShortSoftmax(torch.autograd.Function):
    """exp(scale * scores), where the mask has it, divided by its sum over a row."""

    @staticmethod
    def forward(ctx: Any, scores_BHTS: Tensor, mask: Tensor, scale: float) -> Tensor:
        weights_BHTS = torch.mul(scores_BHTS, scale).exp_().mul_(mask.to(scores_BHTS.dtype))
        weights_BHTS.div_(_row_sums(weights_BHTS).clamp_min_(torch.finfo(weights_BHTS.dtype).tiny))
        ctx.scale = scale
        ctx.save_for_backward(weights_BHTS)
        return weights_BHTS

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (weights_BHTS,) = ctx.saved_tensors
        grad_BHTS = gradients[0] * weights_BHTS
        return grad_BHTS.addcmul_(weights_BHTS, _row_sums(grad_BHTS), value=-1.0).mul_(ctx.scale), None, None


def _row_sums(x_BHTS: Tensor) -> Tensor:
    """Sums over keys, kept as a dimension of 1: as a product, which is faster than torch's sum of short rows."""
    return x_BHTS @ x_BHTS.new_ones(x_BHTS.shape[3], 1)


def attention_weights(scores_BHTS: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """softmax(scale * scores) over the keys that the mask shows, 0 at the others.

    A query that may attend to nothing gets finite numbers that mean nothing.

    Args:
        scores_BHTS: Products of queries and keys, on a CPU, fp32 or fp64.
        mask: Boolean, broadcasts to BHTS.
        scale: 1 / sqrt(channels of a head).
    """
    if 0 < scores_BHTS.shape[3] < SHORT_ROW and scores_BHTS.numel():
        lowest, highest = torch.aminmax(scores_BHTS.detach())
        if max(-float(lowest), float(highest)) * scale <= LARGEST_EXPONENT:  # not so if it is NaN
            weights_BHTS: Tensor = _ShortSoftmax.apply(scores_BHTS, mask, scale)  # type: ignore[no-untyped-call]
            return weights_BHTS
    # The lowest finite number instead of -inf: the weight is exactly 0 all the same, and a row without any True stays free of NaN.
    bias = scores_BHTS.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(scores_BHTS.dtype).min)
    return torch.softmax(torch.add(bias, scores_BHTS, alpha=scale), dim=-1)
