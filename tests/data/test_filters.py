import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtkit.data.filters import (
    DUPLICATE,
    EMPTY,
    IDENTICAL,
    LENGTH_RATIO,
    NONPRINTING,
    REASONS,
    TOO_LONG,
    FilterConfig,
    SeenHashes,
    describe_drops,
    hash_pairs,
    nonprinting_share,
    text_reason,
    token_reasons,
)
from mtkit.errors import ConfigError

ALL_OFF = FilterConfig(max_length=None, max_length_ratio=None, max_nonprinting_share=None)


@pytest.mark.parametrize(
    ("src", "tgt", "config", "reason"),
    [
        ("a", "b", FilterConfig(), None),
        ("", "b", FilterConfig(), EMPTY),
        ("a", "", ALL_OFF, EMPTY),
        ("a", " \t\u3000\u2028", ALL_OFF, EMPTY),  # white space is no text
        ("\u200b\u200e", "a", ALL_OFF, EMPTY),
        ("", "", FilterConfig(drop_identical=True), EMPTY),  # the first reason counts
        ("New York", "New York", FilterConfig(), None),
        ("New York", " New York ", FilterConfig(drop_identical=True), IDENTICAL),
        ("New York", "new york", FilterConfig(drop_identical=True), None),
        ("a\x00\x00", "b", FilterConfig(), NONPRINTING),
        ("a", "\ufffd\ufffd\ufffdb", FilterConfig(), NONPRINTING),
        ("a\x00\x00", "b", ALL_OFF, None),
        ("\u0646\u200c", "\u200ea", FilterConfig(), None),  # marks beside letters belong to the spelling
    ],
)
def test_text_reason(src: str, tgt: str, config: FilterConfig, reason: str | None) -> None:
    assert text_reason(src, tgt, config) == reason


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("plain text", 0.0),
        ("", 0.0),
        ("a\tb\u00a0c\u2028d\x0be\x85f", 0.0),  # white space
        ("نمی\u200cخواهم क\u094d\u200dष 👩\u200d🔬", 0.0),  # joiners are spelling
        ("a\x00b\x1b", 0.5),
        ("\ue000a\ufffdb", 0.5),
        ("\ufffd", 1.0),
    ],
)
def test_nonprinting_share(text: str, share: float) -> None:
    assert nonprinting_share(text) == share


@pytest.mark.parametrize(
    ("src_length", "tgt_length", "reason"),
    [
        (250, 250, None),
        (251, 250, TOO_LONG),
        (250, 251, TOO_LONG),
        (251, 1, TOO_LONG),  # too long before too uneven
        (9, 1, None),
        (10, 1, LENGTH_RATIO),
        (1, 10, LENGTH_RATIO),
        (0, 5, EMPTY),
        (300, 0, EMPTY),
    ],
)
def test_token_reasons(src_length: int, tgt_length: int, reason: str | None) -> None:
    # The pair stands between two good ones, which must not be touched.
    lengths = [np.array([5, length, 5], dtype=np.int32) for length in (src_length, tgt_length)]
    found = {name: mask.tolist() for name, mask in token_reasons(lengths[0], lengths[1], FilterConfig()).items() if mask.any()}
    assert found == ({} if reason is None else {reason: [False, True, False]})


def test_filters_that_are_off_let_everything_but_empty_pairs_through() -> None:
    lengths = np.array([100_000, 0], dtype=np.int32), np.array([1, 1], dtype=np.int32)
    assert {name: mask.tolist() for name, mask in token_reasons(*lengths, ALL_OFF).items()} == {EMPTY: [False, True]}
    assert ALL_OFF.active_reasons() == (EMPTY,)


def test_active_reasons_are_in_order() -> None:
    assert FilterConfig(drop_identical=True, drop_duplicates=True).active_reasons() == REASONS
    assert DUPLICATE not in FilterConfig().active_reasons()


@pytest.mark.parametrize(
    ("key", "value"), [("max_length", 0), ("max_length_ratio", 0.5), ("max_nonprinting_share", 1.5), ("max_nonprinting_share", -0.1)]
)
def test_config_refuses_values_out_of_range(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^{key} must be .* but is {value}"):
        FilterConfig(**{key: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dropped", "counts", "hint"),
    [
        ({EMPTY: 3, TOO_LONG: 0}, "empty 3", "Look at the text: is one of its sides blank?"),
        (
            {EMPTY: 1, NONPRINTING: 3, TOO_LONG: 2},
            "empty 1, nonprinting 3, too_long 2",
            "what dropped most is the setting filters.max_nonprinting_share",
        ),
        ({EMPTY: 0, LENGTH_RATIO: 1}, "length_ratio 1", "the setting filters.max_length_ratio"),
    ],
)
def test_where_nothing_is_left_the_filter_that_dropped_most_is_named(dropped: dict[str, int], counts: str, hint: str) -> None:
    found = describe_drops(dropped)
    assert found[0] == counts
    assert hint in found[1]


def test_hash_depends_on_both_sides_and_where_they_meet() -> None:
    hashes = hash_pairs([("a", "b"), (" a ", "b"), ("b", "a"), ("ab", ""), ("", "ab"), ("a b", "")])
    assert hashes.dtype == np.uint64
    assert hashes[0] == hashes[1]
    assert len(set(hashes.tolist())) == 5


@given(st.lists(st.lists(st.integers(0, 40) | st.integers(2**64 - 3, 2**64 - 1), max_size=30), max_size=12))
def test_seen_hashes_behave_like_a_set(batches: list[list[int]]) -> None:
    seen, expected = SeenHashes(), set()
    for batch in batches:
        is_new = seen.add(np.array(batch, dtype=np.uint64))
        for value, was_new in zip(batch, is_new.tolist(), strict=True):
            assert was_new == (value not in expected)
            expected.add(value)
    assert len(seen) == len(expected)


def test_seen_hashes_stay_compact() -> None:
    seen = SeenHashes()
    values = np.random.default_rng(0).permutation(100_000).astype(np.uint64)
    for batch in np.split(values, 100):
        seen.add(batch)
    assert len(seen._runs) <= 8  # one per power of two of 100 batches
    assert sum(run.nbytes for run in seen._runs) == 800_000
