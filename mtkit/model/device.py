"""Where a model computes and in which number format."""

import contextlib
import ctypes
import functools
import importlib.util
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from mtkit.errors import UsageError

T = TypeVar("T")

PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]

InferencePrecisionName = Literal["auto", "fp32", "bf16", "fp16", "int8"]

GRID = 128
"""Rows of matrices are a multiple of this where `needs_grid` says so."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h

_WARMUP_RUNS = 3

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The number format of matrix products. Softmax, loss, scores and optimizer state are fp32 in any case.

    Attributes:
        name: Which format.
        device_type: `cpu` or `cuda`, for autocast.
    """

    name: Literal["fp32", "bf16", "fp16"]
    device_type: str

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the format."""
        return _DTYPES[self.name]

    @property
    def needs_loss_scaling(self) -> bool:
        """Whether gradients would underflow without a scaled loss: the range of fp16 is too small for them."""
        return self.name == "fp16"

    def autocast(self, *, cache: bool = True) -> contextlib.AbstractContextManager[None]:
        """A block in which fp32 weights take part in matrix products of this format.

        Args:
            cache: Keep what a weight was converted to until the end of the block.
        """
        return contextlib.nullcontext() if self.name == "fp32" else torch.autocast(self.device_type, dtype=self.dtype, cache_enabled=cache)


def resolve_device(name: str) -> torch.device:
    """Turn a device name into a device that exists. A GPU that is named by its number becomes the current one: kernels of Triton are launched there.

    Args:
        name: `auto` (the first GPU if there is one, else the CPU), `cpu`, `cuda`, or `cuda:N`.

    Raises:
        UsageError: The name is unknown, or there is no such GPU.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, colon, number = name.partition(":")
    if kind != "cuda" or (colon and not (number.isascii() and number.isdigit())):
        raise UsageError(f"device must be auto, cpu, cuda or cuda:N, but is {name!r}")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(number or 0) >= num_gpus:
        built = "; this torch is built for the CPU only" if torch.version.cuda is None else ""
        raise UsageError(f"device {name} is not there: torch sees {num_gpus} GPUs{built}", hint="Use --device cpu, or a torch build for CUDA.")
    if number:
        torch.cuda.set_device(int(number))
    return torch.device(name)


def require_gpus(device: torch.device, number: int) -> None:
    """Refuse more processes on this machine than it has GPUs, of which each process needs its own.

    Args:
        device: The GPU that was asked for; with a number it is one for all.
        number: Processes.

    Raises:
        UsageError: There are more.
    """
    is_one = ":" in str(device)
    num_gpus = 1 if is_one else torch.cuda.device_count()
    if number > num_gpus:
        what = f"device {device} is one GPU" if is_one else f"torch sees {num_gpus} GPUs"
        raise UsageError(
            f"{number} processes were asked for, but {what}, and each process needs its own",
            hint="Start one process for each GPU, with --device cuda.",
        )


def resolve_precision(name: PrecisionName, device: torch.device) -> Precision:
    """The precision to train with. `auto` is bf16 where the hardware is fast at it, else fp32.

    Raises:
        UsageError: fp16 is asked for on a CPU.
    """
    if name == "auto":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else cpu_is_fast_at_bf16()
        name = "bf16" if is_fast else "fp32"
    return _checked(name, device)


def resolve_inference_precision(name: PrecisionName, device: torch.device) -> Precision:
    """The precision to translate with. `auto` is fp16 on a GPU, which is closer to fp32 than bf16 is, and fp32 on a CPU.

    Raises:
        UsageError: fp16 is asked for on a CPU.
    """
    if name == "auto":
        name = "fp16" if device.type == "cuda" else "fp32"
    return _checked(name, device)


def cpu_is_fast_at_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices much faster than fp32 ones: AMX does. AVX512-BF16 alone was measured at half the speed of fp32."""
    return torch.backends.mkldnn.is_available() and bool(torch.cpu._is_amx_tile_supported())


def needs_grid(device: torch.device) -> bool:
    """Whether matrix products should be of few different sizes here: a CPU in autocast.

    For half precision oneDNN compiles a kernel for every new shape, in milliseconds and a megabyte of memory, and batches have hundreds of shapes.
    """
    return device.type == "cpu" and torch.is_autocast_enabled("cpu")


@functools.cache
def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next allocation, where it is glibc; for processes that do the same work again and again.

    By default it gives large blocks back to the system, which clears them page by page when they come again: ten thousand page faults for each update
    of a small model on a CPU. Memory then stays at its peak between updates. What is free already, after a model was loaded say, goes back first.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)


def record_graph(run: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record work on a GPU as a CUDA graph. It runs a few times before, so that libraries allocate and choose what they need.

    Args:
        run: The work. It has to take and leave its numbers in tensors that stay where they are, and must not ask the device for a value.
        device: The GPU.

    Returns:
        The graph, which repeats the work when it is replayed, and what `run` returned, which holds the results of each replay.
    """
    with torch.cuda.device(device):  # torch records on a stream of the current device
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(_WARMUP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run()
    return graph, result


@functools.cache
def can_compile() -> bool:
    """Whether `torch.compile` can make GPU kernels here: it needs Triton, and Triton a C compiler for its launchers."""
    return importlib.util.find_spec("triton") is not None and any(shutil.which(name) is not None for name in ("gcc", "clang"))


def _checked(name: Literal["fp32", "bf16", "fp16"], device: torch.device) -> Precision:
    if name == "fp16" and device.type == "cpu":
        raise UsageError("precision fp16 needs a GPU", hint="On a CPU use fp32, or bf16 if the CPU is fast at it.")
    return Precision(name=name, device_type=device.type)
