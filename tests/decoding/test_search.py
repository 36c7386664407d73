"""Beam search against hand-made probability tables and brute force, and the rules that it shares with greedy search and sampling."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtkit.data.tokenizer import EOS_ID
from mtkit.decoding.sampling import greedy_search, sample
from mtkit.decoding.scoring import PenaltyKind, length_penalty
from mtkit.decoding.search import Hypothesis, beam_search, largest_of_rows
from mtkit.errors import ConfigError, MTKitError
from tests.decoding.tables import TWO_PATHS, VOCAB_SIZE, Prefix, Table, TableStep, assert_same, fixed_table, random_table


def brute_force(table: Table, *, cap: int, alpha: float, kind: PenaltyKind, vocab_size: int = VOCAB_SIZE) -> list[Hypothesis]:
    """Every hypothesis there is, the best first, the unfinished ones last. In fp64, with the formulas typed out."""

    def penalty(length: int) -> float:
        return float(((5 + length) / 6) ** alpha if kind == "gnmt" else length**alpha)

    pieces = [piece for piece in range(vocab_size) if piece != EOS_ID]
    finished: list[Hypothesis] = []
    unfinished: list[Hypothesis] = []
    for length in range(cap + 1):
        for tokens in itertools.product(pieces, repeat=length):
            path = tokens if length == cap else (*tokens, EOS_ID)
            log_prob = sum(float(table(path[:index])[piece]) for index, piece in enumerate(path))
            hypothesis = Hypothesis(tokens=tokens, score=log_prob / penalty(len(path)), log_prob=log_prob, finished=length < cap)
            (finished if hypothesis.finished else unfinished).append(hypothesis)
    return sorted(finished, key=lambda h: -h.score) + sorted(unfinished, key=lambda h: -h.score)


# --- against brute force ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gnmt", "power"])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.5])
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_enough_beam_finds_the_exhaustive_optimum(seed: int, alpha: float, kind: PenaltyKind) -> None:
    table = random_table(seed)
    (found,) = beam_search(TableStep([table]), max_lengths=[6], beam_size=243, length_penalty=alpha, penalty=kind, n_best=20)
    assert_same(found, brute_force(table, cap=6, alpha=alpha, kind=kind)[:20])


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_all_hypotheses_of_a_small_space_finished_first_then_unfinished(alpha: float) -> None:
    table = random_table(7)
    expected = brute_force(table, cap=2, alpha=alpha, kind="gnmt")
    assert len(expected) == 4 + 9
    (found,) = beam_search(TableStep([table]), max_lengths=[2], beam_size=20, length_penalty=alpha, n_best=20)
    assert_same(found, expected)


def plain_beam_search(table: Table, *, cap: int, beam_size: int, alpha: float, vocab_size: int) -> list[Hypothesis]:
    """The definition of the search, written without tensors and without the stop that looks ahead: the `beam_size` best hypotheses."""
    live: list[tuple[float, Prefix]] = [(0.0, ())]
    finished: list[Hypothesis] = []
    for length in range(1, cap + 1):
        divisor = ((5 + length) / 6) ** alpha
        candidates = sorted(
            ((log_prob + float(table(prefix)[piece]), (*prefix, piece)) for log_prob, prefix in live for piece in range(vocab_size)),
            key=lambda candidate: -candidate[0],
        )
        ended = [(log_prob, path) for log_prob, path in candidates[:beam_size] if path[-1] == EOS_ID]
        finished += [Hypothesis(tokens=path[:-1], score=log_prob / divisor, log_prob=log_prob, finished=True) for log_prob, path in ended]
        live = [(log_prob, path) for log_prob, path in candidates if path[-1] != EOS_ID][:beam_size]
        if len(ended) == beam_size:
            live = []
    divisor = ((5 + cap) / 6) ** alpha
    unfinished = [Hypothesis(tokens=path, score=log_prob / divisor, log_prob=log_prob, finished=False) for log_prob, path in live]
    return [*sorted(finished, key=lambda h: -h.score), *unfinished][:beam_size]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("beam_size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_the_search_is_its_definition_and_stopping_early_loses_nothing(seed: int, beam_size: int, alpha: float) -> None:
    table = random_table(seed, vocab_size=6)
    (found,) = beam_search(TableStep([table]), max_lengths=[7], beam_size=beam_size, length_penalty=alpha, n_best=beam_size)
    assert_same(found, plain_beam_search(table, cap=7, beam_size=beam_size, alpha=alpha, vocab_size=6))


# --- scores by hand ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "kind", "best", "score"),
    [
        (0.0, "gnmt", (0,), math.log(0.5 * 0.8)),
        (0.6, "gnmt", (0,), math.log(0.5 * 0.8) / (7 / 6) ** 0.6),
        (1.0, "gnmt", (0,), math.log(0.5 * 0.8) / (7 / 6)),
        (2.0, "gnmt", (1, 2), math.log(0.4 * 0.9 * 0.9) / (8 / 6) ** 2),
        (0.0, "power", (0,), math.log(0.5 * 0.8)),
        (0.6, "power", (1, 2), math.log(0.4 * 0.9 * 0.9) / 3**0.6),
        (1.0, "power", (1, 2), math.log(0.4 * 0.9 * 0.9) / 3),
    ],
)
def test_scores_count_eos_and_not_bos(alpha: float, kind: PenaltyKind, best: Prefix, score: float) -> None:
    (found,) = beam_search(TableStep([TWO_PATHS]), max_lengths=[8], beam_size=4, length_penalty=alpha, penalty=kind)
    assert found[0].tokens == best
    assert found[0].finished
    assert found[0].score == pytest.approx(score, abs=1e-6)


def test_the_longer_hypothesis_wins_although_the_first_to_end_was_the_best_until_then() -> None:
    step = TableStep([TWO_PATHS])
    (found,) = beam_search(step, max_lengths=[8], beam_size=2, length_penalty=1.0, penalty="power", n_best=2)
    assert [h.tokens for h in found] == [(1, 2), (0,)]
    assert found[1].score == pytest.approx(math.log(0.5 * 0.8) / 2, abs=1e-6)


def test_alpha_zero_is_the_plain_sum_and_stops_as_soon_as_nothing_can_win() -> None:
    step = TableStep([TWO_PATHS])
    (found,) = beam_search(step, max_lengths=[50], beam_size=2, length_penalty=0.0)
    assert found[0].score == found[0].log_prob == pytest.approx(math.log(0.4), abs=1e-6)
    assert step.num_calls == 2  # "1 2" has 0.36 by then and can only fall


def test_an_unfinished_score_counts_the_tokens_it_has() -> None:
    never = fixed_table({}, default=[0.6, 0.3, 0.1, 0.0])
    (found,) = beam_search(TableStep([never]), max_lengths=[3], beam_size=2, length_penalty=1.0, penalty="power", n_best=2)
    assert [h.finished for h in found] == [False, False]
    assert found[0].tokens == (0, 0, 0)
    assert found[0].log_prob == pytest.approx(3 * math.log(0.6), abs=1e-6)
    assert found[0].score == pytest.approx(math.log(0.6), abs=1e-6)


# --- invariants -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(20))
def test_beam_one_equals_greedy(seed: int, alpha: float) -> None:
    tables = [random_table(100 * seed + index, vocab_size=7) for index in range(4)]
    caps = [3, 12, 1, 8]
    beam = beam_search(TableStep(tables), max_lengths=caps, beam_size=1, length_penalty=alpha)
    greedy = greedy_search(TableStep(tables), max_lengths=caps, length_penalty=alpha)
    for ours, theirs in zip(beam, greedy, strict=True):
        assert_same(ours, theirs)


@settings(max_examples=60, deadline=None)
@given(
    sentences=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 9)), min_size=1, max_size=6),
    beam_size=st.integers(1, 6),
    alpha=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    vocab_size=st.integers(4, 9),
    data=st.data(),
)
def test_a_batch_equals_single_runs_in_any_order(
    sentences: list[tuple[int, int]], beam_size: int, alpha: float, vocab_size: int, data: st.DataObject
) -> None:
    n_best = data.draw(st.integers(1, beam_size))
    order = data.draw(st.permutations(range(len(sentences))))
    tables = [random_table(seed, vocab_size=vocab_size) for seed, _ in sentences]
    caps = [cap for _, cap in sentences]

    def search(chosen: Sequence[int]) -> list[list[Hypothesis]]:
        step = TableStep([tables[index] for index in chosen])
        return beam_search(step, max_lengths=[caps[index] for index in chosen], beam_size=beam_size, length_penalty=alpha, n_best=n_best)

    singles = [search([index])[0] for index in range(len(sentences))]
    assert search(range(len(sentences))) == singles
    assert search(order) == [singles[index] for index in order]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), cap=st.integers(1, 8), beam_size=st.integers(2, 7), alpha=st.sampled_from([0.0, 0.6, 1.0]))
def test_n_best_is_sorted_distinct_and_a_prefix_of_a_longer_n_best(seed: int, cap: int, beam_size: int, alpha: float) -> None:
    table = random_table(seed, vocab_size=5)

    def search(n_best: int) -> list[Hypothesis]:
        return beam_search(TableStep([table]), max_lengths=[cap], beam_size=beam_size, length_penalty=alpha, n_best=n_best)[0]

    full = search(beam_size)
    ranked = sorted(full, key=lambda h: (not h.finished, -h.score))
    assert full == ranked
    assert len({(h.tokens, h.finished) for h in full}) == len(full)
    for n_best in range(1, beam_size):
        assert search(n_best) == full[:n_best]


def test_log_probs_are_those_of_the_table() -> None:
    table = random_table(3, vocab_size=8)
    (found,) = beam_search(TableStep([table]), max_lengths=[10], beam_size=5, length_penalty=0.6, n_best=5)
    for hypothesis in found:
        path = (*hypothesis.tokens, EOS_ID) if hypothesis.finished else hypothesis.tokens
        assert hypothesis.log_prob == pytest.approx(sum(float(table(path[:index])[piece]) for index, piece in enumerate(path)), abs=1e-5)
        assert hypothesis.score == pytest.approx(hypothesis.log_prob / length_penalty(len(path), 0.6, "gnmt"), abs=1e-6)


def test_finished_sentences_leave_the_batch() -> None:
    at_once = fixed_table({}, default=[0.01, 0.01, 0.01, 0.97])
    never = fixed_table({}, default=[0.5, 0.3, 0.2, 0.0])
    step = TableStep([at_once, never, at_once])
    found = beam_search(step, max_lengths=[9, 4, 9], beam_size=2, length_penalty=0.0)
    assert [hypotheses[0].tokens for hypotheses in found] == [(), (0, 0, 0, 0), ()]
    assert step.rows_seen == [3, 2, 2, 2]
    greedy = TableStep([at_once, never, at_once])
    greedy_search(greedy, max_lengths=[9, 4, 9], length_penalty=0.0)
    assert greedy.rows_seen == [3, 1, 1, 1]


@pytest.mark.parametrize(("num_columns", "count"), [(1, 1), (63, 5), (64 * 5, 5), (64 * 6, 5), (64 * 6 + 1, 5), (1000, 3), (8007, 17)])
def test_largest_of_rows_is_topk(num_columns: int, count: int) -> None:
    x_RV = torch.randn(50, num_columns, generator=torch.Generator().manual_seed(num_columns))
    x_RV[1, num_columns // 2 :] = -math.inf
    x_RV[2] = -math.inf
    x_RV[3, -1] = 100.0
    values, columns = largest_of_rows(x_RV, count)
    assert torch.equal(values, x_RV.topk(count).values)
    assert torch.equal(x_RV.gather(1, columns), values)
    assert all(len(set(row)) == count for row in columns.tolist())
    x_RV[4, num_columns // 3] = math.nan
    assert largest_of_rows(x_RV, count)[0][4].isnan().any()


# --- edges ------------------------------------------------------------------------------------------------------------------------------


def test_the_cap_belongs_to_the_sentence() -> None:
    never = fixed_table({}, default=[0.5, 0.3, 0.2, 0.0])
    found = beam_search(TableStep([never] * 3), max_lengths=[1, 5, 2], beam_size=3, length_penalty=0.6, n_best=3)
    assert [[len(h.tokens) for h in hypotheses] for hypotheses in found] == [[1] * 3, [5] * 3, [2] * 3]
    assert not any(h.finished for hypotheses in found for h in hypotheses)
    greedy = greedy_search(TableStep([never] * 3), max_lengths=[1, 5, 2], length_penalty=0.6)
    assert [hypotheses[0].tokens for hypotheses in greedy] == [(0,), (0,) * 5, (0, 0)]


def test_unfinished_hypotheses_fill_only_the_places_that_finished_ones_leave() -> None:
    table = fixed_table({(): [0.6, 0.1, 0.1, 0.2]}, default=[0.5, 0.3, 0.2, 0.0])
    (found,) = beam_search(TableStep([table]), max_lengths=[3], beam_size=4, length_penalty=0.0, n_best=3)
    assert [(h.tokens, h.finished) for h in found] == [((), True), ((0, 0, 0), False), ((0, 0, 1), False)]


@pytest.mark.parametrize("search", ["beam", "greedy", "sample"])
def test_forbidden_ids_are_never_chosen_and_stay_in_the_softmax(search: str) -> None:
    table = fixed_table({}, default=[0.7, 0.2, 0.05, 0.05])
    step = TableStep([table])
    if search == "beam":
        (found,) = beam_search(step, max_lengths=[4], beam_size=4, length_penalty=0.0, n_best=4, forbidden_ids=[0, 2])
    elif search == "greedy":
        (found,) = greedy_search(step, max_lengths=[4], length_penalty=0.0, forbidden_ids=[0, 2])
    else:
        (found,) = sample(step, max_lengths=[4], seeds=[1], num_samples=50, length_penalty=0.0, forbidden_ids=[0, 2])
    assert {token for h in found for token in h.tokens} == {1}
    for hypothesis in found:
        expected = len(hypothesis.tokens) * math.log(0.2) + hypothesis.finished * math.log(0.05)
        assert hypothesis.log_prob == pytest.approx(expected, abs=1e-5)


def test_only_eos_allowed_gives_the_empty_hypothesis_and_no_more() -> None:
    table = fixed_table({}, default=[0.5, 0.2, 0.2, 0.1])
    (found,) = beam_search(TableStep([table]), max_lengths=[5], beam_size=4, length_penalty=0.6, n_best=4, forbidden_ids=[0, 1, 2])
    assert_same(found, [Hypothesis(tokens=(), score=math.log(0.1), log_prob=math.log(0.1), finished=True)])


def test_nothing_allowed_gives_no_hypothesis() -> None:
    table = fixed_table({}, default=[0.5, 0.2, 0.2, 0.1])
    everything = [0, 1, 2, 3]
    assert beam_search(TableStep([table]), max_lengths=[5], beam_size=2, length_penalty=0.6, forbidden_ids=everything) == [[]]
    assert greedy_search(TableStep([table]), max_lengths=[5], length_penalty=0.6, forbidden_ids=everything) == [[]]
    assert sample(TableStep([table]), max_lengths=[5], seeds=[0], num_samples=2, length_penalty=0.6, forbidden_ids=everything) == [[]]


def test_no_sentences() -> None:
    step = TableStep([])
    assert beam_search(step, max_lengths=[], beam_size=2, length_penalty=0.6) == []
    assert greedy_search(step, max_lengths=[], length_penalty=0.6) == []
    assert sample(step, max_lengths=[], seeds=[], num_samples=2, length_penalty=0.6) == []
    assert step.num_calls == 0


def test_n_best_larger_than_the_beam_is_refused() -> None:
    with pytest.raises(ConfigError, match="n_best must be at most beam_size, but is 3 with beam_size 2"):
        beam_search(TableStep([TWO_PATHS]), max_lengths=[5], beam_size=2, length_penalty=0.6, n_best=3)


@pytest.mark.parametrize("at", [(), (0,)])
def test_nan_is_an_error(at: Prefix) -> None:
    table = fixed_table({at: [math.nan] * 4}, default=[0.9, 0.05, 0.03, 0.02])
    with pytest.raises(MTKitError, match="the model gave NaN"):
        beam_search(TableStep([TWO_PATHS, table]), max_lengths=[5, 5], beam_size=3, length_penalty=0.6)
    with pytest.raises(MTKitError, match="the model gave NaN"):
        greedy_search(TableStep([TWO_PATHS, table]), max_lengths=[5, 5], length_penalty=0.6)
    with pytest.raises(MTKitError, match="the model gave NaN"):
        sample(TableStep([TWO_PATHS, table]), max_lengths=[5, 5], seeds=[1, 2], num_samples=20, length_penalty=0.6, top_k=1)


def test_the_result_is_the_same_for_a_tie_on_every_run() -> None:
    even = fixed_table({}, default=[0.25] * 4)
    runs = [beam_search(TableStep([even]), max_lengths=[4], beam_size=4, length_penalty=1.0, n_best=4) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]
