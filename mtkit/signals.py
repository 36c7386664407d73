"""Signals that ask a command to end, and how it ends by them: by an exception, so that what it has begun to write is removed."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

IMPORT_POLL_S = 0.02
"""How often a signal that came during an import looks whether the import is over."""

_IMPORT_MACHINERY = "<frozen importlib"
"""How the names of Python's files begin that carry out an import."""


class Ended(KeyboardInterrupt):
    """A signal other than Ctrl-C asks the command to end.

    Attributes:
        number: Of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a run to stop. A SIGHUP that is ignored, as `nohup` has it, is none of them."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, *hangup]


def end_on_signals() -> None:
    """Let a request to end raise `KeyboardInterrupt`, and `Ended` if it is not Ctrl-C, in the main thread. A second one ends the process at once.

    Signals that are ignored, or have another handler, keep theirs.
    """

    def end(number: int, frame: FrameType | None) -> None:
        def leave() -> NoReturn:
            raise KeyboardInterrupt if number == signal.SIGINT else Ended(number)

        signal.signal(number, signal.SIG_DFL)
        call_outside_imports(leave, frame)

    for number in stop_signals():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end)


def call_outside_imports(action: Callable[[], None], frame: FrameType | None) -> None:
    """Do, in the handler of a signal, what may raise an exception: now, or when the import is over that the signal interrupts.

    An exception in the middle of an import can be lost or worse. Packages that look for an optional module, and C code that imports one, take any
    exception for a sign that it is missing: while torch is imported Ctrl-C went unheard, or aborted the process.

    Args:
        action: Called once, in the main thread.
        frame: What the signal interrupts.
    """
    if not _is_in_import(frame):
        action()
        return
    signal.signal(signal.SIGALRM, lambda _, frame: call_outside_imports(action, frame))
    signal.setitimer(signal.ITIMER_REAL, IMPORT_POLL_S)


def _is_in_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT_MACHINERY):
            return True
        frame = frame.f_back
    return False
