"""Which parameter of ours is which of torch's own Transformer modules."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mtkit.model.layers import CrossAttention, DecoderLayer, EncoderLayer, SelfAttention
from mtkit.model.transformer import Transformer

Pair = tuple[Tensor, Tensor, slice]
"""A parameter of ours, one of torch's, and the rows of torch's that ours holds."""

ALL_ROWS = slice(None)


def attention_pairs(ours: SelfAttention | CrossAttention, theirs: nn.MultiheadAttention) -> Iterator[Pair]:
    assert theirs.in_proj_bias is not None
    d_model = theirs.embed_dim
    own = {ours.in_proj: ALL_ROWS} if isinstance(ours, SelfAttention) else {ours.q_proj: slice(d_model), ours.kv_proj: slice(d_model, None)}
    for linear, rows in own.items():
        yield linear.weight, theirs.in_proj_weight, rows
        yield linear.bias, theirs.in_proj_bias, rows
    yield from module_pairs(ours.out_proj, theirs.out_proj)


def module_pairs(ours: nn.Linear | nn.LayerNorm, theirs: nn.Linear | nn.LayerNorm) -> Iterator[Pair]:
    yield ours.weight, theirs.weight, ALL_ROWS
    yield ours.bias, theirs.bias, ALL_ROWS


def encoder_layer_pairs(ours: EncoderLayer, theirs: nn.TransformerEncoderLayer) -> Iterator[Pair]:
    yield from attention_pairs(ours.self_attention, theirs.self_attn)
    yield from module_pairs(ours.self_attention_norm, theirs.norm1)
    yield from module_pairs(ours.feed_forward.in_proj, theirs.linear1)
    yield from module_pairs(ours.feed_forward.out_proj, theirs.linear2)
    yield from module_pairs(ours.feed_forward_norm, theirs.norm2)


def decoder_layer_pairs(ours: DecoderLayer, theirs: nn.TransformerDecoderLayer) -> Iterator[Pair]:
    yield from attention_pairs(ours.self_attention, theirs.self_attn)
    yield from module_pairs(ours.self_attention_norm, theirs.norm1)
    yield from attention_pairs(ours.cross_attention, theirs.multihead_attn)
    yield from module_pairs(ours.cross_attention_norm, theirs.norm2)
    yield from module_pairs(ours.feed_forward.in_proj, theirs.linear1)
    yield from module_pairs(ours.feed_forward.out_proj, theirs.linear2)
    yield from module_pairs(ours.feed_forward_norm, theirs.norm3)


def stack_pairs(ours: Transformer, theirs: nn.Transformer) -> Iterator[Pair]:
    """All parameters but the embeddings, which torch's model lacks."""
    assert isinstance(theirs.encoder, nn.TransformerEncoder)
    assert isinstance(theirs.decoder, nn.TransformerDecoder)
    for our_encoder_layer, their_encoder_layer in zip(ours.encoder.layers, theirs.encoder.layers, strict=True):
        assert isinstance(our_encoder_layer, EncoderLayer)
        assert isinstance(their_encoder_layer, nn.TransformerEncoderLayer)
        yield from encoder_layer_pairs(our_encoder_layer, their_encoder_layer)
    for our_decoder_layer, their_decoder_layer in zip(ours.decoder.layers, theirs.decoder.layers, strict=True):
        assert isinstance(our_decoder_layer, DecoderLayer)
        assert isinstance(their_decoder_layer, nn.TransformerDecoderLayer)
        yield from decoder_layer_pairs(our_decoder_layer, their_decoder_layer)
    for our_norm, their_norm in ((ours.encoder.norm, theirs.encoder.norm), (ours.decoder.norm, theirs.decoder.norm)):
        if isinstance(our_norm, nn.LayerNorm):
            assert isinstance(their_norm, nn.LayerNorm)
            yield from module_pairs(our_norm, their_norm)


def copy_weights(pairs: Iterator[Pair], num_parameters: int) -> list[Pair]:
    """Give our parameters the values of theirs, which are drawn first: biases and norms start at 0 and 1, where a mistake would not show.

    Args:
        pairs: The correspondence.
        num_parameters: How many parameters of ours it must cover.
    """
    listed = list(pairs)
    assert len({id(ours) for ours, _, _ in listed}) == len(listed) == num_parameters
    with torch.no_grad():
        for theirs in {id(theirs): theirs for _, theirs, _ in listed}.values():
            theirs.normal_(std=0.4)
        for ours, theirs, rows in listed:
            ours.copy_(theirs[rows])
    return listed


def assert_same_gradients(pairs: list[Pair]) -> None:
    for ours, theirs, rows in pairs:
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad[rows], rtol=1e-7, atol=1e-9)
