"""The benchmark of the search does what it says."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mtkit.benchmark import search as module
from mtkit.benchmark.search import TGT_LENGTH, bench_search
from mtkit.decoding.engine.rows import RowModel
from mtkit.decoding.engine.slots import SlotSearch
from mtkit.decoding.search import Hypothesis
from mtkit.model.config import ModelConfig
from mtkit.model.device import InferencePrecisionName
from tests.native.builds import use

CONFIG = ModelConfig(d_model=32, ffn_dim=64, num_heads=4, num_encoder_layers=1, num_decoder_layers=1)


@pytest.mark.parametrize(("beam_size", "threads", "precision"), [(4, 1, "fp32"), (1, 2, "auto"), (2, 2, "int8")])
def test_every_sentence_is_searched_to_the_length(
    monkeypatch: pytest.MonkeyPatch, beam_size: int, threads: int, precision: InferencePrecisionName
) -> None:
    searched: list[int] = []
    for name in ("beam_search", "greedy_search"):
        real = getattr(module, name)

        def count(*args: object, _real: object = real, **options: object) -> object:
            found = _real(*args, **options)  # type: ignore[operator]
            searched.extend(len(hypotheses[0].tokens) for hypotheses in found)
            return found

        monkeypatch.setattr(module, name, count)
    report = bench_search(
        CONFIG,
        vocab_size=50,
        device=torch.device("cpu"),
        precision=precision,
        threads=threads,
        beam_size=beam_size,
        sentences=10,
        batch_sentences=4,
        repeats=2,
    )
    assert searched == [TGT_LENGTH] * (4 * threads + 2 * 10)
    assert report.tgt_tokens_per_s.repeats == 2
    assert report.sentences_per_s == pytest.approx(report.tgt_tokens_per_s.median / TGT_LENGTH)
    assert report.precision.startswith("int8" if precision == "int8" else "fp32")
    assert (report.beam_size, report.threads, report.batch_sentences) == (beam_size, threads, 4)
    assert report.seconds_per_step > 0


def test_the_kernels_search_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    use("this processor", monkeypatch)
    lengths: list[int] = []
    real = RowModel.search

    def count(self: RowModel, sources: Sequence[Sequence[int]], **options: Any) -> list[list[Hypothesis]]:
        found = real(self, sources, **options)
        lengths.extend(len(hypotheses[0].tokens) for hypotheses in found)
        return found

    monkeypatch.setattr(RowModel, "search", count)
    config = dataclasses.replace(CONFIG, num_heads=2)
    bench_search(config, vocab_size=50, device=torch.device("cpu"), precision="fp32", threads=2, sentences=10, batch_sentences=4, repeats=2)
    assert lengths == [TGT_LENGTH] * (4 * 2 + 2 * 10)


def test_slots_search_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    real = SlotSearch.run

    def count(self: SlotSearch, sources: Sequence[Sequence[int]], max_lengths: Sequence[int]) -> list[list[Hypothesis]]:
        found = real(self, sources, max_lengths)
        lengths.extend(len(hypotheses[0].tokens) for hypotheses in found)
        return found

    monkeypatch.setattr(SlotSearch, "run", count)
    report = bench_search(CONFIG, vocab_size=50, device=torch.device("cpu"), threads=2, sentences=10, batch_sentences=4, in_slots=True, repeats=2)
    assert lengths == [TGT_LENGTH] * 3 * 10
    assert (report.threads, report.batch_sentences) == (1, 4)
