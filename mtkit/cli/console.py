"""What the commands share when they talk to a person: everything goes to stderr, because stdout carries data only."""

import contextlib
import json
import sys
from typing import Annotated, Any

import typer

from mtkit.files import STDIO, open_output

MAX_THREADS = 1024
"""The libraries below crash at a million."""

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=MAX_THREADS,
        help="CPU threads; in translation batches at the same time. [default: one per core, at most OMP_NUM_THREADS]",
    ),
]


def say(message: str, *, quiet: bool = False) -> None:
    """Print a line of progress or result for a person, unless `quiet`."""
    if not quiet:
        _tell(message)


def warn(message: str) -> None:
    """Print a warning."""
    _tell(f"warning: {message}")


def report_error(message: str, hint: str | None) -> None:
    """Print an error and what to do about it."""
    _tell(f"error: {message}" + (f"\n{hint}" if hint else ""))


def _tell(message: str) -> None:
    """Print a message. One that cannot be written is lost, and the work goes on: a log has filled the disk, a terminal is gone, or Ctrl-C has ended
    the `tee` behind `mtkit train 2>&1 | tee log` too, which must not keep the run from being saved."""
    with contextlib.suppress(OSError):
        print(escape_control(message), file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print a JSON document on stdout, in UTF-8 whatever the locale."""
    with open_output(STDIO) as output:
        for line in json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).split("\n"):
            output.write(line)


def escape_control(text: str) -> str:
    """Make control characters of foreign text visible, so that it cannot steer the terminal."""
    return "".join(character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1] for character in text)
