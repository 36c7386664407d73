import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtkit.data import blocks as blocks_module
from mtkit.data.blocks import BlockEncoder, EncodedBlock, encode_blocks, split_blocks
from mtkit.data.filters import EMPTY, LENGTH_RATIO, TOO_LONG, FilterConfig, hash_pairs
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import MTKitError

CONFIG = FilterConfig(max_length=100, drop_duplicates=True)


def rows(ids: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> list[list[int]]:
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if len(lengths) else []


@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 5), st.integers(1, 40))
def test_blocks_are_bounded_and_end_where_shards_do(num_pairs: int, shard_pairs: int, block_pairs: int, block_characters: int) -> None:
    pairs = [("x" * (number % 7), "y" * (number % 5)) for number in range(num_pairs)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "BLOCK_PAIRS", block_pairs)
        patch.setattr(blocks_module, "BLOCK_CHARACTERS", block_characters)
        blocks = list(split_blocks(iter(pairs), shard_pairs=shard_pairs))
    assert [pair for block in blocks for pair in block] == pairs
    position = 0
    for block in blocks:
        assert 0 < len(block) <= block_pairs
        assert sum(len(src) + len(tgt) for src, tgt in block[:-1]) < block_characters
        assert position // shard_pairs == (position + len(block) - 1) // shard_pairs
        position += len(block)


def test_a_block_is_filtered_and_encoded(tokenizer: Tokenizer) -> None:
    pairs = [("Anna sees the house", "Anna sieht Haus"), ("", "leer"), ("Anna " * 120, "Anna"), ("Anna", "Anna " * 12), ("Bernd", "Bernd")]
    block = BlockEncoder(tokenizer, CONFIG).encode(pairs)
    kept = [pairs[0], pairs[4]]
    assert rows(block.src_ids, block.src_lengths_N) == tokenizer.encode([src for src, _ in kept], "src")
    assert rows(block.tgt_ids, block.tgt_lengths_N) == tokenizer.encode([tgt for _, tgt in kept], "tgt")
    assert block.hashes_N is not None
    assert block.hashes_N.tolist() == hash_pairs(kept).tolist()
    assert (block.num_read, block.dropped) == (5, {EMPTY: 1, TOO_LONG: 1, LENGTH_RATIO: 1})


def test_emptiness_is_tested_after_tokenization(tokenizer: Tokenizer) -> None:
    # U+2581 is what sentencepiece writes for a space: text to str.strip, nothing to the tokenizer.
    assert "\u2581".strip()
    assert tokenizer.encode(["\u2581"], "src") == [[]]
    block = BlockEncoder(tokenizer, CONFIG).encode([("\u2581", "Haus"), ("house", "\u2581\u2581")])
    assert (len(block.src_lengths_N), block.dropped) == (0, {EMPTY: 2})


def test_each_side_has_its_own_vocabulary(other_tokenizer: Tokenizer) -> None:
    text = "Anna sees the Käse"
    block = BlockEncoder(other_tokenizer, CONFIG).encode([(text, text)])
    assert block.src_ids.tolist() == other_tokenizer.encode([text], "src")[0]
    assert block.tgt_ids.tolist() == other_tokenizer.encode([text], "tgt")[0]
    assert block.src_ids.tolist() != block.tgt_ids.tolist()


def test_a_block_of_nothing(tokenizer: Tokenizer) -> None:
    block = BlockEncoder(tokenizer, CONFIG).encode([("", "")])
    assert (len(block.src_ids), len(block.tgt_lengths_N), block.dropped) == (0, 0, {EMPTY: 1})


def test_select_takes_whole_rows(tokenizer: Tokenizer, make_pairs: Any) -> None:
    pairs = make_pairs(5)
    block = BlockEncoder(tokenizer, CONFIG).encode(pairs)
    is_kept = np.array([True, False, True, True, False])
    selected = block.select(is_kept, reason="duplicate")
    assert rows(selected.src_ids, selected.src_lengths_N) == tokenizer.encode([pairs[index][0] for index in (0, 2, 3)], "src")
    assert rows(selected.tgt_ids, selected.tgt_lengths_N) == tokenizer.encode([pairs[index][1] for index in (0, 2, 3)], "tgt")
    assert selected.dropped == {"duplicate": 2}
    assert block.dropped == {}


# --- several processes ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer_directory(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    tokenizer.write_files(directory)
    return directory


def run(tokenizer: Tokenizer, directory: Path, blocks: Iterator[list[tuple[str, str]]], num_workers: int) -> Iterator[EncodedBlock]:
    return encode_blocks(blocks, tokenizer=tokenizer, tokenizer_directory=directory, filters=CONFIG, num_workers=num_workers)


def cut(pairs: list[tuple[str, str]], size: int) -> Iterator[list[tuple[str, str]]]:
    return iter([pairs[start : start + size] for start in range(0, len(pairs), size)])


@pytest.mark.parametrize("num_workers", [2, 3])
def test_processes_give_the_blocks_of_one_process_in_order(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, tokenizer_directory: Path, make_pairs: Any, num_workers: int
) -> None:
    monkeypatch.setattr(blocks_module, "SERIAL_BLOCKS", 1)
    pairs = make_pairs(400)
    pairs[3:3] = [("", "x"), ("Anna " * 120, "Anna")]
    alone = list(run(tokenizer, tokenizer_directory, cut(pairs, 50), 1))
    together = run(tokenizer, tokenizer_directory, cut(pairs, 50), num_workers)
    first = next(together)
    assert len(multiprocessing.active_children()) == num_workers
    for one, other in zip(alone, [first, *together], strict=True):
        assert (one.num_read, one.dropped) == (other.num_read, other.dropped)
        for name in ("src_ids", "src_lengths_N", "tgt_ids", "tgt_lengths_N", "hashes_N"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)
    assert not multiprocessing.active_children()


def test_a_small_corpus_starts_no_process(tokenizer: Tokenizer, tokenizer_directory: Path, make_pairs: Any) -> None:
    results = run(tokenizer, tokenizer_directory, cut(make_pairs(30), 10), 2)
    next(results)
    assert not multiprocessing.active_children()
    assert sum(block.num_read for block in results) == 20


def test_no_process_is_started_without_a_block_for_it(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, tokenizer_directory: Path, make_pairs: Any
) -> None:
    monkeypatch.setattr(blocks_module, "SERIAL_BLOCKS", 1)
    results = run(tokenizer, tokenizer_directory, cut(make_pairs(30), 15), 9)
    next(results)
    assert len(multiprocessing.active_children()) == 2
    assert sum(block.num_read for block in results) == 15


def test_closing_ends_the_processes(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, tokenizer_directory: Path, make_pairs: Any) -> None:
    monkeypatch.setattr(blocks_module, "SERIAL_BLOCKS", 1)
    results = run(tokenizer, tokenizer_directory, cut(make_pairs(400), 20), 2)
    next(results)
    start = time.monotonic()
    results.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()
    assert time.monotonic() - start < 4  # they ended by themselves, not for a timeout


def test_a_killed_process_is_reported(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, tokenizer_directory: Path, make_pairs: Any) -> None:
    monkeypatch.setattr(blocks_module, "SERIAL_BLOCKS", 1)
    results = run(tokenizer, tokenizer_directory, cut(make_pairs(400), 20), 2)
    next(results)
    victim = multiprocessing.active_children()[0]
    os.kill(victim.pid or 0, signal.SIGKILL)
    with pytest.raises(MTKitError, match=r"a worker process ended unexpectedly \(exit code -9\)"):
        list(results)
    assert not multiprocessing.active_children()


def test_an_exception_in_a_process_is_raised_here(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, tokenizer_directory: Path, make_pairs: Any
) -> None:
    monkeypatch.setattr(blocks_module, "SERIAL_BLOCKS", 1)
    bad: Any = [("one side only",)]
    with pytest.raises((TypeError, ValueError)):
        list(run(tokenizer, tokenizer_directory, iter([make_pairs(5), make_pairs(5), bad]), 2))
    assert not multiprocessing.active_children()
