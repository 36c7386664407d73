import io
import os
import pty
import sys
import time
from typing import Any

import pytest
import rich.console

from mtkit.cli.display import LineDisplay, LiveDisplay, QuietDisplay, describe, format_scores, format_seconds, live_rows, open_display

START = {
    "kind": "start",
    "step": 0,
    "device": "cpu",
    "precision": "fp32",
    "world_size": 2,
    "parameters": 1_234_567,
    "pairs": 29_000,
    "length_correlation": 0.85,
    "pairs_skipped": 0,
    "updates_per_epoch": 106,
    "micro_batches_per_update": 1,
    "padding_share": 0.0514,
    "warning": None,
}
TRAIN = {
    "kind": "train",
    "step": 400,
    "epoch": 3,
    "loss": 3.14159,
    "ppl": 12.345,
    "gradient_norm": 0.987,
    "tgt_tokens_per_s": 12345.6,
    "data_wait_share": 0.0,
    "lr": 0.00049,
    "tgt_tokens": 1_000_000,
    "skipped": 0,
    "elapsed_s": 800.0,
}
VALID = {"kind": "valid", "step": 400, "epoch": 3, "loss": 2.0, "ppl": 7.389, "bleu": 33.333, "chrf": 55.5, "is_best": True, "elapsed_s": 810.0}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (60, "1m00s"), (750.4, "12m30s"), (3599.9, "59m59s"), (3600, "1h00m"), (11100, "3h05m"), (360_000, "100h00m")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (START, "1,234,567 parameters on 2 x cpu in fp32; 29,000 pairs, 106 updates per epoch, 5.1% padding"),
        (
            START | {"pairs_skipped": 3},
            "1,234,567 parameters on 2 x cpu in fp32; 29,000 pairs, 106 updates per epoch, 5.1% padding, 3 pairs too long for batch.max_tokens",
        ),
        (START | {"pairs": None, "updates_per_epoch": None}, "1,234,567 parameters on 2 x cpu in fp32; a stream of pairs, 5.1% padding"),
        (TRAIN, "step 400  epoch 4  loss 3.142  ppl 12.35  lr 0.00049  gradient 0.99  12,346 tokens/s  13m20s"),
        (TRAIN | {"skipped": 2}, "step 400  epoch 4  loss 3.142  ppl 12.35  lr 0.00049  gradient 0.99  12,346 tokens/s  13m20s  skipped 2"),
        (VALID, "step 400  dev  loss 2.000  ppl 7.39  BLEU 33.33  chrF 55.50  best so far"),
        ({"kind": "valid", "step": 1, "loss": 2.0, "ppl": 7.389, "is_best": False}, "step 1  dev  loss 2.000  ppl 7.39"),
        ({"kind": "checkpoint", "step": 5}, "step 5  saved"),
        (
            {"kind": "damaged", "step": 9, "reason": "c/model.safetensors: is damaged"},
            "warning: the model is made of the next best checkpoint, for a better one is damaged: c/model.safetensors: is damaged",
        ),
        ({"kind": "end", "step": 9, "reason": "why", "handed_over": None}, "step 9  finished: why"),
        ({"kind": "end", "step": 0, "reason": "why", "handed_over": 0}, "step 0  finished: why"),
        (
            {"kind": "end", "step": 9, "reason": "why", "handed_over": 0},
            "step 9  finished: why; no validation was better than that of the model it began with, which is handed over",
        ),
        ({"kind": "end", "step": 9, "reason": "why", "resumed": True}, "nothing to do: the run is finished at step 9 (why)"),
    ],
)
def test_lines(record: dict[str, Any], text: str) -> None:
    assert describe(record) == text


def test_an_infinite_perplexity_can_be_shown() -> None:
    assert format_scores({"loss": 800.0, "ppl": float("inf")}) == "loss 800.000  ppl inf"


def test_rows() -> None:
    assert live_rows({}, max_steps=None, checkpoint_age_s=None) == [("", "starting")]
    rows = dict(live_rows({"train": TRAIN, "valid": VALID, "start": START}, max_steps=1000, checkpoint_age_s=65.0))
    assert rows == {
        "step": "400 of 1000   epoch 4",
        "loss": "3.142   perplexity 12.35",
        "learning rate": "0.00049   gradient norm 0.99",
        "speed": "12,346 target tokens/s",
        "remaining": "about 20m00s to the last step",  # 800 s for 400 steps, 600 to go
        "dev": "loss 2.000  ppl 7.39  BLEU 33.33  chrF 55.50",
        "checkpoint": "1m05s old",
    }
    unlimited = dict(live_rows({"train": TRAIN}, max_steps=None, checkpoint_age_s=None))
    assert unlimited["step"] == "400   epoch 4"
    assert "remaining" not in unlimited


def test_plain_lines_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with open_display(quiet=False, max_steps=5) as shown:
        assert isinstance(shown, LineDisplay)
        shown.show(TRAIN)
        shown.show(VALID)
    assert capsys.readouterr() == ("", f"{describe(TRAIN)}\n{describe(VALID)}\n")


@pytest.mark.parametrize("quiet", [False, True])
def test_a_run_that_cannot_use_many_pairs_says_so(capsys: pytest.CaptureFixture[str], quiet: bool) -> None:
    with open_display(quiet=quiet, max_steps=5) as shown:
        shown.show(START | {"pairs_skipped": 290})
        assert "warning" not in capsys.readouterr().err
        shown.show(START | {"pairs_skipped": 291})
        assert "warning: 291 of 29,000 pairs are longer than batch.max_tokens" in capsys.readouterr().err


def test_a_learning_rate_that_misses_its_end_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with open_display(quiet=False, max_steps=5) as shown:
        shown.show(START | {"warning": "the learning rate never reaches its peak"})
    assert "warning: the learning rate never reaches its peak" in capsys.readouterr().err


@pytest.mark.parametrize("quiet", [False, True])
def test_a_run_whose_sides_do_not_belong_together_says_so(capsys: pytest.CaptureFixture[str], quiet: bool) -> None:
    with open_display(quiet=quiet, max_steps=5) as shown:
        for correlation in (0.5, None):
            shown.show(START | {"length_correlation": correlation})
            assert "warning" not in capsys.readouterr().err
        shown.show(START | {"length_correlation": -0.196})
        assert "warning: long sources hardly go with long targets (correlation -0.20;" in capsys.readouterr().err


def test_only_warnings_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with open_display(quiet=True, max_steps=5) as shown:
        assert isinstance(shown, QuietDisplay)
        shown.show(TRAIN)
        assert capsys.readouterr() == ("", "")
        shown.show({"kind": "unsaved", "step": 3, "reason": "no space"})
        shown.show({"kind": "unvalidated", "step": 4, "reason": "ValueError: no", "traceback": "Traceback"})
    saving = "warning: step 3 could not be saved, and the run goes on: no space\n"
    validating = "warning: step 4 could not be validated, and the run goes on: ValueError: no (its traceback is in metrics.jsonl)\n"
    assert capsys.readouterr() == ("", saving + validating)


def test_a_table_and_the_validations_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    real = rich.console.Console
    wanted: list[dict[str, Any]] = []

    def console(**options: Any) -> rich.console.Console:
        wanted.append(options)
        return real(file=screen, force_terminal=True, width=100, color_system=None)

    monkeypatch.setattr(rich.console, "Console", console)
    monkeypatch.setattr(sys, "stderr", screen)
    clock = iter([100.0, *[130.0] * 1000])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with open_display(quiet=False, max_steps=1000) as shown:
        assert isinstance(shown, LiveDisplay)
        for record in (START, TRAIN, VALID | {"is_best": "[red]"}, {"kind": "checkpoint", "step": 400}):
            shown.show(record)
    assert wanted == [{"stderr": True}]
    text = screen.getvalue()
    assert text.count(describe(START)) == 1
    assert text.count(describe(VALID)) == 1, "a validation stays as a line"
    assert describe(TRAIN) not in text, "progress is in the table alone"
    last = text[text.rindex("  step    ") :]
    assert "400 of 1000   epoch 4" in last
    assert "30s old" in last
    assert text.endswith("\n\x1b[?25h"), "the cursor is back, below the table"
    assert capsys.readouterr().out == ""


def test_a_terminal_that_has_gone_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is still to be saved."""
    master, terminal = pty.openpty()
    with io.TextIOWrapper(io.FileIO(terminal, "w"), write_through=True) as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        with open_display(quiet=False, max_steps=1000) as shown:
            assert isinstance(shown, LiveDisplay)
            os.close(master)
            shown.show(VALID)
        with pytest.raises(OSError, match="Input/output error"):
            screen.write("there is nobody")
