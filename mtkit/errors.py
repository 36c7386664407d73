"""The errors that mtkit raises on purpose, each with the exit code of the command line.

A message says what went wrong, where (file:line or config key) and why; `hint` says what to do next. The command line prints both
and no traceback. Anything that is not an `MTKitError` is a bug of ours and keeps its traceback.
"""

from typing import ClassVar


class MTKitError(Exception):
    """A failure that the user can understand and act on.

    Args:
        message: What, where and why, in one or a few sentences.
        hint: What to do next, or None.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n{self.hint}"


class UsageError(MTKitError):
    """An option, argument or config value that cannot be used as given."""

    exit_code = 2


class ConfigError(UsageError):
    """A config key or value that is unknown, of the wrong type or out of range."""


class DataError(MTKitError):
    """Input text that cannot be used: unequal line counts, no usable pairs, a wrong format."""

    exit_code = 3


class ArtefactError(MTKitError):
    """A tokenizer, shard set, checkpoint or model that is corrupt, incomplete or does not fit the others."""

    exit_code = 4


class ResourceError(MTKitError):
    """Out of disk or memory."""

    exit_code = 5


class DivergedError(MTKitError):
    """Training produced non-finite numbers too often to go on."""

    exit_code = 6


class StoppedError(MTKitError):
    """A signal ended the run after its state was saved; running the same command again goes on.

    Args:
        message: What was saved, and where.
        interrupted: True for Ctrl-C (exit code 130), False for a request to stop (exit code 75).
    """

    def __init__(self, message: str, *, interrupted: bool) -> None:
        super().__init__(message)
        self.exit_code = 130 if interrupted else 75  # type: ignore[misc]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is about memory, that of a GPU or that of the machine; torch has a class for the one and words for the other."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
