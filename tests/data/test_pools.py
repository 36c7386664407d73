from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtkit.data.pools import Pool, ShardPools
from mtkit.data.preprocess import PreprocessConfig, preprocess
from mtkit.data.shards import ShardSet
from mtkit.data.token_file import HEADER_SIZE
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import ArtefactError

NUM_PAIRS = 25


@pytest.fixture
def directory(tmp_path: Path, tokenizer: Tokenizer, make_pairs: Any, write_corpus: Any) -> Path:
    """25 pairs in 3 shards."""
    preprocess(
        write_corpus(make_pairs(NUM_PAIRS)), held_out={}, tokenizer=tokenizer, output=tmp_path / "shards", config=PreprocessConfig(shard_pairs=10)
    )
    return tmp_path / "shards"


@pytest.mark.parametrize(("pool_pairs", "num_pools"), [(25, 1), (24, 2), (7, 4), (1, 25)])
def test_a_pool_holds_the_pairs_that_it_names(directory: Path, monkeypatch: pytest.MonkeyPatch, pool_pairs: int, num_pools: int) -> None:
    monkeypatch.setattr("mtkit.data.order.POOL_PAIRS", pool_pairs)
    shards = ShardSet.open(directory)
    source = ShardPools(shards, seed=3)
    assert (source.num_pairs, source.num_pools) == (NUM_PAIRS, num_pools)
    pools = [source.read(1, number) for number in range(num_pools)]
    assert sorted(index for pool in pools for index in pool.indices.tolist()) == list(range(NUM_PAIRS))
    assert [(pool.epoch, pool.number, pool.is_last) for pool in pools] == [(1, number, number == num_pools - 1) for number in range(num_pools)]
    for pool in pools:
        for row, index in enumerate(pool.indices.tolist()):
            assert pool.src(row).tolist() == shards.src(index).tolist()
            assert pool.tgt(row).tolist() == shards.tgt(index).tolist()
        assert pool.src_lengths.tolist() == shards.src_lengths[pool.indices].tolist()
        assert pool.tgt_lengths.tolist() == shards.tgt_lengths[pool.indices].tolist()
        assert pool.src_lengths.dtype == np.int32
        assert pool.src_ids.dtype == np.uint16
        assert pool.src_offsets[-1] == len(pool.src_ids)


def test_the_longest_sentence_is_looked_up_in_small_sets_and_the_limit_of_the_filter_in_large_ones(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = ShardSet.open(directory)
    longest = int(max(shards.src_lengths.max(), shards.tgt_lengths.max()))
    assert ShardPools(shards, seed=3).longest == longest
    monkeypatch.setattr("mtkit.data.order.POOL_PAIRS", NUM_PAIRS - 1)
    assert ShardPools(shards, seed=3).longest == PreprocessConfig().filters.max_length == shards.length_limit == 250
    shards.manifest.config["filters"] = {"max_length": None}
    assert ShardPools(shards, seed=3).longest == longest, "else the shape of packed batches would be that of the first pool"


@pytest.mark.parametrize("config", [{}, {"filters": None}, {"filters": {"max_length": None}}, {"filters": {"max_length": "9"}}, {"filters": [3]}])
def test_a_set_that_says_no_limit_has_none(directory: Path, config: dict[str, Any]) -> None:
    shards = ShardSet.open(directory)
    shards.manifest.config.clear()
    shards.manifest.config.update(config)
    assert shards.length_limit == 0


def pool_of(src_lengths: list[int], tgt_lengths: list[int]) -> Pool:
    sides = [np.cumsum([0, *lengths]) for lengths in (src_lengths, tgt_lengths)]
    ids = [np.zeros(int(offsets[-1]), dtype=np.uint16) for offsets in sides]
    indices = np.arange(len(src_lengths))
    return Pool(epoch=0, number=0, is_last=True, indices=indices, src_ids=ids[0], src_offsets=sides[0], tgt_ids=ids[1], tgt_offsets=sides[1])


def test_the_lengths_of_translations_go_together_and_those_of_shifted_text_do_not() -> None:
    rng = np.random.default_rng(3)
    src = rng.integers(1, 40, size=1000)
    tgt = src + rng.integers(0, 4, size=1000)
    close = pool_of(src.tolist(), tgt.tolist()).length_correlation()
    shifted = pool_of(src.tolist(), np.roll(tgt, 1).tolist()).length_correlation()
    assert close is not None
    assert shifted is not None
    assert close > 0.95
    assert abs(shifted) < 0.1
    assert pool_of(src[1:].tolist(), tgt[1:].tolist()).length_correlation() is None, "too few to tell"
    assert pool_of([5] * 1000, tgt.tolist()).length_correlation() is None
    assert pool_of(src.tolist(), [5] * 1000).length_correlation() is None


def test_a_pool_is_read_again_as_it_was(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.data.order.POOL_PAIRS", 9)
    first, again = (ShardPools(ShardSet.open(directory), seed=3).read(2, 1) for _ in range(2))
    assert np.array_equal(first.indices, again.indices)
    assert np.array_equal(first.tgt_ids, again.tgt_ids)
    assert not np.array_equal(first.indices, ShardPools(ShardSet.open(directory), seed=3).read(3, 1).indices)


def test_a_pool_does_not_need_the_files_any_more(directory: Path) -> None:
    pool = ShardPools(ShardSet.open(directory), seed=3).read(0, 0)
    assert pool.src_ids.flags.owndata
    assert pool.tgt_ids.flags.owndata


def test_a_damaged_shard_is_named(directory: Path) -> None:
    path = directory / "shard-00001.tgt"
    data = bytearray(path.read_bytes())
    data[HEADER_SIZE + 4] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtefactError, match=r"shard-00001\.tgt: the ids in bytes"):
        ShardPools(ShardSet.open(directory), seed=3).read(0, 0)
