"""Dropout. On a CPU, torch's own draws one Bernoulli number per element, which takes a quarter of a small model's training step; this draws bytes."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mtkit.native import training as native


class _ByteDropout(torch.autograd.Function):
    """One random byte decides on an element; eight of them come from one draw of the default generator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: int) -> Tensor:
        ctx.mask = _mask(x, threshold)
        out: Tensor = x * ctx.mask
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.mask, None


def _draw(count: int) -> Tensor:
    """Random bytes from the default generator, uint8 [count]."""
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None)
    return words.view(torch.uint8)[:count]


def _threshold(rate: float) -> int:
    """Of how many values of 256 a byte takes its element out."""
    return min(255, max(1, round(rate * 256.0)))


def _mask(x: Tensor, threshold: int) -> Tensor:
    """0 where a random byte is below the threshold, and elsewhere what keeps the mean, in the shape and dtype of x.

    Bytes become 0 and 1 as bytes, of which a register holds four times as many as of fp32, and without comparisons, whose booleans are slow.
    """
    kept = _draw(x.numel()).clamp_(threshold - 1, threshold).sub_(threshold - 1)
    return kept.view(x.shape).to(x.dtype).mul_(256.0 / (256.0 - threshold))


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
    dropped: Tensor = _ByteDropout.apply(x, _threshold(rate))  # type: ignore[no-untyped-call]
    return dropped


def add_dropped(x: Tensor, change: Tensor, rate: float, *, training: bool) -> Tensor:
    """x + dropout(change), with the same random numbers; in one pass over memory on a CPU with kernels."""
    if x.device.type == "cpu" and training and rate > 0.0 and x.shape == change.shape and change.dtype in native.DTYPES and native.fits_rows(x):
        return native.add_dropped(x, change, _draw(change.numel()), _threshold(rate))
    return x + dropout(change, rate, training=training)
