"""Requests to stop."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from mtkit.errors import StoppedError
from mtkit.training.signals import StopRequest


@pytest.mark.parametrize(("number", "interrupted"), [(signal.SIGTERM, False), (signal.SIGUSR1, False), (signal.SIGHUP, False), (signal.SIGINT, True)])
def test_a_signal_becomes_a_request(number: signal.Signals, interrupted: bool) -> None:
    before = signal.getsignal(number)
    with StopRequest().listen() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.interrupted == interrupted
    assert signal.getsignal(number) is before


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest().listen() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_request_from_another_process_keeps_what_is_known() -> None:
    stop = StopRequest()
    stop.request(interrupted=True)
    stop.request(interrupted=False)
    assert stop.interrupted


def test_a_signal_after_a_request_from_another_process_is_the_first() -> None:
    """It was sent to all processes, and another one was quicker: this one must not leave before it has saved."""
    with StopRequest().listen() as stop:
        stop.request(interrupted=False)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.interrupted


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("is_before", [True, False])
def test_where_nothing_has_to_be_saved_a_signal_ends_the_work_at_once(number: signal.Signals, code: int, is_before: bool) -> None:
    def work(stop: StopRequest) -> None:
        with stop.at_once():
            os.kill(os.getpid(), number)
            raise AssertionError("the block goes on")

    with StopRequest().listen() as stop:
        if is_before:
            os.kill(os.getpid(), number)
        with pytest.raises(StoppedError, match="run the same command again") as error:
            work(stop)
    assert error.value.exit_code == code


def test_the_second_signal_ends_the_process_at_once() -> None:
    script = textwrap.dedent(
        """
        import os, signal, time
        from mtkit.training.signals import StopRequest
        with StopRequest().listen():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        """
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=30, check=False).returncode == 128 + signal.SIGTERM
