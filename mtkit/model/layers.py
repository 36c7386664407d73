"""The parts of the Transformer, in the order in which "Attention Is All You Need" (Vaswani et al., 2017) builds it; section numbers are that paper's.

Shapes: B sentences, T queries (target tokens, or source tokens in the encoder), S keys, R rows (hypotheses in decoding), D = d_model, H heads,
C = D / H, E = 2·D (keys beside values), F = ffn_dim. A mask is boolean, True where a query may attend to a key, and broadcasts to BHTS.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mtkit.model.attention import Attention, attend_in_groups
from mtkit.model.cache import StepCache
from mtkit.model.config import Activation, ModelConfig
from mtkit.model.dropout import add_dropped, dropout
from mtkit.native import training as native


def sinusoids(length: int, d_model: int) -> Tensor:
    """Positional encodings (section 3.5): float64 [length, d_model], sines in the even and cosines in the odd columns.

        PE(pos, 2i) = sin(pos / 10000^(2i / d_model))
        PE(pos, 2i + 1) = cos(pos / 10000^(2i / d_model))

    In float64, since the angles of late positions would lose their fraction in float32.
    """
    rates = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), rates)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


class Positions(nn.Module):
    """Sinusoids for any position, computed when first needed.

    The table is neither a parameter nor a buffer: it is not stored with the model, and data-parallel processes do not try to exchange it.

    Attributes:
        table: What was computed last; a longer sentence, or another device or dtype, replaces it.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model
        self.table = torch.empty(0, d_model)

    def forward(self, end: int, *, like: Tensor) -> Tensor:
        """Encodings of at least the positions before `end`, one in a row of D, in the dtype and on the device of `like`."""
        table = self.table  # which another thread may replace
        if end > table.shape[0] or table.dtype != like.dtype or table.device != like.device:
            with torch.inference_mode(False):  # a table made while translating must serve training too
                table = self.table = sinusoids(max(256, 2 * end), self.d_model).to(like)
        return table


def norm_for_products(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """LayerNorm of what matrix products alone will read: training on a CPU with kernels, in autocast's dtype, which they would take it to."""
    if x.device.type == "cpu" and torch.is_grad_enabled() and native.fits_rows(x):
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        if dtype in native.DTYPES:
            return native.layer_norm(x, norm.weight, norm.bias, norm.eps, dtype)
    return cast(Tensor, norm(x))


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself (section 3.2.3). `in_proj` makes Q, K and V at once: the rows of the three, in this order."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout_rate = config.attention_dropout
        self.in_proj = nn.Linear(config.d_model, 3 * config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """Attend among the positions of x, [..., D], as `attention` has it."""
        q, k, v = native.split_columns(self.in_proj(x), 3)
        rate = self.dropout_rate if self.training else 0.0
        out: Tensor = self.out_proj(attention(q, k, v, num_heads=self.num_heads, dropout_rate=rate))
        return out

    def step(self, x_RD: Tensor, cache: StepCache, layer: int) -> Tensor:
        """Attend from the newest position to all positions in the cache and itself."""
        q_BGD, kv_BGE = cache.group(self.in_proj(x_RD)).split((x_RD.shape[1], 2 * x_RD.shape[1]), dim=-1)
        heads_BGD = attend_in_groups(q_BGD, *cache.append(layer, kv_BGE), cache.visible())
        out_RD: Tensor = self.out_proj(cache.ungroup(heads_BGD))
        return out_RD


class CrossAttention(nn.Module):
    """Multi-head attention of the decoder to the encoder's output (section 3.2.3). `kv_proj` makes K and V at once, in this order of rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout_rate = config.attention_dropout
        self.q_proj = nn.Linear(config.d_model, config.d_model)
        self.kv_proj = nn.Linear(config.d_model, 2 * config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor, kv: Tensor, attention: Attention) -> Tensor:
        """Attend from x, [..., D], to the source, whose keys and values `kv_proj` has made: [..., E]."""
        k, v = native.split_columns(kv, 2)
        rate = self.dropout_rate if self.training else 0.0
        out: Tensor = self.out_proj(attention(self.q_proj(x), k, v, num_heads=self.num_heads, dropout_rate=rate))
        return out

    def start(self, memory_BSD: Tensor) -> Tensor:
        """Keys and values of the source by heads, for `step`: [2, B, H, S, C]."""
        kv_BSE: Tensor = self.kv_proj(memory_BSD)
        return kv_BSE.view(*kv_BSE.shape[:2], 2, self.num_heads, -1).permute(2, 0, 3, 1, 4).contiguous()

    def step(self, x_RD: Tensor, cache: StepCache, layer: int) -> Tensor:
        """Attend from the newest position of each row to the source of its sentence."""
        k_BHSC, v_BHSC = cache.cross_kv[layer].unbind()
        heads_BGD = attend_in_groups(cache.group(self.q_proj(x_RD)), k_BHSC, v_BHSC, cache.src_mask_BS[:, None, None, :])
        out_RD: Tensor = self.out_proj(cache.ungroup(heads_BGD))
        return out_RD


class FeedForward(nn.Module):
    """The position-wise network (section 3.3): max(0, x·W1 + b1)·W2 + b2, or with another activation.

    With SwiGLU (Shazeer, 2020) it is (silu(x·W + b) * (x·V + c))·W2 + b2; `in_proj` holds the rows of W and then those of V.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation: Activation = config.activation
        self.dropout_rate = config.activation_dropout
        self.in_proj = nn.Linear(config.d_model, config.ffn_dim * (2 if config.activation == "swiglu" else 1))
        self.out_proj = nn.Linear(config.ffn_dim, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of x, [..., D], by itself."""
        hidden = self.in_proj(x)
        match self.activation:
            case "relu":
                hidden = functional.relu(hidden, inplace=True)
            case "gelu":
                hidden = functional.gelu(hidden)
            case "swiglu":
                gate, value = hidden.chunk(2, dim=-1)
                hidden = functional.silu(gate) * value
        out: Tensor = self.out_proj(dropout(hidden, self.dropout_rate, training=self.training))
        return out


class ResidualLayer(nn.Module):
    """What encoder and decoder layers share: the rule that surrounds each of their sublayers (sections 3.1 and 5.4)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.dropout_rate = config.dropout

    def _residual(self, x: Tensor, norm: nn.LayerNorm, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Post-norm: norm(x + dropout(sublayer(x))). Pre-norm: x + dropout(sublayer(norm(x)))."""
        change = sublayer(norm_for_products(norm, x) if self.pre_norm else x)
        total = add_dropped(x, change, self.dropout_rate, training=self.training)
        return total if self.pre_norm else cast(Tensor, norm(total))


class EncoderLayer(ResidualLayer):
    """Self-attention, then feed-forward (section 3.1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.self_attention = SelfAttention(config)
        self.self_attention_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """The layer's output for x, [..., D]; `attention` is that among the source tokens of a sentence."""
        x = self._residual(x, self.self_attention_norm, lambda y: self.self_attention(y, attention))
        return self._residual(x, self.feed_forward_norm, self.feed_forward)


class DecoderLayer(ResidualLayer):
    """Causal self-attention, attention to the source, then feed-forward (section 3.1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.self_attention = SelfAttention(config)
        self.self_attention_norm = nn.LayerNorm(config.d_model)
        self.cross_attention = CrossAttention(config)
        self.cross_attention_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)

    def forward(self, x: Tensor, memory: Tensor, *, to_self: Attention, to_src: Attention) -> Tensor:
        """The layer's output for all target positions at once.

        Args:
            x: Output of the layer below, [..., D].
            memory: Output of the encoder, in the same layout.
            to_self: Attention among target tokens, causal.
            to_src: Attention of target tokens to source tokens.
        """
        kv = self.cross_attention.kv_proj(memory)
        x = self._residual(x, self.self_attention_norm, lambda y: self.self_attention(y, to_self))
        x = self._residual(x, self.cross_attention_norm, lambda y: self.cross_attention(y, kv, to_src))
        return self._residual(x, self.feed_forward_norm, self.feed_forward)

    def step(self, x_RD: Tensor, cache: StepCache, layer: int) -> Tensor:
        """The layer's output for the newest position of each row; `layer` is this layer's place in the cache."""
        x_RD = self._residual(x_RD, self.self_attention_norm, lambda y_RD: self.self_attention.step(y_RD, cache, layer))
        x_RD = self._residual(x_RD, self.cross_attention_norm, lambda y_RD: self.cross_attention.step(y_RD, cache, layer))
        return self._residual(x_RD, self.feed_forward_norm, self.feed_forward)
