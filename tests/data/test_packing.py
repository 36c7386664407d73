"""Packed micro-batches hold every sentence once, stay within their shape, are full, and come in random order."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mtkit.data.packing import PackedShape, cut_packed, pack_side, packed_shape

PAD = 0

Indices = NDArray[np.int64]


def lengths(count: int, *, seed: int) -> tuple[Indices, Indices]:
    """Source and target lengths of news-like text: skewed, related to each other, of 1 to 256 tokens."""
    rng = np.random.default_rng(seed)
    tgt = np.exp(rng.normal(3.1, 0.65, count))
    src = tgt * np.exp(rng.normal(0.05, 0.25, count))
    return tuple(np.clip(side, 1, 256).astype(np.int64) for side in (src, tgt))


def flat(rows: list[Indices]) -> tuple[Indices, Indices]:
    """The rows one after the other, and the length of each."""
    return np.concatenate(rows), np.array([len(row) for row in rows])


def micro_batches(order: Indices, starts: Indices) -> list[Indices]:
    return [order[start:stop] for start, stop in itertools.pairwise(starts)]


@settings(max_examples=100, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=150),
    src_tokens=st.integers(20, 90),
    tgt_tokens=st.integers(20, 90),
    max_sentences=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_every_sentence_once_and_within_the_shape(
    pairs: list[tuple[int, int]], src_tokens: int, tgt_tokens: int, max_sentences: int, seed: int
) -> None:
    src, tgt = (np.array(side, dtype=np.int64) for side in zip(*pairs, strict=True))
    shape = PackedShape(src_tokens=src_tokens, tgt_tokens=tgt_tokens, max_sentences=max_sentences, max_length=20)
    order, starts = cut_packed(src, tgt, shape=shape, rng=np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(len(pairs)))
    assert (starts[0], starts[-1]) == (0, len(pairs))
    batches = micro_batches(order, starts)
    for batch in batches:
        assert 1 <= len(batch) <= max_sentences
        assert src[batch].sum() <= src_tokens
        assert tgt[batch].sum() <= tgt_tokens
    for batch, following in itertools.pairwise(batches):
        grown = [*batch, following[0]]
        assert len(grown) > max_sentences or src[grown].sum() > src_tokens or tgt[grown].sum() > tgt_tokens, "it could have held one more"


@pytest.mark.parametrize(("tgt_tokens", "useful"), [(25_000, 0.99), (2_048, 0.98)])
def test_hardly_a_position_is_unused(tgt_tokens: int, useful: float) -> None:
    src, tgt = lengths(20_000, seed=4)
    shape = packed_shape(src, tgt, tgt_tokens=tgt_tokens)
    order, starts = cut_packed(src, tgt, shape=shape, rng=np.random.default_rng(1))
    whole = order[: starts[-2]]  # the last micro-batch is what is left over
    num_whole = len(starts) - 2
    assert num_whole >= 15
    assert tgt[whole].sum() >= useful * num_whole * shape.tgt_tokens
    assert src[whole].sum() >= useful * num_whole * shape.src_tokens


def test_the_order_is_random_and_a_function_of_the_generator() -> None:
    src, tgt = lengths(20_000, seed=4)
    shape = packed_shape(src, tgt, tgt_tokens=2_048)
    cuts = [cut_packed(src, tgt, shape=shape, rng=np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert np.array_equal(cuts[0][0], cuts[1][0])
    assert np.array_equal(cuts[0][1], cuts[1][1])
    assert abs(np.corrcoef(cuts[0][0], cuts[2][0])[0, 1]) < 0.03
    order, starts = cuts[0]
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.03
    # Sentences of all lengths share a micro-batch: the means of micro-batches spread as those of random samples do, or less.
    batches = micro_batches(order, starts)[:-1]
    means = np.array([tgt[batch].mean() for batch in batches])
    assert means.std() < 1.1 * tgt.std() / np.sqrt(np.mean([len(batch) for batch in batches]))
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


def test_the_longest_and_the_shortest_sources_share_micro_batches() -> None:
    src, tgt = lengths(20_000, seed=4)
    shape = packed_shape(src, tgt, tgt_tokens=25_000)
    order, starts = cut_packed(src, tgt, shape=shape, rng=np.random.default_rng(1))
    ratio = src.sum() / tgt.sum()
    for batch in micro_batches(order, starts)[:-1]:
        assert src[batch].sum() / tgt[batch].sum() == pytest.approx(ratio, rel=0.02)


def test_the_shape_by_hand() -> None:
    # 30 source tokens for 20 target tokens, in 4 sentences: 100 target positions want 150 source positions, in eights 152.
    shape = packed_shape(np.array([10, 9, 6, 5]), np.array([4, 7, 4, 5]), tgt_tokens=100)
    assert shape == PackedShape(src_tokens=152, tgt_tokens=100, max_sentences=40, max_length=16)
    # 152 positions are 9.5 sentences of the greatest length.
    assert shape.num_slots == 40 + 10


@pytest.mark.parametrize(("longest", "max_length"), [(1, 2), (15, 16), (16, 32), (40, 64), (64, 96), (90, 96)])
def test_the_greatest_length_is_a_power_of_two_above_the_longest_or_the_whole_shape(longest: int, max_length: int) -> None:
    for src, tgt in itertools.permutations((np.array([longest, 1]), np.array([1, longest]))):
        assert packed_shape(src, tgt, tgt_tokens=96).max_length == max_length


def test_a_side_by_hand() -> None:
    rows = [np.array([11, 12, 13]), np.array([], dtype=np.int64), np.array([21])]
    ids, positions, starts = pack_side(*flat(rows), tokens=11, num_slots=7, max_length=3, pad=PAD)
    assert ids.tolist() == [11, 12, 13, 21, PAD, PAD, PAD, PAD, PAD, PAD, PAD]
    #                                   padding in threes, and one left over
    assert positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 0, 1, 2, 0]
    assert starts.tolist() == [0, 3, 3, 4, 7, 10, 11, 11]
    assert [array.dtype for array in (ids, positions, starts)] == [np.int64, np.int64, np.int32]


@settings(max_examples=100, deadline=None)
@given(row_lengths=st.lists(st.integers(0, 9), min_size=1, max_size=20), unused=st.integers(0, 60), spare=st.integers(0, 3))
def test_unused_positions_are_sentences_of_padding_at_the_end(row_lengths: list[int], unused: int, spare: int) -> None:
    used = sum(row_lengths)
    shape = PackedShape(src_tokens=used + unused, tgt_tokens=1, max_sentences=len(row_lengths) + spare, max_length=9)
    rows = [np.arange(1, length + 1) * 10 + number for number, length in enumerate(row_lengths)]
    ids, positions, starts = pack_side(*flat(rows), tokens=used + unused, num_slots=shape.num_slots, max_length=9, pad=PAD)
    assert ids.shape == positions.shape == (used + unused,)
    assert starts.shape == (shape.num_slots + 1,)
    assert (starts[0], starts[-1]) == (0, used + unused)
    sizes = np.diff(starts)
    assert sizes[: len(rows)].tolist() == row_lengths
    assert sizes.min() >= 0
    assert sizes.max() <= 9
    for number, (start, stop) in enumerate(itertools.pairwise(starts)):
        assert positions[start:stop].tolist() == list(range(stop - start))
        assert ids[start:stop].tolist() == (rows[number].tolist() if number < len(rows) else [PAD] * (stop - start))


def test_a_full_side_has_no_padding() -> None:
    ids, positions, starts = pack_side(*flat([np.array([5, 6]), np.array([7])]), tokens=3, num_slots=4, max_length=2, pad=PAD)
    assert ids.tolist() == [5, 6, 7]
    assert positions.tolist() == [0, 1, 0]
    assert starts.tolist() == [0, 2, 3, 3, 3]


def test_more_than_the_side_holds_is_our_own_bug() -> None:
    with pytest.raises(ValueError, match="could not broadcast"):
        pack_side(*flat([np.array([5, 6]), np.array([7])]), tokens=2, num_slots=4, max_length=2, pad=PAD)
    with pytest.raises(ValueError, match="could not broadcast"):
        pack_side(*flat([np.array([5, 6]), np.array([7])]), tokens=3, num_slots=1, max_length=2, pad=PAD)
