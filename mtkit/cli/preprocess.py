"""`mtkit preprocess`."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtkit.cli import console
from mtkit.cli.console import JsonOption, QuietOption
from mtkit.cli.corpora import MultiValueCommand, parse_test_sets, require_one_stdin
from mtkit.cli.settings import part_layers
from mtkit.config import resolve
from mtkit.cores import num_cores
from mtkit.data.corpus import Corpus, parse_corpus
from mtkit.data.records import HubDataset, RecordFile
from mtkit.data.sources import PairedFiles
from mtkit.errors import UsageError
from mtkit.files import MAX_LINE_BYTES

if TYPE_CHECKING:
    from mtkit.data.preprocess import PreprocessConfig, PreprocessReport

EXAMPLE = "Example: mtkit preprocess --train train.en train.de --dev dev.en dev.de --tokenizer tokenizer --output shards"
UNKNOWN_WARNING_SHARE = 0.01
_LINE_INTERVAL_S = 10.0


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("preprocess", cls=MultiValueCommand, epilog=EXAMPLE)(preprocess)


def preprocess(
    train: Annotated[
        list[str],
        typer.Option(
            "--train",
            metavar="SRC TGT",
            help="Training text: a source and a target file (repeatable), TSV (stdin: -), parquet, JSON lines, or hf:NAME:CONFIG.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Directory to make.", show_default=False)],
    dev: Annotated[list[str] | None, typer.Option("--dev", metavar="SRC TGT", help="Dev set, in the same form; kept as raw text.")] = None,
    test: Annotated[
        list[str] | None,
        typer.Option("--test", metavar="[NAME=]SRC TGT", help="Test set, in the same form; kept as raw text. Repeatable, each is a set of its own."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="DIR", help="What `mtkit tokenizer train` wrote, or a model or run.")
    ] = None,
    src_lang: Annotated[str | None, typer.Option("--src-lang", metavar="LANG", help="Source language code, such as en.")] = None,
    tgt_lang: Annotated[str | None, typer.Option("--tgt-lang", metavar="LANG", help="Target language code, such as de.")] = None,
    config_file: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="TOML file with the settings, at its top level or in a table named preprocess."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as filters.max_length=100; repeatable.")
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, metavar="N", help="Processes that encode; default: one per core.")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Filter and encode a corpus into shards for training.

    The result does not depend on the number of workers. A run that was interrupted goes on where it stopped.
    """
    config = _resolve(config_file, overrides or [])
    require_one_stdin([*train, *(dev or []), *(test or [])])
    train_corpus = parse_corpus(train, src_lang=src_lang, tgt_lang=tgt_lang)
    held_out: dict[str, Corpus] = {}
    if dev:
        held_out["dev"] = parse_corpus(dev, src_lang=src_lang, tgt_lang=tgt_lang, split="validation")
    held_out.update(parse_test_sets(test or [], src_lang=src_lang, tgt_lang=tgt_lang))
    if tokenizer is None:
        raise UsageError("no tokenizer was given", hint=_tokenizer_hint(train_corpus))

    from mtkit.checkpoint.layout import load_tokenizer
    from mtkit.data.preprocess import preprocess as run_preprocess

    start = time.monotonic()
    with _open_progress(quiet=quiet) as progress:
        report = run_preprocess(
            train_corpus,
            held_out=held_out,
            tokenizer=load_tokenizer(tokenizer),
            output=output,
            config=config,
            num_workers=workers or num_cores(),
            progress=progress,
        )
    seconds = time.monotonic() - start
    for line in describe(report, output=output, seconds=seconds):
        console.say(line, quiet=quiet)
    for warning in find_warnings(report):
        console.warn(warning)
    if as_json:
        console.print_json({"output": str(output), **asdict(report), "seconds": round(seconds, 3)})


def describe(report: "PreprocessReport", *, output: Path, seconds: float) -> list[str]:
    """The report as lines for people."""
    from mtkit.data.filters import REASONS

    rows = [("read", f"{report.num_read:,}")]
    rows += [(reason.replace("_", " "), f"{report.dropped[reason]:,}" if reason in report.dropped else "off") for reason in REASONS]
    rows += [("kept", f"{report.num_pairs:,}"), ("source tokens", f"{report.num_src_tokens:,}"), ("target tokens", f"{report.num_tgt_tokens:,}")]
    rows += [(f"{name} set", f"{number:,}") for name, number in report.held_out.items()]
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [
        f"{output}: {report.num_pairs:,} of {report.num_read:,} pairs in {report.num_shards} shard{'s' * (report.num_shards != 1)}, {seconds:.1f} s"
    ]
    if report.num_reused_shards:
        lines.append(f"{report.num_reused_shards} of {report.num_shards} shards were there already")
    return lines + [f"  {name:<{name_width}}  {value:>{value_width}}" for name, value in rows]


def find_warnings(report: "PreprocessReport") -> list[str]:
    """What in a report should make people look twice."""
    warnings = []
    if report.num_bad_utf8:
        warnings.append(f"{report.num_bad_utf8:,} lines hold bytes that are not UTF-8; U+FFFD stands for them")
    if report.num_cut:
        warnings.append(f"{report.num_cut:,} lines are longer than {MAX_LINE_BYTES} bytes and were cut there")
    for side, unknown, tokens in (
        ("source", report.num_src_unknown, report.num_src_tokens),
        ("target", report.num_tgt_unknown, report.num_tgt_tokens),
    ):
        if unknown > UNKNOWN_WARNING_SHARE * tokens:
            warnings.append(f"{unknown / tokens:.1%} of the {side} tokens are unknown or single bytes: was the tokenizer trained on such text?")
    return warnings


def _resolve(file: Path | None, overrides: Sequence[str]) -> "PreprocessConfig":
    from mtkit.data.preprocess import PreprocessConfig

    return resolve(PreprocessConfig, part_layers(file, overrides, PreprocessConfig, table="preprocess")).config


def _tokenizer_hint(corpus: Corpus) -> str:
    words = [word for source in corpus.sources for word in ((source.src, source.tgt) if isinstance(source, PairedFiles) else (source.name,))]
    languages = next((source for source in corpus.sources if isinstance(source, RecordFile | HubDataset)), None)
    if languages is not None:
        words += ["--src-lang", languages.src_lang, "--tgt-lang", languages.tgt_lang]
    return f"Train one: mtkit tokenizer train {' '.join(words)} --output tokenizer\nThen add --tokenizer tokenizer"


@contextmanager
def _open_progress(*, quiet: bool) -> Iterator[Callable[[int], None] | None]:
    """Shows the number of pairs done: moving on a terminal, else in a line now and then."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} pairs"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda num_done: bar.update(task, completed=num_done)
    else:
        yield _LineProgress()


class _LineProgress:
    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, num_done: int) -> None:
        if time.monotonic() - self._last >= _LINE_INTERVAL_S:
            self._last = time.monotonic()
            console.say(f"{num_done:,} pairs done")
