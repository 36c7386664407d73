"""What each process of a data-parallel group computes in `test_step.py`. Run as a script it is one rank: SHARDS OUTPUT, torchrun's environment."""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from mtkit import config as codec
from mtkit import faults
from mtkit.checkpoint.format import parameters_by_name, write_tensors
from mtkit.data.batching import Budget, PoolPlan, derive_budget, plan_pool, with_packing
from mtkit.data.shards import ShardSet
from mtkit.distributed import World, process_group, read_environment
from mtkit.model.device import Precision
from mtkit.model.transformer import Transformer
from mtkit.training.config import TrainConfig
from mtkit.training.step import UpdateBatch, Updater, UpdateResult, update_batches
from tests.training.toy import TOY

MICRO_TOKENS = 30
SEED = 3


def make_plan(shards: ShardSet, *, world_size: int) -> PoolPlan:
    """Four micro-batches per update on one process or two; the last update of the epoch has an odd number."""
    budget = derive_budget(batch_tokens=4 * MICRO_TOKENS, max_tokens=MICRO_TOKENS, world_size=world_size)
    return plan_pool(shards.src_lengths, shards.tgt_lengths, budget=budget, seed=SEED, epoch=0, pool=0)


def make_updater(shards: ShardSet, world: World, **optim: Any) -> Updater:
    """An updater of the toy model; keywords are values of its optimizer's config."""
    config = codec.from_dict(TrainConfig, TOY)
    torch.manual_seed(SEED)
    model = Transformer(config.model, src_vocab_size=shards.tokenizer.src_vocab_size, tgt_vocab_size=shards.tokenizer.tgt_vocab_size)
    optim_config = dataclasses.replace(config.optim, **optim)
    return Updater(model, optim_config, precision=Precision(name="fp32", device_type="cpu"), device=torch.device("cpu"), world=world)


def take_gradients(updater: Updater, batch: UpdateBatch) -> dict[str, Tensor]:
    updater.accumulate(batch)
    gradients = {name: parameter.grad.clone() for parameter, name in updater.parameter_names.items() if parameter.grad is not None}
    updater.optimizer.zero_grad()
    return gradients


def batches(shards: ShardSet, world: World, *, position: int) -> Iterator[UpdateBatch]:
    return update_batches(shards, make_plan(shards, world_size=world.size), world=world, seed=SEED, position=position)


def compute(shards: ShardSet, world: World) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors: the gradient of the first update and of the last, and the weights after three. Facts: what the updates gave."""
    torch.set_num_threads(1)
    updater = make_updater(shards, world)
    buckets: list[int] = []
    if isinstance(updater._objective, DistributedDataParallel):

        def count_exchange(state: list[int], bucket: GradBucket) -> torch.futures.Future[Tensor]:
            state.append(bucket.buffer().numel())
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]

        updater._objective.register_comm_hook(buckets, count_exchange)
    last = make_plan(shards, world_size=world.size).num_updates - 1
    tensors = {
        "first": take_gradients(updater, next(batches(shards, world, position=0))),
        "last": take_gradients(updater, next(batches(shards, world, position=last))),
    }
    facts: dict[str, Any] = {"exchanges": [], "results": []}
    for batch in (batch for _, batch in zip(range(3), batches(shards, world, position=0), strict=False)):
        buckets.clear()
        result = updater.run(batch, lr=1e-3, extra=(1.0, float(world.rank)))
        facts["exchanges"].append(len(buckets))
        facts["results"].append([result.loss_sum, result.nll_sum, result.gradient_norm, result.is_applied, result.extra_sums])
    tensors["weights"] = parameters_by_name(updater.model)
    return tensors, facts


def starve(shards: ShardSet, world: World) -> dict[str, Any]:
    """What becomes of updates for which the memory of rank 1 does not suffice, one after the other: the outcome, and the weights."""
    updater = make_updater(shards, world)
    padded = next(batches(shards, world, position=0))
    budget = with_packing(Budget(micro_per_update=2, tgt_tokens=40, max_tokens=60), shards.src_lengths, shards.tgt_lengths)
    plan = plan_pool(shards.src_lengths, shards.tgt_lengths, budget=budget, seed=SEED, epoch=0, pool=0)
    packed = next(update_batches(shards, plan, world=world, seed=SEED))

    def outcome(work: Callable[[], UpdateResult | None], fault: str) -> list[str]:
        faults.arm({"MTKIT_FAULT": fault, "MTKIT_ALLOW_FAULTS": "1", "RANK": str(world.rank)})
        try:
            result = work()
            word = "tried" if result is None else "split" if result.is_split else "whole"
        except torch.OutOfMemoryError as error:
            word = str(error)
        weights = b"".join(tensor.numpy().tobytes() for tensor in parameters_by_name(updater.model).values())
        return [word, hashlib.sha256(weights).hexdigest()]

    largest = padded.micro_batches[0]
    return {
        "first": outcome(lambda: updater.run(padded, lr=1e-3), ""),
        "once": outcome(lambda: updater.run(padded, lr=1e-3), "oom@step:1/1"),
        "twice": outcome(lambda: updater.run(padded, lr=1e-3), "oom@step:1/1,oom@step:2/1"),
        "packed": outcome(lambda: updater.run(packed, lr=1e-3), "oom@step:1/1"),
        "try": outcome(lambda: updater.try_out(largest), "oom@try:1/1"),
        "fits": outcome(lambda: updater.try_out(largest), ""),
        "last": outcome(lambda: updater.run(padded, lr=1e-3), ""),
    }


def main() -> None:
    shards, output, world = ShardSet.open(Path(sys.argv[1])), Path(sys.argv[2]), read_environment()
    with process_group(world, backend="gloo", timeout_s=60.0):
        tensors, facts = compute(shards, world)
        facts["starved"] = starve(shards, world)
    for name, values in tensors.items():
        write_tensors(output / f"{name}-{world.rank}.safetensors", values)
    (output / f"facts-{world.rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
