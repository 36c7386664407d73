"""8-bit linear layers: near the product they stand for, and independent of what else is in the batch."""

import copy

import pytest
import torch
from torch import Tensor

from mtkit.decoding import quantize
from mtkit.decoding.quantize import Int8Linear, quantize_linear_layers
from mtkit.decoding.steps import inference, model_step, pad_sources
from mtkit.model.config import ModelConfig
from mtkit.model.transformer import Transformer


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("has_vnni", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (3, 64), (40, 64), (5, 7, 64)])
def test_the_product_is_near(shape: tuple[int, ...], has_vnni: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight_NK, bias_N, x = (
        torch.randn(96, 64),
        torch.randn(96),
        torch.randn(shape) * torch.logspace(-3, 3, shape[0]).view(-1, *[1] * (len(shape) - 1)),
    )
    if has_vnni and not quantize.cpu_has_vnni():
        monkeypatch.setattr(quantize, "_LEVELS", 63)  # this CPU's sums would overflow
    layer = Int8Linear(weight_NK, bias_N, has_vnni=has_vnni)
    expected = torch.nn.functional.linear(x, weight_NK)
    found = layer(x) - bias_N
    assert found.shape == expected.shape
    rows = zip(found.flatten(0, -2), expected.flatten(0, -2), strict=True)
    # Of each row, however small it is beside the others; a small one drowns in the rounding of the bias alone.
    assert max(relative_error(row, right) for row, right in rows) < 0.03
    torch.testing.assert_close(Int8Linear(weight_NK, None)(x), layer(x) - bias_N, rtol=0.05, atol=0.05 * float(expected.abs().max()))


def test_a_row_depends_on_itself_alone() -> None:
    torch.manual_seed(0)
    layer, x = Int8Linear(torch.randn(50, 32), torch.randn(50)), torch.randn(20, 32)
    x[7] *= 1000.0
    together = layer(x)
    for number, row in enumerate(x):
        assert torch.equal(layer(row[None])[0], together[number])


def test_a_row_of_zeros_gives_the_bias() -> None:
    bias_N = torch.randn(8)
    assert torch.equal(Int8Linear(torch.randn(8, 16), bias_N)(torch.zeros(2, 16)), bias_N.expand(2, 8))


def test_the_largest_activations_and_weights_do_not_overflow() -> None:
    layer = Int8Linear(torch.ones(4, 256), None)
    torch.testing.assert_close(layer(torch.full((1, 256), 5.0)), torch.full((1, 4), 1280.0), rtol=1e-5, atol=0)
    torch.testing.assert_close(layer(torch.full((1, 256), -5.0)), torch.full((1, 4), -1280.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("tie", ["none", "three-way"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_quantized_model_is_near_the_model(norm: str, tie: str) -> None:
    torch.manual_seed(0)
    config = ModelConfig(d_model=64, ffn_dim=128, num_heads=4, num_encoder_layers=2, num_decoder_layers=2, norm=norm, tie_embeddings=tie)  # type: ignore[arg-type]
    model = Transformer(config, src_vocab_size=101, tgt_vocab_size=101).eval()
    quantized = quantize_linear_layers(copy.deepcopy(model))
    assert not [module for module in quantized.modules() if isinstance(module, torch.nn.Linear)]
    sources = pad_sources([[5, 6, 7], [9]], device="cpu")
    log_probs = []
    for one in (model, quantized):
        with inference([one]):
            step = model_step([one], *sources)
            step(torch.tensor([2, 2]), torch.arange(2))
            log_probs.append(step(torch.tensor([4, 5, 6]), torch.tensor([0, 0, 1])))
    assert log_probs[1].shape == (3, 101)
    assert 0 < float((log_probs[0] - log_probs[1]).abs().max()) < 0.15
