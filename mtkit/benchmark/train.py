"""Training speed: whole updates through the trainer's own code, on the trainer's own batches."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mtkit.benchmark.machine import Spread, describe_machine, matmul_flops_per_s, spread, synchronize
from mtkit.benchmark.synthetic import synthetic_pairs
from mtkit.data.batching import derive_budget, plan_pool, with_packing
from mtkit.data.loader import Prefetcher
from mtkit.distributed import World
from mtkit.model.config import flops_per_token
from mtkit.model.device import keep_freed_memory, resolve_precision
from mtkit.model.transformer import Transformer
from mtkit.training.config import TrainConfig
from mtkit.training.dry_run import peak_memory_mb
from mtkit.training.micro import can_pack
from mtkit.training.step import TrainingPairs, UpdateBatch, Updater, update_batches

SMALLEST_CORPUS = 100_000
"""Generated pairs at least: in a small corpus few sentences have the same length, so that more of a batch is padding than in a real one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """Training speed.

    Attributes:
        tgt_tokens_per_s: Real target tokens, EOS included, padding excluded.
        src_tokens_per_s: Median of the real source tokens.
        seconds_per_update: Median.
        updates: Measured in each repeat, after `warmup_updates`.
        warmup_updates: Left out.
        padding_share: Of the positions of both sides.
        data_wait_share: Share of the time in which the update waited for its batch.
        peak_memory_mb: Of the process; on CUDA allocated on the GPU.
        parameters: Of the model.
        precision: Of the matrix products.
        train_flops_per_tgt_token: Of the matrix products, forward and backward, at the mean lengths measured.
        achieved_flops_per_s: The same times the speed.
        matmul_flops_per_s: What large matrix products reach on this machine in this precision.
        utilization: achieved / matmul.
        machine: Processor, threads, versions.
    """

    tgt_tokens_per_s: Spread
    src_tokens_per_s: float
    seconds_per_update: float
    updates: int
    warmup_updates: int
    padding_share: float
    data_wait_share: float
    peak_memory_mb: float
    parameters: int
    precision: str
    train_flops_per_tgt_token: float
    achieved_flops_per_s: float
    matmul_flops_per_s: float
    utilization: float
    machine: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Repeat:
    seconds: float
    wait_seconds: float
    num_tgt_tokens: int
    num_src_tokens: int


def bench_train(
    config: TrainConfig,
    *,
    device: torch.device,
    pairs: TrainingPairs | None = None,
    vocab_sizes: tuple[int, int] | None = None,
    mean_length: float = 27.0,
    updates: int = 20,
    warmup_updates: int = 5,
    repeats: int = 3,
) -> TrainReport:
    """Measure the training speed of a config on one process.

    Args:
        config: Model, batch sizes, precision.
        device: Where to train.
        pairs: Real training data, or None for generated ids.
        vocab_sizes: Source and target pieces of the real data.
        mean_length: Target tokens of a generated pair.
        updates: Updates of one repeat.
        warmup_updates: Updates before the first repeat, left out.
        repeats: Of the measurement; the median counts.
    """
    if pairs is None:
        vocab_sizes = (config.tokenizer.vocab_size, config.tokenizer.vocab_size)
        needed = (updates * repeats + warmup_updates) * config.batch.batch_tokens / mean_length
        num_pairs = max(SMALLEST_CORPUS, int(needed * 1.3))
        pairs = synthetic_pairs(num_pairs, vocab_size=config.tokenizer.vocab_size, mean_length=mean_length)
    assert vocab_sizes is not None
    if device.type == "cpu":
        keep_freed_memory()
    torch.manual_seed(config.seed)
    model = Transformer(config.model, src_vocab_size=vocab_sizes[0], tgt_vocab_size=vocab_sizes[1]).to(device)
    precision = resolve_precision(config.training.precision, device)
    is_packed = can_pack(config.model, device, precision)
    updater = Updater(
        model,
        config.optim,
        precision=precision,
        device=device,
        world=World(),
        ema_decay=config.training.ema_decay,
        is_packed=is_packed,
        compile_model=config.training.compile_layers,
    )
    budget = derive_budget(batch_tokens=config.batch.batch_tokens, max_tokens=config.batch.max_tokens, world_size=1)
    if is_packed:
        budget = with_packing(budget, pairs.src_lengths, pairs.tgt_lengths)
    plan = plan_pool(pairs.src_lengths, pairs.tgt_lengths, budget=budget, seed=config.seed, epoch=0, pool=0)

    def endless() -> Iterator[UpdateBatch]:
        while True:
            yield from update_batches(pairs, plan, world=World(), seed=config.seed)

    with Prefetcher(endless()) as batches:
        _measure(updater, batches, updates=warmup_updates, device=device)
        results = [_measure(updater, batches, updates=updates, device=device) for _ in range(repeats)]
    speed = spread([result.num_tgt_tokens / result.seconds for result in results])
    num_tgt, num_src = sum(result.num_tgt_tokens for result in results), sum(result.num_src_tokens for result in results)
    src_len = round(float(pairs.src_lengths[plan.indices].mean()) + 1.0)
    tgt_len = round(float(pairs.tgt_lengths[plan.indices].mean()) + 1.0)
    flops = 3.0 * flops_per_token(config.model, tgt_vocab_size=vocab_sizes[1], src_len=src_len, tgt_len=tgt_len)
    peak = peak_memory_mb(device)  # before the matrix products below take memory of their own
    ceiling = matmul_flops_per_s(precision, device)
    return TrainReport(
        tgt_tokens_per_s=speed,
        src_tokens_per_s=speed.median * num_src / num_tgt,
        seconds_per_update=spread([result.seconds / updates for result in results]).median,
        updates=updates,
        warmup_updates=warmup_updates,
        padding_share=plan.padding_share,
        data_wait_share=sum(result.wait_seconds for result in results) / sum(result.seconds for result in results),
        peak_memory_mb=peak,
        parameters=model.num_parameters(),
        precision=precision.name,
        train_flops_per_tgt_token=flops,
        achieved_flops_per_s=flops * speed.median,
        matmul_flops_per_s=ceiling,
        utilization=flops * speed.median / ceiling,
        machine=describe_machine(device),
    )


def _measure(updater: Updater, batches: Iterator[UpdateBatch], *, updates: int, device: torch.device) -> _Repeat:
    wait_seconds, num_tgt_tokens, num_src_tokens = 0.0, 0, 0
    synchronize(device)
    started = time.perf_counter()
    for _ in range(updates):
        asked = time.perf_counter()
        batch = next(batches)
        wait_seconds += time.perf_counter() - asked
        updater.run(batch, lr=1e-6)
        num_tgt_tokens += batch.num_tgt_tokens
        num_src_tokens += sum(micro_batch.num_src_tokens for micro_batch in batch.micro_batches)
    synchronize(device)
    return _Repeat(seconds=time.perf_counter() - started, wait_seconds=wait_seconds, num_tgt_tokens=num_tgt_tokens, num_src_tokens=num_src_tokens)
