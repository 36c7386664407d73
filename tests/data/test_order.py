"""The order of an epoch: permutations without memory, pools that hold every pair once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtkit.data import order as module
from mtkit.data.order import POOL_PAIRS, RUN_PAIRS, EpochOrder, Indices, MixedOrder, Permutation, Walk

KEYS = st.lists(st.integers(0, 2**64), min_size=1, max_size=3)


@settings(max_examples=80, deadline=None)
@given(size=st.one_of(st.integers(1, 70), st.integers(1, 5000)), key=KEYS)
def test_every_number_comes_once(size: int, key: list[int]) -> None:
    numbers = Permutation(size, key)[np.arange(size)]
    assert numbers.dtype == np.int64
    assert np.array_equal(np.sort(numbers), np.arange(size))


@pytest.mark.parametrize("size", [2**31 + 7, 2**62])
def test_a_range_that_no_memory_holds(size: int) -> None:
    positions = np.unique(np.random.default_rng(1).integers(0, size, size=100_000))
    permutation = Permutation(size, (3, 1))
    numbers = permutation[positions]
    assert numbers.min() >= 0
    assert numbers.max() < size
    assert len(np.unique(numbers)) == len(positions)
    assert np.array_equal(permutation[positions[500:510]], numbers[500:510]), "a place does not depend on the others asked for"
    first = permutation[np.arange(100_000)]
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.02
    counts = np.bincount(first // (size // 100 + 1), minlength=100)
    assert ((counts - 1000) ** 2 / 1000).sum() < 160, "chi square with 99 degrees of freedom: above it once in 10,000 times"


def test_another_key_is_another_order() -> None:
    keys = [(1, 0), (0, 1), (1, 1), (1, 2), (2, 1), (2**64 + 1, 1)]
    orders = [Permutation(4096, key)[np.arange(4096)] for key in keys]
    for index, left in enumerate(orders):
        for right in orders[:index]:
            assert (left == right).mean() < 0.005
            assert abs(np.corrcoef(left, right)[0, 1]) < 0.08


@pytest.mark.parametrize("size", [5, 24, 1000])
def test_every_number_is_as_likely_at_every_place(size: int) -> None:
    num_keys = 2000
    orders = np.stack([Permutation(size, (key,))[np.arange(min(size, 5))] for key in range(num_keys)])
    bins = min(size, 10)
    for place in range(orders.shape[1]):
        counts = np.bincount(orders[:, place] * bins // size, minlength=bins)
        expected = np.bincount(np.arange(size) * bins // size) * num_keys / size
        assert ((counts - expected) ** 2 / expected).sum() < 40, "at most 9 degrees of freedom: above it once in 100,000 times"


def test_the_order_stays_what_it_is() -> None:
    """Runs go on with the order they began with: a change of these numbers is a new format of the state."""
    assert Permutation(1000, (1, 0))[np.arange(5)].tolist() == [320, 369, 702, 191, 161]
    assert EpochOrder(num_pairs=300_000, seed=1).pool(2, 1)[::20_000].tolist() == [216, 60568, 120280, 178136, 240184]


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 700), key=KEYS)
def test_a_walk_has_every_number_once(size: int, key: list[int]) -> None:
    walk = Walk(size, key)
    numbers = walk[np.arange(size)]
    assert np.array_equal(np.sort(numbers), np.arange(size))
    places = np.random.default_rng(1).permutation(size)[:5]
    assert np.array_equal(walk[places], numbers[places]), "a place does not depend on the others asked for"
    with pytest.raises(IndexError, match=f"of {size}"):
        walk[np.array([size])]


def test_a_walk_goes_in_runs_that_are_others_for_another_key() -> None:
    size = 1000 * RUN_PAIRS + 5
    cuts = []
    for key in range(20):
        numbers = Walk(size, (key,))[np.arange(size)]
        starts = numbers[np.flatnonzero(np.diff(numbers, prepend=-9) % size != 1)]
        assert 990 <= len(starts) <= 1001, "rarely do two runs follow each other that are neighbours"
        assert abs(np.corrcoef(starts[:-1], starts[1:])[0, 1]) < 0.15
        cuts.append(int(starts[0]) % RUN_PAIRS)
    assert len(set(cuts)) > 8


def test_places_outside_are_refused() -> None:
    permutation = Permutation(10, (1,))
    for places in ([-1, 3], [10]):
        with pytest.raises(IndexError, match="of 10"):
            permutation[np.array(places)]
    assert len(permutation[np.array([], dtype=np.int64)]) == 0
    for size in (0, 2**62 + 1):
        with pytest.raises(ValueError, match="permutation of"):
            Permutation(size, (1,))
    with pytest.raises(IndexError, match="pool 1 of 1"):
        EpochOrder(num_pairs=10, seed=1).pool(0, 1)


@settings(max_examples=40, deadline=None)
@given(num_pairs=st.integers(0, 400), pool_pairs=st.integers(1, 60), seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_an_epoch_has_every_pair_once(num_pairs: int, pool_pairs: int, seed: int, epoch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "POOL_PAIRS", pool_pairs)
        order = EpochOrder(num_pairs=num_pairs, seed=seed)
        pools = [order.pool(epoch, number) for number in range(order.num_pools)]
    assert sorted(np.concatenate(pools).tolist()) == list(range(num_pairs))
    sizes = {len(pool) for pool in pools}
    assert max(sizes) <= pool_pairs
    assert max(sizes) - min(sizes) <= 1
    assert all(np.array_equal(pool, np.sort(pool)) for pool in pools)


def test_epochs_and_seeds_mix_the_pools_anew() -> None:
    size = 2 * POOL_PAIRS
    pools = [EpochOrder(num_pairs=size, seed=seed).pool(epoch, 0) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    for index, left in enumerate(pools):
        for right in pools[:index]:
            assert len(np.intersect1d(left, right)) == pytest.approx(POOL_PAIRS / 2, rel=0.03)


def test_a_small_corpus_is_one_pool_in_its_own_order() -> None:
    order = EpochOrder(num_pairs=POOL_PAIRS, seed=1)
    assert order.num_pools == 1
    assert np.array_equal(order.pool(4, 0), np.arange(POOL_PAIRS))


# --- several corpora --------------------------------------------------------------------------------------------------------------------

MIXES = [((100, 300, 7), (1.0, 1.0, 1.0)), ((1000, 20), (0.3, 0.7)), ((50,), (2.0,)), ((400, 90, 3), (0.61, 0.2, 0.19)), ((5, 200), (9.0, 1.0))]


@pytest.mark.parametrize(("sizes", "weights"), MIXES)
def test_each_corpus_has_its_share_of_every_prefix(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], weights: tuple[float, ...]) -> None:
    monkeypatch.setattr(module, "POOL_PAIRS", 60)
    order = MixedOrder(sizes, weights=weights, seed=3)
    ends = np.cumsum(sizes)
    assert order.num_pairs == sum(sizes)
    drawn, num_drawn = np.zeros(len(sizes)), 0
    counts = [np.zeros(size, dtype=np.int64) for size in sizes]
    for epoch in range(3):
        pools = [order.pool(epoch, number) for number in range(order.num_pools)]
        assert sum(map(len, pools)) == order.num_pairs
        for pool in pools:
            assert np.array_equal(pool, np.sort(pool))
            assert len(pool) <= 60
            num_drawn += len(pool)
            corpora = np.searchsorted(ends, pool, side="right")
            drawn += np.bincount(corpora, minlength=len(sizes))
            assert (np.abs(drawn - num_drawn * np.array(weights) / sum(weights)) < 1).all()
            for corpus, count in enumerate(counts):
                count += np.bincount(pool[corpora == corpus] - (ends[corpus] - sizes[corpus]), minlength=sizes[corpus])
                assert count.max() - count.min() <= 1, "nothing comes again before all has come"


def test_a_mixed_pool_depends_on_its_place_and_the_seed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POOL_PAIRS", 500)
    pools: dict[tuple[int, int, int], Indices] = {}
    for seed in (3, 3, 4):
        order = MixedOrder((2000, 700), weights=(1.0, 1.0), seed=seed)
        for epoch, number in ((1, 2), (0, 0), (2, 5)) if seed == 3 and pools else ((0, 0), (1, 2), (2, 5)):
            pool = order.pool(epoch, number)
            assert np.array_equal(pools.setdefault((seed, epoch, number), pool), pool)
    assert not np.array_equal(pools[3, 0, 0], pools[4, 0, 0])


def test_a_corpus_comes_in_another_order_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POOL_PAIRS", 500)
    order = MixedOrder((2000, 2000), weights=(1.0, 1.0), seed=3)
    first, again = order.pool(0, 0), order.pool(1, 0)  # the beginnings of two walks of each
    for low in (0, 2000):
        assert len(np.intersect1d(first[(first >= low) & (first < low + 2000)], again)) < 120
    assert len(np.intersect1d(first[first < 2000] + 2000, first)) < 120, "nor have two corpora the same"


def test_a_mix_of_a_size_that_no_memory_holds() -> None:
    order = MixedOrder((10**12, 3, 10**9), weights=(1.0, 0.1, 0.5), seed=1)
    pool = order.pool(2, order.num_pools // 2)
    assert len(pool) == pytest.approx(POOL_PAIRS, abs=1)
    assert np.mean(pool < 10**12) == pytest.approx(1.0 / 1.6, rel=1e-4)


def test_a_share_of_less_than_a_pair_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POOL_PAIRS", 100)
    MixedOrder((900, 100), weights=(0.989, 0.011), seed=1)
    with pytest.raises(ValueError, match=r"a share of 0\.9 pairs in a pool"):
        MixedOrder((900, 100), weights=(0.991, 0.009), seed=1)


def test_weights_whose_sum_is_no_number_are_shares_like_others() -> None:
    assert (
        MixedOrder((5, 9), weights=[1e308, 1e308], seed=1).pool(0, 0).tolist() == MixedOrder((5, 9), weights=[1.0, 1.0], seed=1).pool(0, 0).tolist()
    )
    assert MixedOrder((5, 9), weights=[3e-320, 9e-320], seed=1).num_pairs == 14
