"""A GPU kernel for attention in packed sentences of ordinary length, where one program keeps a whole sentence and head on the chip.

torch's kernel for sequences of various lengths works in tiles of 128 positions, mostly empty for a sentence of 30 tokens.

Shapes: B sentences, N packed queries, M packed keys, H heads, C channels of a head, D = H C. Tiles are of BLOCK queries or keys.
The kernels are those of FlashAttention (Dao et al., 2022): only the log-sum-exp of each row of scores is kept for the backward pass.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtkit.data.loader import Packing

MAX_LENGTH = 256
"""Longest sentence for which one program per sentence and head is the faster way."""

BLOCK = 64
NUM_WARPS = 4
LOG2_E = 1.4426950408889634


def fits(*, max_length: int, head_dim: int) -> bool:
    """Whether the kernel takes sentences of up to this length, and heads of this many channels."""
    return max_length <= MAX_LENGTH and head_dim in (16, 32, 64, 128)


@triton.jit
def _tile(pointer, stride, first, length, C: tl.constexpr, BLOCK: tl.constexpr):
    """Addresses of a tile of rows from `first` on, and which of them belong to the sentence."""
    rows = first + tl.arange(0, BLOCK)
    return pointer + rows[:, None] * stride + tl.arange(0, C)[None, :], (rows < length)[:, None]


@triton.jit
def _scores(q, k, m, n, k_length, scale, IS_CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """Scores of a tile of queries from m on with a tile of keys from n on, for exponentials of base 2; -inf where there is nothing to attend to."""
    columns = n + tl.arange(0, BLOCK)[None, :]
    is_seen = columns < k_length
    if IS_CAUSAL:
        is_seen = is_seen & (columns <= m + tl.arange(0, BLOCK)[:, None])
    return tl.where(is_seen, tl.dot(q, tl.trans(k)) * scale, float("-inf"))


@triton.jit
def _forward_kernel(
    q, k, v, out, lse, q_starts, k_starts, q_stride, k_stride, v_stride, out_stride, num_queries, scale,
    IS_CAUSAL: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sentence, head = tl.program_id(0), tl.program_id(1)
    q_start, k_start = tl.load(q_starts + sentence).to(tl.int64), tl.load(k_starts + sentence).to(tl.int64)
    q_length = (tl.load(q_starts + sentence + 1) - q_start).to(tl.int32)
    k_length = (tl.load(k_starts + sentence + 1) - k_start).to(tl.int32)
    q += q_start * q_stride + head * C
    k += k_start * k_stride + head * C
    v += k_start * v_stride + head * C
    out += q_start * out_stride + head * C
    lse += head.to(tl.int64) * num_queries + q_start
    for m in range(0, q_length, BLOCK):
        q_at, q_mask = _tile(q, q_stride, m, q_length, C, BLOCK)
        q_tile = tl.load(q_at, mask=q_mask, other=0.0)
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        mixed = tl.zeros([BLOCK, C], tl.float32)
        stop = k_length
        if IS_CAUSAL:
            stop = tl.minimum(k_length, m + BLOCK)
        for n in range(0, stop, BLOCK):
            k_at, k_mask = _tile(k, k_stride, n, k_length, C, BLOCK)
            v_at, _ = _tile(v, v_stride, n, k_length, C, BLOCK)
            scores = _scores(q_tile, tl.load(k_at, mask=k_mask, other=0.0), m, n, k_length, scale, IS_CAUSAL, BLOCK)
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            v_tile = tl.load(v_at, mask=k_mask, other=0.0)
            mixed = mixed * shrink[:, None] + tl.dot(weights.to(v_tile.dtype), v_tile)
            top = new_top
        # Without a key the output is 0, and the infinite log-sum-exp makes every weight 0 in backward.
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        out_at, _ = _tile(out, out_stride, m, q_length, C, BLOCK)
        tl.store(out_at, mixed.to(out.dtype.element_ty), mask=q_mask)
        rows = m + tl.arange(0, BLOCK)
        tl.store(lse + rows, tl.where(total == 0.0, float("inf"), top + tl.log2(total)), mask=rows < q_length)


@triton.jit
def _score_gradients(q_tile, k_tile, v_tile, grad, delta, lse, m, n, k_length, scale, IS_CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """Weights of a tile, and the gradient of its scores before scaling."""
    weights = tl.exp2(_scores(q_tile, k_tile, m, n, k_length, scale, IS_CAUSAL, BLOCK) - lse[:, None])
    return weights, weights * (tl.dot(grad, tl.trans(v_tile)) - delta[:, None])


@triton.jit
def _query_side(q, out, grad_out, lse, q_stride, out_stride, grad_stride, m, q_length, C: tl.constexpr, BLOCK: tl.constexpr):
    """What backward needs of a tile of queries: themselves, the output's gradient, its product with the output, and the log-sum-exp."""
    q_at, mask = _tile(q, q_stride, m, q_length, C, BLOCK)
    out_at, _ = _tile(out, out_stride, m, q_length, C, BLOCK)
    grad_at, _ = _tile(grad_out, grad_stride, m, q_length, C, BLOCK)
    grad = tl.load(grad_at, mask=mask, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * tl.load(out_at, mask=mask, other=0.0).to(tl.float32), 1)
    rows = m + tl.arange(0, BLOCK)
    return tl.load(q_at, mask=mask, other=0.0), grad, delta, tl.load(lse + rows, mask=rows < q_length, other=float("inf"))


@triton.jit
def _backward_kernel(
    q, k, v, out, lse, grad_out, grad_q, grad_k, grad_v, q_starts, k_starts,
    q_stride, k_stride, v_stride, out_stride, grad_stride, grad_q_stride, grad_k_stride, num_queries, scale, natural_scale,
    IS_CAUSAL: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sentence, head = tl.program_id(0), tl.program_id(1)
    q_start, k_start = tl.load(q_starts + sentence).to(tl.int64), tl.load(k_starts + sentence).to(tl.int64)
    q_length = (tl.load(q_starts + sentence + 1) - q_start).to(tl.int32)
    k_length = (tl.load(k_starts + sentence + 1) - k_start).to(tl.int32)
    q += q_start * q_stride + head * C
    out += q_start * out_stride + head * C
    grad_out += q_start * grad_stride + head * C
    grad_q += q_start * grad_q_stride + head * C
    lse += head.to(tl.int64) * num_queries + q_start
    k += k_start * k_stride + head * C
    v += k_start * v_stride + head * C
    grad_k += k_start * grad_k_stride + head * C
    grad_v += k_start * grad_k_stride + head * C
    is_one_tile = (k_length > 0) & (k_length <= BLOCK)
    for n in range(0, k_length, BLOCK):
        k_at, k_mask = _tile(k, k_stride, n, k_length, C, BLOCK)
        v_at, _ = _tile(v, v_stride, n, k_length, C, BLOCK)
        k_tile, v_tile = tl.load(k_at, mask=k_mask, other=0.0), tl.load(v_at, mask=k_mask, other=0.0)
        k_grad = tl.zeros([BLOCK, C], tl.float32)
        v_grad = tl.zeros([BLOCK, C], tl.float32)
        first = 0
        if IS_CAUSAL:
            first = n
        for m in range(first, q_length, BLOCK):
            q_tile, grad, delta, row_lse = _query_side(q, out, grad_out, lse, q_stride, out_stride, grad_stride, m, q_length, C, BLOCK)
            weights, scores_grad = _score_gradients(q_tile, k_tile, v_tile, grad, delta, row_lse, m, n, k_length, scale, IS_CAUSAL, BLOCK)
            v_grad += tl.dot(tl.trans(weights.to(grad.dtype)), grad)
            k_grad += tl.dot(tl.trans(scores_grad.to(q_tile.dtype)), q_tile)
            if is_one_tile:
                q_grad = tl.dot(scores_grad.to(k_tile.dtype), k_tile) * natural_scale
                grad_q_at, q_mask = _tile(grad_q, grad_q_stride, m, q_length, C, BLOCK)
                tl.store(grad_q_at, q_grad.to(grad_q.dtype.element_ty), mask=q_mask)
        grad_k_at, _ = _tile(grad_k, grad_k_stride, n, k_length, C, BLOCK)
        grad_v_at, _ = _tile(grad_v, grad_k_stride, n, k_length, C, BLOCK)
        tl.store(grad_k_at, (k_grad * natural_scale).to(grad_k.dtype.element_ty), mask=k_mask)
        tl.store(grad_v_at, v_grad.to(grad_v.dtype.element_ty), mask=k_mask)
    if not is_one_tile:
        # The gradient of a query sums over tiles of keys: a second pass, for long sentences only.
        for m in range(0, q_length, BLOCK):
            q_tile, grad, delta, row_lse = _query_side(q, out, grad_out, lse, q_stride, out_stride, grad_stride, m, q_length, C, BLOCK)
            q_grad = tl.zeros([BLOCK, C], tl.float32)
            stop = k_length
            if IS_CAUSAL:
                stop = tl.minimum(k_length, m + BLOCK)
            for n in range(0, stop, BLOCK):
                k_at, k_mask = _tile(k, k_stride, n, k_length, C, BLOCK)
                v_at, _ = _tile(v, v_stride, n, k_length, C, BLOCK)
                k_tile, v_tile = tl.load(k_at, mask=k_mask, other=0.0), tl.load(v_at, mask=k_mask, other=0.0)
                _, scores_grad = _score_gradients(q_tile, k_tile, v_tile, grad, delta, row_lse, m, n, k_length, scale, IS_CAUSAL, BLOCK)
                q_grad += tl.dot(scores_grad.to(k_tile.dtype), k_tile)
            grad_q_at, q_mask = _tile(grad_q, grad_q_stride, m, q_length, C, BLOCK)
            tl.store(grad_q_at, (q_grad * natural_scale).to(grad_q.dtype.element_ty), mask=q_mask)


@torch.library.custom_op("mtkit::short_attention", mutates_args=())
def _attend(q_ND: Tensor, k_MD: Tensor, v_MD: Tensor, q_starts: Tensor, k_starts: Tensor, num_heads: int, is_causal: bool) -> tuple[Tensor, Tensor]:
    out_ND = torch.empty(q_ND.shape, dtype=q_ND.dtype, device=q_ND.device)
    lse_HN = torch.empty(num_heads, len(q_ND), dtype=torch.float32, device=q_ND.device)
    head_dim = q_ND.shape[1] // num_heads
    _forward_kernel[len(q_starts) - 1, num_heads](
        q_ND, k_MD, v_MD, out_ND, lse_HN, q_starts, k_starts,
        q_ND.stride(0), k_MD.stride(0), v_MD.stride(0), out_ND.stride(0), len(q_ND), head_dim**-0.5 * LOG2_E,
        IS_CAUSAL=is_causal, C=head_dim, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out_ND, lse_HN


@_attend.register_fake
def _(q_ND: Tensor, k_MD: Tensor, v_MD: Tensor, q_starts: Tensor, k_starts: Tensor, num_heads: int, is_causal: bool) -> tuple[Tensor, Tensor]:
    out_ND = torch.empty(q_ND.shape, dtype=q_ND.dtype, device=q_ND.device)
    return out_ND, torch.empty(num_heads, len(q_ND), dtype=torch.float32, device=q_ND.device)


@torch.library.custom_op("mtkit::short_attention_backward", mutates_args=())
def _attend_backward(
    grad_ND: Tensor, q_ND: Tensor, k_MD: Tensor, v_MD: Tensor, out_ND: Tensor, lse_HN: Tensor, q_starts: Tensor, k_starts: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_ND = grad_ND.contiguous()
    q_grad, k_grad, v_grad = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_ND, k_MD, v_MD))
    num_heads = len(lse_HN)
    head_dim = q_ND.shape[1] // num_heads
    natural_scale = head_dim**-0.5
    _backward_kernel[len(q_starts) - 1, num_heads](
        q_ND, k_MD, v_MD, out_ND, lse_HN, grad_ND, q_grad, k_grad, v_grad, q_starts, k_starts,
        q_ND.stride(0), k_MD.stride(0), v_MD.stride(0), out_ND.stride(0), grad_ND.stride(0), q_grad.stride(0), k_grad.stride(0),
        len(q_ND), natural_scale * LOG2_E, natural_scale,
        IS_CAUSAL=is_causal, C=head_dim, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    return q_grad, k_grad, v_grad


@_attend_backward.register_fake
def _(
    grad_ND: Tensor, q_ND: Tensor, k_MD: Tensor, v_MD: Tensor, out_ND: Tensor, lse_HN: Tensor, q_starts: Tensor, k_starts: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q_grad, k_grad, v_grad = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_ND, k_MD, v_MD))
    return q_grad, k_grad, v_grad


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_ND, k_MD, v_MD, q_starts, k_starts, _, ctx.is_causal = inputs
    ctx.save_for_backward(q_ND, k_MD, v_MD, *output, q_starts, k_starts)


def _backward(ctx: Any, grad_ND: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q_ND, k_MD, v_MD, out_ND, lse_HN, q_starts, k_starts = ctx.saved_tensors
    grads = torch.ops.mtkit.short_attention_backward(grad_ND, q_ND, k_MD, v_MD, out_ND, lse_HN, q_starts, k_starts, ctx.is_causal)
    return *grads, None, None, None, None


_attend.register_autograd(_backward, setup_context=_setup_context)


def attend_short(q: Tensor, k: Tensor, v: Tensor, queries: Packing, keys: Packing, *, num_heads: int, is_causal: bool) -> Tensor:
    """softmax(Q Kᵀ / sqrt(C)) V in each head and sentence, in half precision with sums in fp32; out_ND in the dtype of q.

    Args:
        q: Queries, [N, D], fp16 or bf16; rows may have any stride, as those of a slice have.
        k: Keys, [M, D].
        v: Values, [M, D].
        queries: Where the sentences of the queries lie.
        keys: Where those of the keys lie. A sentence without keys gives zeros.
        num_heads: H.
        is_causal: Whether a query attends to no later position than its own.
    """
    out_ND: Tensor
    out_ND, _ = torch.ops.mtkit.short_attention(q, k, v, queries.starts, keys.starts, num_heads, is_causal)
    return out_ND
