import random
from collections.abc import Callable
from pathlib import Path

import pytest

from mtkit.data.corpus import Corpus
from mtkit.data.sources import PairedFiles
from mtkit.data.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer

NAMES = ("Anna", "Bernd", "Clara", "David", "Emil", "Frieda", "Georg", "Hanna")
THINGS = (("house", "Haus"), ("river", "Fluss"), ("letter", "Brief"), ("window", "Fenster"), ("garden", "Garten"), ("cheese", "Käse"))

MakePairs = Callable[..., list[tuple[str, str]]]
WriteCorpus = Callable[..., Corpus]


def _make_pairs(count: int, *, seed: int = 1) -> list[tuple[str, str]]:
    choose = random.Random(seed)
    pairs = []
    for number in range(count):
        name, other = choose.choice(NAMES), choose.choice(NAMES)
        (thing, ding), (second, zweites) = choose.choice(THINGS), choose.choice(THINGS)
        pairs.append((f"{name} sees the {thing} and the {second} of {other} {number}", f"{name} sieht {ding} und {zweites} von {other} {number}"))
    return pairs


@pytest.fixture(scope="session")
def make_pairs() -> MakePairs:
    """Makes different sentence pairs, the same ones for the same seed."""
    return _make_pairs


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A joint tokenizer of 330 pieces."""
    return train_tokenizer(_make_pairs(300), TokenizerConfig(vocab_size=330))


@pytest.fixture(scope="session")
def other_tokenizer() -> Tokenizer:
    """Separate vocabularies, neither of which is that of `tokenizer`."""
    return train_tokenizer(_make_pairs(300, seed=2), TokenizerConfig(vocab_size=310, joint=False))


@pytest.fixture
def write_corpus(tmp_path: Path) -> WriteCorpus:
    """Writes pairs into `<name>.en` and `<name>.de`."""

    def write(pairs: list[tuple[str, str]], *, name: str = "train") -> Corpus:
        src, tgt = tmp_path / f"{name}.en", tmp_path / f"{name}.de"
        src.write_bytes("".join(f"{pair[0]}\n" for pair in pairs).encode())
        tgt.write_bytes("".join(f"{pair[1]}\n" for pair in pairs).encode())
        return Corpus(sources=(PairedFiles(src=str(src), tgt=str(tgt)),))

    return write
