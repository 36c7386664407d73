import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtkit.data.sample import MAX_SENTENCE_CHARS, SentenceSample, cut_line


def _sample_of(lines: list[str], *, capacity: int | None, seed: int = 1) -> SentenceSample:
    sample = SentenceSample(capacity=capacity, seed=seed)
    for line in lines:
        sample.add(line)
    return sample


def test_everything_is_kept_in_order_while_it_fits() -> None:
    sample = _sample_of(["a", "b", "c"], capacity=3)
    assert sample.sentences == ["a", "b", "c"]
    assert _sample_of(["a", "b", "c"], capacity=None).sentences == ["a", "b", "c"]


def test_blank_lines_are_neither_kept_nor_counted() -> None:
    sample = _sample_of(["", "a", "  ", "\u3000", "b"], capacity=10)
    assert sample.sentences == ["a", "b"]
    assert sample.num_lines == 2


def test_the_seed_alone_decides_what_is_kept() -> None:
    lines = [str(number) for number in range(1000)]
    first = _sample_of(lines, capacity=20)
    assert first.sentences == _sample_of(lines, capacity=20).sentences
    assert first.sha256() == _sample_of(lines, capacity=20).sha256()
    assert first.sentences != _sample_of(lines, capacity=20, seed=2).sentences
    assert first.sha256() != _sample_of(lines, capacity=20, seed=2).sha256()
    assert len(first.sentences) == 20
    assert first.num_lines == 1000


def test_every_sentence_is_kept_equally_often() -> None:
    num_runs, capacity, population = 2000, 5, 20
    counts = dict.fromkeys((str(number) for number in range(population)), 0)
    for seed in range(num_runs):
        for sentence in _sample_of(list(counts), capacity=capacity, seed=seed).sentences:
            counts[sentence] += 1
    share = capacity / population
    tolerance = 5 * math.sqrt(num_runs * share * (1 - share))  # five standard deviations
    assert all(abs(count - num_runs * share) < tolerance for count in counts.values()), counts


def test_an_over_long_line_is_used_in_pieces() -> None:
    line = " ".join(f"word{number}" for number in range(5000))
    sample = _sample_of([line], capacity=None)
    assert sample.num_lines == 1
    assert sample.num_sentences == len(sample.sentences) > 1
    assert " ".join(sample.sentences) == line
    assert max(map(len, sample.sentences)) <= MAX_SENTENCE_CHARS


@pytest.mark.parametrize(
    ("line", "pieces"),
    [
        ("abcd", ["abcd"]),
        ("ab cd", ["ab", "cd"]),
        ("abcd efgh", ["abcd", "efgh"]),
        ("abcdefghij", ["abcd", "efgh", "ij"]),
        (" bcdefg", [" bcd", "efg"]),
        ("ab cdefgh", ["ab", "cdef", "gh"]),
    ],
)
def test_lines_are_cut_at_spaces_where_there_are_any(line: str, pieces: list[str]) -> None:
    assert list(cut_line(line, limit=4)) == pieces


@given(st.text(alphabet=" ab"), st.integers(1, 9))
def test_cutting_loses_nothing_but_spaces(line: str, limit: int) -> None:
    pieces = list(cut_line(line, limit=limit))
    assert "".join(pieces).replace(" ", "") == line.replace(" ", "")
    assert all(len(piece) <= limit for piece in pieces)
    assert (len(pieces) == 1) == (len(line) <= limit)
