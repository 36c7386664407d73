"""The encoder-decoder Transformer of "Attention Is All You Need" (Vaswani et al., 2017); section numbers are that paper's.

Shapes: B sentences, S source tokens, T target tokens, R rows (hypotheses in decoding), D = d_model, V target vocabulary size.
A mask value of True marks a real token, everywhere.
"""

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mtkit.data.loader import Packing
from mtkit.errors import ConfigError
from mtkit.model.attention import Attention, GridAttention, PackedAttention, PaddedAttention, off_grid, on_grid, packed_kernel
from mtkit.model.cache import DecoderCache, StepCache
from mtkit.model.config import ModelConfig
from mtkit.model.device import needs_grid
from mtkit.model.dropout import dropout
from mtkit.model.layers import CrossAttention, DecoderLayer, EncoderLayer, Positions, SelfAttention

VOCAB_MULTIPLE = 8
"""Rows of embedding matrices are padded to a multiple of this, the width that tensor cores work in."""


class Encoder(nn.Module):
    """The stack of encoder layers (section 3.1), with a final LayerNorm if the layers have theirs in front."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.norm = nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """Encode embedded source tokens, [..., D]."""
        for layer in self.layers:
            x = layer(x, attention)
        out: Tensor = self.norm(x)
        return out


class Decoder(nn.Module):
    """The stack of decoder layers (section 3.1), with a final LayerNorm if the layers have theirs in front."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_decoder_layers))
        self.norm = nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()

    def forward(self, x: Tensor, memory: Tensor, *, to_self: Attention, to_src: Attention) -> Tensor:
        """Decode embedded target tokens, [..., D], all positions at once."""
        for layer in self.layers:
            x = layer(x, memory, to_self=to_self, to_src=to_src)
        out: Tensor = self.norm(x)
        return out

    def start_cache(self, memory_BSD: Tensor, src_mask_BS: Tensor) -> DecoderCache:
        """A cache of the memory, projected to every layer's cross-attention keys and values."""
        return DecoderCache(self.cross_kv(memory_BSD), src_mask_BS)

    def cross_kv(self, memory_BSD: Tensor) -> list[Tensor]:
        """Per layer the keys and values of the source, [2, B, H, S, C]."""
        return [layer.cross_attention.start(memory_BSD) for layer in self._layers()]

    def step(self, x_RD: Tensor, cache: StepCache) -> Tensor:
        """Decode the newest position of each row."""
        for number, layer in enumerate(self._layers()):
            x_RD = layer.step(x_RD, cache, number)
        cache.advance()
        out_RD: Tensor = self.norm(x_RD)
        return out_RD

    def _layers(self) -> Iterator[DecoderLayer]:
        return cast(Iterator[DecoderLayer], iter(self.layers))


class Transformer(nn.Module):
    """An encoder-decoder Transformer for translation.

    The names in `state_dict()` are the file format. Tied matrices are one parameter under one name, the first of those that apply:
    `src_embedding.weight`, `tgt_embedding.weight` (not with `three-way`), `output_projection.weight` (only with `none`).

    The rows of these matrices are padded to a multiple of 8. The padding starts at zero and stays there, for no token reads it and it has no logit.
    The embedding of PAD is an ordinary row: masks keep it from every real token.

    Args:
        config: The architecture.
        src_vocab_size: Number of source pieces.
        tgt_vocab_size: Number of target pieces.

    Raises:
        ConfigError: Three-way tying, and the vocabularies differ in size.
    """

    def __init__(self, config: ModelConfig, *, src_vocab_size: int, tgt_vocab_size: int) -> None:
        super().__init__()
        if config.tie_embeddings == "three-way" and src_vocab_size != tgt_vocab_size:
            raise ConfigError(
                "tie_embeddings is three-way, which needs one vocabulary for both languages, "
                f"but the source has {src_vocab_size} pieces and the target {tgt_vocab_size}",
                hint="Train one joint tokenizer, or set tie_embeddings to decoder or none.",
            )
        self.config = config
        self.src_vocab_size = src_vocab_size
        self.tgt_vocab_size = tgt_vocab_size
        src_rows, tgt_rows = (math.ceil(size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE for size in (src_vocab_size, tgt_vocab_size))
        self.src_embedding = nn.Embedding(src_rows, config.d_model)
        self.tgt_embedding = None if config.tie_embeddings == "three-way" else nn.Embedding(tgt_rows, config.d_model)
        self.output_projection: nn.Module | None = nn.Linear(config.d_model, tgt_rows, bias=False) if config.tie_embeddings == "none" else None
        self.positions = Positions(config.d_model)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all parameters anew, from torch's default generator.

        =============================  ===============================================================================
        embeddings, output projection  N(0, 1/D); times sqrt(D) they have variance 1, like the sinusoids added to them
        Q, K and V projections         Xavier uniform for each D x D matrix with gain 1/sqrt(2): flatter first softmax
        other matrices                 Xavier uniform
        biases                         0
        LayerNorm                      weight 1, bias 0
        rows that pad a vocabulary     0
        =============================  ===============================================================================
        """
        for module in self.modules():
            match module:
                case nn.Embedding():
                    nn.init.normal_(module.weight, std=self.config.d_model**-0.5)
                case nn.Linear():
                    nn.init.xavier_uniform_(module.weight)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)
                case nn.LayerNorm():
                    module.reset_parameters()
        for module in self.modules():
            match module:
                case SelfAttention():
                    projections = [module.in_proj]
                case CrossAttention():
                    projections = [module.q_proj, module.kv_proj]
                case _:
                    projections = []
            for projection in projections:
                for block in projection.weight.chunk(projection.out_features // self.config.d_model):
                    nn.init.xavier_uniform_(block, gain=2**-0.5)
        if self.output_projection is not None:
            nn.init.normal_(self.output_weight, std=self.config.d_model**-0.5)
        self.src_weight[self.src_vocab_size :].zero_()
        self.tgt_weight[self.tgt_vocab_size :].zero_()
        self.output_weight[self.tgt_vocab_size :].zero_()

    @property
    def src_weight(self) -> Tensor:
        """The source embeddings, one row per piece and then the padding."""
        return self.src_embedding.weight

    @property
    def tgt_embedder(self) -> nn.Module:
        """What embeds target pieces; with three-way tying the same module as `src_embedding`."""
        return self.src_embedding if self.tgt_embedding is None else self.tgt_embedding

    @property
    def tgt_weight(self) -> Tensor:
        """The target embeddings; with three-way tying the same tensor as `src_weight`."""
        return self.src_weight if self.tgt_embedding is None else self.tgt_embedding.weight

    @property
    def output_weight(self) -> Tensor:
        """The output projection; unless tying is off, the same tensor as `tgt_weight`."""
        return self.tgt_weight if self.output_projection is None else cast(nn.Linear, self.output_projection).weight

    def num_parameters(self) -> int:
        """Number of trainable values, tied ones counted once, padding rows included."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, src_BS: Tensor, src_mask_BS: Tensor, tgt_in_BT: Tensor, tgt_mask_BT: Tensor | None = None) -> Tensor:
        """logits_BTV of the next token at every target position (teacher forcing); see `encode` and `decode`."""
        memory_BSD = self.encode(src_BS, src_mask_BS)
        return self.logits(self.decode(tgt_in_BT, memory_BSD, src_mask_BS, tgt_mask_BT))

    def encode(self, src_BS: Tensor, src_mask_BS: Tensor) -> Tensor:
        """memory_BSD, the encoder's output.

        Args:
            src_BS: int64 ids, each sentence closed by EOS.
            src_mask_BS: bool, True where the token is real. The output for a sentence without real tokens is finite but means nothing.
        """
        num_sentences, length = src_BS.shape
        mask = src_mask_BS[:, None, None, :]
        x_BSD = self._embed(src_BS, self.src_embedding)
        if not needs_grid(x_BSD.device):
            return cast(Tensor, self.encoder(x_BSD, PaddedAttention(mask)))
        return off_grid(self.encoder(on_grid(x_BSD), GridAttention(mask, num_sentences, length, length)), num_sentences, length)

    def decode(self, tgt_BT: Tensor, memory_BSD: Tensor, src_mask_BS: Tensor, tgt_mask_BT: Tensor | None = None) -> Tensor:
        """hidden_BTD, the decoder's output at every position of a known target; position t sees the positions up to t.

        Args:
            tgt_BT: int64 ids that start with BOS.
            memory_BSD: What `encode` returned.
            src_mask_BS: bool, True where the source token is real.
            tgt_mask_BT: bool, True where the target token is real. Leave it out where padding is at the end: no real token looks that far.
        """
        length = tgt_BT.shape[1]
        self_mask = torch.ones(length, length, dtype=torch.bool, device=tgt_BT.device).tril()
        if tgt_mask_BT is not None:
            self_mask = self_mask & tgt_mask_BT[:, None, None, :]
        x_BTD = self._embed(tgt_BT, self.tgt_embedder)
        src_mask = src_mask_BS[:, None, None, :]
        if not needs_grid(x_BTD.device):
            return cast(Tensor, self.decoder(x_BTD, memory_BSD, to_self=PaddedAttention(self_mask), to_src=PaddedAttention(src_mask)))
        num_sentences, src_length = src_mask_BS.shape
        to_self = GridAttention(self_mask, num_sentences, length, length)
        to_src = GridAttention(src_mask, num_sentences, length, src_length)
        return off_grid(self.decoder(on_grid(x_BTD), on_grid(memory_BSD), to_self=to_self, to_src=to_src), num_sentences, length)

    def encode_packed(self, src_M: Tensor, src: Packing) -> Tensor:
        """memory_MD: what `encode` gives for each sentence, of sentences that lie one after the other without padding.

        Args:
            src_M: int64 ids, each sentence closed by EOS.
            src: Where the sentences lie.
        """
        kernel = packed_kernel(src_M.device.type, max_length=src.max_length, head_dim=self.config.head_dim)
        attention = PackedAttention(src, src, is_causal=False, kernel=kernel)
        memory_MD: Tensor = self.encoder(self._embed_packed(src_M, self.src_embedding, src), attention)
        return memory_MD

    def decode_packed(self, tgt_N: Tensor, tgt: Packing, memory_MD: Tensor, src: Packing) -> Tensor:
        """hidden_ND: what `decode` gives for each sentence, of packed sentences.

        Args:
            tgt_N: int64 ids, each sentence opened by BOS.
            tgt: Where the target sentences lie.
            memory_MD: What `encode_packed` returned.
            src: Where the source sentences lie.
        """
        x_ND = self._embed_packed(tgt_N, self.tgt_embedder, tgt)
        max_length = max(src.max_length, tgt.max_length)
        kernel = packed_kernel(tgt_N.device.type, max_length=max_length, head_dim=self.config.head_dim)
        to_self, to_src = PackedAttention(tgt, tgt, is_causal=True, kernel=kernel), PackedAttention(tgt, src, is_causal=False, kernel=kernel)
        hidden_ND: Tensor = self.decoder(x_ND, memory_MD, to_self=to_self, to_src=to_src)
        return hidden_ND

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores before softmax, [..., V], for hidden states [..., D]; in autocast's dtype, so take them to fp32 before a log-softmax."""
        logits = functional.linear(hidden, self.tgt_weight) if self.output_projection is None else self.output_projection(hidden)
        return cast(Tensor, logits)[..., : self.tgt_vocab_size]

    @torch.no_grad()
    def start_cache(self, memory_BSD: Tensor, src_mask_BS: Tensor) -> DecoderCache:
        """A cache for decoding these sentences step by step, with one row per sentence."""
        return self.decoder.start_cache(memory_BSD, src_mask_BS)

    @torch.no_grad()
    def decode_step(self, tokens_R: Tensor, cache: StepCache) -> Tensor:
        """hidden_RD at the next position of each row: what `decode` gives for the last position of all tokens fed so far.

        Args:
            tokens_R: int64, the token that each row of the cache has chosen last (BOS at first).
            cache: From `start_cache`, or a `SlotCache`; gains one position. Between steps, its `reorder` selects the rows to go on with.
        """
        assert tokens_R.shape[0] == cache.num_rows, f"{tokens_R.shape[0]} tokens for {cache.num_rows} rows"
        x_RD = self.tgt_embedder(tokens_R)
        table_TD = self.positions(cache.num_positions, like=x_RD)
        return self.decoder.step(self._at_positions(x_RD, table_TD[cache.row_positions()]), cache)

    def _embed(self, tokens_BT: Tensor, embedding: nn.Module) -> Tensor:
        """x_BTD of padded tokens."""
        x_BTD = embedding(tokens_BT)
        return self._at_positions(x_BTD, self.positions(tokens_BT.shape[1], like=x_BTD)[: tokens_BT.shape[1]])

    def _embed_packed(self, tokens_N: Tensor, embedding: nn.Module, packing: Packing) -> Tensor:
        """x_ND of packed tokens."""
        x_ND = embedding(tokens_N)
        return self._at_positions(x_ND, self.positions(packing.max_length, like=x_ND)[packing.positions_N])

    def _at_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """Embeddings, which are changed, times sqrt(D), plus positions, with dropout (sections 3.4, 3.5 and 5.4)."""
        x = x.mul_(math.sqrt(self.config.d_model)).add_(positions)
        return dropout(x, self.config.dropout, training=self.training)
