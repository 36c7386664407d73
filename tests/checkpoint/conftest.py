"""A small model with a real tokenizer."""

import pytest
import torch

from mtkit.data.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from mtkit.model.config import ModelConfig
from mtkit.model.transformer import Transformer

WORDS = ["the", "a", "dog", "cat", "house", "tree", "sees", "has", "likes", "finds", "big", "small", "red", "old"]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    lines = [" ".join(WORDS[(index * step) % len(WORDS)] for step in range(1, 7)) for index in range(60)]
    return train_tokenizer(((line, line) for line in lines), TokenizerConfig(vocab_size=30, byte_fallback=False))


@pytest.fixture
def model(tokenizer: Tokenizer) -> Transformer:
    torch.manual_seed(3)
    config = ModelConfig(d_model=16, ffn_dim=24, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
    return Transformer(config, src_vocab_size=tokenizer.src_vocab_size, tgt_vocab_size=tokenizer.tgt_vocab_size)
