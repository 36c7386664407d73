"""Generated data with the shape of real text, for measurements on a machine that has none."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_CONTROL_IDS = 4
_SYLLABLES = [consonant + vowel for consonant in "bdklmnrst" for vowel in "aeiou"]


@dataclass(frozen=True, slots=True)
class SyntheticPairs:
    """Token ids without meaning, whose lengths vary as those of sentences do; a `TrainingPairs` of `mtkit.training.step`.

    Attributes:
        src_lengths: Source tokens of each pair, without EOS.
        tgt_lengths: Target tokens of each pair, without EOS.
    """

    src_lengths: NDArray[np.int32]
    tgt_lengths: NDArray[np.int32]
    src_ids: NDArray[np.uint32]
    tgt_ids: NDArray[np.uint32]

    def src(self, index: int) -> NDArray[Any]:
        """Source ids of a pair."""
        return self.src_ids[index * 7 % 1000 :][: self.src_lengths[index]]

    def tgt(self, index: int) -> NDArray[Any]:
        """Target ids of a pair."""
        return self.tgt_ids[index * 7 % 1000 :][: self.tgt_lengths[index]]


def synthetic_pairs(num_pairs: int, *, vocab_size: int, mean_length: float = 27.0, seed: int = 1) -> SyntheticPairs:
    """Pairs of log-normal length, the target varying around the source's.

    Args:
        num_pairs: How many.
        vocab_size: Pieces; ids are drawn from all but the control ids.
        mean_length: Target tokens of a pair; 27 is that of WMT14 English-German with 32,000 pieces, 15 that of Multi30k.
        seed: Of everything.
    """
    rng = np.random.default_rng(seed)
    sigma = 0.6 if mean_length > 20 else 0.3
    src = np.clip(np.round(rng.lognormal(np.log(mean_length) - sigma**2 / 2, sigma, num_pairs)), 1, 200).astype(np.int32)
    tgt = np.clip(np.round(src * rng.normal(1.0, 0.15, num_pairs)), 1, 200).astype(np.int32)
    src_ids, tgt_ids = rng.integers(NUM_CONTROL_IDS, vocab_size, size=(2, 1200)).astype(np.uint32)
    return SyntheticPairs(src_lengths=src, tgt_lengths=tgt, src_ids=src_ids, tgt_ids=tgt_ids)


def synthetic_text(num_pairs: int, *, seed: int = 1) -> list[tuple[str, str]]:
    """Sentence pairs of made-up words with the length and the word frequencies of short captions: 12 words a side on average.

    Args:
        num_pairs: How many.
        seed: Of everything.
    """
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(_SYLLABLES, size=rng.integers(1, 5))) for _ in range(8000)]
    frequency = 1.0 / np.arange(1, len(words) + 1)
    lengths = np.clip(rng.poisson(11.0, size=(num_pairs, 2)), 3, 40)
    drawn = rng.choice(len(words), size=int(lengths.sum()), p=frequency / frequency.sum())
    ends = np.cumsum(lengths.ravel())
    sides = [" ".join(words[word] for word in part).capitalize() + "." for part in np.split(drawn, ends[:-1])]
    return list(zip(sides[::2], sides[1::2], strict=True))
