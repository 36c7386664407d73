"""Small random models and a tokenizer, for tests of decoding and of the command line."""

import random
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mtkit.checkpoint.format import describe, parameters_by_name, save_model
from mtkit.data.tokenizer import EOS_ID, Tokenizer, TokenizerConfig, train_tokenizer
from mtkit.model.config import ModelConfig
from mtkit.model.transformer import Transformer

_SYLLABLES = ("ba", "ki", "lo", "mu", "ner", "sta", "tri", "vo", "xa", "zen", "ü", "ß", "é")


def sentences(count: int, *, seed: int, max_words: int = 12) -> list[str]:
    """Made-up sentences of 1 to `max_words` words."""
    rng = random.Random(seed)

    def word() -> str:
        return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 3)))

    return [" ".join(word() for _ in range(rng.randint(1, max_words))) for _ in range(count)]


@cache
def tiny_tokenizer(seed: int = 1) -> Tokenizer:
    """A joint tokenizer with byte fallback, about 320 pieces."""
    lines = sentences(300, seed=seed)
    return train_tokenizer(zip(lines, reversed(lines), strict=True), TokenizerConfig(vocab_size=320))


@cache
def tokenizer_of_two() -> Tokenizer:
    """A vocabulary for each side, of different text: to either side the other's is mostly bytes."""
    to_upper = str.maketrans("abiklmnorstuvxze", "ABIKLMNORSTUVXZE")
    pairs = zip(sentences(300, seed=1), (line.translate(to_upper) for line in sentences(300, seed=2)), strict=True)
    return train_tokenizer(pairs, TokenizerConfig(vocab_size=320, joint=False))


def random_model(seed: int, *, tokenizer: Tokenizer | None = None, num_layers: int = 2, **architecture: Any) -> Transformer:
    """An untrained model whose distributions are far from uniform and that ends its sentences now and then.

    The weights depend on the seed and the parameter's name only, not on how the model initializes itself.
    """
    tokenizer = tokenizer or tiny_tokenizer()
    usual: dict[str, Any] = {"d_model": 32, "ffn_dim": 64, "num_heads": 4, "dropout": 0.3, "tie_embeddings": "none"}
    layers = {"num_encoder_layers": num_layers, "num_decoder_layers": num_layers}
    config = ModelConfig(**{**usual, **layers, **architecture})
    model = Transformer(config, src_vocab_size=tokenizer.src_vocab_size, tgt_vocab_size=tokenizer.tgt_vocab_size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * config.d_model**-0.5)
        model.output_weight.mul_(3.0)
        model.output_weight[EOS_ID].mul_(2.6)
    return model.eval()


def never_ends(tokenizer: Tokenizer) -> list[int]:
    """Forbidden ids of a decoder that cannot end a sentence."""
    return [*tokenizer.forbidden_ids("tgt"), EOS_ID]


def save(directory: Path, model: Transformer, tokenizer: Tokenizer) -> Path:
    """Write a model directory."""
    save_model(directory, tensors=parameters_by_name(model), description=describe(model, tokenizer, provenance={}), tokenizer=tokenizer)
    return directory
