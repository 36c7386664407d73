"""`mtkit translate`."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mtkit import config as codec
from mtkit.cli import console
from mtkit.cli.console import DeviceOption, QuietOption, ThreadsOption
from mtkit.data.sources import is_markup
from mtkit.errors import UsageError
from mtkit.files import STDIO, LineReader, open_bytes, open_lines, open_output, require_readable

if TYPE_CHECKING:
    from mtkit.data.tokenizer import Tokenizer
    from mtkit.decoding.lines import LineTranslator, SearchConfig, Translation
    from mtkit.decoding.windows import LineWindows

EPILOG = (
    "Examples: mtkit translate runs/en-de < test.en > test.de  ·  echo 'A dog runs.' | mtkit translate runs/en-de --n-best 4  ·  "
    "mtkit translate runs/a runs/b --input test.en --json  ·  mtkit translate exported --engine ct2 < test.en"
)

MAX_WARNINGS = 10
"""Warnings about single lines that are printed; the others are only counted."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("translate", epilog=EPILOG)(translate)


def translate(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL", help="A model, checkpoint or run directory; several are an ensemble. With --engine ct2 one export."),
    ],
    *,
    input_path: Annotated[str, typer.Option("--input", "-i", metavar="FILE", help="Text to translate, plain or gzip; - is stdin.")] = STDIO,
    output_path: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where translations go, packed if *.gz; - is stdout.")] = STDIO,
    prefix_path: Annotated[
        str | None,
        typer.Option("--prefix", metavar="FILE", help="How each translation has to begin: a line for each line of the input, or a blank one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line: text, hypotheses, scores, pieces.")] = False,
    quiet: QuietOption = False,
    beam_size: Annotated[
        int | None, typer.Option("--beam-size", "-b", help="Hypotheses that the search keeps; 1 is greedy search. [default: 4]")
    ] = None,
    length_penalty: Annotated[
        float | None, typer.Option("--length-penalty", help="Exponent; larger makes longer translations. [default: 0.6]")
    ] = None,
    n_best: Annotated[int | None, typer.Option("--n-best", "-n", help="Translations per line. [default: 1]")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another setting of the search, such as max_length_ratio=2; may be given again."),
    ] = None,
    draw: Annotated[bool, typer.Option("--sample", help="Draw translations at random instead of searching.")] = False,
    temperature: Annotated[float | None, typer.Option("--temperature", help="With --sample: below 1 is safer. [default: 1]")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="With --sample: draw from the K best pieces only.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="With --sample: draw from the best pieces of this total share.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="With --sample: seed of the random numbers. [default: 1]")] = None,
    engine: Annotated[
        Literal["mtkit", "slots", "ct2"],
        typer.Option("--engine", help="What computes: mtkit; mtkit in steps of fixed size, for a GPU; CTranslate2 with what `mtkit export` wrote."),
    ] = "mtkit",
    device: DeviceOption = "auto",
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "int8"],
        typer.Option("--precision", help="auto: fp16 on a GPU; on a CPU int8, for narrow models fp32; with --engine ct2 that of the export."),
    ] = "auto",
    threads: ThreadsOption = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            "--batch-tokens",
            min=1,
            help="Source tokens of a batch. [default: 2048], of a wide model on a CPU 768; with --engine slots 32768, with ct2 on a CPU 512.",
        ),
    ] = None,
) -> None:
    """Translate text, one line at a time.

    Writes exactly one line per input line, in order: a blank line for a blank line, and for a line that is too long the translation of its beginning
    and a warning. With --n-best N above 1 exactly N lines per input line, each `line number TAB rank TAB score TAB translation`; score and
    translation are empty where there are fewer than N; two may be one text, spelt in other pieces. With --json one object per input line.

    Results are written as soon as a batch is ready. The score is the log-probability divided by the length penalty ((5 + tokens) / 6) ^ 0.6.
    --set also takes penalty (gnmt or power), max_length_ratio and max_length_constant (a translation has at most ratio * source tokens + constant
    tokens) and max_source_length.

    --prefix has the translation of each line begin with given words, of which the last may go on, and finds the best of those that begin so. The
    score is that of the whole. Blank lines leave it open. It does not go with --engine slots and ct2.

    --engine ct2 takes an export (mtkit export --format ctranslate2) and gives the same lines, columns and scores. CTranslate2 ends a search earlier,
    so a few translations differ. --sample and ensembles do not go with it; --threads is the number of batches that it works on at the same time.

    --engine slots searches in a fixed number of places, into which new lines move as others are done. On a GPU each step is recorded once as a CUDA
    graph and then repeated. It finds the same translations, with one model and without --sample. It is made for many lines.
    """
    flags = {
        "--beam-size": ("beam_size", beam_size),
        "--length-penalty": ("length_penalty", length_penalty),
        "--n-best": ("n_best", n_best),
        "--sample": ("method", "sample" if draw else None),
        "--temperature": ("temperature", temperature),
        "--top-k": ("top_k", top_k),
        "--top-p": ("top_p", top_p),
        "--seed": ("seed", seed),
    }
    search = _resolve(overrides or [], {name: {key: value} for name, (key, value) in flags.items() if value is not None})
    if text := next((path for path in models if path.is_file()), None):
        raise UsageError(f"{text}: is a file, where a model is a directory", hint=f"Text to translate comes from stdin or --input: --input {text}")
    if prefix_path is not None:
        if engine != "mtkit":
            raise UsageError(f"--prefix does not go with --engine {engine}", hint="Leave out --engine.")
        if prefix_path == STDIO:
            raise UsageError("--prefix cannot be stdin", hint="Give the text to translate on stdin, and the prefixes as a file.")
        require_readable(prefix_path)
    if input_path == STDIO and sys.stdin is not None and sys.stdin.isatty():
        console.say("reads lines from the terminal; Ctrl-D ends them", quiet=quiet)
    elif input_path != STDIO:
        require_readable(input_path)  # before a model is loaded
    from mtkit.decoding.windows import open_windows

    translator: LineTranslator
    if engine == "ct2":
        from mtkit.decoding.engine.ct2 import load_ctranslate2

        if len(models) > 1:
            raise UsageError(f"--engine ct2 takes one export, but {len(models)} were given: ensembles do not go with it")
        translator, tokenizer = load_ctranslate2(
            models[0],
            search=search,
            device=device,
            precision=precision,
            threads=threads,
            exact_scores=as_json or search.n_best > 1,
            batch_tokens=batch_tokens,
        )
    else:
        from mtkit.decoding.loading import load_translator

        translator, tokenizer = load_translator(
            models,
            search=search,
            device=device,
            precision=precision,
            threads=threads,
            batch_tokens=batch_tokens,
            in_slots=engine == "slots",
        )
    console.say(translator.description, quiet=quiet)
    report = _Report(quiet=quiet)
    with (
        open_windows(input_path, size=translator.window_lines) as windows,
        contextlib.nullcontext() if prefix_path is None else open_lines(prefix_path) as prefixes,
        open_output(output_path) as output,
        _open_progress(input_path, to_terminal=output_path == STDIO and sys.stdout.isatty(), quiet=quiet) as progress,
    ):
        for translations in translator.translate_windows(_warn_of_markup(windows), prefixes=prefixes):
            for translation in translations:
                for line in _json_line(translation, tokenizer) if as_json else _text_lines(translation, n_best=search.n_best):
                    output.write(line)
                report.add(translation, source=windows.reader.name)
            output.flush()
            progress(len(translations))
    report.finish(windows.reader)


@contextlib.contextmanager
def _open_progress(input_path: str, *, to_terminal: bool, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Takes the number of lines done. Of a file it shows how many are done, their speed and the time left, if stderr alone is a terminal."""
    path = Path(input_path)
    if quiet or to_terminal or not sys.stderr.isatty() or input_path == STDIO or not path.is_file() or path.suffix == ".gz":
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]:.1f} lines/s"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=_count_lines(path), speed=0.0)
        started, num_done = time.monotonic(), 0

        def advance(count: int) -> None:
            nonlocal num_done
            num_done += count
            bar.update(task, completed=num_done, speed=num_done / max(time.monotonic() - started, 1e-9))

        yield advance


def _count_lines(path: Path) -> int:
    with open_bytes(path) as stream:
        chunks = iter(lambda: stream.read(1 << 20), b"")
        return sum(chunk.count(b"\n") for chunk in chunks)


def _warn_of_markup(windows: "LineWindows") -> Iterator[list[str]]:
    """Pass the windows on; the first line tells whether they are a test set in SGML or XML, whose tags would be translated like words."""
    for number, window in enumerate(windows):
        if number == 0 and is_markup(window[0]):
            console.warn(f"{windows.reader.name}: looks like SGML or XML, and its tags are translated as text. Extract one sentence per line first.")
        yield window


def _resolve(overrides: list[str], flags: Mapping[str, codec.Tree]) -> "SearchConfig":
    """The search settings from `--set` and flags; a flag wins."""
    from mtkit.decoding.lines import SearchConfig

    layers = [codec.Layer(name=f"--set {text}", data=codec.parse_override(text)) for text in overrides]
    layers += [codec.Layer(name=name, data=data) for name, data in flags.items()]
    return codec.resolve(SearchConfig, layers).config


def _text_lines(translation: "Translation", *, n_best: int) -> Iterator[str]:
    """The output lines of one input line: always `n_best`."""
    if n_best == 1:
        yield translation.text
        return
    for rank in range(1, n_best + 1):
        score, text = "", ""
        if rank <= len(translation.hypotheses):
            hypothesis = translation.hypotheses[rank - 1]
            score, text = f"{hypothesis.score:.6f}", hypothesis.text.replace("\t", " ")
        yield f"{translation.line}\t{rank}\t{score}\t{text}"


def _json_line(translation: "Translation", tokenizer: "Tokenizer") -> Iterator[str]:
    hypotheses: list[dict[str, Any]] = [
        {
            "text": hypothesis.text,
            "score": round(hypothesis.score, 6),
            "log_prob": round(hypothesis.log_prob, 6),
            "tokens": tokenizer.pieces(hypothesis.tokens, "tgt"),
            "finished": hypothesis.finished,
        }
        for hypothesis in translation.hypotheses
    ]
    value = {"line": translation.line, "text": translation.text, "source_cut": translation.is_source_cut, "hypotheses": hypotheses}
    yield json.dumps(value, ensure_ascii=False, allow_nan=False)


class _Report:
    """Counts what was done, and tells the person at the end; warnings about single lines are told at once, but not too many of them."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._start_s = time.monotonic()
        self._num_lines = 0
        self._num_tokens = 0
        self._num_warnings = 0

    def add(self, translation: "Translation", *, source: str) -> None:
        """Take in one line."""
        self._num_lines += 1
        if translation.hypotheses:
            self._num_tokens += len(translation.hypotheses[0].tokens) + translation.hypotheses[0].finished
        if translation.warning is not None:
            self._num_warnings += 1
            if self._num_warnings <= MAX_WARNINGS:
                console.warn(f"{source}:{translation.line}: {translation.warning}")

    def finish(self, reader: LineReader) -> None:
        """Print what is left to say."""
        if self._num_warnings > MAX_WARNINGS:
            console.warn(f"{self._num_warnings - MAX_WARNINGS} more lines had a source or a translation that was cut, or a blank translation")
        if reader.num_bad_utf8:
            console.warn(f"{reader.name}: {reader.num_bad_utf8} lines hold bytes that are not UTF-8; they became U+FFFD")
        if reader.num_cut:
            console.warn(f"{reader.name}: {reader.num_cut} lines are too long to be read whole; they were cut")
        seconds = max(time.monotonic() - self._start_s, 1e-9)
        console.say(
            f"{self._num_lines} lines, {self._num_tokens} target tokens in {seconds:.1f} s: "
            f"{self._num_lines / seconds:.1f} lines/s, {self._num_tokens / seconds:.0f} tokens/s",
            quiet=self._quiet,
        )
