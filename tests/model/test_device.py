import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys

import pytest
import torch

from mtkit.errors import UsageError
from mtkit.model import device as device_module
from mtkit.model.device import PrecisionName, require_gpus, resolve_device, resolve_inference_precision, resolve_precision
from tests.helpers import REPOSITORY

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def pretend(monkeypatch: pytest.MonkeyPatch, *, gpus: int = 0, gpu_bf16: bool = False, amx: bool = False, avx512_bf16: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: gpu_bf16 or including_emulation)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)


def test_auto_takes_the_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpus=0)
    assert resolve_device("auto") == CPU
    pretend(monkeypatch, gpus=2)
    current: list[int] = []
    monkeypatch.setattr("torch.cuda.set_device", current.append)
    assert resolve_device("auto") == CUDA
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert current == [1]
    assert resolve_device("cpu") == CPU


def test_each_process_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpus=2)
    require_gpus(CUDA, 2)
    require_gpus(torch.device("cuda:1"), 1)
    with pytest.raises(UsageError, match="3 processes were asked for, but torch sees 2 GPUs"):
        require_gpus(CUDA, 3)
    with pytest.raises(UsageError, match="2 processes were asked for, but device cuda:0 is one GPU"):
        require_gpus(torch.device("cuda:0"), 2)


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend(monkeypatch, gpus=0)
    with pytest.raises(UsageError, match=f"device {name} is not there: torch sees 0 GPUs"):
        resolve_device(name)


def test_a_gpu_number_beyond_the_last_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpus=2)
    with pytest.raises(UsageError, match="device cuda:2 is not there: torch sees 2 GPUs"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:²", "tpu", "", "CPU"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="device must be auto, cpu, cuda or cuda:N, but is"):
        resolve_device(name)


@pytest.mark.parametrize(("amx", "avx512_bf16", "expected"), [(True, False, "bf16"), (False, True, "fp32"), (False, False, "fp32")])
def test_auto_trains_in_bf16_only_on_cpus_that_are_fast_at_it(monkeypatch: pytest.MonkeyPatch, amx: bool, avx512_bf16: bool, expected: str) -> None:
    pretend(monkeypatch, amx=amx, avx512_bf16=avx512_bf16)
    assert resolve_precision("auto", CPU).name == expected
    assert resolve_inference_precision("auto", CPU).name == "fp32"


@pytest.mark.parametrize(("gpu_bf16", "expected"), [(True, "bf16"), (False, "fp32")])
def test_auto_trains_in_bf16_only_on_gpus_that_have_it(monkeypatch: pytest.MonkeyPatch, gpu_bf16: bool, expected: str) -> None:
    pretend(monkeypatch, gpus=1, gpu_bf16=gpu_bf16)
    assert resolve_precision("auto", CUDA).name == expected
    assert resolve_inference_precision("auto", CUDA).name == "fp16"


def test_fp16_needs_a_gpu() -> None:
    assert resolve_precision("fp16", CUDA).needs_loss_scaling
    for resolve in (resolve_precision, resolve_inference_precision):
        with pytest.raises(UsageError, match="precision fp16 needs a GPU"):
            resolve("fp16", CPU)


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_gives_the_dtype_of_matrix_products(name: PrecisionName, dtype: torch.dtype) -> None:
    precision = resolve_precision(name, CPU)
    with precision.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype == precision.dtype
    assert not precision.needs_loss_scaling


def test_the_capability_of_this_cpu_is_a_plain_answer() -> None:
    assert device_module.cpu_is_fast_at_bf16() in (True, False)


def test_autocast_may_forget_converted_weights() -> None:
    precision = resolve_precision("bf16", CPU)
    for cache in (True, False):
        with precision.autocast(cache=cache):
            assert torch.is_autocast_cache_enabled() == cache
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


PAGE_FAULTS = """
import resource
from mtkit.model.device import keep_freed_memory

def page_faults():
    bytearray(64 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        bytearray(64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = page_faults()
keep_freed_memory()
keep_freed_memory()
print(before, page_faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="is about glibc's allocator")
def test_kept_memory_comes_again_without_page_faults() -> None:
    result = subprocess.run([sys.executable, "-c", PAGE_FAULTS], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120)
    before, after = map(int, result.stdout.split())
    assert before >= 8 * 32, "64 MB are 32 huge pages at least"
    assert after < before / 10


FREE_MEMORY = """
from pathlib import Path
from mtkit.model.device import keep_freed_memory

def resident_pages():
    return int(Path("/proc/self/statm").read_text().split()[1])

blocks = [bytearray(100_000) for _ in range(1000)]
last = bytearray(100_000)  # what lies behind them in memory, or the C library would give them back by itself
blocks.clear()
before = resident_pages()
keep_freed_memory()
print(before - resident_pages(), last[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="is about glibc's allocator")
def test_what_is_free_already_is_given_back() -> None:
    result = subprocess.run([sys.executable, "-c", FREE_MEMORY], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120)
    assert int(result.stdout.split()[0]) > 0.9 * 100e6 / os.sysconf("SC_PAGESIZE")


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: pytest.fail("asked the C library"))
    device_module.keep_freed_memory.__wrapped__()


@pytest.mark.parametrize(("triton", "compiler", "expected"), [(True, "gcc", True), (True, "clang", True), (True, None, False), (False, "gcc", False)])
def test_compiling_needs_triton_and_a_c_compiler(monkeypatch: pytest.MonkeyPatch, triton: bool, compiler: str | None, expected: bool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if triton and name == "triton" else None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == compiler else None)
    assert device_module.can_compile.__wrapped__() is expected
