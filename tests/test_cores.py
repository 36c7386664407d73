"""How many cores and threads a process takes."""

import os
from pathlib import Path

import pytest

from mtkit import cores
from mtkit.cores import cgroup_cores, num_cores, num_threads


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, []),
        ({"proc/self/cgroup": "0::/\n"}, []),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, []),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, [3]),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "200000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "50000 100000\n"}, [1, 2]),
        ({"proc/self/cgroup": "0::/outside/of/it\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, [1]),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            [4],
        ),
        ({"proc/self/cgroup": "nonsense\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, []),
    ],
)
def test_limits_of_control_groups(tmp_path: Path, files: dict[str, str], expected: list[int]) -> None:
    for name, text in files.items():
        write(tmp_path, name, text)
    assert list(cgroup_cores(tmp_path)) == expected


def test_the_least_of_all_limits_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for limits, expected in (([], bound), ([10_000], bound), ([10_000, 1], 1)):
        monkeypatch.setattr(cores, "cgroup_cores", lambda limits=limits: iter(limits))
        assert num_cores() == expected


@pytest.mark.parametrize(("asked", "expected"), [(None, 6), ("2", 2), ("4,2", 4), ("9", 6), ("0", 6), ("", 6), ("many", 6)])
def test_openmp_may_be_told_to_take_less(monkeypatch: pytest.MonkeyPatch, asked: str | None, expected: int) -> None:
    monkeypatch.setattr(cores, "num_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert num_threads() == expected
