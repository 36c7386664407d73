"""Metrics records: what is summed up, what is kept when a run resumes."""

import json
import math
from pathlib import Path

import pytest

from mtkit.training.progress import Meter, MetricsFile, perplexity, read_metrics


def test_the_meter_averages_over_tokens_not_over_updates() -> None:
    meter = Meter()
    assert meter.is_empty
    meter.add(loss_sum=30.0, nll_sum=20.0, num_tokens=10, gradient_norm=1.0, seconds=2.0, wait_seconds=0.5)
    meter.add(loss_sum=30.0, nll_sum=40.0, num_tokens=30, gradient_norm=3.0, seconds=2.0, wait_seconds=0.5)
    values = meter.take()
    assert values["loss"] == pytest.approx(60 / 40)
    assert values["ppl"] == pytest.approx(math.exp(60 / 40))
    assert values["gradient_norm"] == pytest.approx(2.0)
    assert values["tgt_tokens_per_s"] == pytest.approx(10.0)
    assert values["data_wait_share"] == pytest.approx(0.25)
    assert meter.is_empty


def test_perplexity_overflows_to_infinity() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(1000.0) == math.inf


def test_records_are_lines_of_json_and_infinity_is_null(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append({"kind": "train", "step": 1, "loss": 2.5})
    metrics.append({"kind": "valid", "step": 1, "ppl": math.inf})
    lines = (tmp_path / "metrics.jsonl").read_text().split("\n")
    assert [json.loads(line) for line in lines[:-1]] == [{"kind": "train", "step": 1, "loss": 2.5}, {"kind": "valid", "step": 1, "ppl": None}]
    assert lines[-1] == ""


def test_resuming_leaves_no_gap_and_no_duplicate(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in (10, 20, 30, 40):
        metrics.append({"kind": "train", "step": step})
    metrics.append({"kind": "end", "step": 40, "reason": "limit"})
    with open(path, "ab") as stream:
        stream.write(b"[" * 10_000 + b"\n")  # more than can be read
        stream.write(b'{"kind": "train", "st')  # torn by a kill
    assert [record["step"] for record in read_metrics(path)] == [10, 20, 30, 40, 40]
    metrics.cut_after(20, is_validated=True)
    metrics.append({"kind": "train", "step": 30})
    assert [record["step"] for record in read_metrics(path)] == [10, 20, 30]


def test_the_end_of_an_earlier_session_is_removed_when_the_run_goes_on(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append({"kind": "train", "step": 40})
    metrics.append({"kind": "end", "step": 40})
    metrics.cut_after(40, is_validated=True)
    assert [record["kind"] for record in read_metrics(tmp_path / "metrics.jsonl")] == ["train"]


def test_a_validation_whose_result_was_not_saved_is_removed(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for kind, step in (("train", 10), ("valid", 10), ("train", 20), ("valid", 20)):
        metrics.append({"kind": kind, "step": step})
    for is_validated, left in ((True, 4), (False, 3)):
        metrics.cut_after(20, is_validated=is_validated)
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == left


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    metrics = MetricsFile(None)
    metrics.append({"kind": "train", "step": 1})
    metrics.cut_after(0, is_validated=True)
    metrics.sync()
    assert list(tmp_path.iterdir()) == []
