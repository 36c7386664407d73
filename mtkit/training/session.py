"""One session of a run: from a config and a directory to a trainer that is ready to go, in the right order and under the run's lock."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mtkit.data.shards import ShardSet
from mtkit.distributed import World, process_group
from mtkit.model.device import keep_freed_memory, resolve_device, resolve_precision
from mtkit.training.config import TrainConfig
from mtkit.training.initial import open_initial
from mtkit.training.prepare import Say, open_shards, prepare_data, shards_directory
from mtkit.training.run import RunDirectory
from mtkit.training.signals import StopRequest
from mtkit.training.trainer import Place, Trainer
from mtkit.training.validate import DevSet

COLLECTIVE_TIMEOUT_S = 1800.0
"""Seconds that a process waits for the others: for the data at the start, and for the slowest share of a validation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """What a session works with.

    Attributes:
        trainer: Ready to train; already where the run left off, if it has begun before.
        shards: The training data.
        dev: The dev set.
    """

    trainer: Trainer
    shards: ShardSet
    dev: DevSet


@contextlib.contextmanager
def open_session(
    config: TrainConfig, output: Path, *, device_name: str, world: World, num_workers: int, resume: bool, stop: StopRequest, say: Say
) -> Iterator[Session]:
    """Prepare the data, join the other processes, and build or resume the trainer; lets go of everything when the block ends.

    Args:
        config: Of the run.
        output: The run directory.
        device_name: `auto`, `cpu`, `cuda` or `cuda:N`.
        world: This process among all.
        num_workers: Processes for preprocessing.
        resume: Go on with the run that is in the directory; False refuses if there is one.
        stop: Tells whether a signal asked to stop.
        say: Gets lines about what happens; called by the main process only.

    Raises:
        UsageError: There is a run already and `resume` is False.
        ConfigError: The run that is there has another config.
        MTKitError: Another process trains in this directory.
    """
    run = RunDirectory(path=output)
    device = resolve_device(device_name)
    if device.type == "cuda":
        device = torch.device("cuda", world.local_rank) if device_name in ("auto", "cuda") else device
        torch.cuda.set_device(device)
    if device.type == "cpu":
        keep_freed_memory()
    place = Place(device=device, precision=resolve_precision(config.training.precision, device), world=world)
    with contextlib.ExitStack() as stack:
        if world.is_main:
            if not resume:
                run.require_new()
            stack.enter_context(run.lock())
            run.adopt_config(config)
            with stop.at_once():
                prepare_data(config, output, num_workers=num_workers, say=say)
        # The other processes wait here until the main one has prepared the data, which takes a while for a large corpus.
        stack.enter_context(process_group(world, backend="nccl" if device.type == "cuda" else "gloo", timeout_s=COLLECTIVE_TIMEOUT_S))
        shards, dev = open_shards(shards_directory(config, output))
        trainer = Trainer(config, shards=shards, dev=dev, run=run, place=place, stop=stop)
        if world.is_main:
            trainer.store.manager.remove_leftovers()
        checkpoint, warnings = trainer.resume()
        initial = open_initial(config) if checkpoint is None else None
        if initial is not None:
            initial.require_tokenizer(shards.tokenizer, shards_directory(config, output))
            initial.load_into(trainer.updater, keep_optimizer=config.training.keep_optimizer)
        if world.is_main:
            for warning in warnings:
                say(f"warning: {warning}")
            if checkpoint is not None:
                say(f"going on from {checkpoint.path}")
            elif initial is not None:
                say(f"beginning with the weights of {initial.path}")
        yield Session(trainer=trainer, shards=shards, dev=dev)
