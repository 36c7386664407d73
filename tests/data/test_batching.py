"""Batches hold every pair once, respect the budget, and are a pure function of their arguments."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mtkit.data.batching import Budget, PoolPlan, batches_by_length, derive_budget, plan_pool, with_packing
from mtkit.data.packing import PackedShape
from mtkit.errors import DataError

LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=120)


def arrays(pairs: list[tuple[int, int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    return np.array([src for src, _ in pairs], dtype=np.int32), np.array([tgt for _, tgt in pairs], dtype=np.int32)


def micro_batches(plan: PoolPlan) -> list[list[int]]:
    return [batch.tolist() for position in range(plan.num_updates) for batch in plan.update(position)]


@settings(max_examples=60, deadline=None)
@given(pairs=LENGTHS, max_tokens=st.integers(41, 200), micro=st.integers(1, 4), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_every_pair_once_and_within_the_budget(pairs: list[tuple[int, int]], max_tokens: int, micro: int, seed: int, epoch: int) -> None:
    src, tgt = arrays(pairs)
    budget = Budget(micro_per_update=micro, tgt_tokens=max(1, max_tokens // micro), max_tokens=max_tokens)
    plan = plan_pool(src, tgt, budget=budget, seed=seed, epoch=epoch, pool=0)
    batches = micro_batches(plan)
    assert sorted(index for batch in batches for index in batch) == list(range(len(pairs)))
    for batch in batches:
        assert len(batch) * (max(src[batch]) + 1) <= max_tokens or len(batch) == 1
        assert len(batch) * (max(tgt[batch]) + 1) <= budget.tgt_tokens or len(batch) == 1
    assert all(len(plan.update(position)) == micro for position in range(plan.num_updates - 1))


@given(pairs=LENGTHS)
@settings(max_examples=20, deadline=None)
def test_a_plan_is_a_function_of_its_arguments_and_epochs_differ(pairs: list[tuple[int, int]]) -> None:
    src, tgt = arrays(pairs)
    budget = Budget(micro_per_update=1, tgt_tokens=41, max_tokens=41)
    first, again = (plan_pool(src, tgt, budget=budget, seed=5, epoch=2, pool=0) for _ in range(2))
    assert np.array_equal(first.indices, again.indices)
    assert np.array_equal(first.starts, again.starts)


def test_epochs_and_seeds_change_the_order() -> None:
    src = tgt = np.arange(200, dtype=np.int32) % 30
    budget = Budget(micro_per_update=1, tgt_tokens=100, max_tokens=100)
    orders = {plan_pool(src, tgt, budget=budget, seed=seed, epoch=epoch, pool=0).indices.tobytes() for seed in (1, 2) for epoch in (0, 1)}
    assert len(orders) == 4


def test_a_pair_longer_than_the_budget_is_skipped_and_counted() -> None:
    src, tgt = arrays([(3, 3), (120, 3), (3, 120), (98, 99)])
    plan = plan_pool(src, tgt, budget=Budget(micro_per_update=1, tgt_tokens=100, max_tokens=100), seed=1, epoch=0, pool=0)
    assert sorted(plan.indices) == [0, 3]
    assert plan.num_skipped == 2


def test_nothing_fits() -> None:
    src, tgt = arrays([(50, 50)])
    with pytest.raises(DataError, match="none of the 1 training pairs fits into max_tokens = 20"):
        plan_pool(src, tgt, budget=Budget(micro_per_update=1, tgt_tokens=20, max_tokens=20), seed=1, epoch=0, pool=0)


def test_padding_share_by_hand() -> None:
    # One batch of (2+1, 3+1) and (4+1, 3+1): source 2 x 5 cells with 8 tokens, target 2 x 4 cells with 8 tokens.
    src, tgt = arrays([(2, 3), (4, 3)])
    plan = plan_pool(src, tgt, budget=Budget(micro_per_update=1, tgt_tokens=100, max_tokens=100), seed=1, epoch=0, pool=0)
    assert plan.padding_share == pytest.approx(2 / 18)


def test_similar_lengths_leave_little_padding() -> None:
    rng = np.random.default_rng(0)
    tgt = rng.poisson(14, size=20_000).astype(np.int32)
    src = np.maximum(1, tgt + rng.integers(-4, 5, size=20_000)).astype(np.int32)
    plan = plan_pool(src, tgt, budget=Budget(micro_per_update=1, tgt_tokens=4096, max_tokens=4096), seed=1, epoch=0, pool=0)
    assert plan.padding_share < 0.08


@pytest.mark.parametrize(
    ("batch_tokens", "max_tokens", "world_size", "expected"),
    [(25_000, 25_000, 1, 1), (25_000, 8192, 1, 4), (25_000, 8192, 4, 4), (25_000, 8192, 8, 8), (25_000, 4096, 4, 8), (10, 100, 2, 2)],
)
def test_the_update_stays_the_same_size_on_any_number_of_devices(batch_tokens: int, max_tokens: int, world_size: int, expected: int) -> None:
    budget = derive_budget(batch_tokens=batch_tokens, max_tokens=max_tokens, world_size=world_size)
    assert budget.micro_per_update == expected
    assert budget.micro_per_update % world_size == 0
    assert batch_tokens - expected < budget.tgt_tokens * expected <= batch_tokens
    assert budget.tgt_tokens <= max_tokens


def test_the_plan_does_not_depend_on_the_world_size() -> None:
    src = tgt = np.arange(300, dtype=np.int32) % 25
    plans = [
        plan_pool(src, tgt, budget=derive_budget(batch_tokens=400, max_tokens=100, world_size=world), seed=3, epoch=1, pool=0) for world in (1, 2, 4)
    ]
    assert all(np.array_equal(plans[0].indices, plan.indices) for plan in plans)


def test_the_largest_batch_has_the_most_positions() -> None:
    rng = np.random.default_rng(1)
    src, tgt = rng.integers(1, 30, size=(2, 500)).astype(np.int32)
    plan = plan_pool(src, tgt, budget=Budget(micro_per_update=1, tgt_tokens=120, max_tokens=150), seed=1, epoch=0, pool=0)

    def positions(batch: list[int]) -> int:
        return len(batch) * int(src[batch].max() + tgt[batch].max() + 2)

    assert positions(plan.largest(src, tgt).tolist()) == max(map(positions, micro_batches(plan)))


PACKED = Budget(micro_per_update=2, tgt_tokens=60, max_tokens=80, shape=PackedShape(src_tokens=72, tgt_tokens=60, max_sentences=6, max_length=41))


@settings(max_examples=60, deadline=None)
@given(pairs=LENGTHS, seed=st.integers(0, 9), epoch=st.integers(0, 3), pool=st.integers(0, 3))
def test_packed_plans_hold_every_pair_once_and_within_the_shape(pairs: list[tuple[int, int]], seed: int, epoch: int, pool: int) -> None:
    src, tgt = arrays(pairs)
    plan, again = (plan_pool(src, tgt, budget=PACKED, seed=seed, epoch=epoch, pool=pool) for _ in range(2))
    assert plan.shape == PACKED.shape
    assert (plan.epoch, plan.pool, plan.num_skipped) == (epoch, pool, 0)
    assert np.array_equal(plan.indices, again.indices)
    assert np.array_equal(plan.starts, again.starts)
    batches = micro_batches(plan)
    assert sorted(index for batch in batches for index in batch) == list(range(len(pairs)))
    for batch in batches:
        assert 1 <= len(batch) <= 6
        assert (src[batch] + 1).sum() <= 72
        assert (tgt[batch] + 1).sum() <= 60
    assert plan.padding_share == pytest.approx(1 - (src + 1 + tgt + 1).sum() / (len(batches) * 132))
    assert all(len(plan.update(position)) == 2 for position in range(plan.num_updates - 1))


def test_packed_plans_of_other_seeds_epochs_and_pools_have_other_orders() -> None:
    src = tgt = np.arange(200, dtype=np.int32) % 30
    orders = {
        plan_pool(src, tgt, budget=PACKED, seed=seed, epoch=epoch, pool=pool).indices.tobytes()
        for seed in (1, 2)
        for epoch in (0, 1)
        for pool in (0, 1)
    }
    assert len(orders) == 8


@pytest.mark.parametrize(
    ("shape", "fitting"),
    [
        (PackedShape(src_tokens=72, tgt_tokens=60, max_sentences=6, max_length=41), [0, 3]),
        (PackedShape(src_tokens=40, tgt_tokens=60, max_sentences=6, max_length=60), [0, 2]),
        (PackedShape(src_tokens=72, tgt_tokens=40, max_sentences=6, max_length=60), [0, 1, 3]),
    ],
)
def test_a_pair_beyond_the_shape_is_skipped_and_counted(shape: PackedShape, fitting: list[int]) -> None:
    src, tgt = arrays([(3, 3), (45, 3), (3, 45), (40, 39), (99, 3)])
    budget = Budget(micro_per_update=1, tgt_tokens=60, max_tokens=80, shape=shape)
    plan = plan_pool(src, tgt, budget=budget, seed=1, epoch=0, pool=0)
    assert sorted(plan.indices) == fitting
    assert plan.num_skipped == 5 - len(fitting)


def test_the_packed_shape_comes_from_the_budget_and_the_corpus() -> None:
    # 3 tokens of source for 2 of target, EOS included: 100 target positions want 150 source positions, in eights 152.
    src, tgt = np.array([8, 14], dtype=np.int32), np.array([4, 10], dtype=np.int32)
    budget = Budget(micro_per_update=3, tgt_tokens=100, max_tokens=200)
    packed = with_packing(budget, src, tgt)
    assert packed == Budget(
        micro_per_update=3, tgt_tokens=100, max_tokens=200, shape=PackedShape(src_tokens=152, tgt_tokens=100, max_sentences=25, max_length=16)
    )


@given(pairs=LENGTHS, tgt_tokens=st.integers(50, 192))
@settings(max_examples=60, deadline=None)
def test_no_side_of_a_packed_shape_exceeds_what_a_device_holds(pairs: list[tuple[int, int]], tgt_tokens: int) -> None:
    shape = with_packing(Budget(micro_per_update=1, tgt_tokens=tgt_tokens, max_tokens=197), *arrays(pairs)).shape
    assert shape is not None
    assert shape.src_tokens <= 197
    assert shape.tgt_tokens <= tgt_tokens
    assert shape.max_length <= 197
    sums = [sum(pair[side] + 1 for pair in pairs) for side in range(2)]
    if sums[0] <= sums[1]:
        assert shape.tgt_tokens == tgt_tokens, "not smaller than it has to be"


@given(lengths=st.lists(st.integers(1, 60), max_size=80), max_tokens=st.integers(1, 200))
def test_batches_by_length(lengths: list[int], max_tokens: int) -> None:
    batches = batches_by_length(lengths, max_tokens=max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= max_tokens
    firsts = [lengths[batch[0]] for batch in batches]
    assert firsts == sorted(firsts, reverse=True)
