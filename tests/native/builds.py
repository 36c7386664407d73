"""The kernels as they are compiled for this processor, and as for lesser ones that its instructions include."""

import ctypes
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from mtkit.native import kernels, library, training

BUILDS = {
    "this processor": (),
    "without AMX": ("-mno-amx-int8",),
    "without VNNI": ("-mno-amx-int8", "-mno-avx512vnni"),
    "AVX2": ("-mno-avx512f",),
    "SSE": ("-mno-avx",),
}


@cache
def _build(name: str) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    if BUILDS[name] and platform.machine() != "x86_64":
        pytest.skip("these flags are for x86")
    directory = Path(mkdtemp(prefix="mtkit-test-"))
    try:
        return ctypes.CDLL(str(library.compiled(compiler, directory, more_flags=BUILDS[name])))
    except subprocess.CalledProcessError as error:
        if not BUILDS[name]:
            raise
        pytest.skip(f"this compiler does not know {' '.join(BUILDS[name])}: {error.stderr!r}")
    finally:
        shutil.rmtree(directory)


def use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels be those of a build, as long as the test lasts."""
    build = _build(name)
    monkeypatch.setattr(library, "load", lambda: build)
    for module, names in ((kernels, ("_library", "int8_level", "has_bf16")), (training, ("_library", "available"))):
        for function in names:
            monkeypatch.setattr(module, function, cache(getattr(module, function).__wrapped__))
