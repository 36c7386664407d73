"""Signals that ask a command to end."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HELP = """
import os, signal, time
def send(number):
    os.kill(os.getpid(), number)
def wait_for_timers():
    while signal.getitimer(signal.ITIMER_REAL)[0]:
        time.sleep(0.01)
"""


def run(script: str, directory: Path) -> "subprocess.CompletedProcess[str]":
    """Run a script in a process of its own, which can import modules from the directory."""
    (directory / "help.py").write_text(HELP)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), *sys.path])}
    lines = ["from mtkit import signals", "from help import *", textwrap.dedent(script)]
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT"])
def test_a_signal_raises_once(tmp_path: Path, number: str) -> None:
    script = f"""
        signals.end_on_signals()
        try:
            send(signal.{number})
        except KeyboardInterrupt as error:
            print(type(error).__name__, getattr(error, "number", None), flush=True)
        send(signal.{number})
    """
    name = "KeyboardInterrupt None" if number == "SIGINT" else f"Ended {signal.Signals[number].value}"

    result = run(script, tmp_path)

    assert (result.stdout, result.stderr, result.returncode) == (f"{name}\n", "", -signal.Signals[number])


def test_what_is_ignored_or_handled_stays_so(tmp_path: Path) -> None:
    script = """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: print("mine"))
        signals.end_on_signals()
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            send(number)
    """
    result = run(script, tmp_path)
    assert (result.stdout, result.stderr, result.returncode) == ("mine\n", "", 0)


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_during_an_import_waits_for_its_end(tmp_path: Path, number: str) -> None:
    """The module has a fallback, as numpy, torch and others do, which any exception starts."""
    (tmp_path / "optional.py").write_text(f"from help import *\nsend(signal.{number})\nprint('found')\n")
    (tmp_path / "fallback.py").write_text("try:\n    import optional\nexcept BaseException:\n    print('not found')\n")
    script = """
        signals.end_on_signals()
        try:
            import fallback
            wait_for_timers()
        except KeyboardInterrupt:
            print("ended")
    """
    result = run(script, tmp_path)
    assert (result.stdout, result.stderr, result.returncode) == ("found\nended\n", "", 0)


def test_a_second_signal_during_an_import_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("from help import *\nsend(signal.SIGINT)\nsend(signal.SIGINT)\n")
    result = run("signals.end_on_signals()\nimport slow", tmp_path)
    assert (result.stderr, result.returncode) == ("", -signal.SIGINT)


def test_what_waits_is_decided_when_the_import_is_over(tmp_path: Path) -> None:
    """What was right when the signal came may no longer be."""
    (tmp_path / "slow.py").write_text("from help import *\nsend(signal.SIGUSR1)\n")
    script = """
        state = "importing"
        signal.signal(signal.SIGUSR1, lambda _, frame: signals.call_outside_imports(lambda: print(state), frame))
        import slow
        state = "over"
        wait_for_timers()
    """
    assert run(script, tmp_path).stdout == "over\n"
