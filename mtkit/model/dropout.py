"""Dropout. On a CPU, torch's own draws one Bernoulli number per element, which takes a quarter of a small model's training step; this draws bytes."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class _ByteDropout(torch.autograd.Function):
    """One random byte decides on an element; eight of them come from one draw of the default generator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: int) -> Tensor:
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
        ctx.bytes = words.view(torch.uint8)[: x.numel()].view(x.shape)
        ctx.threshold = threshold
        return _dropped(x, ctx.bytes, threshold)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _dropped(gradients[0], ctx.bytes, ctx.threshold), None


def _dropped(x: Tensor, bytes_: Tensor, threshold: int) -> Tensor:
    """x where the byte reaches the threshold, scaled to keep the mean, and else 0.

    In arithmetic on floating numbers, since comparisons of bytes and products with booleans are many times slower; a mask of 0 and 1 is exact in any
    format.
    """
    return bytes_.to(x.dtype).sub_(threshold - 1).clamp_(0.0, 1.0).mul_(x).mul_(256.0 / (256.0 - threshold))


def dropout(x: Tensor, rate: float, *, training: bool) -> Tensor:
    """Zero elements at random and scale the others so that the mean stays (Srivastava et al., 2014).

    On a CPU the probability is `rate` rounded to a multiple of 1/256, but not to 0, and the scale is exact for it. The numbers come from torch's
    default generator of the device, so they are a function of its seed alone.

    Args:
        x: Any shape, any floating dtype.
        rate: Probability of zeroing an element, from 0 up to but not including 1.
        training: Whether to do anything at all.
    """
    if not training or rate == 0.0:
        return x
    if x.device.type != "cpu":
        return functional.dropout(x, rate)
    dropped: Tensor = _ByteDropout.apply(x, min(255, max(1, round(rate * 256.0))))  # type: ignore[no-untyped-call]
    return dropped
