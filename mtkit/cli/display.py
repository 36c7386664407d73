"""Shows the records of a training run: a live table on a terminal, plain lines elsewhere. Everything goes to stderr."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from mtkit.cli import console

Record = Mapping[str, Any]

LEAST_CORRELATION = 0.5
"""Of the lengths of sources and targets. Multi30k has 0.85 and WMT22 0.98; with one side shifted by a line -0.2 and 0.29."""
LOSS_SHARE = 0.01
"""Share of the pairs that a run may leave out without a warning."""


class Display(Protocol):
    """Takes in the records of a run, one after the other."""

    def show(self, record: Record) -> None:
        """Show one record."""


class LineDisplay:
    """One line per record."""

    def show(self, record: Record) -> None:
        """Print a line."""
        console.say(describe(record))
        warn_of_data(record)


class QuietDisplay:
    """Shows warnings only."""

    def show(self, record: Record) -> None:
        """Print a warning, or nothing."""
        if record["kind"] in ("unsaved", "unvalidated", "split", "damaged"):
            console.say(describe(record))
        warn_of_data(record)


class LiveDisplay:
    """A table that is kept up to date in place; validations also stay as lines above it. When the terminal is gone, nothing is shown any more.

    Args:
        max_steps: Updates of the whole run, for the remaining time; None = unknown.
    """

    def __init__(self, *, max_steps: int | None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._max_steps = max_steps
        self._last: dict[str, Record] = {}
        self._saved_at: float | None = None
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=2)  # renders at once

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        with contextlib.suppress(OSError):
            self._live.stop()

    def show(self, record: Record) -> None:
        """Update the table."""
        self._last[record["kind"]] = record
        if record["kind"] == "checkpoint":
            self._saved_at = time.monotonic()
        elif record["kind"] != "train":
            with contextlib.suppress(OSError):
                self._console.print(describe(record), markup=False, highlight=False)
            warn_of_data(record)

    def _render(self) -> Any:
        from rich.table import Table

        table = Table(show_header=False, box=None, padding=(0, 2))
        for name, value in live_rows(self._last, max_steps=self._max_steps, checkpoint_age_s=self._checkpoint_age()):
            table.add_row(name, value)
        return table

    def _checkpoint_age(self) -> float | None:
        return None if self._saved_at is None else time.monotonic() - self._saved_at


@contextlib.contextmanager
def open_display(*, quiet: bool, max_steps: int | None) -> Iterator[Display]:
    """The display that suits where stderr goes."""
    if quiet:
        yield QuietDisplay()
    elif sys.stderr.isatty():
        with LiveDisplay(max_steps=max_steps) as live:
            yield live
    else:
        yield LineDisplay()


def live_rows(last: Mapping[str, Record], *, max_steps: int | None, checkpoint_age_s: float | None) -> list[tuple[str, str]]:
    """The rows of the live table, from the last record of each kind."""
    rows = []
    if train := last.get("train"):
        of = f" of {max_steps}" if max_steps else ""
        rows += [
            ("step", f"{train['step']}{of}   epoch {train['epoch'] + 1}"),
            ("loss", f"{train['loss']:.3f}   perplexity {train['ppl']:.2f}"),
            ("learning rate", f"{train['lr']:.3g}   gradient norm {train['gradient_norm']:.2f}"),
            ("speed", f"{train['tgt_tokens_per_s']:,.0f} target tokens/s"),
        ]
        if max_steps and train["step"]:
            remaining = train["elapsed_s"] / train["step"] * (max_steps - train["step"])
            rows.append(("remaining", f"about {format_seconds(remaining)} to the last step"))
    if valid := last.get("valid"):
        rows.append(("dev", format_scores(valid)))
    if checkpoint_age_s is not None:
        rows.append(("checkpoint", f"{format_seconds(checkpoint_age_s)} old"))
    return rows or [("", "starting")]


def warn_of_data(record: Record) -> None:
    """Print a warning if a run begins without many of its pairs, with pairs that are none, or with a learning rate that misses its end."""
    if record["kind"] != "start":
        return
    correlation = record["length_correlation"]
    if correlation is not None and correlation < LEAST_CORRELATION:
        console.warn(
            f"long sources hardly go with long targets (correlation {correlation:.2f}; translations have 0.7 and more): is each line of the target "
            "text the translation of the same line of the source text?"
        )
    if record["warning"] is not None:
        console.warn(record["warning"])
    if record["pairs"] and record["pairs_skipped"] > LOSS_SHARE * record["pairs"]:
        console.warn(
            f"{record['pairs_skipped']:,} of {record['pairs']:,} pairs are longer than batch.max_tokens and are not used; raise it, or "
            "drop long pairs on purpose with preprocess.filters.max_length"
        )


def describe(record: Record) -> str:
    """One line about a record, for people."""
    kind, step = record["kind"], record["step"]
    if kind == "start":
        return (
            f"{record['parameters']:,} parameters on {record['world_size']} x {record['device']} in {record['precision']}; "
            + (f"{record['pairs']:,} pairs" if record["pairs"] is not None else "a stream of pairs")
            + (f", {record['updates_per_epoch']} updates per epoch" if record["updates_per_epoch"] is not None else "")
            + f", {record['padding_share']:.1%} padding"
            + (f", {record['pairs_skipped']:,} pairs too long for batch.max_tokens" if record["pairs_skipped"] else "")
        )
    if kind == "train":
        return (
            f"step {step}  epoch {record['epoch'] + 1}  loss {record['loss']:.3f}  ppl {record['ppl']:.2f}  lr {record['lr']:.3g}  "
            f"gradient {record['gradient_norm']:.2f}  {record['tgt_tokens_per_s']:,.0f} tokens/s  {format_seconds(record['elapsed_s'])}"
            + (f"  skipped {record['skipped']}" if record["skipped"] else "")
        )
    if kind == "valid":
        return f"step {step}  dev  {format_scores(record)}{'  best so far' if record['is_best'] else ''}"
    if kind == "checkpoint":
        return f"step {step}  saved"
    if kind == "split":
        shapes = ", ".join(f"{rows} x {columns}" for rows, columns in record["shapes"])
        return f"warning: step {step} did not fit into the memory and was made in halves (target shapes {shapes}); lower batch.max_tokens"
    if kind == "unsaved":
        return f"warning: step {step} could not be saved, and the run goes on: {record['reason']}"
    if kind == "unvalidated":
        return f"warning: step {step} could not be validated, and the run goes on: {record['reason']} (its traceback is in metrics.jsonl)"
    if kind == "damaged":
        return f"warning: the model is made of the next best checkpoint, for a better one is damaged: {record['reason']}"
    if record.get("resumed"):
        return f"nothing to do: the run is finished at step {step} ({record['reason']})"
    begun = "; no validation was better than that of the model it began with, which is handed over" if record["handed_over"] == 0 < step else ""
    return f"step {step}  finished: {record['reason']}{begun}"


def format_scores(record: Record) -> str:
    """Loss, perplexity and, where measured, BLEU and chrF."""
    text = f"loss {record['loss']:.3f}  ppl {record['ppl']:.2f}"
    if "bleu" in record:
        text += f"  BLEU {record['bleu']:.2f}  chrF {record['chrf']:.2f}"
    return text


def format_seconds(seconds: float) -> str:
    """Seconds as 45s, 12m30s or 3h05m."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
