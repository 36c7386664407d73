"""`mtkit inspect`: what a directory of mtkit is."""

from pathlib import Path
from typing import Annotated

import typer

from mtkit import files
from mtkit.artefacts import Verify
from mtkit.cli import console
from mtkit.cli.summary import summarize
from mtkit.errors import ArtefactError


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("inspect", epilog="Example: mtkit inspect runs/en-de/model")(inspect)


def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A tokenizer, shard set, checkpoint, model or run.")],
    verify: Annotated[Verify, typer.Option("--verify", help="fast: names and sizes of the files; full: also the sha256 of each.")] = "fast",
    as_json: console.JsonOption = False,
) -> None:
    """Say what a directory is: its kind, sizes, state, origin, and whether its files are whole.

    Prints the essentials, one `name: value` per line. --json gives all there is: the whole config, every file, every fingerprint. Exit code 4 if
    something is damaged.
    """
    from mtkit.training.inspection import inspect_directory

    found = inspect_directory(path, verify=verify)
    if as_json:
        console.print_json(found.to_json())
    else:
        with files.open_output(files.STDIO) as output:
            for name, value in summarize(found):
                output.write(console.escape_control(files.one_line(f"{f'{name}:':<14} {value}")))
    if found.damage:
        raise ArtefactError("\n".join(found.damage), hint="The other parts are whole." if found.facts.get("checkpoints") else None)
