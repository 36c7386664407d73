import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mtkit.config import from_dict, to_dict
from mtkit.errors import ConfigError
from mtkit.model import softmax
from mtkit.model.config import MODEL_PRESETS, ModelConfig, flops_per_token
from mtkit.model.transformer import Transformer
from mtkit.native import training


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"d_model": 0}, "^d_model must be at least 1, but is 0$"),
        ({"ffn_dim": -1}, "^ffn_dim must be at least 1, but is -1$"),
        ({"num_heads": 0}, "^num_heads must be at least 1, but is 0$"),
        ({"num_encoder_layers": 0}, "^num_encoder_layers must be at least 1, but is 0$"),
        ({"num_decoder_layers": 0}, "^num_decoder_layers must be at least 1, but is 0$"),
        ({"d_model": 9, "num_heads": 3}, "^d_model must be even, for the sines and cosines of the positions, but is 9$"),
        ({"d_model": 500}, r"^d_model must be a multiple of num_heads \(8\), but is 500$"),
        ({"dropout": 1.0}, "^dropout must be at least 0 and less than 1, but is 1.0$"),
        ({"attention_dropout": -0.1}, "^attention_dropout must be at least 0 and less than 1, but is -0.1$"),
        ({"activation_dropout": float("nan")}, "^activation_dropout must be at least 0 and less than 1, but is nan$"),
        ({"norm": "middle"}, "^norm must be one of post, pre, but is 'middle'$"),
        ({"activation": "tanh"}, "^activation must be one of relu, gelu, swiglu, but is 'tanh'$"),
        ({"tie_embeddings": "all"}, "^tie_embeddings must be one of none, decoder, three-way, but is 'all'$"),
    ],
)
def test_bad_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**values)


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_presets_survive_the_codec(name: str) -> None:
    config = MODEL_PRESETS[name]
    assert from_dict(ModelConfig, to_dict(config)) == config


def test_presets_are_those_of_the_papers() -> None:
    def shape(name: str) -> tuple[int, int, int, int, int]:
        config = MODEL_PRESETS[name]
        return config.num_encoder_layers, config.num_decoder_layers, config.d_model, config.ffn_dim, config.num_heads

    assert shape("tiny") == (4, 4, 128, 256, 4)
    assert shape("base") == (6, 6, 512, 2048, 8)
    assert shape("big") == (6, 6, 1024, 4096, 16)
    assert shape("deep") == (12, 2, 512, 2048, 8)
    assert {name: config.dropout for name, config in MODEL_PRESETS.items()} == {"tiny": 0.3, "small": 0.3, "base": 0.1, "big": 0.3, "deep": 0.1}
    assert [name for name, config in MODEL_PRESETS.items() if config.norm == "pre"] == ["deep"]
    assert MODEL_PRESETS["base"] == ModelConfig()
    assert MODEL_PRESETS["base"].head_dim == MODEL_PRESETS["big"].head_dim == 64


def test_config_needs_no_torch() -> None:
    code = "import sys, mtkit.model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_flops_per_token_counts_what_torch_computes(norm: str, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "available", lambda: False)  # of kernels it knows nothing
    monkeypatch.setattr(softmax, "SHORT_ROW", 0)  # sums of attention weights as products, which are not counted
    config = dataclasses.replace(MODEL_PRESETS["tiny"], num_encoder_layers=3, num_decoder_layers=2, norm=norm, activation=activation)  # type: ignore[arg-type]
    num_sentences, src_len, tgt_len, vocab_size = 3, 11, 7, 96
    model = Transformer(config, src_vocab_size=vocab_size, tgt_vocab_size=vocab_size)
    src_BS = torch.randint(4, vocab_size, (num_sentences, src_len))
    tgt_BT = torch.randint(4, vocab_size, (num_sentences, tgt_len))
    with FlopCounterMode(display=False) as counter:
        model(src_BS, torch.ones_like(src_BS, dtype=torch.bool), tgt_BT)
    per_token = flops_per_token(config, tgt_vocab_size=vocab_size, src_len=src_len, tgt_len=tgt_len)
    assert per_token * num_sentences * tgt_len == pytest.approx(counter.get_total_flops(), rel=1e-12)


def test_flops_of_the_paper_models() -> None:
    """By hand for base, V = 37,000, S = T = 27: twice 63.0 M matrix parameters, and 3 x 6 attentions of 4 x 27 x 512."""
    matrices = 6 * (4 * 512**2 + 2 * 512 * 2048) + 6 * (8 * 512**2 + 2 * 512 * 2048) + 512 * 37_000
    expected = 2 * matrices + 18 * 4 * 27 * 512
    assert flops_per_token(MODEL_PRESETS["base"], tgt_vocab_size=37_000, src_len=27, tgt_len=27) == expected
