import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.data.tokenizer import EOS_ID
from mtkit.decoding import translator as translator_module
from mtkit.decoding.engine import slots
from mtkit.decoding.lines import SearchConfig, Translation
from mtkit.decoding.scoring import score_pairs, score_token_pairs
from mtkit.decoding.search import StepFn, beam_search
from mtkit.decoding.translator import Translator
from mtkit.errors import MTKitError, ResourceError
from mtkit.model.transformer import Transformer
from tests.decoding.builders import never_ends, random_model, sentences, tiny_tokenizer, tokenizer_of_two

SHORT = {"max_length_constant": 5}


def make(search: dict[str, Any] | None = None, *, models: Sequence[Transformer] | None = None, **options: Any) -> Translator:
    return Translator(models or [random_model(4)], tiny_tokenizer(), search=SearchConfig(**{**SHORT, **(search or {})}), **options)


def assert_same(found: Sequence[Translation], expected: Sequence[Translation]) -> None:
    assert [[h.text for h in t.hypotheses] for t in found] == [[h.text for h in t.hypotheses] for t in expected]
    assert [t.text for t in found] == [t.text for t in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for key in ("score", "log_prob", "finished"):
            assert [getattr(h, key) for h in ours.hypotheses] == pytest.approx([getattr(h, key) for h in theirs.hypotheses], abs=1e-4)


# --- lines in, lines out ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "search",
    [{}, {"beam_size": 1}, {"beam_size": 5, "n_best": 5, "length_penalty": 1.0, "penalty": "power"}, {"method": "sample", "n_best": 2, "top_k": 20}],
)
@pytest.mark.parametrize("can_end", [True, False])
def test_the_batch_the_window_and_the_order_change_nothing(search: dict[str, Any], can_end: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_end:
        monkeypatch.setattr(tiny_tokenizer(), "forbidden_ids", lambda side: never_ends_ids)
    lines = sentences(30, seed=3, max_words=8)
    order = random.Random(1).sample(range(30), 30)
    expected = list(make(search, batch_tokens=1, window_lines=1).translate(lines))
    assert [translation.line for translation in expected] == list(range(1, 31))
    assert len({translation.text for translation in expected}) > 20
    assert any(h.finished for t in expected for h in t.hypotheses) == can_end
    for batch_tokens, window_lines in ((100, 2000), (10_000, 2000), (100, 9)):
        assert_same(list(make(search, batch_tokens=batch_tokens, window_lines=window_lines).translate(lines)), expected)
    if search.get("method") != "sample":  # a sample depends on the line number
        shuffled = list(make(search, batch_tokens=300).translate([lines[index] for index in order]))
        assert_same(shuffled, [expected[index] for index in order])


def test_samples_share_the_room_of_a_batch() -> None:
    """Else its memory would grow with their number."""
    plain, many = (make({"method": "sample", "n_best": n_best}, batch_tokens=100)._batches([10] * 40) for n_best in (1, 5))
    assert max(map(len, plain)) == 10
    assert max(map(len, many)) == 2
    assert sorted(index for batch in many for index in batch) == list(range(40))


never_ends_ids = never_ends(tiny_tokenizer())


def test_blank_lines_stay_blank_and_in_place() -> None:
    lines = ["", "baki", "   ", "\t", "lo mu", "\u3000", "\u00a0\u2028", ""]
    found = list(make().translate(lines))
    assert [t.line for t in found] == list(range(1, 9))
    assert [bool(t.hypotheses) for t in found] == [False, True, False, False, True, False, False, False]
    assert [t.text for t in found if not t.hypotheses] == [""] * 6
    assert all(t.warning is None for t in found if not t.hypotheses)
    assert list(make().translate([])) == []
    assert [t.text for t in make().translate(["", "\n"[:0], " "])] == ["", "", ""]


def test_an_over_long_source_is_cut_with_a_warning() -> None:
    tokenizer = tiny_tokenizer()
    words = ["baki"] * 8
    (ids,) = tokenizer.encode([" ".join(words)], "src")
    exact, longer = make({"max_source_length": len(ids)}), make({"max_source_length": len(ids) - 1})
    lines = ["lo mu", " ".join(words), "vo"]
    assert [t.is_source_cut for t in exact.translate(lines)] == [False] * 3
    found = list(longer.translate(lines))
    assert [t.is_source_cut for t in found] == [False, True, False]
    assert found[1].warning is not None
    assert found[1].warning.startswith(f"the source has {len(ids)} tokens, only the first {len(ids) - 1} were translated")
    assert found[1].hypotheses
    assert [t.text for t in found[::2]] == [t.text for t in exact.translate(lines)][::2]


def test_a_line_of_50_000_characters_is_one_line_out() -> None:
    (found,) = make({"beam_size": 1, "max_source_length": 100}).translate(["xyz" * 17_000])
    assert found.is_source_cut
    assert len(found.hypotheses[0].tokens) <= 105


def test_the_cap_is_that_of_the_sentence_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_tokenizer(), "forbidden_ids", lambda side: never_ends_ids)
    lines = ["ba", "baki lo mu ner sta", "ki"]
    lengths = [len(ids) for ids in tiny_tokenizer().encode(lines, "src")]
    found = list(make({"max_length_ratio": 2.0, "max_length_constant": 3}).translate(lines))
    assert [len(t.hypotheses[0].tokens) for t in found] == [2 * length + 3 for length in lengths]
    assert not any(t.hypotheses[0].finished for t in found)
    assert all(t.warning and "was cut at" in t.warning for t in found)


def test_each_side_has_its_own_vocabulary() -> None:
    """B26."""
    tokenizer = tokenizer_of_two()
    model = random_model(4, tokenizer=tokenizer)
    lines = sentences(40, seed=3)
    found = list(Translator([model], tokenizer, search=SearchConfig(max_length_constant=20)).translate(lines))
    tokens = [list(t.hypotheses[0].tokens) for t in found]
    assert [t.text for t in found] == tokenizer.decode(tokens, "tgt") != tokenizer.decode(tokens, "src")
    ended = [number for number, t in enumerate(found) if t.hypotheses[0].finished]
    assert ended
    scores = score_token_pairs(model, tokenizer.encode(lines, "src"), tokens)
    for number in ended:
        assert found[number].hypotheses[0].log_prob == pytest.approx(scores[number].log_prob, abs=1e-4)


@pytest.mark.parametrize(
    ("ratio", "constant", "num_src", "expected"), [(1.0, 50, 7, 57), (0.0, 2, 100, 2), (0.0, 0, 9, 1), (1.5, 0, 3, 4), (0.1, 0, 3, 1)]
)
def test_max_length(ratio: float, constant: int, num_src: int, expected: int) -> None:
    assert SearchConfig(max_length_ratio=ratio, max_length_constant=constant).max_length(num_src) == expected


def test_n_best_has_n_different_hypotheses_sorted_even_on_a_short_line_with_a_short_cap() -> None:
    for constant in (0, 1, 5):
        (found,) = make({"beam_size": 10, "n_best": 10, "max_length_ratio": 0.0, "max_length_constant": constant}).translate(["ba"])
        assert len({(h.tokens, h.finished) for h in found.hypotheses}) == 10
        ranked = sorted(found.hypotheses, key=lambda h: (not h.finished, -h.score))
        assert list(found.hypotheses) == ranked
        assert found.text == found.hypotheses[0].text


# --- windows ----------------------------------------------------------------------------------------------------------------------------


def test_results_come_before_the_next_window_is_asked_for() -> None:
    asked: list[int] = []

    def windows() -> Iterator[list[str]]:
        for number in range(3):
            asked.append(number)
            yield [f"ba{number}", "", "ki lo"]

    results = make().translate_windows(windows())
    for number in range(3):
        lines: list[int] = []
        while len(lines) < 3:
            lines += [t.line for t in next(results)]
            assert asked == list(range(number + 1))
        assert lines == [3 * number + 1, 3 * number + 2, 3 * number + 3]
    assert list(results) == []


def test_results_come_after_every_batch_and_leading_blank_lines_at_once() -> None:
    lines = ["", "", *sentences(30, seed=5), ""]
    handed_over = list(make(batch_tokens=30).translate_windows([lines]))
    assert [t.line for t in handed_over[0]] == [1, 2]
    assert [t.line for translations in handed_over for t in translations] == list(range(1, 34))
    assert len(handed_over) > 3


# --- text -------------------------------------------------------------------------------------------------------------------------------


def scripted(*scripts: Sequence[int]) -> Callable[..., StepFn]:
    """Stands in for `model_step`: sentence i prefers the ids of its script one after the other, and then EOS."""

    def model_step(models: object, src_BS: Tensor, src_mask_BS: Tensor) -> StepFn:
        rows: list[tuple[int, int]] = [(sentence, 0) for sentence in range(len(src_BS))]

        def step(tokens_R: Tensor, parents_R: Tensor) -> Tensor:
            nonlocal rows
            rows = [rows[parent] for parent in parents_R.tolist()]
            probs_RV = torch.full((len(rows), tiny_tokenizer().tgt_vocab_size), 1e-6)
            for row, (sentence, position) in enumerate(rows):
                probs_RV[row, [*scripts[sentence], EOS_ID][min(position, len(scripts[sentence]))]] = 0.9
            rows = [(sentence, position + 1) for sentence, position in rows]
            return probs_RV.log()

        return step

    return model_step


def translate_script(monkeypatch: pytest.MonkeyPatch, pieces: Sequence[str], **search: Any) -> Translation:
    monkeypatch.setattr(translator_module, "model_step", scripted(tiny_tokenizer().piece_ids(pieces, "tgt")))
    (found,) = make({"max_length_constant": 20, "beam_size": 1, **search}).translate(["ba"])
    return found


def test_byte_pieces_become_characters_and_bad_bytes_become_u_fffd(monkeypatch: pytest.MonkeyPatch) -> None:
    euro = ["<0xE2>", "<0x82>", "<0xAC>"]
    assert translate_script(monkeypatch, euro).text == "€"
    broken = translate_script(monkeypatch, euro[:2])
    assert broken.hypotheses[0].finished
    assert set(broken.text) == {"\ufffd"}
    cut = translate_script(monkeypatch, euro, max_length_ratio=0.0, max_length_constant=2)
    assert set(cut.text) == {"\ufffd"}


def test_a_translation_that_shows_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """marian-dev 462, OpenNMT-py 1934: an empty line in the output, and no word about it."""
    for pieces in ([], ["▁"]):
        found = translate_script(monkeypatch, pieces)
        assert (found.text, found.warning) == ("", "the translation is blank")
    assert translate_script(monkeypatch, ["▁ba"]).warning is None


@pytest.mark.parametrize("byte", ["<0x0A>", "<0x0D>"])
def test_a_line_break_is_never_emitted(monkeypatch: pytest.MonkeyPatch, byte: str) -> None:
    found = translate_script(monkeypatch, ["▁ba", byte, "▁ba"])
    assert tiny_tokenizer().piece_ids([byte], "tgt")[0] not in found.hypotheses[0].tokens
    assert "\n" not in found.text
    assert "\r" not in found.text


@pytest.mark.parametrize("pieces", [["<0xE2>", "<0x80>", "<0xA8>"], ["<0xC2>", "<0x85>"]])
def test_what_others_take_for_a_line_break_becomes_a_space(monkeypatch: pytest.MonkeyPatch, pieces: list[str]) -> None:
    found = translate_script(monkeypatch, ["<0x61>", *pieces, "<0x62>"], beam_size=2, n_best=2)
    assert found.text == "a b"
    assert all(h.text == h.text.replace("\u2028", " ").replace("\x85", " ") for h in found.hypotheses)


# --- scores -----------------------------------------------------------------------------------------------------------------------------


def test_reported_scores_are_those_of_scoring_the_pair() -> None:
    model, tokenizer = random_model(4), tiny_tokenizer()
    lines = sentences(30, seed=8)
    search = {"beam_size": 4, "n_best": 4, "length_penalty": 0.6, "max_source_length": 12}
    found = list(make(search, models=[model]).translate(lines))
    finished = [(t.line - 1, h) for t in found for h in t.hypotheses if h.finished]
    assert len(finished) > 20
    sources = [tokenizer.encode([lines[index]], "src")[0][:12] for index, _ in finished]
    scores = score_token_pairs(model, sources, [h.tokens for _, h in finished])
    assert [h.log_prob for _, h in finished] == pytest.approx([score.log_prob for score in scores], abs=1e-4)
    assert [h.score for _, h in finished] == pytest.approx([s.log_prob / ((5 + s.num_tokens) / 6) ** 0.6 for s in scores], abs=1e-4)
    same_text = [(index, h) for index, h in finished if tokenizer.encode([h.text], "tgt")[0] == list(h.tokens)]
    assert same_text
    by_text = score_pairs(model, tokenizer, [lines[index] for index, _ in same_text], [h.text for _, h in same_text], max_source_length=12)
    assert [h.log_prob for _, h in same_text] == pytest.approx([score.log_prob for score in by_text], abs=1e-4)


def test_beam_one_is_greedy_and_a_wider_beam_is_not() -> None:
    lines = sentences(20, seed=9)
    greedy = list(make({"beam_size": 1}).translate(lines))
    assert_same(list(make({"method": "sample", "top_k": 1}).translate(lines)), greedy)
    assert [t.text for t in make({"beam_size": 4}).translate(lines)] != [t.text for t in greedy]


def test_an_ensemble_of_one_model_twice_is_the_model() -> None:
    lines = sentences(10, seed=10)
    model = random_model(4)
    assert_same(list(make(models=[model, model]).translate(lines)), list(make(models=[model]).translate(lines)))
    mixed = list(make(models=[model, random_model(2)]).translate(lines))
    assert [t.text for t in mixed] != [t.text for t in make(models=[model]).translate(lines)]


def test_samples_depend_on_the_seed_and_the_line_number_only() -> None:
    def draw(lines: list[str], seed: int) -> list[str]:
        return [t.text for t in make({"method": "sample", "seed": seed}).translate(lines)]

    lines = ["baki lo"] * 5
    assert len(set(draw(lines, 1))) > 1
    assert draw(lines, 1) == draw(lines, 1)
    assert draw(lines, 1) != draw(lines, 2)
    assert draw(["mu", *lines[1:]], 1)[1:] == draw(lines, 1)[1:]


# --- models -----------------------------------------------------------------------------------------------------------------------------


def test_a_model_in_training_translates_without_dropout_and_stays_in_training() -> None:
    model = random_model(4).train()
    lines = sentences(5, seed=11)
    assert_same(list(make(models=[model]).translate(lines)), list(make().translate(lines)))
    assert model.training
    assert not torch.is_inference_mode_enabled()


def test_nan_in_the_weights_is_an_error() -> None:
    model = random_model(4)
    with torch.no_grad():
        next(parameter for parameter in reversed(list(model.parameters())) if parameter.dim() == 2).fill_(float("nan"))
    for search in ({}, {"beam_size": 1}, {"method": "sample"}):
        with pytest.raises(MTKitError, match="the model gave NaN"):
            list(make(search, models=[model]).translate(["ba"]))


def test_half_precision_translates() -> None:
    model = random_model(4).to(torch.bfloat16)
    found = list(make(models=[model]).translate(sentences(5, seed=12)))
    assert all(t.hypotheses for t in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("search", [{}, {"beam_size": 1}, {"beam_size": 4, "n_best": 4}, {"method": "sample", "n_best": 2}])
def test_a_gpu_gives_the_translations_of_the_cpu(search: dict[str, Any]) -> None:
    lines = sentences(50, seed=3)
    found = list(make(search, models=[random_model(4).cuda()], device="cuda").translate(lines))
    expected = list(make(search).translate(lines))
    same = [(ours, theirs) for ours, theirs in zip(found, expected, strict=True) if ours.text == theirs.text]
    assert len(same) >= 48  # rounding differs, and a close call may fall the other way
    scores = [[translation.hypotheses[0].score for translation in pair] for pair in same]
    assert [ours for ours, _ in scores] == pytest.approx([theirs for _, theirs in scores], abs=1e-3)
    half = list(make(search, models=[random_model(4).cuda().half()], device="cuda").translate(lines))
    assert all(translation.hypotheses for translation in half)


@pytest.mark.parametrize("search", [{}, {"beam_size": 1}, {"method": "sample", "n_best": 2}])
def test_workers_change_nothing(search: dict[str, Any]) -> None:
    lines = [*sentences(25, seed=3), "", *sentences(5, seed=4)]
    expected = list(make(search, batch_tokens=40).translate(lines))
    for workers in (1, 3):
        found = list(make(search, batch_tokens=40, workers=workers).translate(lines))
        assert_same(found, expected)
        assert [translation.line for translation in found] == list(range(1, 32))


@pytest.mark.parametrize("search", [{}, {"beam_size": 1}, {"beam_size": 5, "n_best": 3, "length_penalty": 1.0, "penalty": "power"}])
@pytest.mark.parametrize("positions", [65_536, 300])
def test_slots_change_nothing(search: dict[str, Any], positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_POSITIONS", positions)
    lines = [*sentences(25, seed=3), "", *sentences(3, seed=4, max_words=40), "  "]
    expected = list(make(search).translate(lines))
    for batch_tokens, window_lines in ((10_000, 2000), (100, 2000), (10_000, 7)):
        assert_same(list(make(search, in_slots=True, batch_tokens=batch_tokens, window_lines=window_lines).translate(lines)), expected)


def test_slots_of_one_size_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int, int]] = []

    class Counted(slots.SlotSearch):
        def __init__(self, model: Transformer, **options: Any) -> None:
            made.append((options["num_slots"], options["src_capacity"], options["tgt_capacity"]))
            super().__init__(model, **options)

    monkeypatch.setattr(slots, "SlotSearch", Counted)
    translator = make({"max_length_ratio": 2.0}, in_slots=True, window_lines=10, batch_tokens=10_000)
    for _ in range(2):
        assert len(list(translator.translate(["baki", *sentences(19, seed=3, max_words=6)]))) == 20
    assert sorted(set(made)) == sorted(made)
    assert all(num_slots == 16 and tgt_capacity == -(-(2 * (src_capacity - 1) + 5) // 8) * 8 for num_slots, src_capacity, tgt_capacity in made)


def test_several_workers_search_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=30)

    def wait_for_the_other(*args: Any, **options: Any) -> Any:
        both.wait()
        return beam_search(*args, **options)

    monkeypatch.setattr(translator_module, "beam_search", wait_for_the_other)
    model = random_model(4).train()
    assert len(list(make(models=[model], batch_tokens=1, workers=2).translate(["ba ki", "lo"]))) == 2
    assert model.training


@pytest.mark.parametrize(("num_lines", "sizes"), [(5, [5]), (9, [4, 5]), (40, [13, 13, 14])])
def test_few_lines_are_divided_among_the_workers(num_lines: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []

    def count(*args: Any, **options: Any) -> Any:
        searched.append(len(options["max_lengths"]))
        return beam_search(*args, **options)

    monkeypatch.setattr(translator_module, "beam_search", count)
    lines = sentences(num_lines, seed=3)
    found = list(make(workers=3, batch_tokens=10_000).translate(lines))
    assert sorted(searched) == sizes
    assert_same(found, list(make(batch_tokens=10_000).translate(lines)))


@pytest.mark.parametrize(("smallest_width", "num_threads"), [(32, 3), (33, 1)])
def test_one_line_has_all_threads_if_the_model_is_wide(smallest_width: int, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translator_module, "SMALLEST_THREADED_WIDTH", smallest_width)
    before, seen = torch.get_num_threads(), []

    def look(*args: Any, **options: Any) -> Any:
        seen.append(torch.get_num_threads())
        return beam_search(*args, **options)

    monkeypatch.setattr(translator_module, "beam_search", look)
    try:
        assert len(list(make(workers=3).translate(["baki lo"]))) == 1
    finally:
        torch.set_num_threads(before)
    assert seen == [num_threads]


def test_an_error_of_one_worker_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fail(*_: object, **__: object) -> None:
        calls.append(1)
        raise MTKitError("broken")

    monkeypatch.setattr(translator_module, "beam_search", fail)
    with pytest.raises(MTKitError, match="broken"):
        list(make(batch_tokens=1, workers=2).translate(sentences(200, seed=1)))
    assert len(calls) < 100


def test_out_of_memory_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(translator_module, "beam_search", fail)
    with pytest.raises(ResourceError, match="lines 1 to 2: a batch of 2 sentences does not fit") as raised:
        list(make().translate(["ba", "ki"]))
    assert raised.value.hint is not None
    assert "--batch-tokens" in raised.value.hint


def test_threads_of_the_caller_stay_as_they_were() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        list(make(workers=1).translate(["baki"]))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
