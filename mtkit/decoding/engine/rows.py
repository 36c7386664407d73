"""The model as the search on a CPU needs it, with the kernels of `mtkit.native`: rows without padding, nothing copied when hypotheses change places,
and of the distribution over the vocabulary only the best pieces.

A row is a hypothesis. Keys and values of a step stay where the projection has put them; what a row descends from is a table of row numbers, so that
hypotheses that double, change places or end cost nothing but a look-up. Some steps later those of which no hypothesis is left are dropped. The source
is stored once per sentence, and rows know where theirs begins.

Shapes: M source positions of all sentences, R rows, D = d_model, T steps, V target pieces.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mtkit.data.tokenizer import EOS_ID
from mtkit.decoding.prefixes import Prefixes
from mtkit.decoding.quantize import Int8Linear, NativeLinear, RoundedEmbedding
from mtkit.decoding.scoring import PenaltyKind
from mtkit.decoding.search import Extensions, Hypothesis, search_extensions
from mtkit.model.layers import DecoderLayer, EncoderLayer
from mtkit.model.transformer import Decoder, Encoder, Transformer
from mtkit.native import kernels
from mtkit.native.structs import CHANNELS_MULTIPLE

FIRST_CAPACITY = 64
"""Steps that the table of ancestors holds at first; it doubles when full."""

AGE_OF_THINNING = 8
"""Steps after which keys and values are dropped of which no hypothesis is left: those of a beam descend from one or two that long ago."""


def fits(model: Transformer) -> bool:
    """Whether the kernels can stand for the layers of a model: in fp32, int8 or bf16, on a CPU, of sizes that fill the registers of the processor."""
    parameter = next(model.parameters())
    if parameter.device.type != "cpu" or parameter.dtype != torch.float32 or not kernels.available():
        return False
    if model.config.activation != "relu" and model.config.ffn_dim % CHANNELS_MULTIPLE != 0:
        return False
    has_fitting_heads = model.config.head_dim % CHANNELS_MULTIPLE == 0 and model.config.num_heads <= kernels.MAX_HEADS
    return has_fitting_heads and not any(isinstance(module, Int8Linear) for module in model.modules())


class RowModel:
    """A model whose computing is done by the kernels, with the weights that the model has now.

    Args:
        model: In eval mode; `fits` says whether it can be used.
    """

    def __init__(self, model: Transformer) -> None:
        config = model.config
        encoder_layers = [cast(EncoderLayer, layer) for layer in model.encoder.layers]
        decoder_layers = [cast(DecoderLayer, layer) for layer in model.decoder.layers]
        in_half = isinstance(model.output_projection, NativeLinear)

        def stack(parts: Encoder | Decoder, embedding: nn.Module, linears: list[list[nn.Module]], norms: list[list[nn.LayerNorm]]) -> kernels.Stack:
            return kernels.Stack(
                linears=[[_native(module) for module in modules] for modules in linears],
                norms=[[kernels.Norm.of(norm) for norm in layer] for layer in norms],
                last_norm=kernels.Norm.of(cast(nn.LayerNorm, parts.norm)) if config.norm == "pre" else None,
                embedding=_embedding(embedding),
                num_heads=config.num_heads,
                activation=config.activation,
                in_half=in_half,
            )

        encoder = stack(
            model.encoder,
            model.src_embedding,
            [
                [layer.self_attention.in_proj, layer.self_attention.out_proj, layer.feed_forward.in_proj, layer.feed_forward.out_proj]
                for layer in encoder_layers
            ],
            [[layer.self_attention_norm, layer.feed_forward_norm] for layer in encoder_layers],
        )
        decoder = stack(
            model.decoder,
            model.tgt_embedder,
            [
                [
                    layer.self_attention.in_proj,
                    layer.self_attention.out_proj,
                    layer.cross_attention.q_proj,
                    layer.cross_attention.out_proj,
                    layer.feed_forward.in_proj,
                    layer.feed_forward.out_proj,
                ]
                for layer in decoder_layers
            ],
            [[layer.self_attention_norm, layer.cross_attention_norm, layer.feed_forward_norm] for layer in decoder_layers],
        )
        output = model.output_projection
        self.positions = model.positions
        self.encoder = kernels.Encoder(encoder, [_native(layer.cross_attention.kv_proj) for layer in decoder_layers])
        self.decoder = kernels.Decoder(
            decoder,
            kernels.Linear(model.output_weight.detach(), None, precision="fp32") if output is None else _native(output),
            vocab_size=model.tgt_vocab_size,
        )

    def search(
        self,
        sources: Sequence[Sequence[int]],
        *,
        max_lengths: Sequence[int],
        beam_size: int,
        length_penalty: float,
        penalty: PenaltyKind = "gnmt",
        n_best: int = 1,
        forbidden_ids: Sequence[int] = (),
        prefixes: Prefixes | None = None,
    ) -> list[list[Hypothesis]]:
        """What `mtkit.decoding.search.beam_search` gives; see there for what is not described here. With `beam_size` 1 it is greedy search.

        Args:
            sources: Token ids of each sentence, without EOS.
            prefixes: How the translations have to begin; None = with any piece.
        """
        if not sources:
            return []
        step = _RowStep(self, sources, beam_size=beam_size, forbidden_ids=forbidden_ids, prefixes=prefixes)
        return search_extensions(step, max_lengths=max_lengths, beam_size=beam_size, length_penalty=length_penalty, penalty=penalty, n_best=n_best)


def _native(module: nn.Module) -> kernels.Linear:
    if isinstance(module, NativeLinear):
        return module.linear
    linear = cast(nn.Linear, module)
    bias: Tensor | None = linear.bias
    return kernels.Linear(linear.weight.detach(), None if bias is None else bias.detach(), precision="fp32")


def _embedding(module: nn.Module) -> kernels.Embedding:
    if isinstance(module, RoundedEmbedding):
        return kernels.Embedding(module.weight_VD, module.scale_V)
    return kernels.Embedding(cast(nn.Embedding, module).weight.detach(), None)


class _RowStep:
    """The step function for a batch of sources, see `mtkit.decoding.search.ExtendFn`."""

    def __init__(
        self,
        model: RowModel,
        sources: Sequence[Sequence[int]],
        *,
        beam_size: int,
        forbidden_ids: Sequence[int],
        prefixes: Prefixes | None = None,
    ) -> None:
        tokens_M = torch.tensor([token for ids in sources for token in (*ids, EOS_ID)], dtype=torch.int64)
        lengths = [len(ids) + 1 for ids in sources]
        self._like = torch.empty(0)
        encoded = model.encoder.encode(tokens_M, lengths, model.positions(max(lengths), like=self._like))
        # Of each row: where its source begins and how many positions it has, and the row of each step that it descends from.
        self._start_R, self._count_R = encoded.start_B, encoded.length_B
        self._ancestor_RT = torch.empty(len(sources), FIRST_CAPACITY, dtype=torch.int32)
        self._num_steps = 0
        self._positions = model.positions
        self._prefixes = prefixes
        self._search = kernels.Search(
            model.decoder,
            encoded,
            max_rows=len(sources) * beam_size,
            count=min(beam_size + 1, model.decoder.vocab_size),
            forbidden_ids=torch.tensor(sorted(set(forbidden_ids)), dtype=torch.int64),
        )

    def __call__(self, tokens_R: Tensor, parents_R: Tensor) -> Extensions:
        rows_R = torch.arange(len(parents_R), dtype=torch.int32)
        if len(parents_R) != len(self._start_R) or not torch.equal(parents_R, rows_R):
            self._start_R, self._count_R, self._ancestor_RT = self._start_R[parents_R], self._count_R[parents_R], self._ancestor_RT[parents_R]
        if self._num_steps == self._ancestor_RT.shape[1]:
            self._ancestor_RT = functional.pad(self._ancestor_RT, (0, self._num_steps))
        self._ancestor_RT[:, self._num_steps] = rows_R
        if self._num_steps >= AGE_OF_THINNING:
            self._thin(self._num_steps - AGE_OF_THINNING)
        position_D = self._positions(self._num_steps + 1, like=self._like)[self._num_steps]
        self._num_steps += 1
        forced_R = None if self._prefixes is None else self._prefixes.next(parents_R)
        return Extensions(*self._search.step(tokens_R.contiguous(), position_D, self._ancestor_RT, self._start_R, self._count_R, forced_R))

    def _thin(self, step: int) -> None:
        """Keep of a step what hypotheses descend from, if that is less than half of it."""
        rows, places_R = torch.unique(self._ancestor_RT[:, step], return_inverse=True)
        if 2 * len(rows) <= self._search.num_rows(step):
            self._search.keep_rows(step, rows)
            self._ancestor_RT[:, step] = places_R
