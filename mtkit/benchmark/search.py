"""Decoding speed of an architecture, whatever its weights: searches that all have the same length, without text and tokenizer."""

import math
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from mtkit.benchmark.machine import Spread, describe_machine, spread, synchronize
from mtkit.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from mtkit.decoding.engine.rows import RowModel, fits
from mtkit.decoding.engine.slots import SlotSearch
from mtkit.decoding.loading import in_precision
from mtkit.decoding.sampling import greedy_search
from mtkit.decoding.search import Hypothesis, beam_search
from mtkit.decoding.steps import inference, model_step, pad_sources
from mtkit.model.config import ModelConfig
from mtkit.model.device import InferencePrecisionName, keep_freed_memory
from mtkit.model.transformer import Transformer
from mtkit.training.dry_run import peak_memory_mb

SRC_LENGTHS = (20, 30)
"""Shortest and longest source, in tokens."""

TGT_LENGTH = 25
"""Tokens of every translation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchReport:
    """Decoding speed.

    Attributes:
        tgt_tokens_per_s: Tokens of the best hypotheses.
        sentences_per_s: The same divided by `TGT_LENGTH`; the median.
        seconds_per_step: Of one batch, the median over the whole run: encoding and search, divided by the tokens of a translation.
        precision: What computes.
        threads: Batches at the same time, on a CPU.
        beam_size: Hypotheses per sentence.
        batch_sentences: Sentences searched together.
        parameters: Of the model.
        peak_memory_mb: Of the process; on CUDA allocated on the GPU.
        machine: Processor, threads, versions.
    """

    tgt_tokens_per_s: Spread
    sentences_per_s: float
    seconds_per_step: float
    precision: str
    threads: int
    beam_size: int
    batch_sentences: int
    parameters: int
    peak_memory_mb: float
    machine: dict[str, Any]


def bench_search(
    config: ModelConfig,
    *,
    vocab_size: int,
    device: torch.device,
    precision: InferencePrecisionName = "auto",
    threads: int = 1,
    beam_size: int = 4,
    sentences: int = 128,
    batch_sentences: int = 32,
    in_slots: bool = False,
    repeats: int = 3,
) -> SearchReport:
    """Search translations of `TGT_LENGTH` tokens with random weights; the first batch warms up and is left out.

    Args:
        config: The architecture.
        vocab_size: Pieces of both sides.
        device: Where to compute.
        precision: As for `mtkit translate`.
        threads: Batches at the same time, on a CPU.
        beam_size: 1 is greedy search.
        sentences: In each repeat.
        batch_sentences: Of a batch.
        in_slots: In so many slots instead, all sentences one after the other; on a CPU with one thread.
        repeats: Of the measurement; the median counts.
    """
    torch.manual_seed(1)
    model = Transformer(config, src_vocab_size=vocab_size, tgt_vocab_size=vocab_size).eval()
    parameters = model.num_parameters()
    model, name = in_precision(model, precision, device)
    rng = random.Random(1)
    sources = sorted(([rng.randrange(4, vocab_size) for _ in range(rng.randint(*SRC_LENGTHS))] for _ in range(sentences)), key=len)
    rows = RowModel(model) if fits(model) else None
    options: dict[str, Any] = {"length_penalty": 0.6, "forbidden_ids": (PAD_ID, UNK_ID, BOS_ID, EOS_ID)}

    def search(batch: Sequence[Sequence[int]]) -> list[list[Hypothesis]]:
        with inference([model]):
            max_lengths = [TGT_LENGTH] * len(batch)
            if rows is not None:
                return rows.search(batch, max_lengths=max_lengths, beam_size=beam_size, **options)
            step = model_step([model], *pad_sources(batch, device=device))
            if beam_size == 1:
                return greedy_search(step, max_lengths=max_lengths, device=device, **options)
            return beam_search(step, max_lengths=max_lengths, beam_size=beam_size, device=device, **options)

    def search_in_slots(batch: Sequence[Sequence[int]]) -> list[list[Hypothesis]]:
        with inference([model]):
            return slots.run(batch, [TGT_LENGTH] * len(batch))

    run, batches = search, [sources[start : start + batch_sentences] for start in range(0, sentences, batch_sentences)]
    if in_slots:
        run, batches, threads = search_in_slots, [sources], 1
        sizes: dict[str, Any] = {"num_slots": batch_sentences, "src_capacity": SRC_LENGTHS[1] + 1, "tgt_capacity": TGT_LENGTH, "beam_size": beam_size}
        with inference([model]):
            slots = SlotSearch(model, **sizes, **options)

    if device.type == "cpu":
        keep_freed_memory()
    seconds: list[float] = []
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(run, batches[:1] * threads))
        for _ in range(repeats):
            synchronize(device)
            started = time.perf_counter()
            found = list(pool.map(run, batches))
            synchronize(device)
            seconds.append(time.perf_counter() - started)
            assert all(len(hypotheses[0].tokens) == TGT_LENGTH for batch in found for hypotheses in batch)
    speed = spread([sentences * TGT_LENGTH / value for value in seconds])
    return SearchReport(
        tgt_tokens_per_s=speed,
        sentences_per_s=speed.median / TGT_LENGTH,
        seconds_per_step=spread(seconds).median * threads / (math.ceil(sentences / batch_sentences) * TGT_LENGTH),
        precision=name,
        threads=threads,
        beam_size=beam_size,
        batch_sentences=batch_sentences,
        parameters=parameters,
        peak_memory_mb=peak_memory_mb(device),
        machine=describe_machine(device),
    )
