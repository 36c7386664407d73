"""Writes the quickstart corpus: English–German sentence pairs from a grammar, for training, development and test.

Run from the root of the repository: python -m recipes.quickstart.generate --output data
"""

import argparse
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from mtkit.errors import DataError, MTKitError
from mtkit.files import open_output
from recipes.quickstart.grammar import SentencePair
from recipes.quickstart.sentences import Composer

Splits = dict[str, list[SentencePair]]
"""The pairs of `train`, `dev` and `test`."""

MIN_TRAINING_COUNT = 2
"""A word of the dev and test sets occurs in so many training pairs at least, on its side."""

_MAX_CANDIDATES = 50
"""So many new pairs are looked at for each pair of the dev and test sets before the training set counts as too small."""


def generate(*, train: int, dev: int, test: int, seed: int) -> Splits:
    """Generate the three sets. No English sentence occurs twice, in one set or in two.

    Every word of the dev and test sets, with its inflection, occurs in the training set, so that the score tells what was learned of the
    grammar and not which words were seen by chance.

    Args:
        train: Number of training pairs; a few thousand are needed before they hold enough words.
        dev: Number of development pairs.
        test: Number of test pairs.
        seed: Equal seeds give equal sets.

    Raises:
        DataError: The training set is so small that hardly any sentence has all of its words in it.
    """
    pairs = _distinct(Composer(random.Random(seed)))
    splits: Splits = {"train": list(itertools.islice(pairs, train))}
    counts: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for pair in splits["train"]:
        for text, count in zip(pair, counts, strict=True):
            for word in set(words(text)):
                count[word] = count.get(word, 0) + 1
    candidates = itertools.islice(pairs, _MAX_CANDIDATES * (dev + test))
    known = (pair for pair in candidates if all(_is_known(text, count) for text, count in zip(pair, counts, strict=True)))
    for name, size in (("dev", dev), ("test", test)):
        splits[name] = list(itertools.islice(known, size))
        if len(splits[name]) < size:
            raise DataError(f"{train} training pairs hold too few words for a {name} set of known words", hint="Generate more training pairs.")
    return splits


def words(text: str) -> list[str]:
    """The words of a sentence, lower-cased and without punctuation."""
    return text.lower().replace(",", "").rstrip(".?!").split(" ")


def _is_known(text: str, counts: dict[str, int]) -> bool:
    return all(counts.get(word, 0) >= MIN_TRAINING_COUNT for word in words(text))


def write(splits: Splits, output: Path) -> None:
    """Write `train.en`, `train.de` and so on, one sentence a line, into a directory that is made if there is none."""
    for name, pairs in splits.items():
        with open_output(output / f"{name}.en") as en, open_output(output / f"{name}.de") as de:
            for english, german in pairs:
                en.write(english)
                de.write(german)


def _distinct(composer: Composer) -> Iterator[SentencePair]:
    """Endless pairs with no English sentence twice."""
    seen: dict[str, str] = {}
    while True:
        english, german = composer.pair()
        if english not in seen:
            seen[english] = german
            yield english, german
        elif seen[english] != german:
            raise AssertionError(f"{english!r} has two translations: {seen[english]!r} and {german!r}")


def main() -> None:
    """Read the command line and write the corpus."""
    parser = argparse.ArgumentParser(description="Generate English–German sentence pairs for the quickstart recipe.")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory for train.en, train.de, dev.en, ...")
    parser.add_argument("--train", type=_positive, default=20_000, metavar="N", help="training pairs (default: %(default)s)")
    parser.add_argument("--dev", type=_positive, default=500, metavar="N", help="development pairs (default: %(default)s)")
    parser.add_argument("--test", type=_positive, default=500, metavar="N", help="test pairs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="equal seeds give equal files (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        write(generate(train=arguments.train, dev=arguments.dev, test=arguments.test, seed=arguments.seed), arguments.output)
    except MTKitError as error:
        sys.exit(f"error: {error}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


if __name__ == "__main__":
    main()
