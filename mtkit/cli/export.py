"""`mtkit export`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from mtkit.cli import console
from mtkit.cli.console import QuietOption


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("export", epilog="Example: mtkit export runs/en-de --format ctranslate2 --precision int8 --output exported")(export)


def export(
    model: Annotated[Path, typer.Argument(help="A model, checkpoint or run directory.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory to make.")],
    _format: Annotated[Literal["ctranslate2"], typer.Option("--format", help="ctranslate2: for CTranslate2, a C++ runtime with int8.")],
    precision: Annotated[
        Literal["fp32", "fp16", "bf16", "int8"],
        typer.Option("--precision", help="How weights are stored; CTranslate2 calls it float32, float16, bfloat16, int8."),
    ] = "fp32",
    quiet: QuietOption = False,
) -> None:
    """Write a model in the format of another program, with its tokenizer and a README that shows how to use it.

    Needs the package of that program: pip install 'mtkit[ct2]'. `mtkit translate --engine ct2` translates with the result.
    """
    from mtkit.checkpoint.ctranslate2 import export_ctranslate2
    from mtkit.checkpoint.format import load_model

    loaded = load_model(model, verify="full")
    export_ctranslate2(loaded, output, precision=precision)
    num_bytes = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    console.say(f"exported {loaded.path} to {output}: {num_bytes / 1e6:.1f} MB, {precision}", quiet=quiet)
