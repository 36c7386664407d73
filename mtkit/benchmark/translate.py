"""Decoding speed: whole translations through the translator, loading left out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtkit.benchmark.machine import Spread, describe_machine, spread, synchronize
from mtkit.data.tokenizer import Tokenizer
from mtkit.decoding.lines import Translation
from mtkit.decoding.translator import Translator
from mtkit.evaluation.metrics import corpus_scores
from mtkit.training.dry_run import peak_memory_mb


@dataclass(frozen=True, kw_only=True, slots=True)
class TranslateReport:
    """Decoding speed.

    Attributes:
        sentences_per_s: Lines, segmentation and detokenization included, loading excluded.
        tgt_tokens_per_s: Tokens of the best translations, EOS included.
        tokenizer_share: Share of the time that segmenting the sources and putting the translations together takes.
        first_line_s: Median seconds to translate one line alone.
        sentences: In each repeat.
        mean_tgt_tokens: Of the best translations, EOS included.
        cut_share: Share of translations that the length cap ended.
        bleu: Against the references, where there are any.
        peak_memory_mb: Of the process; on CUDA allocated on the GPU.
        machine: Processor, threads, versions.
    """

    sentences_per_s: Spread
    tgt_tokens_per_s: Spread
    tokenizer_share: float
    first_line_s: float
    sentences: int
    mean_tgt_tokens: float
    cut_share: float
    bleu: float | None
    peak_memory_mb: float
    machine: dict[str, Any]


def bench_translate(
    translator: Translator,
    tokenizer: Tokenizer,
    lines: Sequence[str],
    *,
    device: torch.device,
    references: Sequence[str] | None = None,
    tgt_lang: str | None = None,
    repeats: int = 3,
) -> TranslateReport:
    """Translate lines several times over; the first pass over a tenth of them warms up and is left out.

    Args:
        translator: Loaded and configured.
        tokenizer: Its tokenizer.
        lines: Source lines.
        device: Where the model is.
        references: As many raw lines, or None.
        tgt_lang: For BLEU.
        repeats: Of the measurement; the median counts.
    """
    list(translator.translate(lines[: max(1, len(lines) // 10)]))
    seconds, translations = [], list[Translation]()
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        translations = list(translator.translate(lines))
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    best = [translation.hypotheses[0] for translation in translations if translation.hypotheses]
    num_tokens = sum(len(hypothesis.tokens) + hypothesis.finished for hypothesis in best)
    started = time.perf_counter()
    tokenizer.encode(lines, "src")
    tokenizer.decode([hypothesis.tokens for hypothesis in best], "tgt")
    tokenizer_seconds = time.perf_counter() - started
    bleu = None
    if references is not None:
        bleu = corpus_scores([translation.text for translation in translations], [references], metrics=("bleu",), target_lang=tgt_lang)[0].value
    return TranslateReport(
        sentences_per_s=spread([len(lines) / value for value in seconds]),
        tgt_tokens_per_s=spread([num_tokens / value for value in seconds]),
        tokenizer_share=tokenizer_seconds / spread(seconds).median,
        first_line_s=spread([_seconds_alone(translator, line) for line in lines[:: max(1, len(lines) // 10)]]).median,
        sentences=len(lines),
        mean_tgt_tokens=num_tokens / max(1, len(best)),
        cut_share=sum(not hypothesis.finished for hypothesis in best) / max(1, len(best)),
        bleu=bleu,
        peak_memory_mb=peak_memory_mb(device),
        machine=describe_machine(device),
    )


def _seconds_alone(translator: Translator, line: str) -> float:
    started = time.perf_counter()
    list(translator.translate([line]))
    return time.perf_counter() - started
