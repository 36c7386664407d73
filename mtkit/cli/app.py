"""The `mtkit` application: its commands, its global options, and how errors become exit codes."""

import contextlib
import errno
import gc
import io
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn, TextIO

import typer
from typer.core import TyperGroup

from mtkit import __version__
from mtkit.cli import average, bench, console, export, inspect, preprocess, score, tokenizer, train, translate
from mtkit.distributed import read_environment
from mtkit.errors import MTKitError, ResourceError, is_out_of_memory
from mtkit.signals import Ended, end_on_signals

BROKEN_PIPE_EXIT_CODE = 141
INTERRUPT_EXIT_CODE = 130
STDOUT, STDERR = 1, 2
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
IDLE_SPINS = 4000
"""How often an idle OpenMP thread looks for work before it sleeps, see `_let_idle_threads_sleep`."""


class _Group(TyperGroup):
    """Turns mtkit's own errors, Ctrl-C and a closed pipe into a message and an exit code, for every command alike."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Read the options that stand before the command, of which some print something and end it."""
        with _errors_as_exit_codes(debug="--debug" in args):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        with _errors_as_exit_codes(debug=ctx.params["debug"]):
            return super().invoke(ctx)


@contextlib.contextmanager
def _errors_as_exit_codes(*, debug: bool) -> Iterator[None]:
    """End the command after an error in the block that is not a fault of ours."""
    try:
        yield
        return
    except (BrokenPipeError, EOFError) as error:
        if isinstance(error, EOFError) or not _reader_has_gone():
            raise RuntimeError("the way to another process or file broke") from error  # bare, typer would end without a word
        code = BROKEN_PIPE_EXIT_CODE  # as with `| head -1`: nothing to say, and nobody to hear it
    except (MTKitError, KeyboardInterrupt, MemoryError) as error:
        if debug:
            traceback.print_exc()
        code = _report(error)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if debug:
            traceback.print_exc()
        code = _report(MemoryError())
    except OSError as error:
        if error.errno not in _NO_SPACE and error.filename is None:
            raise
        if debug:
            traceback.print_exc()
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        if error.errno in _NO_SPACE:
            code = _report(ResourceError(f"{where}{error.strerror}", hint="Free some space and run the command again."))
        else:  # what cannot even be looked at: no permission, or a name that is too long
            code = _report(MTKitError(f"{where}{error.strerror}"))
    _give_up(sys.stdout)
    raise typer.Exit(code)


def _report(error: MTKitError | KeyboardInterrupt | MemoryError) -> int:
    """Say what ended the command, and return its exit code."""
    match error:
        case MTKitError():
            console.report_error(error.message, error.hint)
            return error.exit_code
        case MemoryError():
            console.report_error("out of memory", None)
            return ResourceError.exit_code
        case Ended():
            console.report_error(f"ended by {signal.Signals(error.number).name}", None)
            return 128 + error.number
    console.report_error("interrupted", None)
    return INTERRUPT_EXIT_CODE


def _give_up(stream: TextIO) -> None:
    """Drop what is left in the buffer of stdout or stderr if it cannot be written, lest the interpreter fails over it at exit."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT if stream is sys.stdout else STDERR)


def _reader_has_gone() -> bool:
    """Whether stdout or stderr is a pipe that nobody reads any more."""
    poll = select.poll()
    for descriptor in (STDOUT, STDERR):
        poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


app = typer.Typer(
    name="mtkit",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: starts in half the time, can be copied, and brackets in it mean brackets
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train Transformers for machine translation and put them to work.",
    epilog="Example: mtkit train --train train.en train.de --dev dev.en dev.de --preset tiny --output runs/en-de",
)


def _print_version(value: bool) -> None:
    if value:
        sys.stdout.write(f"mtkit {__version__}\n")
        sys.stdout.flush()
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of every error.")] = False,
) -> None:
    """Options that stand before the command."""


for module in (tokenizer, preprocess, train, average, translate, score, export, inspect, bench):
    module.register(app)


def main() -> None:
    """Entry point of the `mtkit` script."""
    _open_closed_streams()
    _make_streams_dependable()
    _let_idle_threads_sleep()
    end_on_signals()  # but for training, which has its own way
    try:
        is_rank = read_environment().size > 1
    except MTKitError as error:
        sys.exit(_report(error))
    try:
        app()
        code: object = 0
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        if not (is_rank or _left_a_thread()):
            raise
        traceback.print_exc()
        code = 1
    if is_rank or _left_a_thread():
        _leave_at_once(code)
    _give_up(sys.stderr)
    gc.freeze()  # else the interpreter, as it ends, looks twice through the hundreds of thousands of objects that torch consists of
    sys.exit(code)  # type: ignore[arg-type]


def _let_idle_threads_sleep() -> None:
    """Have the threads of an operator wait for each other on the processor for a moment only; must come before torch is imported.

    GNU OpenMP, which the Linux builds of torch use, spins for about a millisecond, and each operator of a small model takes microseconds. Beside
    another busy process, one thread spins away the time that the other one waits for: on two cores, training fell to a tenth and less. With this it
    is 1.7 to 10 times as fast there, by what the other process does, and at most a tenth slower where the machine is free.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(IDLE_SPINS))


def _left_a_thread() -> bool:
    """Whether a thread of ours was left behind: it waits for input which may never come, or works for somebody who no longer waits for it."""
    return any(thread.daemon and thread.name.startswith("mtkit-") for thread in threading.enumerate())


def _leave_at_once(code: object) -> NoReturn:
    """Leave without taking the interpreter down.

    Other threads, such as those of a process group, may still hold Python objects. An interpreter that is shutting down ends such a thread where it
    stands, and that aborts the process: a run that was all right would now and then end with exit code 134.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _open_closed_streams() -> None:
    """Put something in the place of a standard stream that is closed, so that no other file gets its number; using stdin or stdout then fails."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_WRONLY)  # the lowest free number, which is that of the closed stream
            raw = io.FileIO(descriptor, "r" if name == "stdin" else "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", write_through=True))


def _make_streams_dependable() -> None:
    """See to it that what is read and written through the standard streams is all of it.

    Without a buffer (PYTHONUNBUFFERED), what the system does not take at once would be lost; and a stream that does not block, as some parents hand
    it down, seems to be at its end, or full, when it only has to be waited for.
    """
    for descriptor in (0, STDOUT, STDERR):
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, True)
    if isinstance(sys.stdout, io.TextIOWrapper) and isinstance(sys.stdout.buffer, io.RawIOBase):
        encoding, errors = sys.stdout.encoding, sys.stdout.errors
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(sys.stdout.detach()), encoding=encoding, errors=errors, write_through=True)
