"""Attention against its formula, in both layouts: each sentence of a packed batch is as it would be alone."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtkit.data.loader import Packing
from mtkit.model import attention, softmax
from mtkit.model.attention import GridAttention, PackedAttention, PaddedAttention, attend

B, T, S, D, H = 3, 5, 7, 16, 4

SELF = [4, 1, 0, 6, 2]
"""Lengths of sentences, one of them empty."""

CROSS = [3, 0, 2, 5, 7]
"""Lengths of the sources of the same sentences."""


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def source_mask() -> Tensor:
    mask_BS = torch.ones(B, S, dtype=torch.bool)
    mask_BS[1, 4:] = False
    mask_BS[2, 1:] = False
    return mask_BS


def causal_mask(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def typed_out_attention(q_BTD: Tensor, k_BSD: Tensor, v_BSD: Tensor, mask: Tensor | None) -> Tensor:
    heads = []
    for q, k, v in zip(q_BTD.chunk(H, -1), k_BSD.chunk(H, -1), v_BSD.chunk(H, -1), strict=True):
        scores = q @ k.transpose(1, 2) / math.sqrt(D / H)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        heads.append(scores.exp() / scores.exp().sum(-1, keepdim=True) @ v)
    return torch.cat(heads, -1)


class Calls(TorchDispatchMode):
    """Records which operators run, and the dtype of their first argument."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor):
            self.dtypes.setdefault(func.__name__.partition(".")[0], set()).add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("limit", [0, attention.MATMUL_MAX_SCORES])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("kind", ["none", "padding", "causal"])
def test_attend_is_the_formula(kind: str, requires_grad: bool, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MATMUL_MAX_SCORES", limit)
    q, k, v = (torch.randn(B, T, D, requires_grad=requires_grad) for _ in range(3))
    mask = {"none": None, "padding": source_mask()[:, None, None, :T], "causal": causal_mask(T)}[kind]
    with Calls() as calls:
        out = attend(q, k, v, mask=mask, num_heads=H)
    by_matmul = requires_grad and limit > 0 and mask is not None
    assert ("bmm" in calls.dtypes and not any("scaled_dot_product" in name for name in calls.dtypes)) == by_matmul
    expected = typed_out_attention(q, k, v, None if mask is None else mask.reshape(-1, *mask.shape[-2:]))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    if requires_grad:
        assert_same_gradients(out, expected, (q, k, v))


def assert_same_gradients(out: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    for gradient, expected_gradient in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("limit", [0, attention.MATMUL_MAX_SCORES])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_query_without_keys_spoils_nothing(dtype: torch.dtype, requires_grad: bool, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MATMUL_MAX_SCORES", limit)
    q, k, v = (torch.randn(B, T, D, dtype=dtype) for _ in range(3))
    leaves = [x.clone().requires_grad_(requires_grad) for x in (q, k, v)]
    mask = torch.ones(B, 1, 1, T, dtype=torch.bool)
    mask[1] = False
    out = attend(*leaves, mask=mask, num_heads=H)
    assert out.isfinite().all()
    alone = attend(q[:1], k[:1], v[:1], mask=mask[:1], num_heads=H)
    torch.testing.assert_close(out[:1].detach(), alone, rtol=1e-2, atol=1e-2)
    if requires_grad:
        torch.autograd.backward(out.float().square().sum())
        for leaf in leaves:
            assert leaf.grad is not None
            assert leaf.grad.isfinite().all()


@pytest.mark.parametrize(("short_row", "kernel"), [(0, "_softmax"), (T + 1, "exp_")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_softmax_runs_in_float32(dtype: torch.dtype, short_row: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "SHORT_ROW", short_row)
    q, k, v = (torch.randn(B, T, D, dtype=dtype, requires_grad=True) for _ in range(3))
    with Calls() as calls:
        out = attend(q, k, v, mask=causal_mask(T), num_heads=H)
    assert out.dtype == dtype
    assert calls.dtypes[kernel] == {torch.float32}


@pytest.mark.parametrize("lengths", [(T, T), (T, S)])
@pytest.mark.parametrize("grid", [1, 8, 64])
def test_on_the_grid_it_is_the_same(grid: int, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "GRID", grid)
    num_queries, num_keys = lengths
    q, k, v = (torch.randn(B, length, D, requires_grad=True) for length in (num_queries, num_keys, num_keys))
    mask = source_mask()[:, None, None, :num_keys]
    expected = PaddedAttention(mask)(q, k, v, num_heads=H)
    on_grid = GridAttention(mask, B, num_queries, num_keys)(*(attention.on_grid(x) for x in (q, k, v)), num_heads=H)
    assert len(on_grid) % grid == 0
    assert len(on_grid) - B * num_queries < grid
    assert (on_grid[B * num_queries :] == 0).all()
    out = attention.off_grid(on_grid, B, num_queries)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert_same_gradients(out, expected, (q, k, v))


def packing(lengths: list[int], *, max_length: int = 8) -> Packing:
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return Packing(starts=starts, positions_N=torch.cat([torch.arange(length) for length in lengths]), max_length=max_length)


LAYOUTS = {
    "self": (SELF, SELF, False),
    "causal": (SELF, SELF, True),
    "cross": (SELF, CROSS, False),
}


def packed_inputs(
    layout: str, *, dtype: torch.dtype = torch.float64
) -> tuple[PackedAttention, tuple[Tensor, Tensor, Tensor], list[tuple[slice, slice]]]:
    """The attention, its queries, keys and values, and where each sentence lies in the queries and in the keys."""
    queries, keys, is_causal = LAYOUTS[layout]
    packed = PackedAttention(packing(queries), packing(keys), is_causal=is_causal)
    inputs = tuple(torch.randn(sum(lengths), D, dtype=dtype, requires_grad=True) for lengths in (queries, keys, keys))
    q_slices, k_slices = (itertools.starmap(slice, itertools.pairwise(side.starts.tolist())) for side in (packed.queries, packed.keys))
    return packed, inputs, list(zip(q_slices, k_slices, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("limit", [0, attention.MATMUL_MAX_SCORES])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_packed_sentence_is_as_alone(layout: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MATMUL_MAX_SCORES", limit)
    packed, (q, k, v), sentences = packed_inputs(layout)
    out_ND = packed(q, k, v, num_heads=H)
    assert out_ND.shape == q.shape
    compared = 0
    for queries, keys in sentences:
        length = queries.stop - queries.start
        if length == 0 or keys.stop == keys.start:
            continue
        mask = causal_mask(length) if packed.is_causal else None
        expected = typed_out_attention(q[None, queries], k[None, keys], v[None, keys], mask)[0]
        torch.testing.assert_close(out_ND[queries], expected, rtol=1e-10, atol=1e-12)
        weight = torch.randn_like(expected)
        ours = torch.autograd.grad((out_ND[queries] * weight).sum(), (q, k, v), retain_graph=True)
        theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v))
        # The gradient of one sentence's output is zero in all other sentences: none sees another.
        for gradient, expected_gradient in zip(ours, theirs, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)
        compared += 1
    assert compared >= 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_equals_padded(layout: str, dtype: torch.dtype) -> None:
    packed, inputs, sentences = packed_inputs(layout, dtype=dtype)
    queries, keys, is_causal = LAYOUTS[layout]
    q_pad, k_pad, v_pad = (torch.zeros(len(sentences), max(lengths), D, dtype=dtype) for lengths in (queries, keys, keys))
    for row, (q_slice, k_slice) in enumerate(sentences):
        for padded, x, where in ((q_pad, inputs[0], q_slice), (k_pad, inputs[1], k_slice), (v_pad, inputs[2], k_slice)):
            padded[row, : where.stop - where.start] = x.detach()[where]
    padded_inputs = tuple(x.requires_grad_() for x in (q_pad, k_pad, v_pad))
    mask = (torch.arange(max(keys)) < torch.tensor(keys)[:, None])[:, None, None, :]
    padded_attention = PaddedAttention(mask & causal_mask(max(queries)) if is_causal else mask)
    out_ND, out_BTD = packed(*inputs, num_heads=H), padded_attention(*padded_inputs, num_heads=H)
    has_keys = torch.tensor(keys) > 0
    real_BT = (torch.arange(max(queries)) < torch.tensor(queries)[:, None]) & has_keys[:, None]
    real_N = has_keys.repeat_interleave(torch.tensor(queries))
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out_ND[real_N], out_BTD[real_BT], rtol=tolerance, atol=tolerance)
    weight = torch.randn_like(out_ND[real_N])
    ours = torch.autograd.grad((out_ND[real_N] * weight).sum(), inputs)
    theirs = torch.autograd.grad((out_BTD[real_BT] * weight).sum(), padded_inputs)
    for gradient, padded_gradient, lengths in zip(ours, theirs, (queries, keys, keys), strict=True):
        is_token = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        torch.testing.assert_close(gradient, padded_gradient[is_token], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_queries_without_keys_spoil_nothing(dtype: torch.dtype) -> None:
    packed, inputs, _ = packed_inputs("cross", dtype=dtype)
    assert any(keys == 0 < queries for queries, keys in zip(SELF, CROSS, strict=True)), "else this tests nothing"
    out_ND = packed(*inputs, num_heads=H)
    assert out_ND.isfinite().all()
    for gradient in torch.autograd.grad(out_ND.float().square().sum(), inputs):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("lengths", [[0, 3], [1], [1, 0, 0], [0, 0]])
def test_hardly_any_tokens(lengths: list[int]) -> None:
    where = packing(lengths)
    x_ND = torch.randn(sum(lengths), D, requires_grad=True)
    out_ND = PackedAttention(where, where, is_causal=True)(x_ND, x_ND, x_ND, num_heads=H)
    assert out_ND.shape == x_ND.shape
    torch.testing.assert_close(out_ND[:1], x_ND[:1], msg="the first position sees itself alone")


@pytest.mark.parametrize("limit", [0, attention.MATMUL_MAX_SCORES])
def test_packed_attention_drops_weights_and_keeps_the_mean(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MATMUL_MAX_SCORES", limit)
    copies, length = 4000, 3
    where = packing([length] * copies)
    packed = PackedAttention(where, where, is_causal=True)
    q, k, v = (torch.randn(length, D, requires_grad=True).repeat(copies, 1) for _ in range(3))
    plain = packed(q, k, v, num_heads=H).unflatten(0, (copies, length))[0]
    torch.manual_seed(5)
    first = packed(q, k, v, num_heads=H, dropout_rate=0.5)
    second = packed(q, k, v, num_heads=H, dropout_rate=0.5)
    torch.manual_seed(5)
    assert torch.equal(packed(q, k, v, num_heads=H, dropout_rate=0.5), first), "the seed decides"
    assert not torch.equal(first, second)
    # The first position of a sentence has one weight in each head: it is dropped, or doubled.
    ratios = (first / v).unflatten(0, (copies, length))[:, 0].detach()
    assert set(ratios.round(decimals=9).unique().tolist()) == {0.0, 2.0}
    mean = first.unflatten(0, (copies, length)).mean(0)
    assert (mean - plain).abs().max() < 0.1 * plain.abs().max()
