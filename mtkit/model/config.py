"""What a Transformer is made of: the model's config, the presets, and the cost of a forward pass. Needs no torch."""

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mtkit.errors import ConfigError

Norm = Literal["post", "pre"]
Activation = Literal["relu", "gelu", "swiglu"]
TieEmbeddings = Literal["none", "decoder", "three-way"]


MAX_LAYERS = 512
MAX_SIZE = 1 << 24
"""Of widths, and of vocabularies. Larger ones are mistakes, and could overflow."""

ONLY_IN_TRAINING = ("dropout", "attention_dropout", "activation_dropout")
"""Keys of a model's config without which its weights compute the same once it is trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The architecture of an encoder-decoder Transformer. The defaults are the paper's base model.

    Vocabulary sizes are not part of it: they come from the tokenizer.

    Raises:
        ConfigError: A value is out of range or does not fit another.
    """

    d_model: int = 512
    """Width of embeddings and of every layer's input and output; even, and a multiple of `num_heads`."""

    ffn_dim: int = 2048
    """Width inside the feed-forward blocks. With `swiglu` a block has three matrices of this width instead of two."""

    num_heads: int = 8
    """Attention heads in every attention block; each is `d_model / num_heads` wide."""

    num_encoder_layers: int = 6
    """Encoder layers, at least 1."""

    num_decoder_layers: int = 6
    """Decoder layers, at least 1. Decoding time follows this number far more than that of encoder layers."""

    norm: Norm = "post"
    """`post`: LayerNorm after each residual addition, as in the paper. `pre`: before each sublayer and once after each stack; trains deep models."""

    activation: Activation = "relu"
    """Of the feed-forward blocks: `relu` as in the paper, `gelu` (exact, not the tanh approximation) or `swiglu` (gated)."""

    dropout: float = 0.1
    """Probability in [0, 1) of dropping an element of embeddings and of sublayer outputs, in training."""

    attention_dropout: float = 0.0
    """Probability in [0, 1) of dropping an attention weight, in training. 0 = off."""

    activation_dropout: float = 0.0
    """Probability in [0, 1) of dropping an element inside the feed-forward blocks, in training. 0 = off."""

    tie_embeddings: TieEmbeddings = "three-way"
    """Which matrices are one: `none`; `decoder`: target embedding and output projection; `three-way`: all three (needs a joint tokenizer)."""

    def __post_init__(self) -> None:
        for name in ("d_model", "ffn_dim", "num_heads", "num_encoder_layers", "num_decoder_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, but is {getattr(self, name)}")
            if getattr(self, name) > (largest := MAX_LAYERS if name.endswith("layers") else MAX_SIZE):
                raise ConfigError(f"{name} must be at most {largest}, but is {getattr(self, name)}")
        if self.d_model % 2:
            raise ConfigError(f"d_model must be even, for the sines and cosines of the positions, but is {self.d_model}")
        if self.d_model % self.num_heads:
            raise ConfigError(f"d_model must be a multiple of num_heads ({self.num_heads}), but is {self.d_model}")
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} must be at least 0 and less than 1, but is {getattr(self, name)}")
        for name, kind in (("norm", Norm), ("activation", Activation), ("tie_embeddings", TieEmbeddings)):
            choices = typing.get_args(kind)
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, but is {getattr(self, name)!r}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads


MODEL_PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "tiny": ModelConfig(d_model=128, ffn_dim=256, num_heads=4, num_encoder_layers=4, num_decoder_layers=4, dropout=0.3),
        "small": ModelConfig(d_model=256, ffn_dim=1024, num_heads=4, dropout=0.3),
        "base": ModelConfig(),
        "big": ModelConfig(d_model=1024, ffn_dim=4096, num_heads=16, dropout=0.3),
        "deep": ModelConfig(num_encoder_layers=12, num_decoder_layers=2, norm="pre"),
    }
)
"""Name -> architecture. All tie three ways.

- `tiny`: for tens of thousands of sentence pairs (Multi30k), and for CPUs.
- `small`: for hundreds of thousands of pairs (IWSLT).
- `base`, `big`: "Attention Is All You Need", Table 3, for millions of pairs; `big` with the dropout of its English-German model.
- `deep`: deep encoder, shallow decoder: about base's quality, and decodes much faster.
"""


def flops_per_token(config: ModelConfig, *, tgt_vocab_size: int, src_len: int, tgt_len: int) -> float:
    """Floating-point operations in the matrix products of one forward pass, per target token. Training costs three times as much.

    With S = src_len, T = tgt_len, D = d_model, F = ffn_dim, V = tgt_vocab_size, M = 2 feed-forward matrices (3 for SwiGLU), and a product of an
    n x k with a k x m matrix counted as 2·n·k·m:

        encoder layer:  2·S·(4·D² + M·D·F) + 4·S²·D                  Q, K, V and output projections, feed-forward; scores and weighted sums
        decoder layer:  2·T·(4·D² + M·D·F) + 4·T²·D                  the same over the target
                        + 2·T·2·D² + 2·S·2·D² + 4·T·S·D              cross-attention: Q and output; K and V of the source; scores and weighted sums
        logits:         2·T·D·V

    The sum is divided by T. The masked half of the decoder's self-attention is counted, since it is computed.

    Args:
        config: The architecture.
        tgt_vocab_size: V, without the rows that pad it to a multiple of 8.
        src_len: Source tokens of a sentence, with EOS.
        tgt_len: Target tokens of a sentence, with EOS.
    """
    d, s, t = config.d_model, src_len, tgt_len
    feed_forward = (3 if config.activation == "swiglu" else 2) * d * config.ffn_dim
    encoder_layer = 2 * s * (4 * d**2 + feed_forward) + 4 * s**2 * d
    decoder_layer = 2 * t * (6 * d**2 + feed_forward) + 4 * t**2 * d + 4 * s * d**2 + 4 * t * s * d
    logits = 2 * t * d * tgt_vocab_size
    return (config.num_encoder_layers * encoder_layer + config.num_decoder_layers * decoder_layer + logits) / t
