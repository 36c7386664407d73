"""What the machine could do, and how measurements are summed up."""

import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtkit.cores import num_cores
from mtkit.model.device import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A measurement that was repeated.

    Attributes:
        median: Of the repeats.
        lowest: The smallest.
        highest: The largest.
        repeats: How many.
    """

    median: float
    lowest: float
    highest: float
    repeats: int


def spread(values: Sequence[float]) -> Spread:
    """Sum up repeats of a measurement."""
    return Spread(median=statistics.median(values), lowest=min(values), highest=max(values), repeats=len(values))


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores and threads in use, and versions, for the record."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def matmul_flops_per_s(precision: Precision, device: torch.device, *, rows: int = 2048, width: int = 1024, seconds: float = 1.0) -> float:
    """The rate of large matrix products that this machine reaches in a precision: a practical ceiling, measured, not a data sheet's.

    Args:
        precision: Number format of the factors.
        device: Where.
        rows: Rows of the left factor.
        width: Both sides of the right factor.
        seconds: How long to measure.
    """
    left = torch.randn(rows, width, device=device, dtype=precision.dtype)
    right = torch.randn(width, width, device=device, dtype=precision.dtype)

    def once() -> float:
        started = time.perf_counter()
        for _ in range(4):
            left @ right
        synchronize(device)
        return (time.perf_counter() - started) / 4

    once()
    deadline = time.perf_counter() + seconds
    best = once()
    while time.perf_counter() < deadline:
        best = min(best, once())
    return 2.0 * rows * width * width / best


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", "rb") as lines:
            return next(line.partition(b":")[2].decode("ascii", "replace").strip() for line in lines if line.startswith(b"model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
