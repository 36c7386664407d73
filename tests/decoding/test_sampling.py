"""Greedy search and sampling against tables of probabilities."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mtkit.data.tokenizer import EOS_ID
from mtkit.decoding.sampling import _draw, greedy_search, sample
from mtkit.decoding.search import Hypothesis
from mtkit.errors import MTKitError
from tests.decoding.tables import VOCAB_SIZE, TableStep, fixed_table, random_table


def first_tokens(probabilities: Sequence[float], *, num_samples: int = 20_000, **options: Any) -> list[float]:
    """Shares of the first pieces among samples of one step; EOS is the empty hypothesis."""
    table = fixed_table({}, default=probabilities)
    (found,) = sample(TableStep([table]), max_lengths=[1], seeds=[11], num_samples=num_samples, length_penalty=0.0, **options)
    counts = [0] * VOCAB_SIZE
    for hypothesis in found:
        counts[hypothesis.tokens[0] if hypothesis.tokens else EOS_ID] += 1
    return [count / num_samples for count in counts]


def test_samples_follow_the_distribution() -> None:
    assert first_tokens([0.5, 0.3, 0.05, 0.15]) == pytest.approx([0.5, 0.3, 0.05, 0.15], abs=0.015)


def test_temperature_shapes_the_distribution() -> None:
    weights = [0.5**2, 0.3**2, 0.05**2, 0.15**2]
    assert first_tokens([0.5, 0.3, 0.05, 0.15], temperature=0.5) == pytest.approx([w / sum(weights) for w in weights], abs=0.015)


def test_top_k_and_top_p_leave_out_the_tail() -> None:
    assert first_tokens([0.5, 0.3, 0.05, 0.15], top_k=2) == pytest.approx([0.625, 0.375, 0.0, 0.0], abs=0.015)
    assert first_tokens([0.5, 0.3, 0.05, 0.15], top_p=0.9) == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.0, 0.15 / 0.95], abs=0.015)
    assert first_tokens([0.5, 0.3, 0.05, 0.15], top_p=0.01, num_samples=100) == [1.0, 0.0, 0.0, 0.0]


def test_top_p_counts_the_probability_after_temperature_and_without_forbidden_ids() -> None:
    flat = [probability**0.1 for probability in (0.5, 0.3, 0.05, 0.15)]  # shares 0.28, 0.26, 0.22, 0.24
    shares = [weight / (sum(flat) - flat[2]) for weight in flat]
    assert first_tokens([0.5, 0.3, 0.05, 0.15], temperature=10.0, top_p=0.7) == pytest.approx([shares[0], shares[1], 0.0, shares[3]], abs=0.015)
    assert first_tokens([0.5, 0.3, 0.05, 0.15], forbidden_ids=[0], top_p=0.55) == pytest.approx([0.0, 1.0, 0.0, 0.0])


def test_a_sampled_log_prob_is_the_models_own() -> None:
    table = random_table(5)
    (found,) = sample(TableStep([table]), max_lengths=[6], seeds=[3], num_samples=20, length_penalty=0.6, temperature=1.7, top_k=3)
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
    for hypothesis in found:
        path = (*hypothesis.tokens, EOS_ID) if hypothesis.finished else hypothesis.tokens
        assert hypothesis.log_prob == pytest.approx(sum(float(table(path[:index])[piece]) for index, piece in enumerate(path)), abs=1e-5)


def test_samples_do_not_depend_on_the_batch() -> None:
    tables, caps, seeds = [random_table(index) for index in range(5)], [4, 9, 1, 6, 7], [10, 20, 30, 40, 50]

    def draw(chosen: Sequence[int]) -> list[list[Hypothesis]]:
        step = TableStep([tables[index] for index in chosen])
        return sample(step, max_lengths=[caps[i] for i in chosen], seeds=[seeds[i] for i in chosen], num_samples=3, length_penalty=1.0)

    singles = [draw([index])[0] for index in range(5)]
    assert draw(range(5)) == singles
    assert draw([3, 1, 4, 0, 2]) == [singles[index] for index in (3, 1, 4, 0, 2)]
    assert sample(TableStep(tables), max_lengths=caps, seeds=[s + 1 for s in seeds], num_samples=3, length_penalty=1.0) != singles


def test_top_k_one_is_greedy() -> None:
    tables = [random_table(index, vocab_size=6) for index in range(5)]
    greedy = greedy_search(TableStep(tables), max_lengths=[8] * 5, length_penalty=0.6)
    assert sample(TableStep(tables), max_lengths=[8] * 5, seeds=[1] * 5, num_samples=1, length_penalty=0.6, top_k=1) == greedy


def test_a_rounding_error_changes_no_sample() -> None:
    """Thousands of pieces are about as unlikely: which of two comes first by probability must not decide on what is drawn."""
    generator = torch.Generator().manual_seed(5)
    log_probs_RV = torch.full((64, 5000), -9.0).log_softmax(dim=1)
    noise_RV = torch.randn(log_probs_RV.shape, generator=generator) * 1e-6
    uniform_R = torch.rand(64, generator=generator)
    plain, noisy = (_draw(rows, uniform_R, temperature=1.0, top_k=None, top_p=None) for rows in (log_probs_RV, log_probs_RV + noise_RV))
    assert int((plain != noisy).sum()) <= 2
    assert int((plain - noisy).abs().max()) <= 1
    assert len(set(plain.tolist())) > 50


@pytest.mark.parametrize(("temperature", "expected"), [(1e-300, [1.0, 0.0, 0.0, 0.0]), (1e-40, [1.0, 0.0, 0.0, 0.0]), (1e300, [0.25] * 4)])
def test_extreme_temperatures(temperature: float, expected: list[float]) -> None:
    assert first_tokens([0.5, 0.3, 0.05, 0.15], temperature=temperature) == pytest.approx(expected, abs=0.015)


def test_no_temperature_makes_forbidden_pieces_possible() -> None:
    assert first_tokens([0.5, 0.3, 0.05, 0.15], temperature=1e300, forbidden_ids=[0, 3]) == pytest.approx([0.0, 0.5, 0.5, 0.0], abs=0.015)


def test_many_rows_are_drawn_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    log_probs_RV, uniform_R = torch.randn((50, 30), generator=generator).log_softmax(dim=1), torch.rand(50, generator=generator)
    whole = _draw(log_probs_RV, uniform_R, temperature=1.0, top_k=9, top_p=0.9)
    monkeypatch.setattr("mtkit.decoding.sampling._DRAWN_ELEMENTS", 100)
    assert torch.equal(_draw(log_probs_RV, uniform_R, temperature=1.0, top_k=9, top_p=0.9), whole)


def test_nan_is_refused() -> None:
    table = fixed_table({}, default=[0.5, 0.3, float("nan"), 0.2])
    with pytest.raises(MTKitError, match="NaN"):
        sample(TableStep([table]), max_lengths=[3], seeds=[1], num_samples=2, length_penalty=0.0)
