import os
import platform
import time

import pytest
import torch

from mtkit.benchmark import machine
from mtkit.benchmark.machine import describe_machine, matmul_flops_per_s, spread
from mtkit.model.device import Precision

CPU = torch.device("cpu")


def test_a_spread_has_the_median_in_the_middle() -> None:
    result = spread([5.0, 1.0, 2.0])
    assert (result.lowest, result.median, result.highest, result.repeats) == (1.0, 2.0, 5.0, 3)
    assert spread([4.0, 1.0]).median == 2.5
    assert spread([7.0]).median == 7.0


def test_the_machine_is_described() -> None:
    described = describe_machine(CPU)
    assert described.keys() == {"device", "cores", "threads", "torch", "python"}
    assert described["cores"] == len(os.sched_getaffinity(0))
    assert described["threads"] == torch.get_num_threads()
    assert described["torch"] == torch.__version__
    assert described["device"]


def test_a_processor_without_a_name_is_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(machine, "open", fail, raising=False)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert describe_machine(CPU)["device"] == "riscv64"


def test_the_rate_counts_two_operations_per_multiplication(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    # On this clock four products take one second.
    rate = matmul_flops_per_s(Precision(name="fp32", device_type="cpu"), CPU, rows=8, width=4, seconds=5.0)
    assert rate == 4 * 2 * 8 * 4 * 4


def test_the_rate_of_this_machine_is_within_reason() -> None:
    rate = matmul_flops_per_s(Precision(name="fp32", device_type="cpu"), CPU, rows=256, width=256, seconds=0.05)
    assert 1e8 < rate < 1e14
