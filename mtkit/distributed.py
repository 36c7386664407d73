"""Rank, world size and launching. The only reader of torchrun's environment; without one, the world is this process alone."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from mtkit.errors import MTKitError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

GRACE_S = 15.0
"""Seconds that the other ranks have after one has failed: they may be saving, or ending for the same reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Where this process stands among those that train together.

    Attributes:
        rank: Number of this process in the group, from 0.
        local_rank: Its number on this machine; picks the GPU.
        size: Number of processes.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0


def read_environment(environment: Mapping[str, str] | None = None) -> World:
    """The world that torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE) describe.

    Raises:
        UsageError: The variables contradict each other.
    """
    environment = os.environ if environment is None else environment
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return World()
    try:
        world = World(
            rank=int(environment["RANK"]),
            local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
            size=int(environment["WORLD_SIZE"]),
        )
    except ValueError as error:
        raise UsageError(f"RANK, LOCAL_RANK and WORLD_SIZE must be whole numbers: {error}") from error
    if not 0 <= world.rank < world.size:
        raise UsageError(f"RANK={world.rank} does not fit WORLD_SIZE={world.size}")
    if not 0 <= world.local_rank < world.size:
        raise UsageError(f"LOCAL_RANK={world.local_rank} does not fit WORLD_SIZE={world.size}")
    return world


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def process_group(world: World, *, backend: str, timeout_s: float = 120.0) -> Iterator[None]:
    """Join the other processes for the time of the block. A world of one needs no group and gets none.

    Args:
        world: This process and the number of all.
        backend: `nccl` for CUDA, `gloo` for CPUs.
        timeout_s: Seconds after which a collective operation that not all processes have joined fails.
    """
    if world.size == 1:
        yield
        return
    import torch.distributed as dist

    try:
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise MTKitError(
            f"rank {world.rank} of {world.size} cannot join the others: {error}",
            hint="Check MASTER_ADDR and MASTER_PORT, and that all processes were started.",
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_reduce_sums(values: Sequence[float], world: World, device: object = "cpu") -> list[float]:
    """Sum each value over all processes, in fp64; every process gets the same sums."""
    if world.size == 1:
        return list(values)
    import torch

    tensor = torch.tensor(values, dtype=torch.float64, device=device)  # type: ignore[arg-type]
    all_reduce_tensor(tensor, world)
    return [float(value) for value in tensor.tolist()]


def all_reduce_tensor(tensor: "Tensor", world: World) -> None:
    """Sum a tensor over all processes, in place; where there is one process nothing is done, and nothing waited for."""
    if world.size > 1:
        import torch.distributed as dist

        dist.all_reduce(tensor)


def all_gather_lines(lines: Sequence[str], world: World, device: object = "cpu") -> list[list[str]]:
    """Every process's lines, by rank, on every process. They travel as plain bytes.

    Args:
        lines: Text without line breaks.
        world: This process among all.
        device: Where the collective operations of the group take their tensors.
    """
    if world.size == 1:
        return [list(lines)]
    import torch
    import torch.distributed as dist

    data = b"".join(line.encode("utf-8", "replace") + b"\n" for line in lines)
    mine = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world.size)]  # type: ignore[call-overload]
    dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64, device=device))  # type: ignore[arg-type]
    largest = max(int(size) for size in sizes)
    padded = torch.zeros(largest, dtype=torch.uint8, device=device)  # type: ignore[call-overload]
    padded[: len(data)] = mine
    gathered = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(gathered, padded)
    texts = [bytes(part[: int(size)].cpu().numpy().tobytes()).decode() for part, size in zip(gathered, sizes, strict=True)]
    return [text.split("\n")[:-1] for text in texts]


def launch(arguments: Sequence[str], *, num_processes: int) -> int:
    """Run `python -m mtkit ARGUMENTS` as `num_processes` ranks on this machine and wait for them.

    Each rank is in a process group of its own, so that a signal reaches it once: through this process, be it from the terminal or from `kill`.
    When one rank fails the others get some time to end and are then killed.

    Returns:
        The exit code: 0, or that of the first rank that failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(num_processes))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    command = [sys.executable, "-m", "mtkit", *arguments]
    workers: list[subprocess.Popen[bytes]] = []
    with _forwarding_signals(workers):
        try:
            for rank in range(num_processes):
                rank_environment = dict(environment, RANK=str(rank), LOCAL_RANK=str(rank))
                workers.append(subprocess.Popen(command, env=rank_environment, stdin=subprocess.DEVNULL, process_group=0))
            return _wait_for_all(workers)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


@contextlib.contextmanager
def _forwarding_signals(workers: Sequence["subprocess.Popen[bytes]"]) -> Iterator[None]:
    def forward(number: int, _frame: object) -> None:
        for worker in workers:
            worker.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    previous = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait_for_all(workers: Sequence["subprocess.Popen[bytes]"]) -> int:
    first_failure = 0
    deadline = float("inf")
    while None in (codes := [worker.poll() for worker in workers]) and time.monotonic() < deadline:
        if not first_failure and any(codes):
            first_failure = next(code for code in codes if code)
            deadline = time.monotonic() + GRACE_S
        time.sleep(0.05)
    code = first_failure or next((code for code in codes if code), 0)
    return code if code >= 0 else 128 - code
