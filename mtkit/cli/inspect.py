"""`mtkit inspect`: what a directory of mtkit is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from mtkit import files
from mtkit.artefacts import Verify
from mtkit.cli import console
from mtkit.errors import ArtefactError


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("inspect", epilog="Example: mtkit inspect runs/en-de/model")(inspect)


def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A tokenizer, shard set, checkpoint, model or run.")],
    verify: Annotated[Verify, typer.Option("--verify", help="fast: names and sizes of the files; full: also the sha256 of each.")] = "fast",
    as_json: console.JsonOption = False,
) -> None:
    """Say what a directory is: its kind, sizes, state, config, origin, and whether its files are whole.

    Prints one `name: value` per line. Exit code 4 if something is damaged.
    """
    from mtkit.training.inspection import inspect_directory

    found = inspect_directory(path, verify=verify)
    if as_json:
        console.print_json(found.to_json())
    else:
        with files.open_output(files.STDIO) as output:
            for name, value in _flat(found.to_json()):
                output.write(console.escape_control(files.one_line(f"{name}: {value}")))
    if found.damage:
        raise ArtefactError("\n".join(found.damage), hint="The other parts are whole." if found.facts.get("checkpoints") else None)


def _flat(value: dict[str, Any], *, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of a nested object with dotted names; the facts without a prefix, and nothing of what is empty."""
    for key, item in value.items():
        name = f"{prefix}{key}"
        if name == "facts":
            yield from _flat(item)
        elif isinstance(item, dict) and item:
            yield from _flat(item, prefix=f"{name}.")
        elif isinstance(item, list) and item and all(isinstance(part, dict) for part in item):
            for index, part in enumerate(item):
                yield from _flat(part, prefix=f"{name}.{index}.")
        elif isinstance(item, list) and item:
            yield name, ", ".join(map(str, item))
        elif isinstance(item, bool):
            yield name, "yes" if item else "no"
        elif item is not None and item not in ({}, [], ""):
            yield name, str(item)
