"""One session of a run: from a config and a directory to a trainer that is ready to go, in the right order and under the run's lock."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from mtkit import config as codec
from mtkit.distributed import World, all_gather_lines, process_group
from mtkit.errors import ConfigError
from mtkit.model.device import keep_freed_memory, require_gpus, resolve_device, resolve_precision
from mtkit.training.config import TrainConfig
from mtkit.training.initial import open_initial
from mtkit.training.prepare import Say, open_data, prepare_data, shards_directory
from mtkit.training.run import RunDirectory
from mtkit.training.signals import StopRequest
from mtkit.training.trainer import Place, Trainer
from mtkit.training.validate import dev_set_warnings, require_bleu, scoring_warnings


@contextlib.contextmanager
def open_session(
    config: TrainConfig,
    output: Path,
    *,
    device_name: str,
    world: World,
    num_workers: int,
    resume: bool,
    timeout_s: float = 1800.0,
    stop: StopRequest,
    say: Say,
) -> Iterator[Trainer]:
    """Prepare the data, join the other processes, and build the trainer, already where the run left off if it has begun before.

    Lets go of everything when the block ends.

    Args:
        config: Of the run.
        output: The run directory.
        device_name: `auto`, `cpu`, `cuda` or `cuda:N`.
        world: This process among all.
        num_workers: Processes for preprocessing.
        resume: Go on with the run that is in the directory; False refuses if there is one.
        timeout_s: Seconds that a process waits for the others: for the data at the start, and for the slowest share of a validation.
        stop: Tells whether a signal asked to stop.
        say: Gets lines about what happens; called by the main process only.

    Raises:
        UsageError: There is a run already and `resume` is False.
        ConfigError: The run that is there has another config, or another process has.
        ArtefactError: Something else is where its model will be.
        MTKitError: Another process trains in this directory, or BLEU cannot be computed for the target language.
    """
    run = RunDirectory(path=output)
    device = resolve_device(device_name)
    if device.type == "cuda":
        require_gpus(device, world.local_rank + 1)
        device = torch.device("cuda", world.local_rank) if device_name in ("auto", "cuda") else device
        torch.cuda.set_device(device)
    if device.type == "cpu":
        keep_freed_memory()
    place = Place(device=device, precision=resolve_precision(config.training.precision, device), world=world)
    if config.validation.translate:
        require_bleu(config.data.tgt_lang)
    with contextlib.ExitStack() as stack:
        if world.is_main:
            if not resume:
                run.require_new()
            stack.enter_context(run.lock())
            run.require_fitting(config)
            with stop.at_once():
                prepare_data(config, output, num_workers=num_workers, world_size=world.size, say=say)
        # The other processes wait here until the main one has prepared the data, which takes a while for a large corpus.
        stack.enter_context(process_group(world, backend="nccl" if device.type == "cuda" else "gloo", timeout_s=timeout_s))
        with stop.at_once():
            data = open_data(config, output)
        trainer = Trainer(config, data=data, run=run, place=place, stop=stop)
        checkpoint, warnings = trainer.resume()
        _require_agreement(config, trainer, None if checkpoint is None else str(checkpoint.path))
        initial = open_initial(config) if checkpoint is None else None
        if initial is not None:
            initial.require_tokenizer(data.tokenizer, shards_directory(config, output))
            initial.load_into(trainer.updater, keep_optimizer=config.training.keep_optimizer)
            trainer.state.is_validation_due = True  # what it begins with is what it has to beat
        if world.is_main:
            warnings += dev_set_warnings(data.dev, data.tokenizer)
            if config.validation.translate:
                warnings += scoring_warnings(data.dev, tgt_lang=config.data.tgt_lang)
            for warning in warnings:
                say(f"warning: {warning}")
            if checkpoint is not None:
                if (begun := config.training.init_from) is not None and not Path(begun).exists():
                    say(f"warning: {begun}: is not there; the run goes on without it")
                say(f"going on from {checkpoint.path}")
            elif initial is not None:
                say(f"beginning with the weights of {initial.path}")
        yield trainer


def _require_agreement(config: TrainConfig, trainer: Trainer, checkpoint: str | None) -> None:
    """Refuse to train where the processes do not have the same config, data and checkpoint: each would train a model of its own.

    Raises:
        ConfigError: Says what differs.
    """
    mine = {"config": json.dumps(codec.to_dict(config), sort_keys=True), "data": trainer.data.fingerprint, "checkpoint": checkpoint or "none"}
    by_rank = all_gather_lines(list(mine.values()), trainer.place.world, trainer.place.device)
    for rank, values in enumerate(by_rank):
        for name, value, first in zip(mine, values, by_rank[0], strict=True):
            if value != first:
                raise ConfigError(
                    f"process {rank} has another {name} than process 0", hint="Start all processes with the same options, on the same files."
                )
