"""Rank, world size and launching. The only reader of torchrun's environment; without one, the world is this process alone."""

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from mtkit.cores import num_cores
from mtkit.errors import MTKitError, UsageError
from mtkit.signals import stop_signals

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store

GRACE_S = 15.0
"""Seconds that the other ranks have after one has failed: they may be saving, or ending for the same reason."""

_SHOW_STACKS = signal.SIGUSR2
_STACKS_S = 1.0
"""Seconds that a rank has to show where it hangs."""


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


def is_launched() -> bool:
    """Whether `launch` has started this process."""
    return "MTKIT_LAUNCHER" in os.environ


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
        timeout = timedelta(seconds=timeout_s)
        store = _store_of_launcher(world, timeout=timeout)
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=timeout, store=store)
    except (RuntimeError, ValueError) as error:
        raise MTKitError(
            f"rank {world.rank} of {world.size} cannot join the others: {error}",
            hint="Check MASTER_ADDR and MASTER_PORT, and that all processes were started.",
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def _store_of_launcher(world: World, *, timeout: timedelta) -> "Store | None":
    """Where the processes of `launch` meet: rank 0 listens on the socket that it was given. None lets torch look into torchrun's environment."""
    if not is_launched():
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listening = int(os.environ["MTKIT_LISTENING"]) if world.is_main else None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, world.size, world.is_main, timeout, master_listen_fd=listening)


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


def launch(arguments: Sequence[str], *, num_processes: int, max_restarts: int = 0, say: Callable[[str], None] = lambda _line: None) -> int:
    """Run `python -m mtkit ARGUMENTS` as `num_processes` ranks on this machine and wait for them.

    Each rank is in a process group of its own, so that a signal reaches it once: through this process, be it from the terminal or from `kill`.
    When one rank fails the others get some time to end; then they show where they hang, and are killed. When it was killed, all are started anew.

    Args:
        arguments: Of the command. A second start must be able to go on from what the first has done.
        num_processes: Ranks.
        max_restarts: How often they are started anew. Not after an error of their own, nor after a signal that this process has passed on.
        say: Gets a line about each new start.

    Returns:
        The exit code: 0, or that of the first rank that failed.
    """
    num_restarts = 0
    while True:
        code, is_asked_to_stop = _run_group(arguments, num_processes=num_processes)
        if code >= 0 or is_asked_to_stop or num_restarts == max_restarts:
            return code if code >= 0 else 128 - code
        num_restarts += 1
        say(f"a process was ended by signal {-code}; starting all {num_processes} anew, for the {num_restarts}. of {max_restarts} times")


def _run_group(arguments: Sequence[str], *, num_processes: int) -> tuple[int, bool]:
    """Start the ranks once and wait; returns the exit code of the first that failed, or 0, and whether a signal was passed on to them."""
    listener = socket.socket()  # made here for rank 0: a number that is only free now could be taken when rank 0 has begun
    listener.bind(("127.0.0.1", 0))
    listener.listen(num_processes)
    port = listener.getsockname()[1]
    reading, writing = os.pipe()  # nobody writes to it: a rank notices when this process is gone, see `watch_launcher`
    environment = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(num_processes), MTKIT_LAUNCHER=str(reading))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_processes)))
    command = [sys.executable, "-m", "mtkit", *arguments]
    workers: list[subprocess.Popen[bytes]] = []
    with _forwarding_signals(workers) as forwarded:
        try:
            for rank in range(num_processes):
                rank_environment = dict(environment, RANK=str(rank), LOCAL_RANK=str(rank))
                if rank == 0:
                    rank_environment["MTKIT_LISTENING"] = str(listener.fileno())
                passed = (reading, listener.fileno()) if rank == 0 else (reading,)
                workers.append(subprocess.Popen(command, env=rank_environment, stdin=subprocess.DEVNULL, process_group=0, pass_fds=passed))
            listener.close()  # rank 0 has it
            return _wait_for_all(workers), bool(forwarded)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
            listener.close()
            os.close(reading)
            os.close(writing)


def watch_launcher() -> None:
    """Let this process end when the one that launched it is gone, and show its stacks when it is asked where it hangs.

    Nothing happens in a process that `launch` has not started.
    """
    if not is_launched():
        return
    faulthandler.register(_SHOW_STACKS, all_threads=True)
    descriptor = int(os.environ["MTKIT_LAUNCHER"])

    def wait() -> None:
        os.read(descriptor, 1)
        os.kill(os.getpid(), signal.SIGTERM)  # which saves what there is to be saved
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="mtkit-launcher", daemon=True).start()


@contextlib.contextmanager
def _forwarding_signals(workers: Sequence["subprocess.Popen[bytes]"]) -> Iterator[list[int]]:
    """Pass signals on to the workers for the time of the block; gives the list of those that came. What `nohup` ignores, the workers ignore too."""
    forwarded: list[int] = []

    def forward(number: int, _frame: object) -> None:
        forwarded.append(number)
        for worker in workers:
            worker.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        yield forwarded
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait_for_all(workers: Sequence["subprocess.Popen[bytes]"]) -> int:
    """The exit code of the first that fails, or 0; the others have `GRACE_S` from then on.

    One that lost its connection may end before the one that caused it: an error for users that comes later counts for more.
    """
    first_failure, deadline = 0, float("inf")
    while None in (codes := [worker.poll() for worker in workers]) and time.monotonic() < deadline:
        if not first_failure and any(codes):
            first_failure = _failure(codes)
            deadline = time.monotonic() + GRACE_S
        time.sleep(0.05)
    for worker, code in zip(workers, codes, strict=True):
        if code is None:
            worker.send_signal(_SHOW_STACKS)
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(_STACKS_S)
    return max([1, *filter(None, codes)]) if first_failure == 1 else first_failure or _failure(codes)


def _failure(codes: Sequence[int | None]) -> int:
    """A signal, or else an error for users, before what other ranks say about a lost connection; 0 where there is none."""
    return next((code for code in sorted(filter(None, codes), key=lambda code: (code > 0, code == 1))), 0)
