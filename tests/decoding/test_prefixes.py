"""Translations that have to begin with given pieces, by torch and by the kernels."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from mtkit.data.tokenizer import UNK_ID
from mtkit.decoding.engine.ct2 import CTranslate2Translator
from mtkit.decoding.engine.rows import RowModel
from mtkit.decoding.lines import SearchConfig
from mtkit.decoding.prefixes import Prefixes, with_prefixes
from mtkit.decoding.sampling import greedy_search, sample
from mtkit.decoding.scoring import score_token_pairs
from mtkit.decoding.search import Hypothesis, beam_search
from mtkit.decoding.steps import inference, model_step, pad_sources
from mtkit.decoding.translator import Translator
from mtkit.errors import DataError, UsageError
from mtkit.model.transformer import Transformer
from mtkit.native import kernels
from tests.decoding.builders import random_model, sentences, tiny_tokenizer
from tests.native.builds import BUILDS, use

FORBIDDEN = tiny_tokenizer().forbidden_ids("tgt")
SEARCH: dict[str, Any] = {"beam_size": 4, "n_best": 3, "length_penalty": 0.6, "forbidden_ids": FORBIDDEN}


def model() -> Transformer:
    return random_model(4, num_heads=2, norm="pre")


def ids(count: int, *, least: int, most: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(260, 300) for _ in range(rng.randint(least, most))] for _ in range(count)]


SOURCES = ids(12, least=1, most=20, seed=1)
PREFIXES = ids(12, least=0, most=5, seed=2)
CAPS = [len(prefix) + 6 for prefix in PREFIXES]


def by_torch(one: Transformer, prefixes: Sequence[Sequence[int]], search: Any = beam_search, **options: Any) -> list[list[Hypothesis]]:
    with inference([one]):
        step = with_prefixes(model_step([one], *pad_sources(SOURCES, device="cpu")), Prefixes(prefixes))
        return list(search(step, max_lengths=CAPS, **options))


def test_all_begin_so_and_have_the_probability_that_the_model_gives_them() -> None:
    one = model()
    assert {0, 5} <= {len(prefix) for prefix in PREFIXES}
    found = by_torch(one, PREFIXES, **SEARCH)
    for source, prefix, hypotheses in zip(SOURCES, PREFIXES, found, strict=True):
        assert len(hypotheses) == 3
        for hypothesis in hypotheses:
            assert list(hypothesis.tokens[: len(prefix)]) == prefix
            if hypothesis.finished:
                (score,) = score_token_pairs(one, [source], [hypothesis.tokens])
                assert hypothesis.log_prob == pytest.approx(score.log_prob, abs=1e-3)
    assert any(hypothesis.finished for hypotheses in found for hypothesis in hypotheses)


@pytest.mark.parametrize("search", [greedy_search, beam_search])
def test_what_would_be_found_anyway_is_found(search: Any) -> None:
    one = model()
    options: dict[str, Any] = {"length_penalty": 0.6, "forbidden_ids": FORBIDDEN, **({"beam_size": 1} if search is beam_search else {})}
    free = by_torch(one, [[]] * len(SOURCES), search, **options)
    forced = by_torch(one, [hypotheses[0].tokens[:3] for hypotheses in free], search, **options)
    assert [hypotheses[0].tokens for hypotheses in forced] == [hypotheses[0].tokens for hypotheses in free]
    assert [hypotheses[0].log_prob for hypotheses in forced] == pytest.approx([hypotheses[0].log_prob for hypotheses in free], abs=1e-4)


def test_samples_begin_so_too() -> None:
    options: dict[str, Any] = {"seeds": range(12), "num_samples": 3, "length_penalty": 0.6, "forbidden_ids": FORBIDDEN, "top_k": 5}
    for prefix, hypotheses in zip(PREFIXES, by_torch(model(), PREFIXES, sample, **options), strict=True):
        assert len(hypotheses) == 3
        assert all(list(hypothesis.tokens[: len(prefix)]) == prefix for hypothesis in hypotheses)


@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("build", BUILDS)
def test_the_kernels_find_the_same(build: str, beam_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use(build, monkeypatch)
    if not kernels.available():
        pytest.skip("no kernels here")
    one, options = model(), {**SEARCH, "beam_size": beam_size, "n_best": 1}
    expected = by_torch(one, PREFIXES, **options)
    with inference([one]):
        found = RowModel(one).search(SOURCES, max_lengths=CAPS, prefixes=Prefixes(PREFIXES), **options)
    assert [[entry.tokens for entry in hypotheses] for hypotheses in found] == [[entry.tokens for entry in hypotheses] for hypotheses in expected]
    flat = [[entry.log_prob for entry in itertools.chain.from_iterable(results)] for results in (found, expected)]
    assert flat[0] == pytest.approx(flat[1], abs=1e-3)


# --- of lines ---------------------------------------------------------------------------------------------------------------------------

LINES = [*sentences(9, seed=3), ""]


def make(**search: Any) -> Translator:
    return Translator([model()], tiny_tokenizer(), search=SearchConfig(max_length_ratio=0.0, max_length_constant=8, **search), batch_tokens=60)


def test_lines_that_begin_as_they_have_to() -> None:
    translator = make()
    free = list(translator.translate(LINES))
    wanted = ["", "baki", "", "duna fogi", *["ka"] * 6]
    found = list(translator.translate(LINES, prefixes=wanted))
    for line, prefix, before in zip(found[:-1], wanted, free, strict=False):
        assert line.text.startswith(prefix)
        if not prefix:
            assert line.text == before.text
            assert line.hypotheses[0].log_prob == pytest.approx(before.hypotheses[0].log_prob, abs=1e-4)
        number = len(tiny_tokenizer().encode([prefix], "tgt")[0])
        assert len(line.hypotheses[0].tokens) + line.hypotheses[0].finished <= 8 + number
    assert found[-1].text == "", "a blank line stays one"
    assert [line.text for line in make(method="sample").translate(LINES[:2], prefixes=["duna", "duna"])] != [line.text for line in free[:2]]


def test_as_many_prefixes_as_lines() -> None:
    for count, message in ((9, "there are 9 prefixes, and more lines to translate"), (11, "there are more prefixes than the 10 lines to translate")):
        with pytest.raises(DataError, match=message):
            list(make().translate(LINES, prefixes=["ka"] * count))


def test_a_prefix_counts_up_to_what_there_is_no_piece_for(monkeypatch: pytest.MonkeyPatch) -> None:
    translator = make()
    piece = tiny_tokenizer().encode(["ka baki"], "tgt")[0][-1]
    monkeypatch.setattr(translator, "_forbidden_ids", [*translator._forbidden_ids, piece])
    (found,) = translator.translate(["baki"], prefixes=["ka baki"])
    assert "the prefix holds what the model has no piece for, and counts up to there" in (found.warning or "")
    assert piece not in found.hypotheses[0].tokens


def test_engines_that_cannot_do_it_say_so() -> None:
    translator = Translator([model()], tiny_tokenizer(), in_slots=True)
    with pytest.raises(UsageError, match="cannot be made to begin with given words"):
        list(translator.translate(LINES, prefixes=["ka"] * len(LINES)))
    assert not CTranslate2Translator.takes_prefixes


def test_what_is_unknown_ends_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary without bytes has a piece for it, which stands for anything."""
    translator = make()
    monkeypatch.setattr(translator._tokenizer, "encode", lambda lines, _side: [[270, UNK_ID, 271] for _ in lines])
    monkeypatch.setattr(translator, "_forbidden_ids", [one for one in translator._forbidden_ids if one != UNK_ID])
    (found,) = translator.translate(["baki"], prefixes=["ka ? baki"])
    assert found.hypotheses[0].tokens[0] == 270
    assert "the prefix holds what the model has no piece for" in (found.warning or "")
