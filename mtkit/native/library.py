"""Compiles `kernels.c` for the processor at hand, once, and loads it. Without a C compiler there are no kernels, and torch does their work."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")

SWITCH = "MTKIT_NATIVE"
"""Environment variable: with 0 the kernels are not used."""

_COMPILERS = ("cc", "gcc", "clang")

_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-Wno-psabi")

_SECONDS_TO_COMPILE = 120.0


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be had; `reason` then says why.

    They are kept in the user's cache directory, under a name that holds whatever they depend on: the source, the compiler, the processor. Where that
    directory cannot be written, they are compiled for each process.
    """
    return _load()[0]


def reason() -> str:
    """Why there are no kernels; empty if there are."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get(SWITCH) == "0":
        return None, f"{SWITCH} is 0"
    compiler = next((path for path in map(shutil.which, _COMPILERS) if path is not None), None)
    if compiler is None:
        return None, "there is no C compiler"
    problem = ""
    with tempfile.TemporaryDirectory(prefix="mtkit-") as scratch:
        for directory in (_cache_directory(), Path(scratch)):
            try:
                return ctypes.CDLL(str(compiled(compiler, directory))), ""
            except OSError as error:
                problem = f"they cannot be stored or loaded: {error}"
            except subprocess.SubprocessError as error:
                return None, f"{compiler} cannot compile them: {error}"
    return None, problem


def compiled(compiler: str, directory: Path, *, more_flags: Sequence[str] = ()) -> Path:
    """The library in a directory, made if it is not there.

    Args:
        compiler: Path of a C compiler that takes the flags of gcc.
        directory: Where it goes.
        more_flags: For the compiler, such as what the processor is to be taken for.

    Raises:
        OSError: It cannot be stored.
        subprocess.SubprocessError: The compiler fails.
    """
    source = SOURCE.read_bytes()
    flags = (*_FLAGS, *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()), *more_flags)
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_SECONDS_TO_COMPILE).stdout
    what = b"\0".join((source, compiler.encode(), version, " ".join(flags).encode(), _processor()))
    name = f"kernels-{hashlib.sha256(what).hexdigest()[:32]}.so"
    target = directory / name
    if not target.is_file():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".kernels-", dir=directory) as scratch:
            made = Path(scratch, name)
            command = [compiler, *flags, "-o", str(made), str(SOURCE), "-lm"]
            subprocess.run(command, capture_output=True, check=True, timeout=_SECONDS_TO_COMPILE)
            made.replace(target)
    return target


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "mtkit")


def _processor() -> bytes:
    """What -march=native depends on, as far as the system tells: home directories may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0].split(b"\n")
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    return b"\n".join(line for line in lines if line.split(b"\t")[0] in (b"model name", b"flags", b"Features", b"CPU part"))
