"""Compiles the C files beside it for the processor at hand, once, and loads them. Without a C compiler torch does their work."""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

SOURCES = Path(__file__).parent
"""The directory of the C files and their headers."""

SWITCH = "MTKIT_NATIVE"
"""Environment variable: with 0 the kernels are not used."""

_COMPILERS = ("cc", "gcc", "clang")

_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-Wno-psabi")

_THREADS = "-fopenmp"
"""What lets kernels use several threads: those that torch has, since both use the OpenMP library of the same name. Compilers may lack it."""

_SECONDS_TO_COMPILE = 120.0


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
    compilers = dict.fromkeys(path for path in map(shutil.which, _COMPILERS) if path is not None)
    problem = "there is no C compiler"
    for compiler in compilers:
        for place in (_in_cache, _for_this_process):
            try:
                with place() as directory:
                    return ctypes.CDLL(str(compiled(compiler, directory))), ""
            except (OSError, RuntimeError) as error:
                problem = f"they cannot be stored or loaded: {error}"
            except subprocess.SubprocessError as error:
                problem = f"{compiler} cannot compile them: {_told(error)}"
    return None, problem


@contextlib.contextmanager
def _in_cache() -> Iterator[Path]:
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    yield (named if named.is_absolute() else Path("~/.cache").expanduser()) / "mtkit"  # a relative one is to be ignored: XDG Base Directory


@contextlib.contextmanager
def _for_this_process() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mtkit-") as scratch:
        yield Path(scratch)


def _told(error: subprocess.SubprocessError) -> str:
    """What a compiler says last, or what became of it."""
    stderr = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    lines = [line for line in (stderr or b"").decode("utf-8", "replace").split("\n") if line.strip()]
    return lines[-1].strip() if lines else str(error)


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
    sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".c", ".h"))
    flags = (*_FLAGS, *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()), *more_flags)
    version = _run([compiler, "--version"])
    what = (*(path.read_bytes() for path in sources), compiler.encode(), version, " ".join(flags).encode(), _processor())
    fingerprint = hashlib.sha256(b"\0".join(what)).hexdigest()[:32]
    # The name holds what the file holds too: to load one that is damaged would end the process without a word.
    for found in sorted(directory.glob(f"kernels-{fingerprint}-*.so")):
        if found.name == f"kernels-{fingerprint}-{_content(found)}.so":
            return found
        found.unlink(missing_ok=True)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kernels-", dir=directory) as scratch:
        made = Path(scratch, "kernels.so")
        command = [compiler, *flags, "-o", str(made), *(str(path) for path in sources if path.suffix == ".c"), "-lm"]
        try:
            _run([*command, _THREADS])
        except subprocess.CalledProcessError:
            _run(command)
        return made.replace(directory / f"kernels-{fingerprint}-{_content(made)}.so")


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _run(command: Sequence[str]) -> bytes:
    """Run a compiler, with all that it starts, and return its stdout."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        stdout, stderr = process.communicate(timeout=_SECONDS_TO_COMPILE)
    except BaseException:  # it takes too long, or whoever waits is to end: it must not go on alone
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command, stdout, stderr)
    return stdout


def _processor() -> bytes:
    """What -march=native depends on, as far as the system tells: home directories may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0].split(b"\n")
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    return b"\n".join(line for line in lines if line.split(b"\t")[0] in (b"model name", b"flags", b"Features", b"CPU part"))
