"""Batches of tensors, and the thread that makes them ahead of time."""

import dataclasses
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mtkit.data.loader import Batch, PackedBatch, Prefetcher, collate, load_batch, pack
from mtkit.data.packing import PackedShape
from mtkit.data.tokenizer import BOS_ID, EOS_ID, PAD_ID


def test_collate_by_hand() -> None:
    batch = collate([[10, 11, 12], [20]], [[30], [40, 41]])
    assert batch.src_BS.tolist() == [[10, 11, 12, EOS_ID], [20, EOS_ID, PAD_ID, PAD_ID]]
    assert batch.src_mask_BS.tolist() == [[True] * 4, [True, True, False, False]]
    assert batch.tgt_in_BT.tolist() == [[BOS_ID, 30, PAD_ID], [BOS_ID, 40, 41]]
    assert batch.tgt_out_BT.tolist() == [[30, EOS_ID, PAD_ID], [40, 41, EOS_ID]]
    assert batch.tgt_mask_BT.tolist() == [[True, True, False], [True, True, True]]
    assert (batch.num_src_tokens, batch.num_tgt_tokens) == (6, 5)
    assert batch.src_BS.dtype == batch.tgt_in_BT.dtype == torch.int64


def test_an_empty_side_is_its_end_symbol() -> None:
    batch = collate([[]], [[]])
    assert batch.src_BS.tolist() == [[EOS_ID]]
    assert batch.tgt_in_BT.tolist() == [[BOS_ID]]
    assert batch.tgt_out_BT.tolist() == [[EOS_ID]]


def test_large_ids_of_unsigned_shards_survive() -> None:
    batch = collate([np.array([65535], dtype=np.uint16)], [np.array([65534, 40000], dtype=np.uint16)])
    assert batch.src_BS.tolist() == [[65535, EOS_ID]]
    assert batch.tgt_out_BT.tolist() == [[65534, 40000, EOS_ID]]


SHAPE = PackedShape(src_tokens=12, tgt_tokens=10, max_sentences=3, max_length=4)


def test_pack_by_hand() -> None:
    batch = pack([[10, 11, 12], [20]], [[30], [40, 41]], SHAPE)
    rest = [PAD_ID] * 6
    assert batch.src_M.tolist() == [10, 11, 12, EOS_ID, 20, EOS_ID, *rest]
    assert batch.src.positions_N.tolist() == [0, 1, 2, 3, 0, 1, *[0, 1, 2, 3], *[0, 1]]
    assert batch.src.starts.tolist() == [0, 4, 6, 10, 12, 12, 12], "two sentences, two of padding, two empty ones"
    assert batch.tgt_in_N.tolist() == [BOS_ID, 30, BOS_ID, 40, 41, *rest[:5]]
    assert batch.tgt_out_N.tolist() == [30, EOS_ID, 40, 41, EOS_ID, *rest[:5]]
    assert batch.tgt.positions_N.tolist() == [0, 1, 0, 1, 2, *[0, 1, 2, 3], 0]
    assert batch.tgt.starts.tolist() == [0, 2, 5, 9, 10, 10, 10]
    assert batch.src.max_length == batch.tgt.max_length == 4
    assert (batch.num_src_tokens, batch.num_tgt_tokens) == (6, 5), "what is unused does not count"
    assert {tensor.dtype for tensor in (batch.src_M, batch.tgt_in_N, batch.tgt_out_N, batch.src.positions_N, batch.tgt.positions_N)} == {torch.int64}
    assert batch.src.starts.dtype == batch.tgt.starts.dtype == torch.int32


def test_packed_batches_of_a_shape_have_the_same_sizes() -> None:
    batches = [pack([[5]], [[]], SHAPE), pack([[10, 11, 12], [20], []], [[30], [40, 41], [50, 51, 52]], SHAPE)]
    sizes = [[tensor.shape for tensor in batch.tensors()] for batch in batches]
    assert sizes[0] == sizes[1]
    assert [batch.num_src_tokens for batch in batches] == [2, 7]
    assert [batch.num_tgt_tokens for batch in batches] == [1, 9]


def test_a_packed_batch_lists_all_its_tensors() -> None:
    batch = pack([[10]], [[30]], SHAPE)
    listed = {id(tensor) for tensor in batch.tensors()}
    owners = (batch, batch.src, batch.tgt)
    held = {id(value) for owner in owners for field in dataclasses.fields(owner) if isinstance(value := getattr(owner, field.name), torch.Tensor)}
    assert listed == held
    assert len(listed) == 7


def test_an_empty_side_is_packed_as_its_end_symbol() -> None:
    batch = pack([[], [10]], [[30], []], SHAPE)
    assert batch.src_M.tolist()[:3] == [EOS_ID, 10, EOS_ID]
    assert batch.tgt_in_N.tolist()[:3] == [BOS_ID, 30, BOS_ID]
    assert batch.tgt_out_N.tolist()[:3] == [30, EOS_ID, EOS_ID]


def test_large_ids_of_unsigned_shards_survive_packing() -> None:
    batch = pack([np.array([65535], dtype=np.uint16)], [np.array([65534, 40000], dtype=np.uint16)], SHAPE)
    assert batch.src_M.tolist()[:2] == [65535, EOS_ID]
    assert batch.tgt_out_N.tolist()[:3] == [65534, 40000, EOS_ID]


def test_too_much_for_the_shape_is_our_own_bug() -> None:
    with pytest.raises(ValueError, match="could not broadcast"):
        pack([[4] * 12], [[4]], SHAPE)


class Numbers:
    """Pair n is 10 + n twice, and 50 + n once."""

    def src(self, index: int) -> np.ndarray:
        return np.full(2, 10 + index)

    def tgt(self, index: int) -> np.ndarray:
        return np.full(1, 50 + index)


def test_load_batch_takes_the_pairs_it_is_told() -> None:
    batch = load_batch(Numbers(), np.array([3, 1]))
    assert isinstance(batch, Batch)
    assert batch.src_BS.tolist() == [[13, 13, EOS_ID], [11, 11, EOS_ID]]
    assert batch.tgt_out_BT[:, 0].tolist() == [53, 51]


def test_load_batch_packs_the_pairs_it_is_told() -> None:
    batch = load_batch(Numbers(), np.array([3, 1]), SHAPE)
    assert isinstance(batch, PackedBatch)
    assert batch.src_M.tolist()[:6] == [13, 13, EOS_ID, 11, 11, EOS_ID]
    assert batch.tgt_out_N.tolist()[:4] == [53, EOS_ID, 51, EOS_ID]


def test_prefetching_keeps_order() -> None:
    with Prefetcher(iter(range(50)), depth=3) as items:
        assert list(items) == list(range(50))
        with pytest.raises(StopIteration):
            next(items)


def test_an_error_is_raised_where_its_item_is_asked_for() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ValueError("broken pair")

    with Prefetcher(broken()) as items:
        assert next(items) == 1
        with pytest.raises(ValueError, match="broken pair"):
            next(items)


def test_closing_early_ends_the_thread() -> None:
    def endless() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    before = threading.active_count()
    items = Prefetcher(endless(), depth=2)
    assert next(items) == 0
    items.close()
    assert threading.active_count() == before


def test_it_works_ahead_but_not_without_bound() -> None:
    made: list[int] = []

    def slow() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    with Prefetcher(slow(), depth=3) as items:
        next(items)
        deadline = time.monotonic() + 5
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert 4 <= len(made) <= 6


def test_a_thread_that_waits_for_input_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.data.loader.CLOSE_TIMEOUT_S", 0.1)
    go_on = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        go_on.wait(timeout=20)
        yield 2

    first = Prefetcher(items())
    second = Prefetcher(iter(first))
    assert next(second) == 1
    first.close()
    assert list(second) == [], "who waits for the thread is told that nothing comes"
    second.close()
    second.close()
    go_on.set()
    first._thread.join(timeout=10)
    assert not first._thread.is_alive()
    assert not second._thread.is_alive()
