import time
from typing import Any

import pytest
import torch

from mtkit.benchmark.translate import TranslateReport, bench_translate
from mtkit.decoding.lines import SearchConfig, Translation
from mtkit.decoding.translator import Translator
from mtkit.evaluation.metrics import corpus_scores
from tests.decoding.builders import random_model, sentences, tiny_tokenizer

LINES = [*sentences(11, seed=5, max_words=5), ""]
REPEATS = 2


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def translator() -> Translator:
    return Translator([random_model(4)], tiny_tokenizer(), search=SearchConfig(max_length_constant=2, beam_size=2))


def measure(**options: Any) -> TranslateReport:
    return bench_translate(translator(), tiny_tokenizer(), LINES, device=torch.device("cpu"), repeats=REPEATS, **options)


def test_the_tokens_of_the_best_translations_are_counted() -> None:
    report = measure(references=LINES)
    results: list[Translation] = list(translator().translate(LINES))
    best = [result.hypotheses[0] for result in results if result.hypotheses]
    assert len(best) == 11, "a blank line has no translation"
    num_tokens = sum(len(hypothesis.tokens) + hypothesis.finished for hypothesis in best)
    cut = sum(not hypothesis.finished for hypothesis in best)
    assert 0 < cut < 11, "else the end of sentence is not tested"
    assert report.mean_tgt_tokens == pytest.approx(num_tokens / 11)
    assert report.cut_share == pytest.approx(cut / 11)
    assert report.sentences == 12
    assert report.tgt_tokens_per_s.median / report.sentences_per_s.median == pytest.approx(num_tokens / 12, rel=1e-6)
    assert report.bleu == corpus_scores([result.text for result in results], [LINES], metrics=("bleu",))[0].value
    assert measure().bleu is None


def test_each_repeat_is_a_whole_translation_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = Translator.translate

    def spy(self: Translator, lines: Any) -> Any:
        calls.append(len(lines))
        return real(self, lines)

    monkeypatch.setattr(Translator, "translate", spy)
    ticks = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    report = measure()
    assert calls == [1, *[12] * REPEATS, *[1] * 12], "warm-up, repeats, single lines"
    assert report.sentences_per_s.median == 12.0, "one tick of this clock per repeat"
    assert (report.first_line_s, report.tokenizer_share) == (1.0, 1.0)
    assert report.sentences_per_s.repeats == REPEATS
