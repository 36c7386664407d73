"""`mtkit train`."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtkit.cli import console
from mtkit.cli.console import DeviceOption, JsonOption, QuietOption, ThreadsOption
from mtkit.cli.corpora import MultiValueCommand, require_one_stdin
from mtkit.cli.display import open_display
from mtkit.errors import UsageError
from mtkit.files import STDIO, open_output

if TYPE_CHECKING:
    from mtkit.config import Layer, Resolved
    from mtkit.training.config import TrainConfig
    from mtkit.training.trainer import Trainer

EXAMPLE = "Example: mtkit train --train train.en train.de --dev dev.en dev.de --preset tiny --output runs/en-de"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("train", cls=MultiValueCommand, epilog=EXAMPLE)(train)


def train(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The run directory: checkpoints, metrics, and the model at the end.")] = None,
    train_data: Annotated[
        list[str] | None,
        typer.Option(
            "--train",
            metavar="SRC TGT",
            help="Training text: a source and a target file (repeatable), TSV (stdin: -), parquet, JSON lines, or hf:NAME:CONFIG.",
        ),
    ] = None,
    dev_data: Annotated[list[str] | None, typer.Option("--dev", metavar="SRC TGT", help="Dev set, in the same form.")] = None,
    shards: Annotated[
        list[Path] | None,
        typer.Option("--shards", metavar="DIR", help="Instead of --train: a directory that `mtkit preprocess` wrote, and its dev set unless --dev."),
    ] = None,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Encode --train while training, without shards; --train - reads TSV from stdin.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="DIR", help="Use this tokenizer, or that of a model or run, instead of learning one.")
    ] = None,
    src_lang: Annotated[str | None, typer.Option("--src-lang", help="Source language code, such as en.")] = None,
    tgt_lang: Annotated[str | None, typer.Option("--tgt-lang", help="Target language code, such as de.")] = None,
    preset: Annotated[str | None, typer.Option("--preset", help="tiny, small, base, big (the paper's) or deep.")] = None,
    config_file: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file with any config keys, or the config.json of a run.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a config key, such as optim.lr=5e-4; repeatable.")
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option("--init-from", metavar="MODEL", help="Fine-tune: begin with the weights of a model, and take its architecture and tokenizer."),
    ] = None,
    keep_optimizer: Annotated[
        bool | None,
        typer.Option("--keep-optimizer/--fresh-optimizer", help="With --init-from CHECKPOINT: its optimizer state too, or none."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the initial weights, the data order and dropout.")] = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    num_processes: Annotated[int, typer.Option("--nproc", min=1, help="Processes to start on this machine, one per GPU.")] = 1,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="With --nproc: how often to go on from the last checkpoint when a process was killed.")
    ] = 3,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, metavar="SECONDS", help="With several processes: how long one waits for the others.")
    ] = 1800.0,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Processes for preprocessing; default: one per core.")] = None,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Go on with the run that is in the output directory.")] = True,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the resolved config as TOML with the source of each value.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Build everything, run the largest batch, report memory and time.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a model, or go on with a run that was stopped.

    Values come from, the strongest first: flags, --set, the --config file, --preset, the defaults (the paper's base model).
    """
    if shards and len(shards) > 1:
        raise UsageError(
            f"--shards was given {len(shards)} times", hint="One shard set can hold several corpora: name all in one `mtkit preprocess`."
        )
    require_one_stdin([*(train_data or []), *(dev_data or [])])
    flags: dict[str, object] = {
        "data": {
            "train": train_data,
            "dev": dev_data,
            "shards": str(shards[0]) if shards else None,
            "stream": stream,
            "tokenizer": None if tokenizer is None else str(tokenizer),
            "src_lang": src_lang,
            "tgt_lang": tgt_lang,
        },
        "training": {"init_from": None if init_from is None else str(init_from), "keep_optimizer": keep_optimizer},
        "seed": seed,
    }
    resolved = resolve_config(preset=preset, config_file=config_file, overrides=overrides or [], flags=flags, output=output)
    if print_config:
        from mtkit.config import dump_toml

        with open_output(STDIO) as writer:
            for line in dump_toml(resolved.config, origins=resolved.origins).rstrip("\n").split("\n"):
                writer.write(line)
        return
    if output is None:
        raise UsageError("no output directory was given", hint="Add --output runs/NAME")
    config = resolved.config
    from mtkit.cores import num_cores, num_threads
    from mtkit.distributed import is_launched, launch, read_environment, watch_launcher
    from mtkit.training.run import RunDirectory

    num_workers = workers or num_cores()
    world = read_environment()
    if world.is_main and not is_launched():
        _warn_of_idle_settings(resolved)
    if num_processes > 1 and world.size == 1:
        from mtkit.training.prepare import prepare_data
        from mtkit.training.signals import StopRequest

        run = RunDirectory(path=output)
        if not resume:  # what can be refused is refused before others are started, who would wait for this one
            run.require_new()
        with StopRequest().listen() as stop, run.lock(), stop.at_once():
            run.require_fitting(config)
            say = partial(console.say, quiet=quiet)
            prepare_data(config, output, num_workers=num_workers, world_size=num_processes, say=say)
        _check_processes(num_processes, device)
        arguments = [argument for argument in sys.argv[1:] if argument != "--no-resume"]  # has done its work here, and would refuse a restart
        raise typer.Exit(launch(arguments, num_processes=num_processes, max_restarts=max_restarts, say=console.warn))

    watch_launcher()

    import torch

    from mtkit.training.session import open_session
    from mtkit.training.signals import StopRequest

    torch.set_num_threads(threads or min(torch.get_num_threads(), num_threads()))  # torch does not know the limit of a container
    quiet = quiet or not world.is_main
    with (
        StopRequest().listen() as stop,
        open_session(
            config,
            output,
            device_name=device,
            world=world,
            num_workers=num_workers,
            resume=resume,
            timeout_s=timeout,
            stop=stop,
            say=partial(console.say, quiet=quiet),
        ) as trainer,
    ):
        if dry_run:
            _report_dry_run(trainer, as_json=as_json and world.is_main, quiet=quiet)
        else:
            _run(trainer, quiet=quiet, as_json=as_json and world.is_main)


def resolve_config(
    *, preset: str | None, config_file: Path | None, overrides: list[str], flags: dict[str, object], output: Path | None = None
) -> "Resolved[TrainConfig]":
    """Put the layers of a training config together. The model that a run begins with brings its architecture, which a preset does not change.

    Args:
        preset: Its name, or None for that of the file.
        config_file: TOML or JSON.
        overrides: Words of `--set`.
        flags: Values by table and key; None where a flag was not given.
        output: The run directory, which knows the architecture when the model that the run began with is gone.
    """
    from mtkit import config as codec
    from mtkit.training.config import TrainConfig
    from mtkit.training.config import preset as preset_layer

    file_data = {} if config_file is None else codec.read_config(config_file)
    name = preset or file_data.pop("preset", None)
    file_data.pop("preset", None)
    layers = [] if name is None else [preset_layer(str(name))]
    if config_file is not None:
        layers.append(codec.Layer(name=str(config_file), data=file_data))
    layers += [codec.Layer(name="--set", data=codec.parse_override(text)) for text in overrides]
    layers.append(codec.Layer(name="command line", data=_given(flags)))
    tables = [layer.data.get("training") for layer in layers]
    named = [table["init_from"] for table in tables if isinstance(table, dict) and "init_from" in table]
    if named and isinstance(named[-1], str) and (layer := _architecture_layer(named[-1], output)) is not None:
        layers.insert(0 if name is None else 1, layer)
    return codec.resolve(TrainConfig, layers)


def _architecture_layer(init_from: str, output: Path | None) -> "Layer | None":
    """The architecture of the model that a run begins with; None where that is nowhere to be read."""
    from mtkit.checkpoint.layout import CONFIG_NAME, find_model
    from mtkit.config import Layer
    from mtkit.files import read_json
    from mtkit.model.config import ONLY_IN_TRAINING
    from mtkit.training.run import RunDirectory

    if output is not None and (output / CONFIG_NAME).exists() and RunDirectory(path=output).has_checkpoints():
        saved = output / CONFIG_NAME  # the run goes on, and needs the model no more
    elif Path(init_from).exists():
        saved = find_model(Path(init_from)) / CONFIG_NAME
    else:
        return None
    value = read_json(saved)
    model = value.get("model") if isinstance(value, dict) else None
    if not isinstance(model, dict):
        return None  # which is told where it is loaded
    return Layer(name=str(saved), data={"model": {key: value for key, value in model.items() if key not in ONLY_IN_TRAINING}})


def _warn_of_idle_settings(resolved: "Resolved[TrainConfig]") -> None:
    """Tell of what `--set` sets about steps that are done already. (A config file may be that of all steps.)"""
    data = resolved.config.data
    idle = {}
    if data.shards is not None:
        idle = dict.fromkeys(("tokenizer.", "preprocess."), f"{data.shards} is encoded already")
    elif (given := data.tokenizer or resolved.config.training.init_from) is not None:
        idle = {"tokenizer.": f"the tokenizer is that of {given}"}
    for key, origin in resolved.origins.items():
        for table, reason in idle.items():
            if origin == "--set" and key.startswith(table):
                console.warn(f"{key} has no effect: {reason}")


def _given(flags: dict[str, object]) -> dict[str, object]:
    """The flags without those that were not given."""
    pairs = ((key, _given(value) if isinstance(value, dict) else value) for key, value in flags.items())
    return {key: value for key, value in pairs if value is not None and value != {}}


def _check_processes(num_processes: int, device_name: str) -> None:
    """Refuse more processes than GPUs, and warn if processes that compute on the CPU have less than a core each."""
    from mtkit.cores import num_cores
    from mtkit.model.device import require_gpus, resolve_device

    device = resolve_device(device_name)
    if device.type == "cuda":
        require_gpus(device, num_processes)
    elif num_processes > num_cores():
        console.warn(f"{num_processes} processes share {num_cores()} CPU cores, which makes them slower than one per core")


def _run(trainer: "Trainer", *, quiet: bool, as_json: bool) -> None:
    last = {}
    with open_display(quiet=quiet, max_steps=trainer.config.training.max_steps) as display:
        for record in trainer.train():
            if trainer.place.world.is_main:
                display.show(record)
            last[record["kind"]] = dict(record)
    if as_json:
        console.print_json({kind: record for kind, record in last.items() if kind in ("valid", "end")})


def _report_dry_run(trainer: "Trainer", *, as_json: bool, quiet: bool) -> None:
    from dataclasses import asdict

    from mtkit.training.dry_run import dry_run as run_dry

    report = run_dry(trainer)
    if as_json:
        console.print_json(asdict(report))
        return
    for key, value in asdict(report).items():
        console.say(f"{key:<26} {_show(value)}", quiet=quiet)


def _show(value: float | int | tuple[int, ...] | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else " x ".join(map(str, value))
