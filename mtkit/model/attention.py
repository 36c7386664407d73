"""Scaled dot-product attention over sentences that lie in a batch in one of two layouts: padded to one length, or packed one after the other.

The layers of the model do not know which; they hand queries, keys and values to an `Attention`.

Shapes: B sentences, T queries, S keys, N packed queries of all sentences, M packed keys, D = d_model, H heads, C = D / H. A mask is boolean, True
where a query may attend to a key, and broadcasts to BHTS.
"""

import functools
import importlib.util
import inspect
import math
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

from mtkit.data.loader import Packing
from mtkit.model.device import GRID
from mtkit.model.dropout import dropout
from mtkit.model.softmax import attention_weights
from mtkit.native import training

MATMUL_MAX_SCORES = 256 * 256
"""Up to this many scores per sentence and head, training on a CPU multiplies matrices instead of calling torch's fused attention."""


class Attention(Protocol):
    """Which keys each query of a batch attends to."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, num_heads: int, dropout_rate: float = 0.0) -> Tensor:
        """softmax(Q·Kᵀ / sqrt(C))·V in each head, side by side, in the shape of q.

        Args:
            q: Queries, all heads side by side.
            k: Keys.
            v: Values.
            num_heads: H.
            dropout_rate: Probability of dropping an attention weight.
        """


@dataclass(frozen=True, slots=True)
class PaddedAttention:
    """Attention in sentences padded to one length: q_BTD, k_BSD and v_BSD.

    Attributes:
        mask: Boolean, broadcasts to BHTS.
    """

    mask: Tensor

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, num_heads: int, dropout_rate: float = 0.0) -> Tensor:
        """See `Attention`."""
        return attend(q, k, v, mask=self.mask, num_heads=num_heads, dropout_rate=dropout_rate)


@dataclass(frozen=True, slots=True)
class GridAttention:
    """The same with all positions in one dimension, and after them unused ones up to a size of the grid, see `on_grid`: q_ND, k_MD and v_MD.

    Attributes:
        mask: Boolean, broadcasts to BHTS.
        num_sentences: B.
        num_queries: T.
        num_keys: S.
    """

    mask: Tensor
    num_sentences: int
    num_queries: int
    num_keys: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, num_heads: int, dropout_rate: float = 0.0) -> Tensor:
        """See `Attention`."""
        sizes = (self.num_sentences, self.num_queries, self.num_keys)
        if dropout_rate == 0.0 and (out := _attend_by_kernel(q, k, v, self.mask, sizes=sizes, num_heads=num_heads)) is not None:
            return out
        lengths = (self.num_queries, self.num_keys, self.num_keys)
        sides = [off_grid(x, self.num_sentences, length) for x, length in zip((q, k, v), lengths, strict=True)]
        return on_grid(attend(*sides, mask=self.mask, num_heads=num_heads, dropout_rate=dropout_rate))


def on_grid(x_BTD: Tensor) -> Tensor:
    """All positions in one dimension, with zeros after them up to a multiple of `device.GRID`: x_ND."""
    num_rows = x_BTD.shape[0] * x_BTD.shape[1]
    return functional.pad(x_BTD.flatten(0, 1), (0, 0, 0, -num_rows % GRID))


def off_grid(x_ND: Tensor, num_sentences: int, length: int) -> Tensor:
    """Undo `on_grid`: x_BTD, a view."""
    return x_ND[: num_sentences * length].view(num_sentences, length, -1)


class PackedKernel(Protocol):
    """Attention in packed sentences on a GPU, in half precision; see `PackedAttention` for the arguments."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, queries: Packing, keys: Packing, *, num_heads: int, is_causal: bool) -> Tensor:
        """What `Attention` returns, in the dtype of q."""


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Attention in packed sentences: q_ND, k_MD and v_MD; a query attends to the keys of its own sentence.

    Without a kernel, in fp32, and with dropout of weights, sentences are padded on the way, with the same result.

    Attributes:
        queries: Where the sentences of the queries lie.
        keys: Where those of the keys lie; the same number.
        is_causal: Whether a query attends to no later position than its own.
        kernel: What `packed_kernel` gave, or None.
    """

    queries: Packing
    keys: Packing
    is_causal: bool
    kernel: PackedKernel | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, num_heads: int, dropout_rate: float = 0.0) -> Tensor:
        """See `Attention`."""
        if self.kernel is None or q.dtype == torch.float32 or dropout_rate > 0.0:
            return self._by_padding(q, k, v, num_heads=num_heads, dropout_rate=dropout_rate)
        return self.kernel(q, k, v, self.queries, self.keys, num_heads=num_heads, is_causal=self.is_causal)

    def _by_padding(self, q: Tensor, k: Tensor, v: Tensor, *, num_heads: int, dropout_rate: float) -> Tensor:
        q_index_BT, q_mask_BT = _padded_index(self.queries)
        k_index_BS, k_mask_BS = _padded_index(self.keys)
        mask = k_mask_BS[:, None, None, :]
        if self.is_causal:
            mask = mask & torch.ones(q_index_BT.shape[1], k_index_BS.shape[1], dtype=torch.bool, device=q.device).tril()
        out_BTD = attend(q[q_index_BT], k[k_index_BS], v[k_index_BS], mask=mask, num_heads=num_heads, dropout_rate=dropout_rate)
        return out_BTD[q_mask_BT]


@functools.cache
def packed_kernel(device_type: str, *, max_length: int, head_dim: int) -> PackedKernel | None:
    """The fastest kernel for packed sentences on a device, or None where there is none. Modules are imported only where they are used.

    Args:
        device_type: Of the tensors.
        max_length: Tokens of the longest sentence.
        head_dim: Channels of a head.
    """
    if device_type != "cuda":
        return None
    if importlib.util.find_spec("triton") is not None:
        from mtkit.model import short_attention

        if short_attention.fits(max_length=max_length, head_dim=head_dim):
            return short_attention.attend_short
    from torch.nn.attention import varlen  # takes 75 MB of memory

    takes_causal = "is_causal" in inspect.signature(varlen.varlen_attn).parameters  # torch 2.10

    def attend_varlen(q: Tensor, k: Tensor, v: Tensor, queries: Packing, keys: Packing, *, num_heads: int, is_causal: bool) -> Tensor:
        heads = (x.unflatten(-1, (num_heads, -1)) for x in (q, k, v))
        how: dict[str, Any] = {"is_causal": is_causal} if takes_causal else {"window_size": (-1, 0) if is_causal else (-1, -1)}
        arguments: Any = (*heads, queries.starts, keys.starts, queries.max_length, keys.max_length)
        out_NHC = varlen.varlen_attn(*arguments, **how)
        return cast(Tensor, out_NHC).flatten(-2)

    return attend_varlen


def _padded_index(packing: Packing) -> tuple[Tensor, Tensor]:
    """For each place of the padded layout the packed position that goes there, and whether it is a token: int64 and bool [B, longest]."""
    starts = packing.starts.long()
    lengths = starts.diff()
    columns = torch.arange(int(lengths.max()), device=starts.device)
    mask_BT = columns < lengths[:, None]
    return torch.where(mask_BT, starts[:-1, None] + columns, 0), mask_BT


def attend(q_BTD: Tensor, k_BSD: Tensor, v_BSD: Tensor, *, mask: Tensor | None, num_heads: int, dropout_rate: float = 0.0) -> Tensor:
    """Scaled dot-product attention in several heads (sections 3.2.1 and 3.2.2): softmax(Q·Kᵀ / sqrt(C))·V in each, side by side in out_BTD.

    Softmax is computed in fp32 at least. A query that may attend to nothing gets finite numbers that mean nothing.

    Args:
        q_BTD: Queries, all heads side by side.
        k_BSD: Keys.
        v_BSD: Values.
        mask: Boolean, broadcasts to BHTS; None = attend to everything.
        num_heads: H.
        dropout_rate: Probability of dropping an attention weight.
    """
    trains_on_cpu = _is_short_training(q_BTD, q_BTD.shape[1], k_BSD.shape[1])
    if mask is not None and trains_on_cpu and dropout_rate == 0.0:
        q_ND, k_MD, v_MD = (x.flatten(0, 1) for x in (q_BTD, k_BSD, v_BSD))
        out_ND = _attend_by_kernel(q_ND, k_MD, v_MD, mask, sizes=(*q_BTD.shape[:2], k_BSD.shape[1]), num_heads=num_heads)
        if out_ND is not None:
            return out_ND.view(q_BTD.shape)
    q_BHTC, k_BHSC, v_BHSC = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q_BTD, k_BSD, v_BSD))
    # On CPUs, backward through torch's fused attention is slow for sentences: in bf16, at 128 x 18 tokens, five to nine times as slow as this.
    if mask is not None and trains_on_cpu:
        out_BHTC = _attend_by_matmul(q_BHTC, k_BHSC, v_BHSC, mask=mask, dropout_rate=dropout_rate)
    else:
        out_BHTC = functional.scaled_dot_product_attention(q_BHTC, k_BHSC, v_BHSC, attn_mask=mask, dropout_p=dropout_rate)
    return out_BHTC.transpose(1, 2).to(q_BTD.dtype, memory_format=torch.contiguous_format).flatten(2)  # one copy, cast or not


def attend_in_groups(q_BGD: Tensor, k_BHNC: Tensor, v_BHNC: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of the few hypotheses of a sentence to the same N keys, as decoding needs it at every step: out_BGD.

    Args:
        q_BGD: One query for each of G hypotheses.
        k_BHNC: Keys.
        v_BHNC: Values.
        mask: bool, True where a query may attend to a key, and broadcasts to BHGN; None = everywhere.
    """
    q_BHGC = q_BGD.unflatten(2, (k_BHNC.shape[1], -1)).transpose(1, 2)
    if q_BGD.device.type != "cpu" or q_BGD.dtype not in (torch.float32, torch.float64):
        out_BHGC = functional.scaled_dot_product_attention(q_BHGC, k_BHNC, v_BHNC, attn_mask=mask)
    else:  # torch's fused attention is made for long sequences
        scores_BHGN = torch.matmul(q_BHGC * k_BHNC.shape[3] ** -0.5, k_BHNC.transpose(2, 3))
        if mask is not None:
            scores_BHGN.masked_fill_(~mask, torch.finfo(scores_BHGN.dtype).min)
        out_BHGC = torch.matmul(scores_BHGN.softmax(dim=3), v_BHNC)
    return out_BHGC.transpose(1, 2).flatten(2)


def _is_short_training(q: Tensor, num_queries: int, num_keys: int) -> bool:
    """Whether this trains on a CPU, in sentences short enough that the weights of attention may be in memory."""
    return q.requires_grad and q.device.type == "cpu" and num_queries * num_keys <= MATMUL_MAX_SCORES


def _attend_by_kernel(q_ND: Tensor, k_MD: Tensor, v_MD: Tensor, mask: Tensor, *, sizes: tuple[int, int, int], num_heads: int) -> Tensor | None:
    """`training.attend_short`, see there, or None where that does not take these or is not made for them."""
    if _is_short_training(q_ND, *sizes[1:]) and training.fits_attention(q_ND, k_MD, v_MD, mask, num_heads=num_heads):
        return training.attend_short(q_ND, k_MD, v_MD, mask, sizes=sizes, num_heads=num_heads)
    return None


def _attend_by_matmul(q_BHTC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, *, mask: Tensor, dropout_rate: float) -> Tensor:
    """In fp32 at least: products as small as these are no faster in half precision, and the copies by heads, needed anyway, convert on their way."""
    dtype = torch.promote_types(q_BHTC.dtype, torch.float32)
    with torch.autocast("cpu", enabled=False):
        q_BHTC, k_BHSC, v_BHSC = (x.to(dtype, memory_format=torch.contiguous_format) for x in (q_BHTC, k_BHSC, v_BHSC))
        weights_BHTS = attention_weights(torch.matmul(q_BHTC, k_BHSC.transpose(-2, -1)), mask, scale=1.0 / math.sqrt(q_BHTC.shape[-1]))
        return torch.matmul(dropout(weights_BHTS, dropout_rate, training=True), v_BHSC)
