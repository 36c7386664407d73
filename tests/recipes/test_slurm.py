"""The SLURM script, with stand-ins for the commands of SLURM."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY

ToyPairs = Callable[[int, int], list[tuple[str, str]]]
Submit = Callable[..., "subprocess.Popen[bytes]"]

SCRIPT = REPOSITORY / "recipes" / "slurm" / "train.sbatch"

SCONTROL = '#!/bin/sh\necho "$@" >> "$RECORD"\n'
SBATCH = '#!/bin/sh\nscript=$1\nshift\nexec bash "$script" "$@"\n'
FAKE_TRAINING = """#!/usr/bin/env python3
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: (print("signal", flush=True), time.sleep(0.5), sys.exit(int(os.environ["CODE"]))))
print("training", *sys.argv[1:], flush=True)
time.sleep(0.2 if os.environ["CODE"] == "0" else 60)
"""


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Submit]:
    """`submit(*arguments, CODE="75", ...)` runs the job here and now."""
    (tmp_path / "bin").mkdir()
    for name, text in (("scontrol", SCONTROL), ("sbatch", SBATCH), ("mtkit", FAKE_TRAINING)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    jobs: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str | Path, **variables: str) -> "subprocess.Popen[bytes]":
        path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "42", "RECORD": str(tmp_path / "record"), "OMP_NUM_THREADS": "1", **variables}
        command = ["sbatch", str(SCRIPT), *map(str, arguments)]
        jobs.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True))
        return jobs[-1]

    yield run
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


def record(tmp_path: Path) -> str:
    return (tmp_path / "record").read_text() if (tmp_path / "record").exists() else ""


def test_the_settings_for_slurm_stand_where_it_reads_them() -> None:
    head = SCRIPT.read_text().split("\n\n${MTKIT")[0]
    assert re.findall(r"^#SBATCH (--signal\S+|--requeue|--open-mode\S+)$", head, re.MULTILINE) == [
        "--signal=B:USR1@120",
        "--requeue",
        "--open-mode=append",
    ]


@pytest.mark.parametrize("numbers", [[signal.SIGUSR1], [signal.SIGTERM], [signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1]])
def test_a_job_whose_time_is_over_is_queued_again(submit: Submit, tmp_path: Path, numbers: list[signal.Signals]) -> None:
    """D10: the training hears of it once, and has the time that it needs."""
    job = submit("--output", "runs/a b", CODE="75", SLURM_GPUS_ON_NODE="4")
    assert job.stdout is not None
    assert job.stdout.readline() == b"training train --nproc 4 --output runs/a b\n"
    for number in numbers:
        job.send_signal(number)
        time.sleep(0.1)
    assert job.stdout.read() == b"signal\n"
    assert (job.wait(20), record(tmp_path)) == (0, "requeue 42\n")


@pytest.mark.parametrize(("code", "is_signalled"), [(0, False), (5, True), (1, True)])
def test_any_other_end_is_the_end_of_the_job(submit: Submit, tmp_path: Path, code: int, is_signalled: bool) -> None:
    job = submit(CODE=str(code))
    assert job.stdout is not None
    job.stdout.readline()
    if is_signalled:
        job.send_signal(signal.SIGUSR1)
    assert (job.wait(20), record(tmp_path)) == (code, "")


@pytest.mark.slow
@pytest.mark.reliability
def test_a_training_goes_on_from_job_to_job(submit: Submit, tmp_path: Path, toy_pairs: ToyPairs, toy_config: Path) -> None:
    """D10: with mtkit itself."""
    for seed, (name, count) in enumerate({"train": 300, "dev": 10}.items()):
        for side, language in enumerate(("en", "de")):
            (tmp_path / f"{name}.{language}").write_text("".join(f"{pair[side]}\n" for pair in toy_pairs(count, seed)), encoding="utf-8")
    train, dev = ([tmp_path / f"{name}.{language}" for language in ("en", "de")] for name in ("train", "dev"))
    arguments = ["--config", toy_config, "--train", *train, "--dev", *dev, "--output", tmp_path / "run", "--device", "cpu", "--workers", "1"]
    arguments += ["--set", "training.log_every_steps=1"]
    mtkit = f"{sys.executable} -m mtkit"
    job = submit(*arguments, MTKIT=mtkit)
    assert job.stdout is not None
    while not job.stdout.readline().startswith(b"step 5 "):
        assert job.poll() is None
    job.send_signal(signal.SIGUSR1)
    assert b"stopped at step" in job.stdout.read()
    assert (job.wait(20), record(tmp_path)) == (0, "requeue 42\n")
    again = submit(*arguments, MTKIT=mtkit)
    output, _ = again.communicate(timeout=100)
    assert b"going on from" in output
    assert (again.returncode, record(tmp_path)) == (0, "requeue 42\n"), output
