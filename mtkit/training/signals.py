"""Requests to stop: the first signal lets the current update end and the state be saved, a second one ends the process at once."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from mtkit.errors import StoppedError
from mtkit.signals import call_outside_imports, stop_signals


class StopRequest:
    """Whether somebody asked the run to stop.

    Attributes:
        requested: A signal came, here or to another process.
        interrupted: It was Ctrl-C.
    """

    def __init__(self) -> None:
        self.requested = False
        self.interrupted = False
        self._is_at_once = False
        self._had_signal = False

    def request(self, *, interrupted: bool) -> None:
        """Ask the run to stop after the current update."""
        self.requested = True
        self.interrupted = self.interrupted or interrupted

    @contextlib.contextmanager
    def listen(self) -> Iterator["StopRequest"]:
        """React to SIGTERM, SIGUSR1, SIGINT and SIGHUP within the block. A SIGHUP that is ignored, as `nohup` has it, stays so."""
        previous = {number: signal.signal(number, self._handle) for number in stop_signals()}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal end the block, in which nothing comes about that would have to be saved, instead of waiting for an update.

        Raises:
            StoppedError: A signal came.
        """
        self._is_at_once = True
        try:
            self._stop_if_at_once()
            yield
        finally:
            self._is_at_once = False

    def _stop_if_at_once(self) -> None:
        if self.requested and self._is_at_once:
            raise StoppedError("stopped before training began; run the same command again to go on", interrupted=self.interrupted)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._had_signal:  # here: that another process had one does not make this the second
            # Nothing to clean up: files become visible only when complete. Leave as the signal would have it.
            os._exit(128 + number)
        self._had_signal = True
        self.request(interrupted=number == signal.SIGINT)
        if self._is_at_once:
            call_outside_imports(self._stop_if_at_once, frame)
