import math

import pytest
import torch
from torch.nn import functional

from mtkit.data.tokenizer import BOS_ID, EOS_ID
from mtkit.decoding import scoring
from mtkit.decoding.scoring import PenaltyKind, length_penalty, score_pairs, score_token_pairs
from mtkit.errors import DataError, MTKitError
from tests.decoding.builders import random_model, sentences, tiny_tokenizer, tokenizer_of_two


@pytest.mark.parametrize(
    ("length", "alpha", "kind", "expected"),
    [
        (1, 0.6, "gnmt", 1.0),
        (7, 1.0, "gnmt", 2.0),
        (2, 0.6, "gnmt", (7 / 6) ** 0.6),
        (25, 0.6, "gnmt", 5**0.6),
        (40, 0.0, "gnmt", 1.0),
        (1, 1.0, "power", 1.0),
        (9, 0.5, "power", 3.0),
        (9, 1.0, "power", 9.0),
        (9, 0.0, "power", 1.0),
    ],
)
def test_length_penalty_is_the_formula_for_numbers_and_tensors(length: int, alpha: float, kind: PenaltyKind, expected: float) -> None:
    assert length_penalty(length, alpha, kind) == pytest.approx(expected)
    assert length_penalty(torch.tensor([float(length)]), alpha, kind).tolist() == pytest.approx([expected])


def test_log_probs_are_those_of_cross_entropy_one_sentence_at_a_time() -> None:
    model = random_model(3)
    sources, targets = [[10, 11, 12], [20], []], [[30, 31], [40, 41, 42, 43, 44], [50]]
    scores = score_token_pairs(model, sources, targets)
    for src, tgt, score in zip(sources, targets, scores, strict=True):
        src_BS = torch.tensor([[*src, EOS_ID]])
        with torch.no_grad():
            logits_BTV = model(src_BS, torch.ones_like(src_BS, dtype=torch.bool), torch.tensor([[BOS_ID, *tgt]]))
        expected = -functional.cross_entropy(logits_BTV[0].double(), torch.tensor([*tgt, EOS_ID]), reduction="sum")
        assert score.log_prob == pytest.approx(float(expected), abs=1e-4)
        assert score.num_tokens == len(tgt) + 1


def test_the_batch_changes_nothing_and_the_order_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = random_model(4), tiny_tokenizer()
    src, tgt = sentences(40, seed=1), sentences(40, seed=2)
    whole = score_pairs(model, tokenizer, src, tgt)
    monkeypatch.setattr(scoring, "_LOGIT_ROWS", 3)
    single = score_pairs(model, tokenizer, src, tgt, batch_tokens=1)
    assert [score.num_tokens for score in whole] == [score.num_tokens for score in single]
    assert [score.log_prob for score in whole] == pytest.approx([score.log_prob for score in single], abs=1e-4)
    backwards = score_pairs(model, tokenizer, src[::-1], tgt[::-1], batch_tokens=200)
    assert [score.log_prob for score in backwards[::-1]] == pytest.approx([score.log_prob for score in whole], abs=1e-4)


def test_each_side_has_its_own_vocabulary() -> None:
    """B26."""
    tokenizer = tokenizer_of_two()
    model = random_model(4, tokenizer=tokenizer)
    src, tgt = ["baki lo mu", "xazen"], ["NER STA", "TRI LOKI MU"]
    ids = [tokenizer.encode(lines, side) for lines, side in ((src, "src"), (tgt, "tgt"), (src, "tgt"), (tgt, "src"))]  # type: ignore[arg-type]
    assert ids[0] != ids[2]
    assert ids[1] != ids[3]
    assert score_pairs(model, tokenizer, src, tgt) == score_token_pairs(model, ids[0], ids[1])


def test_empty_lines_have_finite_scores() -> None:
    model, tokenizer = random_model(4), tiny_tokenizer()
    scores = score_pairs(model, tokenizer, ["baki lo", "", "  "], ["", "mu", ""])
    assert [score.num_tokens == 1 for score in scores] == [True, False, True]
    assert all(math.isfinite(score.log_prob) and score.log_prob < 0 for score in scores)
    assert scores[0].log_prob != scores[2].log_prob


def test_a_long_source_is_cut_as_translate_cuts_it() -> None:
    model, tokenizer = random_model(4), tiny_tokenizer()
    line = "baki lo mu ner sta tri vo xa zen"
    (ids,) = tokenizer.encode([line], "src")
    cut, whole = score_pairs(model, tokenizer, [line, "mu"], ["mu", "mu"], max_source_length=5)
    assert cut.log_prob == pytest.approx(score_token_pairs(model, [ids[:5]], tokenizer.encode(["mu"], "tgt"))[0].log_prob, abs=1e-5)
    assert (cut.is_source_cut, whole.is_source_cut) == (True, False)


def test_a_long_target_is_cut_and_not_a_matter_of_memory() -> None:
    """B04: one line must not cost the scores of all others."""
    model, tokenizer = random_model(4), tiny_tokenizer()
    line = "baki lo mu ner sta tri vo xa zen"
    (ids,) = tokenizer.encode([line], "tgt")
    cut, whole = score_pairs(model, tokenizer, ["mu", "mu"], [line, "mu"], max_target_length=5)
    assert cut.log_prob == pytest.approx(score_token_pairs(model, tokenizer.encode(["mu"], "src"), [ids[:5]])[0].log_prob, abs=1e-5)
    assert (cut.is_target_cut, cut.num_tokens, whole.is_target_cut) == (True, 6, False)


def test_scoring_uses_no_dropout_and_leaves_the_mode_alone() -> None:
    model, tokenizer = random_model(4).train(), tiny_tokenizer()
    first = score_pairs(model, tokenizer, ["baki"], ["lo mu"])
    assert score_pairs(model, tokenizer, ["baki"], ["lo mu"]) == first
    assert model.training


def test_different_line_counts_are_refused() -> None:
    with pytest.raises(DataError, match="the source has 2 lines and the target 1"):
        score_pairs(random_model(4), tiny_tokenizer(), ["a", "b"], ["c"])


def test_no_pairs() -> None:
    assert score_pairs(random_model(4), tiny_tokenizer(), [], []) == []


def test_nan_is_an_error() -> None:
    model = random_model(1)
    with torch.no_grad():
        model.src_weight[5, 0] = math.nan
    with pytest.raises(MTKitError, match="the model gave NaN"):
        score_token_pairs(model, [[5, 6]], [[7]])
