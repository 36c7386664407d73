"""Batches of tensors, and the thread that makes them ahead of time."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mtkit.data.loader import Prefetcher, collate, load_batch
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


def test_load_batch_takes_the_pairs_it_is_told() -> None:
    class Numbers:
        def src(self, index: int) -> np.ndarray:
            return np.full(2, 10 + index)

        def tgt(self, index: int) -> np.ndarray:
            return np.full(1, 50 + index)

    batch = load_batch(Numbers(), np.array([3, 1]))
    assert batch.src_BS.tolist() == [[13, 13, EOS_ID], [11, 11, EOS_ID]]
    assert batch.tgt_out_BT[:, 0].tolist() == [53, 51]


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
