"""A dry run: build everything, do the largest batch once, and report what the run will need. Nothing is trained or saved."""

import resource
import sys
import time
from dataclasses import dataclass

import torch

from mtkit.data.loader import PackedBatch
from mtkit.training.step import UpdateBatch
from mtkit.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRunReport:
    """What a dry run found.

    Attributes:
        parameters: Trained numbers, tied ones once.
        pairs: Sentence pairs; None for a stream.
        updates_per_epoch: Updates in one pass over the data; of several pools, an estimate from the first, and None for a stream.
        micro_batches_per_update: Over all processes.
        padding_share: Of the positions of the first pool.
        largest_src_shape: Rows and columns of the source of the largest micro-batch of the first pool.
        largest_tgt_shape: Rows and columns of its target.
        seconds_per_update: Of an update made of the largest micro-batch, after one to warm up.
        peak_memory_mb: Largest memory of this process: of the GPU on CUDA, resident memory elsewhere.
    """

    parameters: int
    pairs: int | None
    updates_per_epoch: int | None
    micro_batches_per_update: int
    padding_share: float
    largest_src_shape: tuple[int, ...]
    largest_tgt_shape: tuple[int, ...]
    seconds_per_update: float
    peak_memory_mb: float


def dry_run(trainer: Trainer) -> DryRunReport:
    """Run the largest micro-batch of the first pool twice, forward, backward and optimizer, with a learning rate of 0."""
    batch, planned = trainer.largest_batch()
    plan = planned.plan
    micro_per_update = plan.micro_per_update // trainer.place.world.size
    update = UpdateBatch(
        micro_batches=[batch] * micro_per_update,
        weights=[1.0] * micro_per_update,
        seeds=list(range(micro_per_update)),
        num_tgt_tokens=batch.num_tgt_tokens * plan.micro_per_update,
    )
    src, tgt = (batch.src_M, batch.tgt_in_N) if isinstance(batch, PackedBatch) else (batch.src_BS, batch.tgt_in_BT)
    trainer.updater.run(update, lr=0.0)
    started = time.perf_counter()
    trainer.updater.run(update, lr=0.0)
    seconds = time.perf_counter() - started
    return DryRunReport(
        parameters=trainer.updater.model.num_parameters(),
        pairs=trainer.feed.source.num_pairs,
        updates_per_epoch=trainer.feed.updates_per_epoch(planned),
        micro_batches_per_update=plan.micro_per_update,
        padding_share=plan.padding_share,
        largest_src_shape=tuple(src.shape),
        largest_tgt_shape=tuple(tgt.shape),
        seconds_per_update=seconds,
        peak_memory_mb=peak_memory_mb(trainer.place.device),
    )


def peak_memory_mb(device: torch.device) -> float:
    """The largest memory so far, in MB (10^6 bytes): allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0) / 1e6
