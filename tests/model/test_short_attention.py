"""The kernel for short packed sentences against attention in padded fp32, forward and backward."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mtkit.data.loader import Packing
from mtkit.model.attention import PackedAttention, packed_kernel

SELF = [5, 70, 1, 0, 33, 64, 130, 256, 17]
"""Lengths of sentences: within a tile, at its edge, of several tiles, and none at all."""

CROSS = [9, 3, 1, 12, 64, 65, 90, 31, 200]
"""Lengths of the sources of the same sentences."""


def packing(lengths: Sequence[int], device: str) -> Packing:
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    return Packing(starts, torch.cat([torch.arange(length) for length in lengths]).to(device), 256)


def test_there_is_a_kernel_for_a_gpu_alone() -> None:
    assert packed_kernel("cpu", max_length=64, head_dim=64) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
    @pytest.mark.parametrize(("key_lengths", "is_causal"), [(SELF, False), (SELF, True), (CROSS, False)])
    def test_equals_padded_fp32(self, dtype: torch.dtype, head_dim: int, key_lengths: list[int], is_causal: bool) -> None:
        from mtkit.model.short_attention import attend_short

        torch.manual_seed(0)
        heads, queries, keys = 3, packing(SELF, "cuda"), packing(key_lengths, "cuda")
        width = heads * head_dim
        # As the layers make them: slices of what one product gave.
        q_all, kv_all = torch.randn(sum(SELF), 3 * width, device="cuda"), torch.randn(sum(key_lengths), 2 * width, device="cuda")
        inputs = [part.to(dtype) for part in (q_all[:, :width], *kv_all.chunk(2, dim=-1))]
        gradient = torch.randn(sum(SELF), width, device="cuda").to(dtype)

        def run(attention: object, parts: list[Tensor]) -> list[Tensor]:
            leaves = [part.detach().requires_grad_() for part in parts]
            out: Tensor = attention(*leaves, num_heads=heads)  # type: ignore[operator]
            return [out.detach(), *torch.autograd.grad(out, leaves, gradient.to(out.dtype))]

        exact = run(PackedAttention(queries, keys, is_causal=is_causal), [part.float() for part in inputs])
        found = run(PackedAttention(queries, keys, is_causal=is_causal, kernel=attend_short), inputs)
        for name, expected, value in zip(("out", "q", "k", "v"), exact, found, strict=True):
            error = float((expected - value.float()).norm() / expected.norm())
            assert error < (0.008 if dtype == torch.bfloat16 else 0.001), (name, error)

    def test_a_sentence_without_keys_gives_zeros_and_takes_no_gradient(self) -> None:
        from mtkit.model.short_attention import attend_short

        queries, keys = packing([4, 80, 2], "cuda"), packing([3, 0, 5], "cuda")
        q, k, v = (torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for rows in (86, 8, 8))
        out = attend_short(q, k, v, queries, keys, num_heads=2, is_causal=False)
        q_grad, k_grad, _ = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert (out[4:84] == 0).all()
        assert (q_grad[4:84] == 0).all()
        assert out.isfinite().all()
        assert k_grad.isfinite().all()
        assert (out[:4] != 0).all()
