"""Linear layers in 8-bit integers, or in bf16, for decoding on a CPU.

Weights have one scale per row of the matrix (per output channel), activations one per position, found as they come. Sums are exact integers, so a
row of a product depends on that row alone.

Shapes: M positions, K inputs, N outputs.
"""

import warnings
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from mtkit.checkpoint.format import BuildFn, ModelDescription, StoredWeights, model_without_weights
from mtkit.checkpoint.narrow import SMALLEST_MAGNITUDE, row_scales
from mtkit.model.transformer import Transformer
from mtkit.native import kernels

SMALLEST_ONEDNN_BATCH = 8
"""Positions from which oneDNN's product is faster than FBGEMM's on a CPU with matrix units."""

LEVELS_OF_SAFE_SUMS = 63
"""Largest magnitude of a weight as an integer without VNNI: AVX2 adds pairs of products in 16 bits, which 8 bits of activation and 7 of weight cannot
overflow. (7 of activation and 8 of weight cost more BLEU.)"""

NarrowPrecision = Literal["int8", "bf16"]

_LEVELS = 127


class Int8Linear(nn.Module):
    """y = x Wᵀ + b with W in 8 bits; x and y are fp32.

    The product is FBGEMM's; on a CPU with instructions for products of 8-bit integers (VNNI, AMX), where there are many positions, oneDNN's.

    Args:
        weight_NK: W, fp32.
        bias_N: b, fp32, or None.
        has_vnni: Whether the CPU has them; None = find out.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, *, has_vnni: bool | None = None) -> None:
        super().__init__()
        self._has_vnni = cpu_has_vnni() if has_vnni is None else has_vnni
        self._scale_N = row_scales(weight_NK, levels=_LEVELS if self._has_vnni else LEVELS_OF_SAFE_SUMS)
        self._zero_N = torch.zeros(len(weight_NK), dtype=torch.int64)
        self._bias_N = bias_N
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor")  # deprecated, but there is no other way to FBGEMM yet
            quantized_NK = torch.quantize_per_channel(weight_NK, self._scale_N.double(), self._zero_N, 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(quantized_NK, None)
        self._packed_for_onednn = torch.ops.onednn.qlinear_prepack(quantized_NK.int_repr(), None) if self._has_vnni else None

    def forward(self, x: Tensor) -> Tensor:
        """The product, [..., N], of x, [..., K]."""
        largest = x.abs().amax(dim=-1, keepdim=True).clamp_(min=SMALLEST_MAGNITUDE)
        y = self._product(x / largest)
        return y.mul_(largest) if self._bias_N is None else torch.addcmul(self._bias_N, y, largest)

    def _product(self, x: Tensor) -> Tensor:
        """x Wᵀ for x between -1 and 1."""
        y: Tensor
        scale, zero = 1.0 / _LEVELS, _LEVELS + 1
        if self._packed_for_onednn is None or x.numel() < SMALLEST_ONEDNN_BATCH * x.shape[-1]:
            y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, scale, zero, self._packed)
        else:
            x_u8 = x.mul(_LEVELS).add_(zero + 0.5).to(torch.uint8).flatten(0, -2)
            y = torch.ops.onednn.qlinear_pointwise(
                x_u8, scale, zero, self._packed_for_onednn, self._scale_N, self._zero_N, None, 1.0, 0, torch.float32, "none", [], ""
            )
        return y.view(*x.shape[:-1], -1)


class NativeLinear(nn.Module):
    """y = x Wᵀ + b with the kernels of `mtkit.native`, with W in fewer bits; x and y are fp32.

    Args:
        weight_NK: W, fp32.
        bias_N: b, fp32, or None.
        precision: See `kernels.Linear`.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, *, precision: kernels.LinearPrecision) -> None:
        super().__init__()
        self.linear = kernels.Linear(weight_NK, bias_N, precision=precision)

    def forward(self, x: Tensor) -> Tensor:
        """The product, [..., N], of x, [..., K]."""
        return self.linear(x.float().reshape(-1, x.shape[-1]).contiguous()).view(*x.shape[:-1], -1)


class RoundedEmbedding(nn.Module):
    """An embedding in 8 bits, for a model that is stored in them: it takes a quarter of the memory, and gives what it would in fp32.

    Args:
        weight_VD: int8.
        scale_V: What each row is multiplied by, fp32.
    """

    def __init__(self, weight_VD: Tensor, scale_V: Tensor) -> None:
        super().__init__()
        self.weight_VD, self.scale_V = weight_VD, scale_V

    def forward(self, tokens: Tensor) -> Tensor:
        """The vectors of tokens, [..., D], fp32."""
        return functional.embedding(tokens, self.weight_VD).float().mul_(self.scale_V[tokens].unsqueeze(-1))


def cpu_has_vnni() -> bool:
    """Whether this CPU has instructions for products of 8-bit integers with sums in 32 bits."""
    return bool(torch.cpu._is_vnni_supported())


def build_quantized(precision: NarrowPrecision) -> BuildFn:
    """What makes a model with linear layers in fewer bits, see `quantize_linear_layers`, for `mtkit.checkpoint.format.load_model`. It takes weight by
    weight, so that never all of them are in memory in fp32."""

    def build(description: ModelDescription, weights: StoredWeights) -> Transformer:
        model = quantize_linear_layers(model_without_weights(description), precision, weights)
        for name, module in list(model.named_children()):
            if isinstance(module, nn.Embedding) and (rounded := weights.rounded(f"{name}.weight")) is not None:
                setattr(model, name, RoundedEmbedding(*rounded))
        model.load_state_dict({name: weights[name] for name, _ in model.named_parameters()}, assign=True)
        return model

    return build


def quantize_linear_layers(model: Transformer, precision: NarrowPrecision = "int8", weights: Mapping[str, Tensor] | None = None) -> Transformer:
    """Replace all matrices of a model but its embeddings, in place. It can translate and score on a CPU, and no more be trained or stored.

    Args:
        model: On the CPU, in fp32.
        precision: Of the products. All else stays fp32.
        weights: Its weights by name; None = those that it has.

    Returns:
        The model.
    """
    given = {name: parameter.detach() for name, parameter in model.named_parameters()} if weights is None else weights

    def linear(weight_NK: Tensor, bias_N: Tensor | None) -> nn.Module:
        if precision == "int8" and kernels.int8_level() == 0:
            return Int8Linear(weight_NK, bias_N)
        return NativeLinear(weight_NK, bias_N, precision=precision)

    output = linear(given[next(name for name, parameter in model.named_parameters() if parameter is model.output_weight)], None)
    for prefix, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child is not model.output_projection:
                path = f"{prefix}.{name}"
                bias: Tensor | None = child.bias
                setattr(module, name, linear(given[f"{path}.weight"], None if bias is None else given[f"{path}.bias"]))
    model.output_projection = output
    return model
