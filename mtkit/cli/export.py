"""`mtkit export`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from mtkit.artefacts import require_free
from mtkit.cli import console
from mtkit.cli.console import QuietOption


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        "export",
        epilog="Examples: mtkit export runs/en-de --output small  ·  mtkit export runs/en-de --format ctranslate2 --precision int8 --output exported",
    )(export)


def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model, checkpoint or run directory.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory to make.")],
    format_: Annotated[
        Literal["mtkit", "ctranslate2"], typer.Option("--format", help="mtkit: a smaller model; ctranslate2: for CTranslate2, a C++ runtime.")
    ] = "mtkit",
    precision: Annotated[
        Literal["fp32", "fp16", "bf16", "int8"],
        typer.Option("--precision", help="How weights are stored: int8 takes a quarter of the space of fp32, fp16 and bf16 half of it."),
    ] = "int8",
    quiet: QuietOption = False,
) -> None:
    """Write a model in fewer bits, or in the format of another program, with its tokenizer.

    With --format mtkit all commands take the result like any model. With --format ctranslate2 a README shows how to use it; this needs CTranslate2
    itself: pip install 'mtkit[ct2]'. `mtkit translate --engine ct2` translates with the result.
    """
    require_free(output)
    from mtkit.checkpoint.format import load_model

    loaded = load_model(model)
    if format_ == "mtkit":
        from mtkit.checkpoint.format import save_narrow_model

        save_narrow_model(loaded, output, precision=precision)
    else:
        from mtkit.checkpoint.ctranslate2 import export_ctranslate2

        export_ctranslate2(loaded, output, precision=precision)
    num_bytes = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    console.say(f"exported {loaded.path} to {output}: {num_bytes / 1e6:.1f} MB, {precision}", quiet=quiet)
