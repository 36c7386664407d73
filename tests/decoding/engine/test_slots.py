"""Search in slots against the plain search, on random models."""

import functools
import random
from collections.abc import Sequence

import pytest
import torch

from mtkit.decoding.engine.slots import MAX_SEARCHES, SlotSearch, SlotSearches
from mtkit.decoding.scoring import PenaltyKind
from mtkit.decoding.search import Hypothesis, beam_search
from mtkit.decoding.steps import inference, model_step, pad_sources
from mtkit.decoding.translator import Translator
from mtkit.errors import MTKitError
from mtkit.model.transformer import Transformer
from tests.decoding.builders import never_ends, random_model, tiny_tokenizer

SRC_CAPACITY, TGT_CAPACITY = 12, 20


def sources(count: int, *, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 300) for _ in range(rng.randint(1, SRC_CAPACITY - 1))] for _ in range(count)]


def plain(
    model: Transformer, batch: Sequence[Sequence[int]], caps: Sequence[int], *, beam_size: int, n_best: int, alpha: float, kind: PenaltyKind
) -> list[list[Hypothesis]]:
    """Each sentence alone."""
    forbidden = tiny_tokenizer().forbidden_ids("tgt")
    with inference([model]):
        return [
            beam_search(
                model_step([model], *pad_sources([source], device="cpu")),
                max_lengths=[cap],
                beam_size=beam_size,
                n_best=n_best,
                length_penalty=alpha,
                penalty=kind,
                forbidden_ids=forbidden,
            )[0]
            for source, cap in zip(batch, caps, strict=True)
        ]


def in_slots(
    model: Transformer, *, beam_size: int = 4, num_slots: int = 3, alpha: float = 0.6, forbidden: Sequence[int] = (), n_best: int = 1, looks: int = 4
) -> SlotSearch:
    with inference([model]):
        return SlotSearch(
            model,
            num_slots=num_slots,
            src_capacity=SRC_CAPACITY,
            tgt_capacity=TGT_CAPACITY,
            beam_size=beam_size,
            length_penalty=alpha,
            forbidden_ids=forbidden or tiny_tokenizer().forbidden_ids("tgt"),
            n_best=n_best,
            steps_between_looks=looks,
        )


def assert_same(found: Sequence[Sequence[Hypothesis]], expected: Sequence[Sequence[Hypothesis]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert [(hypothesis.tokens, hypothesis.finished) for hypothesis in ours] == [
            (hypothesis.tokens, hypothesis.finished) for hypothesis in theirs
        ]
        for left, right in zip(ours, theirs, strict=True):
            assert left.score == pytest.approx(right.score, abs=1e-4)
            assert left.log_prob == pytest.approx(right.log_prob, abs=1e-4)


def random_caps(count: int) -> list[int]:
    return [random.Random(index).randint(1, TGT_CAPACITY) for index in range(count)]


@functools.cache
def plain_search(beam_size: int, n_best: int) -> list[list[Hypothesis]]:
    """What the next test compares with, once for all its cases of one beam."""
    return plain(random_model(3), sources(25), random_caps(25), beam_size=beam_size, n_best=n_best, alpha=0.6, kind="gnmt")


@pytest.mark.parametrize("looks", [1, 4, 7])
@pytest.mark.parametrize(("beam_size", "n_best"), [(1, 1), (4, 1), (5, 3)])
@pytest.mark.parametrize("num_slots", [1, 3, 40])
def test_equals_the_plain_search(num_slots: int, beam_size: int, n_best: int, looks: int) -> None:
    model, batch, caps = random_model(3), sources(25), random_caps(25)
    search = in_slots(model, num_slots=num_slots, beam_size=beam_size, n_best=n_best, looks=looks)
    with inference([model]):
        found = search.run(batch, caps)
    expected = plain_search(beam_size, n_best)
    assert_same(found, expected)
    ended = [hypotheses[0].finished for hypotheses in expected]
    assert 0 < sum(ended) < len(ended), "some searches end by themselves, others at their cap"


def test_a_search_leaves_nothing_behind_for_the_next() -> None:
    model = random_model(5)
    search = in_slots(model, n_best=2)
    with inference([model]):
        for seed in range(3):
            batch = sources(7, seed=seed)
            assert_same(search.run(batch, [9] * 7), plain(model, batch, [9] * 7, beam_size=4, n_best=2, alpha=0.6, kind="gnmt"))


def test_what_never_ends_is_cut_at_its_cap() -> None:
    model = random_model(3)
    search = in_slots(model, forbidden=never_ends(tiny_tokenizer()))
    with inference([model]):
        found = search.run(sources(5), [1, 2, TGT_CAPACITY, 7, 3])
    assert [(len(hypotheses[0].tokens), hypotheses[0].finished) for hypotheses in found] == [(cap, False) for cap in (1, 2, TGT_CAPACITY, 7, 3)]


def test_no_sentences_no_results() -> None:
    model = random_model(3)
    assert in_slots(model).run([], []) == []


def test_nan_is_refused() -> None:
    model = random_model(3)
    search = in_slots(model)
    with torch.no_grad():
        model.output_weight[5] = float("nan")
    with inference([model]), pytest.raises(MTKitError, match="NaN"):
        search.run(sources(5), [5] * 5)


@pytest.mark.gpu
@pytest.mark.parametrize("beam_size", [1, 4])
def test_recorded_steps_equal_the_plain_search(beam_size: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    batch, caps = sources(60), [TGT_CAPACITY] * 60
    model = random_model(3)
    expected = plain(model, batch, caps, beam_size=beam_size, n_best=1, alpha=0.6, kind="gnmt")
    on_gpu = model.to("cuda")
    search = in_slots(on_gpu, num_slots=16, beam_size=beam_size)
    with inference([on_gpu]):
        for _ in range(2):
            assert_same(search.run(batch, caps), expected)


def test_only_the_sizes_that_were_needed_last_are_kept() -> None:
    """Each holds keys and values of gigabytes on a GPU."""
    model = random_model(3)
    options = {"beam_size": 2, "length_penalty": 0.6, "forbidden_ids": tiny_tokenizer().forbidden_ids("tgt")}
    searches = SlotSearches(model, lambda length: length + 5, **options)
    with inference([model]):
        for length in (3, 20, 40, 3):
            batch = [[7] * length]
            assert_same(searches.run(batch), plain(model, batch, [length + 5], beam_size=2, n_best=1, alpha=0.6, kind="gnmt"))
    assert len(searches._searches) == MAX_SEARCHES == 2


def test_what_has_met_nan_is_not_searched_with_again(monkeypatch: pytest.MonkeyPatch) -> None:
    translator = Translator([random_model(4)], tiny_tokenizer(), in_slots=True)
    encode = Transformer.encode
    with monkeypatch.context() as broken:
        broken.setattr(Transformer, "encode", lambda *arguments: encode(*arguments) * float("nan"))
        with pytest.raises(MTKitError, match="the model gave NaN"):
            list(translator.translate(["baki"]))
    assert next(translator.translate(["baki"])).text
