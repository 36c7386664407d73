"""How much of the machine this process may use. Containers and batch systems give a part of it, each in its own way."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def num_cores() -> int:
    """CPU cores that this process may use, at least 1: those that it is bound to, or the time that its control group has, if that is less."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *cgroup_cores()]))


def num_threads() -> int:
    """Threads that this process computes with unless told otherwise: one per core, or what OMP_NUM_THREADS says if that is less."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(num_cores(), int(asked)) if asked.isdecimal() and int(asked) > 0 else num_cores()


def cgroup_cores(root: Path = Path("/")) -> Iterator[int]:
    """Cores' worth of time that each control group of this process allows, rounded up, where it has a limit (Linux, versions 1 and 2).

    Args:
        root: Of the file system; another one in tests.
    """
    mounted = root / "sys" / "fs" / "cgroup"
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc" / "self" / "cgroup").read_bytes().strip().split(b"\n"):
            _, controllers, path = os.fsdecode(line).split(":", 2)
            is_second = not controllers
            if not is_second and "cpu" not in controllers.split(","):
                continue
            top = mounted if is_second else mounted / "cpu"
            group = top / path.strip("/")
            # A limit of any group above counts too. Inside a container the path may be that outside: then only the top is there.
            for place in [one for one in (group, *group.parents) if one.is_relative_to(top)]:
                with contextlib.suppress(OSError, ValueError):
                    quota, period = _second(place) if is_second else _first(place)
                    if quota > 0 and period > 0:
                        yield -(-quota // period)


def _second(group: Path) -> tuple[int, int]:
    quota, period = (group / "cpu.max").read_bytes().split()
    return int(quota), int(period)  # "max" is no number


def _first(group: Path) -> tuple[int, int]:
    return int((group / "cpu.cfs_quota_us").read_bytes()), int((group / "cpu.cfs_period_us").read_bytes())
