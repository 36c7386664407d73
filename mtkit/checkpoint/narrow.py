"""Weights in fewer bits, for models that are only translated with.

`fp16` and `bf16` store every tensor in that format. `int8` stores matrices as integers with one fp32 scale per row, the largest magnitude of the row
being 127, and everything else as it is; it takes about a quarter of the space.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from mtkit.checkpoint.layout import SCALE_SUFFIX

StoredPrecision = Literal["fp32", "fp16", "bf16", "int8"]

STORED_PRECISIONS: tuple[str, ...] = get_args(StoredPrecision)

SMALLEST_MAGNITUDE = 1e-12
"""Stands for the largest magnitude of a row of zeros, which could not be divided by."""

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def narrow(tensors: Mapping[str, Tensor], precision: StoredPrecision) -> dict[str, Tensor]:
    """What is stored for fp32 tensors.

    Raises:
        ValueError: A weight is beyond the range of fp16.
    """
    if precision == "fp32":
        return dict(tensors)
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if precision in _HALF:
            stored[name] = tensor.to(_HALF[precision])
            if not bool(stored[name].isfinite().all()):
                raise ValueError(f"{name} holds numbers beyond the range of {precision}")
        elif tensor.dim() == 2:
            scale_N = row_scales(tensor, levels=127)
            stored[name] = (tensor / scale_N[:, None]).round().to(torch.int8)
            stored[name + SCALE_SUFFIX] = scale_N
        else:
            stored[name] = tensor
    return stored


def row_scales(matrix_NK: Tensor, *, levels: int) -> Tensor:
    """What each row of a matrix is divided by so that its largest magnitude is `levels`: fp32 [N]."""
    return matrix_NK.abs().amax(dim=1).clamp(min=SMALLEST_MAGNITUDE) / levels


def widen(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The fp32 tensors that stored ones stand for."""
    tensors = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE_SUFFIX):
            continue
        scale_N = stored.get(name + SCALE_SUFFIX)
        tensors[name] = tensor.float() if scale_N is None else tensor.float().mul_(scale_N[:, None])
    return tensors


def stored_shapes(shapes: Mapping[str, torch.Size], precision: StoredPrecision) -> dict[str, torch.Size]:
    """The names and shapes of a file that holds parameters of these."""
    scales = {name + SCALE_SUFFIX: torch.Size(shape[:1]) for name, shape in shapes.items() if precision == "int8" and len(shape) == 2}
    return {**shapes, **scales}


def stored_type(shape: torch.Size, precision: StoredPrecision) -> str:
    """The number format, as safetensors calls it, of a stored tensor of this shape."""
    if precision == "int8":
        return "I8" if len(shape) == 2 else "F32"
    return {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}[precision]
