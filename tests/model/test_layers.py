"""Layers against torch.nn with copied weights, forward and gradient, in float64."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mtkit.model.attention import PaddedAttention
from mtkit.model.config import Activation, ModelConfig, Norm
from mtkit.model.dropout import dropout
from mtkit.model.layers import CrossAttention, DecoderLayer, EncoderLayer, FeedForward, Positions, SelfAttention, sinusoids
from tests.model.reference import assert_same_gradients, attention_pairs, copy_weights, decoder_layer_pairs, encoder_layer_pairs

B, T, S, D, H, FFN = 3, 5, 7, 16, 4, 24


def small_config(**values: Any) -> ModelConfig:
    return ModelConfig(**{"d_model": D, "ffn_dim": FFN, "num_heads": H, "dropout": 0.0, **values})


def source_mask() -> Tensor:
    mask_BS = torch.ones(B, S, dtype=torch.bool)
    mask_BS[1, 4:] = False
    mask_BS[2, 1:] = False
    return mask_BS


def to_source() -> PaddedAttention:
    return PaddedAttention(source_mask()[:, None, None, :])


def causal_mask(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def causal(length: int) -> PaddedAttention:
    return PaddedAttention(causal_mask(length))


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_attention_dropout_drops_weights_only_in_training() -> None:
    config = small_config(attention_dropout=0.5)
    x = torch.randn(B, T, D)
    attention = SelfAttention(config)
    nn.init.ones_(attention.out_proj.weight)
    evaluated = attention.eval()(x, causal(T))
    torch.testing.assert_close(attention(x, causal(T)), evaluated)
    trained = [attention.train()(x, causal(T)) for _ in range(2)]
    assert not torch.equal(trained[0], trained[1])
    # Dropped weights are zero and the others doubled, so the average over many draws is the undropped output.
    mean = torch.stack([attention(x, causal(T)) for _ in range(4000)]).mean(0)
    assert (mean - evaluated).abs().max() < 0.1 * evaluated.abs().max()


def assert_same_outputs_and_gradients(ours: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Compare two outputs and their gradients to the same inputs; the gradients of the parameters are left in `.grad`."""
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    weight = torch.randn_like(ours)
    grads = torch.autograd.grad((ours * weight).sum(), inputs, retain_graph=True)
    expected_grads = torch.autograd.grad((theirs * weight).sum(), inputs, retain_graph=True)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-8, atol=1e-10)
    torch.autograd.backward((ours * weight).sum())
    torch.autograd.backward((theirs * weight).sum())


@pytest.mark.parametrize("masked", ["padding", "causal"])
def test_self_attention_equals_torch(masked: str) -> None:
    reference = nn.MultiheadAttention(D, H, batch_first=True)
    ours = SelfAttention(small_config())
    pairs = copy_weights(attention_pairs(ours, reference), 4)
    x = torch.randn(B, S, D, requires_grad=True)
    if masked == "padding":
        out = ours(x, to_source())
        expected, _ = reference(x, x, x, key_padding_mask=~source_mask())
    else:
        out = ours(x, causal(S))
        expected, _ = reference(x, x, x, attn_mask=~causal_mask(S))
    assert_same_outputs_and_gradients(out, expected, (x,))
    assert_same_gradients(pairs)


def test_cross_attention_equals_torch() -> None:
    reference = nn.MultiheadAttention(D, H, batch_first=True)
    ours = CrossAttention(small_config())
    pairs = copy_weights(attention_pairs(ours, reference), 6)
    x, memory = torch.randn(B, T, D, requires_grad=True), torch.randn(B, S, D, requires_grad=True)
    out = ours(x, ours.kv_proj(memory), to_source())
    expected, _ = reference(x, memory, memory, key_padding_mask=~source_mask())
    assert_same_outputs_and_gradients(out, expected, (x, memory))
    assert_same_gradients(pairs)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_encoder_layer_equals_torch(norm: Norm, activation: Activation) -> None:
    reference = nn.TransformerEncoderLayer(D, H, FFN, dropout=0.0, activation=activation, batch_first=True, norm_first=norm == "pre")
    ours = EncoderLayer(small_config(norm=norm, activation=activation))
    pairs = copy_weights(encoder_layer_pairs(ours, reference), 12)
    x = torch.randn(B, S, D, requires_grad=True)
    out = ours(x, to_source())
    expected = reference(x, src_key_padding_mask=~source_mask())
    assert_same_outputs_and_gradients(out, expected, (x,))
    assert_same_gradients(pairs)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_decoder_layer_equals_torch(norm: Norm, activation: Activation) -> None:
    reference = nn.TransformerDecoderLayer(D, H, FFN, dropout=0.0, activation=activation, batch_first=True, norm_first=norm == "pre")
    ours = DecoderLayer(small_config(norm=norm, activation=activation))
    pairs = copy_weights(decoder_layer_pairs(ours, reference), 20)
    x, memory = torch.randn(B, T, D, requires_grad=True), torch.randn(B, S, D, requires_grad=True)
    out = ours(x, memory, to_self=causal(T), to_src=to_source())
    expected = reference(x, memory, tgt_mask=~causal_mask(T), memory_key_padding_mask=~source_mask())
    assert_same_outputs_and_gradients(out, expected, (x, memory))
    assert_same_gradients(pairs)


def test_swiglu_is_its_formula() -> None:
    ours = FeedForward(small_config(activation="swiglu"))
    x = torch.randn(B, T, D)
    gate_weight, value_weight = ours.in_proj.weight[:FFN], ours.in_proj.weight[FFN:]
    gate = x @ gate_weight.T + ours.in_proj.bias[:FFN]
    value = x @ value_weight.T + ours.in_proj.bias[FFN:]
    expected = (gate / (1 + (-gate).exp()) * value) @ ours.out_proj.weight.T + ours.out_proj.bias
    torch.testing.assert_close(ours(x), expected)


def test_activation_dropout_acts_inside_the_feed_forward_block_in_training_only() -> None:
    ours = FeedForward(small_config(activation_dropout=0.5))
    x = torch.randn(B, T, D)
    assert torch.equal(ours.eval()(x), ours(x))
    assert not torch.equal(ours.train()(x), ours(x))
    torch.manual_seed(3)
    hidden = dropout(functional.relu(ours.in_proj(x)), 0.5, training=True)
    torch.manual_seed(3)
    torch.testing.assert_close(ours(x), ours.out_proj(hidden))


def test_residual_dropout_spares_the_residual_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.model.dropout.dropout", lambda x, _rate, *, training: x * 0.0 if training else x)
    monkeypatch.setattr("mtkit.native.training.available", lambda: False)
    layer = EncoderLayer(small_config(dropout=0.5, norm="pre"))
    x = torch.randn(B, S, D)
    torch.testing.assert_close(layer.train()(x, to_source()), x)
    assert not torch.allclose(layer.eval()(x, to_source()), x)


def test_sinusoids_are_the_papers() -> None:
    length, d_model = 50, 12
    table = sinusoids(length, d_model)
    for pos in range(length):
        for i in range(d_model // 2):
            angle = pos / 10000 ** (2 * i / d_model)
            assert table[pos, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-12)
            assert table[pos, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)


def test_positions_grow_and_follow_dtype_without_entering_the_state() -> None:
    positions = Positions(D)
    like = torch.empty(0, dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(positions(5, like=like)[:5], sinusoids(5, D).float(), rtol=0, atol=0)
    late = positions(20_003, like=like)
    torch.testing.assert_close(late[20_000:20_003], sinusoids(20_003, D)[20_000:].float(), rtol=0, atol=0)
    assert positions(3, like=torch.empty(0, dtype=torch.float64)).dtype == torch.float64
    assert not positions(3, like=like).is_inference()
    assert positions.state_dict() == {}
    assert list(positions.buffers()) == []


def test_positions_are_computed_once() -> None:
    positions = Positions(D)
    like = torch.empty(0)
    table = positions(200, like=like)
    assert positions(3, like=like) is table
    assert positions(table.shape[0], like=like) is table
    assert positions(table.shape[0] + 1, like=like) is not table


def test_positions_made_in_inference_mode_serve_training() -> None:
    positions = Positions(D)
    like = torch.empty(0)
    with torch.inference_mode():
        positions(4, like=like)
    x = torch.ones(4, D, requires_grad=True)
    torch.autograd.backward((x * positions(4, like=like)[:4]).sum())
    assert x.grad is not None
