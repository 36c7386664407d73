from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit.checkpoint.format import parameters_by_name
from mtkit.training.dry_run import dry_run, peak_memory_mb
from mtkit.training.step import UpdateBatch
from mtkit.training.trainer import Trainer
from tests.training.toy import shards_of

MakeTrainer = Callable[..., Trainer]


def test_the_report_is_about_this_run(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "batch.batch_tokens=240", "batch.max_tokens=80")
    before = {name: tensor.clone() for name, tensor in parameters_by_name(trainer.updater.model).items()}
    report = dry_run(trainer)
    plan = trainer.feed.plan(0, 0).plan
    src, tgt = shards_of(trainer).src_lengths, shards_of(trainer).tgt_lengths
    assert report.parameters == sum(tensor.numel() for tensor in before.values())
    assert report.pairs == 120
    assert report.updates_per_epoch == plan.num_updates
    assert report.micro_batches_per_update == 3
    assert report.padding_share == plan.padding_share
    groups = [group for position in range(plan.num_updates) for group in plan.update(position)]
    areas = [len(group) * int(src[group].max() + tgt[group].max() + 2) for group in groups]
    rows, width = report.largest_src_shape
    assert report.largest_tgt_shape[0] == rows
    assert rows * (width + report.largest_tgt_shape[1]) == max(areas)
    assert rows * max(width, report.largest_tgt_shape[1]) <= 80
    assert report.seconds_per_update > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in parameters_by_name(trainer.updater.model).items()), "nothing is trained"
    assert list(tmp_path.iterdir()) == [], "and nothing is saved"


def test_the_update_is_as_large_as_a_real_one(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, "batch.batch_tokens=240", "batch.max_tokens=80")
    sizes = []
    real = trainer.updater.accumulate

    def spy(batch: UpdateBatch) -> Any:
        sizes.append(len(batch.micro_batches))
        return real(batch)

    monkeypatch.setattr(trainer.updater, "accumulate", spy)
    dry_run(trainer)
    assert sizes == [3, 3], "once to warm up, once measured"


def test_the_memory_is_what_the_kernel_says() -> None:
    status = Path("/proc/self/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    assert peak_memory_mb(torch.device("cpu")) == pytest.approx(peak_kib * 1024 / 1e6, rel=0.1)
