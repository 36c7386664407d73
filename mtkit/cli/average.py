"""`mtkit average`."""

from pathlib import Path
from typing import Annotated

import typer

from mtkit.artefacts import require_free
from mtkit.cli import console
from mtkit.cli.console import QuietOption
from mtkit.errors import ArtefactError, UsageError


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("average", epilog="Example: mtkit average runs/en-de --last 5 --output runs/en-de/average")(average)


def average(
    inputs: Annotated[list[Path], typer.Argument(metavar="RUN|CHECKPOINT", help="A run directory, or the checkpoints to average.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The model directory to make.")],
    last: Annotated[int | None, typer.Option("--last", min=1, help="Of a run: average its N newest checkpoints, see below.")] = None,
    best: Annotated[int | None, typer.Option("--best", min=1, help="Of a run: average its N best checkpoints.")] = None,
    metric: Annotated[str, typer.Option("--metric", help="What --best goes by: bleu, chrf or loss.")] = "bleu",
    quiet: QuietOption = False,
) -> None:
    """Average checkpoints into one model, which is usually better than each of them.

    --last takes checkpoints that lie equally far apart, every checkpoint.every_steps updates, if the run has enough of them: not what was saved in
    between, because of the time or of a stop.
    """
    from mtkit.checkpoint.average import average_checkpoints, select_best, select_last
    from mtkit.checkpoint.layout import CHECKPOINTS_NAME, read_every_steps
    from mtkit.checkpoint.manager import StoredCheckpoint, scan_checkpoints

    if metric not in ("bleu", "chrf", "loss"):
        raise UsageError(f"--metric must be bleu, chrf or loss, but is {metric}")
    if last is not None and best is not None:
        raise UsageError("--last and --best exclude each other")
    paths = inputs
    if last is not None or best is not None:
        if len(inputs) != 1:
            raise UsageError(f"--last and --best take one run directory, but {len(inputs)} paths were given")
        if not (inputs[0] / CHECKPOINTS_NAME).is_dir():
            what = f"is no run: it has no {CHECKPOINTS_NAME}" if inputs[0].exists() else "does not exist"
            raise ArtefactError(f"{inputs[0]}: {what}", hint="Give the directory of a run, as --output of `mtkit train` named it.")
        stored, unreadable = scan_checkpoints(inputs[0] / CHECKPOINTS_NAME)
        damaged = {path: StoredCheckpoint(path=path, step=step, scores={}) for step, path in unreadable}
        meant = list(damaged) if last is None else []
        if last is not None:
            meant = paths = [one.path for one in select_last([*stored, *damaged.values()], last, every_steps=read_every_steps(inputs[0]))]
        if bad := next((path for path in meant if path in damaged), None):
            raise ArtefactError(
                f"{bad}: is damaged, and may be one of those that were asked for",
                hint="Remove it, or name the checkpoints to average instead of the run.",
            )
        if last is None:
            paths = [one.path for one in select_best(stored, best or 1, metric=metric)]
    elif run := next((path for path in inputs if (path / CHECKPOINTS_NAME).is_dir()), None):
        hint = "Add --last 5, or --best 5." if len(inputs) == 1 else f"Name checkpoints, such as {run / CHECKPOINTS_NAME}/step-0001000, or models."
        raise UsageError(f"{run} is a run: say which of its checkpoints to average", hint=hint)
    require_free(output)
    average_checkpoints(paths, output)
    console.say(f"averaged {', '.join(path.name for path in paths)} into {output}", quiet=quiet)
