"""The functions of `training.c` as operations with a gradient. They are for a CPU, and there only where `available` says so.

Numbers are fp32, or bf16 where it is said so; all arithmetic is fp32.

Shapes: B sentences, T queries and S keys of each, H heads, C = D / H channels of a head, N and M rows.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from mtkit.native import library
from mtkit.native.structs import CHANNELS_MULTIPLE
from mtkit.native.structs import LONG as _LONG
from mtkit.native.structs import POINTER as _POINTER

_FLOAT = ctypes.c_float

_ROWS_OF_CHUNK = 64  # of training.c

DTYPES = (torch.float32, torch.bfloat16)
"""Of what the kernels read and write in half precision or not."""


class _Attention(ctypes.Structure):
    _fields_ = (
        *[(name, _LONG) for name in ("sentences", "queries", "keys", "heads", "channels", "is_half")],
        *[(name, _POINTER) for name in ("q", "k", "v")],
        ("ldq", _LONG),
        ("ldkv", _LONG),
        ("mask", _POINTER),
        *[(name, _LONG) for name in ("mask_b", "mask_t", "mask_s")],
        ("weights", _POINTER),
        ("out", _POINTER),
        ("ldo", _LONG),
    )


class _AttentionGradients(ctypes.Structure):
    _fields_ = (("out", _POINTER), ("ldo", _LONG), *[(name, _POINTER) for name in ("q", "k", "v")], ("ldq", _LONG), ("ldkv", _LONG))


_ARGUMENTS = {
    "attention": (_POINTER, _POINTER),
    "layer_norm_forward": (*[_POINTER] * 3, _FLOAT, _LONG, _LONG, *[_POINTER] * 3, _LONG),
    "layer_norm_backward": (*[_POINTER] * 5, _LONG, _LONG, *[_POINTER] * 3, _LONG),
    "dropout_add_forward": (*[_POINTER] * 3, _LONG, _FLOAT, _LONG, _POINTER, _LONG),
    "dropout_add_backward": (*[_POINTER] * 2, _LONG, _FLOAT, _LONG, _POINTER, _LONG),
    "softmax_less_target": (_POINTER, _POINTER, _FLOAT, _LONG, _LONG, _POINTER, _POINTER, _LONG),
}


@functools.cache
def _library() -> ctypes.CDLL:
    loaded = library.load()
    assert loaded is not None, library.reason()
    for name, types in _ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, _LONG if name == "attention" else None
    return loaded


@functools.cache
def available() -> bool:
    """Whether there are kernels on this machine, for as many threads as torch has."""
    loaded = library.load()
    return loaded is not None and bool(loaded.has_threads())


def fits_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, num_heads: int) -> bool:
    """Whether `attend_short` takes these: of one dtype, rows dense in themselves, keys and values in the same layout, one mask for all heads."""
    return (
        q.device.type == "cpu"
        and q.dtype in DTYPES
        and q.dtype == k.dtype == v.dtype
        and (q.shape[-1] // num_heads) % CHANNELS_MULTIPLE == 0
        and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        and k.stride() == v.stride()
        and mask.dtype == torch.bool
        and (mask.dim() < 3 or mask.shape[-3] == 1)
        and available()
    )


def attend_short(q_ND: Tensor, k_MD: Tensor, v_MD: Tensor, mask: Tensor, *, sizes: tuple[int, int, int], num_heads: int) -> Tensor:
    """softmax(Q·Kᵀ / sqrt(C))·V in each head and sentence: out_ND, in the dtype of q.

    A query that may attend to nothing gets finite numbers that mean nothing.

    Args:
        q_ND: fp32 or bf16; row b T + t is query t of sentence b. Rows behind the last sentence are unused: they give 0, and get the gradient 0.
        k_MD: Keys, in the same way.
        v_MD: Values, in the layout of the keys.
        mask: bool, True where a query may attend to a key; broadcasts to BHTS, with one for all heads.
        sizes: B, T and S.
        num_heads: H.
    """
    num_sentences, num_queries, num_keys = sizes
    mask_BTS = mask.expand(num_sentences, 1, num_queries, num_keys).select(1, 0)
    out_ND: Tensor = _ShortAttention.apply(q_ND, k_MD, v_MD, mask_BTS, num_heads)  # type: ignore[no-untyped-call]
    return out_ND


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_ND: Tensor, k_MD: Tensor, v_MD: Tensor, mask_BTS: Tensor, num_heads: int) -> Tensor:
        num_sentences, num_queries, num_keys = mask_BTS.shape
        num_rows, d_model = q_ND.shape
        out_ND = torch.empty(num_rows, d_model, dtype=q_ND.dtype)
        out_ND[num_sentences * num_queries :] = 0.0
        weights = torch.empty(num_sentences, num_heads, num_queries, -(-num_keys // 16) * 16)
        attention = _attention(q_ND, k_MD, v_MD, mask_BTS, weights, out_ND)
        _check(_library().attention(ctypes.addressof(attention), None))
        ctx.save_for_backward(q_ND, k_MD, v_MD, mask_BTS, weights)
        return out_ND

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_ND, k_MD, v_MD, mask_BTS, weights = ctx.saved_tensors
        num_sentences, num_queries, num_keys = mask_BTS.shape
        grad_ND = gradients[0].contiguous()
        # What is a part of one matrix gets its gradient as a part of one: see `split_columns`.
        if k_MD.shape == q_ND.shape and k_MD.untyped_storage().data_ptr() == q_ND.untyped_storage().data_ptr():
            q_grad, k_grad, v_grad = q_ND.new_empty(len(q_ND), 3 * q_ND.shape[1]).chunk(3, dim=1)
        else:
            q_grad, (k_grad, v_grad) = q_ND.new_empty(q_ND.shape), k_MD.new_empty(len(k_MD), 2 * k_MD.shape[1]).chunk(2, dim=1)
        for grad, used in ((q_grad, num_sentences * num_queries), (k_grad, num_sentences * num_keys), (v_grad, num_sentences * num_keys)):
            grad[used:] = 0.0
        addresses = [grad.data_ptr() for grad in (q_grad, k_grad, v_grad)]
        out = _AttentionGradients(grad_ND.data_ptr(), grad_ND.stride(0), *addresses, q_grad.stride(0), k_grad.stride(0))
        attention = _attention(q_ND, k_MD, v_MD, mask_BTS, weights, None)
        _check(_library().attention(ctypes.addressof(attention), ctypes.addressof(out)))
        return q_grad, k_grad, v_grad, None, None


def _attention(q_ND: Tensor, k_MD: Tensor, v_MD: Tensor, mask_BTS: Tensor, weights: Tensor, out_ND: Tensor | None) -> _Attention:
    num_sentences, num_queries, num_keys = mask_BTS.shape
    num_heads = weights.shape[1]
    return _Attention(
        num_sentences,
        num_queries,
        num_keys,
        num_heads,
        q_ND.shape[1] // num_heads,
        q_ND.dtype == torch.bfloat16,
        *(x.data_ptr() for x in (q_ND, k_MD, v_MD)),
        q_ND.stride(0),
        k_MD.stride(0),
        mask_BTS.data_ptr(),
        *mask_BTS.stride(),
        weights.data_ptr(),
        None if out_ND is None else out_ND.data_ptr(),
        q_ND.shape[1],
    )


def _check(result: int) -> None:
    if result != 0:
        raise MemoryError("no memory for attention")


def split_columns(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """`x.chunk(count, dim=-1)`. Its backward copies nothing where the gradients of the parts lie side by side, as `attend_short` makes them."""
    if x.device.type != "cpu" or not (x.requires_grad and torch.is_grad_enabled() and available()):
        return x.chunk(count, dim=-1)
    parts: tuple[Tensor, ...] = _SplitColumns.apply(x, count)  # type: ignore[no-untyped-call]
    return parts


class _SplitColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return x.chunk(count, dim=-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        first = gradients[0]
        width = first.shape[-1]
        storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
        for number, part in enumerate(gradients):
            place = (storage, start + number * width, first.stride())
            if (part.untyped_storage().data_ptr(), part.storage_offset(), part.stride()) != place or part.stride(-2) < len(gradients) * width:
                return torch.cat(gradients, dim=-1), None
        return first.as_strided((*first.shape[:-1], len(gradients) * width), first.stride()), None


def fits_rows(x: Tensor) -> bool:
    """Whether `layer_norm` and `add_dropped` take x as their fp32 argument."""
    is_plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() and x.shape[-1] % CHANNELS_MULTIPLE == 0
    return is_plain and available()


def layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """LayerNorm over the last dimension of x, fp32 [..., D], in fp32 or bf16."""
    y: Tensor = _LayerNorm.apply(x, weight_D, bias_D, eps, dtype)  # type: ignore[no-untyped-call]
    return y


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        d_model = x.shape[-1]
        num_rows = x.numel() // d_model
        y, statistics = torch.empty(x.shape, dtype=dtype), torch.empty(2, num_rows)
        _library().layer_norm_forward(
            x.data_ptr(),
            weight_D.data_ptr(),
            bias_D.data_ptr(),
            eps,
            num_rows,
            d_model,
            y.data_ptr(),
            statistics[0].data_ptr(),
            statistics[1].data_ptr(),
            dtype == torch.bfloat16,
        )
        ctx.save_for_backward(x, weight_D, statistics)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight_D, statistics = ctx.saved_tensors
        grad_y = gradients[0].contiguous()
        num_rows, d_model = statistics.shape[1], x.shape[-1]
        grad_x, parts = torch.empty_like(x), torch.empty(2, -(-num_rows // _ROWS_OF_CHUNK), d_model)
        _library().layer_norm_backward(
            grad_y.data_ptr(),
            x.data_ptr(),
            weight_D.data_ptr(),
            statistics[0].data_ptr(),
            statistics[1].data_ptr(),
            num_rows,
            d_model,
            grad_x.data_ptr(),
            parts[0].data_ptr(),
            parts[1].data_ptr(),
            grad_y.dtype == torch.bfloat16,
        )
        sums = parts.sum(dim=1)
        return grad_x, sums[0], sums[1], None, None


def add_dropped(x: Tensor, change: Tensor, drawn: Tensor, threshold: int) -> Tensor:
    """x + dropout(change), fp32.

    Args:
        x: fp32.
        change: fp32 or bf16, in the shape of x.
        drawn: A random byte for each number, uint8, flat: those below the threshold take it out.
        threshold: 1 to 255, of 256.
    """
    out: Tensor = _AddDropped.apply(x, change, drawn, threshold)  # type: ignore[no-untyped-call]
    return out


class _AddDropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Tensor, drawn: Tensor, threshold: int) -> Tensor:
        change = change.contiguous()
        out = torch.empty_like(x)
        ctx.drawn, ctx.threshold, ctx.dtype = drawn, threshold, change.dtype
        ctx.scale = 256.0 / (256.0 - threshold)
        _library().dropout_add_forward(
            x.data_ptr(), change.data_ptr(), drawn.data_ptr(), threshold, ctx.scale, x.numel(), out.data_ptr(), change.dtype == torch.bfloat16
        )
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad = gradients[0].contiguous()
        grad_change = torch.empty(grad.shape, dtype=ctx.dtype)
        _library().dropout_add_backward(
            grad.data_ptr(), ctx.drawn.data_ptr(), ctx.threshold, ctx.scale, grad.numel(), grad_change.data_ptr(), ctx.dtype == torch.bfloat16
        )
        return grad, grad_change, None, None


def fits_softmax(z_KR: Tensor) -> bool:
    """Whether `softmax_less_target_` takes these logits."""
    return z_KR.device.type == "cpu" and z_KR.dtype in DTYPES and z_KR.is_contiguous() and available()


def softmax_less_target_(z_KR: Tensor, target_K: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Make softmax(z), less 1 - epsilon at the target, of the logits in their place. It has no gradient.

    Args:
        z_KR: Logits, fp32 or bf16.
        target_K: A column of each row, int64.
        epsilon: From 0 to 1.

    Returns:
        The logarithm of the sum of the exponentials of each row, and its logit at the target, both fp32 [K].
    """
    num_rows, num_columns = z_KR.shape
    sums_2K = torch.empty(2, num_rows)
    _library().softmax_less_target(
        z_KR.data_ptr(),
        target_K.contiguous().data_ptr(),
        epsilon,
        num_rows,
        num_columns,
        sums_2K[0].data_ptr(),
        sums_2K[1].data_ptr(),
        z_KR.dtype == torch.bfloat16,
    )
    return sums_2K[0], sums_2K[1]
