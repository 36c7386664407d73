import numpy as np
import pytest

from mtkit.benchmark.synthetic import synthetic_pairs, synthetic_text


@pytest.mark.parametrize("mean_length", [15.0, 27.0])
def test_lengths_are_those_of_sentences(mean_length: float) -> None:
    pairs = synthetic_pairs(20_000, vocab_size=500, mean_length=mean_length)
    assert len(pairs.src_lengths) == len(pairs.tgt_lengths) == 20_000
    assert float(pairs.tgt_lengths.mean()) == pytest.approx(mean_length, rel=0.05)
    assert float(pairs.src_lengths.mean()) == pytest.approx(mean_length, rel=0.05)
    assert int(pairs.tgt_lengths.min()) >= 1
    assert float(pairs.tgt_lengths.std()) > 0.2 * mean_length, "sentences differ in length, or there would be no padding"
    assert float(np.corrcoef(pairs.src_lengths, pairs.tgt_lengths)[0, 1]) > 0.7


def test_ids_have_the_length_and_the_range_that_is_said() -> None:
    pairs = synthetic_pairs(3000, vocab_size=50)
    for index in range(3000):
        src, tgt = pairs.src(index), pairs.tgt(index)
        assert (len(src), len(tgt)) == (pairs.src_lengths[index], pairs.tgt_lengths[index])
        assert src.min() >= 4
        assert max(src.max(), tgt.max()) < 50


def test_the_seed_decides() -> None:
    first, again, other = (synthetic_pairs(100, vocab_size=50, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.src_lengths, again.src_lengths)
    assert np.array_equal(first.src(3), again.src(3))
    assert not np.array_equal(first.src_lengths, other.src_lengths)


def test_text_has_words_and_lengths_like_captions() -> None:
    text = synthetic_text(2000)
    assert len(text) == 2000
    assert all(side.endswith(".") and side[0].isupper() and "\n" not in side for pair in text for side in pair)
    lengths = [len(side.split()) for pair in text for side in pair]
    assert sum(lengths) / len(lengths) == pytest.approx(11.0, abs=1.5)
    words = [word for src, _ in text for word in src.lower().rstrip(".").split()]
    counts = sorted((words.count(word) for word in set(words[:300])), reverse=True)
    assert counts[0] > 10 * counts[len(counts) // 2], "few words are frequent, most are rare"
    assert synthetic_text(5) == synthetic_text(5) != synthetic_text(5, seed=2)
