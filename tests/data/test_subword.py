"""Drawn segmentations: the same text, the stated distribution, and nothing that depends on what else is drawn."""

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mtkit.data import subword
from mtkit.data.pools import Pool
from mtkit.data.subword import SampledPools, SubwordSampler
from mtkit.data.tokenizer import SIDES, SPACE_MARK, UNK_ID, Side, Tokenizer, TokenizerConfig, train_on_lines
from mtkit.errors import ConfigError

CHOOSE = random.Random(3)
SYLLABLES = ["ga", "the", "ro", "web", "a", "ho", "re", "tha", "bo", "er"]
TEXT = [" ".join("".join(CHOOSE.choices(SYLLABLES, k=CHOOSE.randint(1, 4))) for _ in range(6)) for _ in range(60)]
WORD = "gatherobo"


def train(**changes: Any) -> Tokenizer:
    values: dict[str, Any] = {"vocab_size": 75, "byte_fallback": False, "joint": True, **changes}
    return train_on_lines(((side, line) for line in TEXT for side in SIDES), TokenizerConfig(**values))


TOKENIZERS = {
    "nfkc": train(),
    "identity": train(normalization="identity"),
    "bytes": train(byte_fallback=True, vocab_size=330),
    "symbols": train(user_defined_symbols=("<x>", "webga")),
}
PLAIN = TOKENIZERS["nfkc"]


def flat(rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    ids = np.array([index for row in rows for index in row], dtype=np.uint16)
    return ids, np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)


def draw(
    sampler: SubwordSampler,
    rows: Sequence[Sequence[int]],
    numbers: Sequence[int] | None = None,
    *,
    side: Side = "src",
    seed: int = 1,
    epoch: int = 0,
) -> list[list[int]]:
    pair_numbers = np.arange(len(rows)) if numbers is None else np.array(numbers, dtype=np.int64)
    ids, offsets = sampler.sample(*flat(rows), pair_numbers, side=side, seed=seed, epoch=epoch)
    assert ids.dtype == np.uint16
    assert offsets.dtype == np.int64
    assert (offsets[0], offsets[-1], len(offsets)) == (0, len(ids), len(rows) + 1)
    return [ids[start:stop].tolist() for start, stop in itertools.pairwise(offsets)]


def segmentations(tokenizer: Tokenizer, surface: str) -> dict[tuple[int, ...], float]:
    """All segmentations with their scores, by trying each piece at each place."""
    scores = tokenizer.piece_scores("src")
    score_of = {piece: (index, score) for index, (piece, score) in enumerate(zip(tokenizer.pieces(range(len(scores)), "src"), scores, strict=True))}
    if not surface:
        return {(): 0.0}
    found: dict[tuple[int, ...], float] = {}
    for stop in range(1, len(surface) + 1):
        index, score = score_of.get(surface[:stop], (0, None))
        if score is not None:
            found |= {(index, *rest): score + other for rest, other in segmentations(tokenizer, surface[stop:]).items()}
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_piece_crosses_a_space(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert not [piece for piece in tokenizer.pieces(range(tokenizer.src_vocab_size), "src") if SPACE_MARK in piece[1:]]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(
        st.lists(st.sampled_from([*"aehtgrobw", " ", "<x>", *SYLLABLES, "webga", "\u00e9", "\u4e2d", SPACE_MARK]), max_size=20).map("".join)
    ),
    alpha=st.sampled_from([0.01, 0.2, 1.0]),
    seed=st.integers(min_value=0, max_value=2**70),
)
def test_the_text_stays_the_same(name: str, lines: list[str], alpha: float, seed: int) -> None:
    tokenizer = TOKENIZERS[name]
    rows = tokenizer.encode(lines, "src")
    drawn = draw(SubwordSampler(tokenizer, alpha=alpha), rows, seed=seed)
    assert tokenizer.decode(drawn, "src") == tokenizer.decode(rows, "src")


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_the_distribution_is_the_stated_one(alpha: float) -> None:
    scores = segmentations(PLAIN, SPACE_MARK + WORD)
    weights = {row: math.exp(alpha * score) for row, score in scores.items()}
    total = sum(weights.values())
    assert len(weights) > 15
    count = 40_000
    found = Counter(map(tuple, draw(SubwordSampler(PLAIN, alpha=alpha), PLAIN.encode([WORD] * count, "src"))))
    assert set(found) <= set(weights)
    often = [row for row, weight in weights.items() if weight / total * count >= 5]
    statistic = sum((found[row] - weights[row] / total * count) ** 2 / (weights[row] / total * count) for row in often)
    # chi-square: mean n - 1, standard deviation sqrt(2 (n - 1)); the draws are the same in every run of the test
    assert statistic < len(often) + 4 * math.sqrt(2 * len(often))


def test_the_scores_are_those_that_sentencepiece_segments_by() -> None:
    rows = PLAIN.encode([*TEXT, "gatherobaathe"], "src")
    assert draw(SubwordSampler(PLAIN, alpha=1000.0), rows) == rows
    assert draw(SubwordSampler(PLAIN, alpha=0.2), rows) != rows


def test_a_sentence_is_drawn_alike_in_any_company() -> None:
    rows = PLAIN.encode(TEXT[:15], "src")
    rows[3] = rows[7] = []
    numbers = [10**12 + 3 * number for number in range(len(rows))]
    expected = draw(SubwordSampler(PLAIN, alpha=0.3), rows, numbers)
    assert expected[3] == []
    order = np.random.default_rng(1).permutation(len(rows)).tolist()
    sampler = SubwordSampler(PLAIN, alpha=0.3)
    shuffled = draw(sampler, [rows[index] for index in order], [numbers[index] for index in order])
    assert shuffled == [expected[index] for index in order]
    assert [draw(sampler, [row], [number])[0] for row, number in zip(rows, numbers, strict=True)] == expected


def test_what_the_draw_depends_on() -> None:
    sampler = SubwordSampler(PLAIN, alpha=0.1)
    rows = PLAIN.encode(TEXT, "src")
    results = [
        draw(sampler, rows),
        draw(sampler, rows, seed=2),
        draw(sampler, rows, epoch=1),
        draw(sampler, rows, side="tgt"),
        draw(sampler, rows, range(100, 100 + len(rows))),
    ]
    assert all(first != second for index, first in enumerate(results) for second in results[:index])
    assert draw(sampler, rows) == results[0]
    words = draw(sampler, PLAIN.encode([f"{WORD} {WORD}"] * 50, "src"))
    texts = ["".join(PLAIN.pieces(row, "src")) for row in words]
    assert len(set(texts)) == 1
    assert len({tuple(row) for row in words}) > 30, "the two words of a sentence are drawn apart, and so are the sentences"
    halves = [tuple(row[: len(row) // 2]) == tuple(row[len(row) // 2 :]) for row in words]
    assert sum(halves) < 10


def test_the_same_draws_on_every_machine() -> None:
    # The first outputs of SplitMix64 for the seeds 0 and 1234567, as published with it.
    assert subword._mix(np.array([0x9E3779B97F4A7C15], dtype=np.uint64)).tolist() == [0xE220A8397B1DCDAF]
    assert subword._mix(np.array([(1234567 + 0x9E3779B97F4A7C15) % 2**64], dtype=np.uint64)).tolist() == [6457827717110365317]
    pieces = ["<pad>", "<unk>", "<s>", "</s>", SPACE_MARK, "a", "b", "ab", "ba", f"{SPACE_MARK}a", "aba"]
    model: Any = SimpleNamespace(
        config=TokenizerConfig(),
        joint=True,
        pieces=lambda ids, _side: [pieces[index] for index in ids],
        piece_scores=lambda _side: [None] * 4 + [-1.0] * 7,
    )
    drawn = draw(SubwordSampler(model, alpha=0.1), [[4, 10, 7], [5, 7, 9, 9, 5, 7]] * 2, [0, 1, 123_456_789, 2**40], seed=7, epoch=3)
    assert drawn == [[9, 8, 7], [5, 7, 4, 5, 4, 5, 5, 7], [4, 7, 5, 7], [5, 7, 4, 5, 9, 5, 5, 6]]


def test_what_keeps_its_segmentation() -> None:
    word = "gatherobaathe"
    unknown = TOKENIZERS["nfkc"].encode([f"{word}\u4e2d"], "src") * 20
    assert UNK_ID in unknown[0]
    assert draw(SubwordSampler(TOKENIZERS["nfkc"], alpha=0.01), unknown) == unknown
    spelled = TOKENIZERS["bytes"].encode([f"{word}\u4e2d"], "src") * 20
    assert draw(SubwordSampler(TOKENIZERS["bytes"], alpha=0.01), spelled) == spelled
    symbols = TOKENIZERS["symbols"].encode([f"{word}<x>"], "src") * 20
    assert draw(SubwordSampler(TOKENIZERS["symbols"], alpha=0.01), symbols) == symbols
    plain = TOKENIZERS["symbols"].encode(["gathero"], "src") * 20
    assert draw(SubwordSampler(TOKENIZERS["symbols"], alpha=0.01), plain) != plain


def test_two_vocabularies() -> None:
    lines: list[tuple[Side, str]] = [("src", line) for line in TEXT]
    lines += [("tgt", line[::-1]) for line in TEXT]
    tokenizer = train_on_lines(lines, TokenizerConfig(vocab_size=50, byte_fallback=False, joint=False))
    sampler = SubwordSampler(tokenizer, alpha=0.2)
    for side, text in (("src", TEXT), ("tgt", [line[::-1] for line in TEXT])):
        rows = tokenizer.encode(text, side)  # type: ignore[arg-type]
        drawn = draw(sampler, rows, side=side)  # type: ignore[arg-type]
        assert drawn != rows
        assert tokenizer.decode(drawn, side) == tokenizer.decode(rows, side)  # type: ignore[arg-type]


def test_forgetting_lattices_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = PLAIN.encode(TEXT, "src")
    sampler = SubwordSampler(PLAIN, alpha=0.2)
    expected = draw(sampler, rows), draw(sampler, rows[::-1])
    num_states = len(sampler._lattices["src"]._first_edges)
    monkeypatch.setattr(subword, "MAX_STATES", 0)
    other = SubwordSampler(PLAIN, alpha=0.2)
    assert (draw(other, rows), draw(other, rows[::-1])) == expected
    draw(other, rows[:1])
    assert 0 < len(other._lattices["src"]._first_edges) < num_states


def test_nothing_to_draw() -> None:
    sampler = SubwordSampler(PLAIN, alpha=0.2)
    assert draw(sampler, []) == []
    assert draw(sampler, [[], []]) == [[], []]


def test_many_words_find_their_lattices() -> None:
    rng = np.random.default_rng(1)
    lines = ["".join(row) for row in rng.choice(list("aehtgrobw"), (9000, 6))]
    rows = PLAIN.encode(lines, "src")
    sampler = SubwordSampler(PLAIN, alpha=0.2)
    for part in (rows[:100], rows[:6000], rows):
        assert PLAIN.decode(draw(sampler, part), "src") == lines[: len(part)]


class OnePool:
    """Epochs of one pool, the texts in an order of their own each."""

    num_pairs, num_epochs = 30, None

    def read(self, epoch: int, number: int) -> Pool:
        indices = np.random.default_rng(epoch).permutation(self.num_pairs)
        (src_ids, src_offsets), (tgt_ids, tgt_offsets) = (flat(PLAIN.encode([TEXT[index + shift] for index in indices], "src")) for shift in (0, 10))
        return Pool(
            epoch=epoch,
            number=number,
            is_last=True,
            indices=indices,
            src_ids=src_ids,
            src_offsets=src_offsets,
            tgt_ids=tgt_ids,
            tgt_offsets=tgt_offsets,
        )

    @property
    def longest(self) -> int:
        return 20

    def close(self) -> None:
        pass


def test_pools_are_drawn_anew_in_each_epoch() -> None:
    source = OnePool()
    pools = SampledPools(source, SubwordSampler(PLAIN, alpha=0.2), seed=5)
    assert (pools.num_pairs, pools.longest) == (30, 2 * source.longest)
    drawn: list[dict[int, tuple[list[int], list[int]]]] = []
    for epoch in (0, 1, 1):
        pool = pools.read(epoch, 0)
        assert (pool.epoch, pool.number, pool.is_last, len(pool)) == (epoch, 0, True, 30)
        np.testing.assert_array_equal(pool.indices, source.read(epoch, 0).indices)
        np.testing.assert_array_equal(pool.src_lengths, [len(pool.src(row)) for row in range(30)])
        drawn.append({int(index): (pool.src(row).tolist(), pool.tgt(row).tolist()) for row, index in enumerate(pool.indices)})
        for index, (src, tgt) in drawn[-1].items():
            assert PLAIN.decode([src, tgt], "src") == [TEXT[index], TEXT[index + 10]]
    assert drawn[1] == drawn[2]
    assert sum(drawn[0][index] == drawn[1][index] for index in range(30)) < 3
    expected = SubwordSampler(PLAIN, alpha=0.2)
    for place, side in enumerate(SIDES):
        row = PLAIN.encode([TEXT[4 + 10 * place]], side)
        assert [drawn[1][4][place]] == draw(expected, row, [4], side=side, seed=5, epoch=1)


def test_a_tokenizer_without_probabilities_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a unigram tokenizer, but this one is of type bpe") as error:
        SubwordSampler(train(type="bpe"), alpha=0.1)
    assert "tokenizer.type = unigram" in (error.value.hint or "")
    for alpha in (0.0, -1.0, math.nan, math.inf, 1000.5):
        with pytest.raises(ConfigError, match="subword_alpha must be above 0 and at most 1000"):
            SubwordSampler(PLAIN, alpha=alpha)


class Repeating(OnePool):
    """Pairs that come more than once, in one pool and in the next."""

    def read(self, epoch: int, number: int) -> Pool:
        pool = super().read(epoch, number)
        rows = np.zeros(20, dtype=np.int64)
        ids, offsets = (np.tile(pool.src(0), 20), np.arange(21) * len(pool.src(0)))
        return dataclasses.replace(pool, number=number, indices=rows + 3, src_ids=ids, src_offsets=offsets, tgt_ids=ids, tgt_offsets=offsets)


def test_a_pair_that_comes_again_is_drawn_anew() -> None:
    source = SampledPools(Repeating(), SubwordSampler(PLAIN, alpha=0.1), seed=1)
    drawn = [[tuple(pool.src(row).tolist()) for row in range(20)] for pool in (source.read(0, 0), source.read(0, 1))]
    assert all(len(set(rows)) > 5 for rows in drawn)
    assert drawn[0] != drawn[1]
    assert [tuple(source.read(0, 1).src(row).tolist()) for row in range(20)] == drawn[1], "the same arguments give the same pool"
