import dataclasses
import time
from typing import Any

import pytest
import torch

from mtkit import config as codec
from mtkit.benchmark import train as module
from mtkit.benchmark.synthetic import SyntheticPairs, synthetic_pairs
from mtkit.benchmark.train import TrainReport, bench_train
from mtkit.data.batching import derive_budget, plan_pool
from mtkit.data.loader import Batch
from mtkit.model.config import flops_per_token
from mtkit.training.config import TrainConfig
from mtkit.training.step import UpdateBatch, Updater
from tests.training.toy import TOY

CPU = torch.device("cpu")
UPDATES, WARMUP, REPEATS = 3, 2, 2


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(module, "matmul_flops_per_s", lambda *_: 1e12)


def config(*overrides: str) -> TrainConfig:
    layers = [codec.Layer(name="toy", data=TOY), *(codec.Layer(name="test", data=codec.parse_override(text)) for text in overrides)]
    return codec.resolve(TrainConfig, layers).config


def measure(config: TrainConfig, **options: Any) -> TrainReport:
    return bench_train(config, device=CPU, updates=UPDATES, warmup_updates=WARMUP, repeats=REPEATS, mean_length=10.0, **options)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[UpdateBatch, float]]:
    """The batches that the trainer's own update got, and the learning rates."""
    batches: list[tuple[UpdateBatch, float]] = []
    real = Updater.run

    def spy(self: Updater, batch: UpdateBatch, *, lr: float, **options: Any) -> Any:
        batches.append((batch, lr))
        return real(self, batch, lr=lr, **options)

    monkeypatch.setattr(Updater, "run", spy)
    return batches


def padded(update: UpdateBatch) -> list[Batch]:
    return [batch for batch in update.micro_batches if isinstance(batch, Batch)]


def pairs() -> SyntheticPairs:
    return synthetic_pairs(400, vocab_size=44, mean_length=10.0)


def test_real_tokens_are_counted_and_the_clock_is_honest(seen: list[tuple[UpdateBatch, float]], monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    report = measure(config("batch.max_tokens=50"), pairs=pairs(), vocab_sizes=(44, 44))
    assert len(seen) == WARMUP + REPEATS * UPDATES
    measured = [batch for batch, _ in seen[WARMUP:]]
    tgt = [sum(int(micro.tgt_mask_BT.sum()) for micro in padded(batch)) for batch in measured]
    src = [sum(int(micro.src_mask_BS.sum()) for micro in padded(batch)) for batch in measured]
    positions = [sum(micro.tgt_mask_BT.numel() for micro in padded(batch)) for batch in measured]
    assert sum(positions) > sum(tgt), "there is padding that could be counted by mistake"
    # The clock ticks once at the start, twice per update and once at the end.
    seconds = 2 * UPDATES + 1
    rates = sorted([sum(tgt[:UPDATES]) / seconds, sum(tgt[UPDATES:]) / seconds])
    speed = report.tgt_tokens_per_s
    assert [speed.lowest, speed.highest, speed.repeats] == [*rates, REPEATS]
    assert speed.median == pytest.approx(sum(rates) / 2)
    assert report.src_tokens_per_s == pytest.approx(speed.median * sum(src) / sum(tgt))
    assert report.seconds_per_update == seconds / UPDATES
    assert report.data_wait_share == pytest.approx(UPDATES / seconds)


def test_the_rest_of_the_report(seen: list[tuple[UpdateBatch, float]]) -> None:
    data = pairs()
    report = measure(config(), pairs=data, vocab_sizes=(44, 44))
    plan = plan_pool(
        data.src_lengths, data.tgt_lengths, budget=derive_budget(batch_tokens=120, max_tokens=120, world_size=1), seed=1, epoch=0, pool=0
    )
    assert report.padding_share == plan.padding_share
    assert (report.updates, report.warmup_updates) == (UPDATES, WARMUP)
    assert report.precision == "fp32"
    src_len, tgt_len = round(float(data.src_lengths.mean()) + 1), round(float(data.tgt_lengths.mean()) + 1)
    flops = 3 * flops_per_token(config().model, tgt_vocab_size=44, src_len=src_len, tgt_len=tgt_len)
    assert report.train_flops_per_tgt_token == flops
    assert report.achieved_flops_per_s == flops * report.tgt_tokens_per_s.median
    assert report.utilization == report.achieved_flops_per_s / 1e12
    assert 0 <= report.data_wait_share < 1
    assert report.peak_memory_mb > 50
    assert all(lr > 0 for _, lr in seen), "the optimizer does its work"
    assert report.machine["threads"] == 1


def test_generated_pairs_are_enough_for_every_update(seen: list[tuple[UpdateBatch, float]]) -> None:
    measure(config())
    firsts = [tuple(batch.seeds) for batch, _ in seen]
    assert len(set(firsts)) == len(firsts), "no batch comes twice"
    assert max(int(micro.src_BS.max()) for batch, _ in seen for micro in padded(batch)) < 44


def test_data_that_is_too_short_begins_anew(seen: list[tuple[UpdateBatch, float]]) -> None:
    few = synthetic_pairs(30, vocab_size=44, mean_length=10.0)
    report = measure(config(), pairs=few, vocab_sizes=(44, 44))
    assert len(seen) == WARMUP + REPEATS * UPDATES
    assert dataclasses.asdict(report)["tgt_tokens_per_s"]["repeats"] == REPEATS
