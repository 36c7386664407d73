"""Rank, world size and launching, with real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mtkit import distributed
from mtkit.distributed import World, all_gather_lines, all_reduce_sums, launch, process_group, read_environment, watch_launcher
from mtkit.errors import MTKitError, UsageError

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lets `launch` start a given script, which finds `mtkit ARGUMENTS` in `sys.argv[2:]` and `out` in the working directory."""

    def install(script: str) -> None:
        (tmp_path / "worker.py").write_text(script)
        (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/worker.py" "$@"\n')
        (tmp_path / "python").chmod(0o755)
        (tmp_path / "out").mkdir()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    return install


def outputs(directory: Path = Path("out")) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


# --- the environment ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, World()),
        ({"RANK": "1"}, World()),
        ({"WORLD_SIZE": "2"}, World()),
        ({"RANK": "0", "WORLD_SIZE": "1"}, World()),
        ({"RANK": "1", "WORLD_SIZE": "2"}, World(rank=1, local_rank=1, size=2)),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, World(rank=5, local_rank=1, size=8)),
    ],
)
def test_the_world_is_what_torchrun_says(environment: dict[str, str], expected: World) -> None:
    assert read_environment(environment) == expected
    assert expected.is_main == (expected.rank == 0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 does not fit WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 does not fit WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 does not fit WORLD_SIZE=0"),
        ({"RANK": "0", "LOCAL_RANK": "-1", "WORLD_SIZE": "2"}, "LOCAL_RANK=-1 does not fit"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "must be whole numbers.*'one'"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "must be whole numbers"),
    ],
)
def test_an_environment_that_contradicts_itself(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_environment(environment)


def test_the_environment_of_this_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")

    assert read_environment() == World(rank=1, local_rank=0, size=3)


# --- the group ------------------------------------------------------------------------------------------------------------------------


def test_a_world_of_one_needs_no_group() -> None:
    script = """
import sys
from mtkit.distributed import World, all_reduce_sums, process_group
with process_group(World(), backend="gloo"):
    assert all_reduce_sums([1.5, 2.0], World()) == [1.5, 2.0]
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    with process_group(World(), backend="gloo"):
        assert all_reduce_sums([1.5], World()) == [1.5]
        assert all_gather_lines(["a", ""], World()) == [["a", ""]]


def test_two_processes_exchange_sums_in_double_precision_and_lines(install: Install) -> None:
    install("""
from pathlib import Path
from mtkit.distributed import all_gather_lines, all_reduce_sums, process_group, read_environment
world = read_environment()
with process_group(world, backend="gloo", timeout_s=60):
    sums = all_reduce_sums([[0.1, 0.2][world.rank], 2.0 ** 53 * world.rank, 1.0], world)
    uneven = all_gather_lines([["a\\u2028b", "", "ü"], []][world.rank], world)
    nothing = all_gather_lines([], world)
Path("out", str(world.rank)).write_text(repr((sums, uneven, nothing)))
""")
    expected = repr(([0.1 + 0.2, 2.0**53, 2.0], [["a\u2028b", "", "ü"], []], [[], []]))

    assert launch([], num_processes=2) == 0
    assert outputs() == {"0": expected, "1": expected}


def test_nobody_else_gets_the_port_before_the_processes_meet(install: Install) -> None:
    """D9: however long rank 0 takes to begin."""
    install("""
import os, socket, time
from mtkit.distributed import all_reduce_sums, process_group, read_environment
world = read_environment()
if world.rank == 0:
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        except OSError:
            pass
        else:
            raise AssertionError("the port is free")
    time.sleep(0.5)
with process_group(world, backend="gloo", timeout_s=60):
    assert all_reduce_sums([1.0], world) == [2.0]
""")

    assert launch([], num_processes=2) == 0


def test_a_process_whose_partners_do_not_come_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")

    with pytest.raises(MTKitError, match="rank 0 of 2 cannot join the others"), process_group(World(size=2), backend="gloo", timeout_s=1):
        pass


# --- launching ------------------------------------------------------------------------------------------------------------------------


def test_every_rank_gets_the_arguments_and_its_place(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("mtkit.distributed.num_cores", lambda: 6)  # which may be fewer than the machine has
    install("""
import os, sys
from pathlib import Path
assert sys.argv[1:3] == ["-m", "mtkit"]
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
Path("out", os.environ["RANK"]).write_text(" ".join([*sys.argv[3:], *(os.environ[name] for name in names)]))
assert 1024 <= int(os.environ["MASTER_PORT"]) < 65536
""")

    assert launch(["train", "--output", "x"], num_processes=3) == 0
    assert outputs() == {str(rank): f"train --output x {rank} {rank} 3 127.0.0.1 2" for rank in range(3)}


def test_the_number_of_threads_is_the_users(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    install("import os; from pathlib import Path; Path('out', os.environ['RANK']).write_text(os.environ['OMP_NUM_THREADS'])")

    assert launch([], num_processes=2) == 0
    assert outputs() == {"0": "7", "1": "7"}


@pytest.mark.parametrize(("failure", "code"), [("sys.exit(4)", 4), ("sys.exit(75)", 75), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_the_code_is_that_of_the_rank_that_failed(install: Install, failure: str, code: int) -> None:
    install(f"import os, signal, sys, time\nif os.environ['RANK'] == '1':\n    {failure}")

    assert launch([], num_processes=2) == code


def test_an_error_for_users_comes_before_a_lost_connection(install: Install) -> None:
    """C3: one rank ends because of the other, and before it."""
    install("""
import os, sys, time
from pathlib import Path
Path("out", os.environ["RANK"]).touch()
while not Path("out", "1").exists():
    time.sleep(0.02)
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    sys.exit(5)
sys.exit(1)
""")

    assert launch([], num_processes=2) == 5


def test_the_others_are_ended_when_one_has_failed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "GRACE_S", 0.3)
    install("""
import os, sys, time
from pathlib import Path
if os.environ["RANK"] == "1":
    sys.exit(3)
Path("out", "pid").write_text(str(os.getpid()))
time.sleep(60)
""")
    start = time.monotonic()

    assert launch([], num_processes=2) == 3
    assert time.monotonic() - start < 30
    if "pid" in outputs():
        with pytest.raises(ProcessLookupError):
            os.kill(int(outputs()["pid"]), 0)


def test_a_rank_that_cannot_be_started_takes_the_others_with_it(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("import time; time.sleep(60)")
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def fail_at_the_second(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        if started:
            raise OSError("no more processes")
        started.append(popen(*arguments, **options))  # type: ignore[call-overload]
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", fail_at_the_second)

    with pytest.raises(OSError, match="no more processes"):
        launch([], num_processes=2)
    assert started[0].returncode == -signal.SIGKILL


DRIVER = """
import sys
from mtkit.distributed import launch
sys.executable = sys.argv[1]
sys.exit(launch([], num_processes=2))
"""


def test_no_rank_reads_what_is_typed(install: Install) -> None:
    python = sys.executable
    install("import os, sys; from pathlib import Path; Path('out', os.environ['RANK']).write_text(sys.stdin.read())")
    subprocess.run([python, "-c", DRIVER, sys.executable], input=b"y", check=True, timeout=60)

    assert outputs() == {"0": "", "1": ""}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("to_group", [True, False], ids=["from the terminal", "from kill"])
def test_a_signal_reaches_every_rank_once(install: Install, number: signal.Signals, to_group: bool) -> None:
    python = sys.executable
    install(f"""
import os, signal, sys, time
from pathlib import Path
count = 0
def handle(*_):
    global count
    count += 1
signal.signal({int(number)}, handle)
Path("out", "ready" + os.environ["RANK"]).touch()
while count == 0:
    time.sleep(0.02)
time.sleep(0.2)
Path("out", os.environ["RANK"]).write_text(str(count))
sys.exit(75)
""")
    with subprocess.Popen([python, "-c", DRIVER, sys.executable], start_new_session=True) as driver:
        deadline = time.monotonic() + 30
        while not {"ready0", "ready1"} <= outputs().keys() and time.monotonic() < deadline:
            time.sleep(0.02)
        (os.killpg if to_group else os.kill)(driver.pid, number)

        assert driver.wait(timeout=30) == 75
    assert (outputs()["0"], outputs()["1"]) == ("1", "1")


def test_the_handlers_of_signals_are_given_back(install: Install) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]
    install("pass")
    launch([], num_processes=1)

    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)] == before


def test_a_hangup_that_nohup_ignores_reaches_no_rank(install: Install) -> None:
    install("""
import os, signal
from pathlib import Path
if os.environ["RANK"] == "0":
    os.kill(os.getppid(), signal.SIGHUP)
os.kill(os.getpid(), signal.SIGHUP)
Path("out", os.environ["RANK"]).touch()
""")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch([], num_processes=2) == 0
    finally:
        signal.signal(signal.SIGHUP, before)

    assert outputs().keys() == {"0", "1"}


# --- when ranks or the launcher die -----------------------------------------------------------------------------------------------------

DIES_TWICE = """
import os, signal, time
from pathlib import Path
rank, mark = os.environ["RANK"], Path("out", "deaths")
deaths = len(mark.read_text()) if mark.exists() else 0
ready = Path("ready" + str(deaths))
if rank == "0":
    ready.touch()
while not ready.exists():
    time.sleep(0.02)
if rank == "1" and deaths < 2:
    mark.write_text("x" * (deaths + 1))
    os.kill(os.getpid(), signal.SIGKILL)
if deaths < 2:
    time.sleep(60)
Path("out", rank).touch()
"""


@pytest.mark.smoke
@pytest.mark.parametrize(("max_restarts", "code"), [(2, 0), (1, 137), (0, 137)])
def test_a_killed_rank_starts_all_anew(install: Install, monkeypatch: pytest.MonkeyPatch, max_restarts: int, code: int) -> None:
    """D4: so many times, and each time it is said."""
    monkeypatch.setattr(distributed, "GRACE_S", 0.1)
    install(DIES_TWICE)
    said: list[str] = []

    assert launch([], num_processes=2, max_restarts=max_restarts, say=said.append) == code
    assert said == [f"a process was ended by signal 9; starting all 2 anew, for the {n}. of {max_restarts} times" for n in range(1, max_restarts + 1)]
    assert outputs().keys() == ({"deaths", "0", "1"} if code == 0 else {"deaths"})


def test_an_error_of_a_rank_is_not_tried_again(install: Install) -> None:
    install("import os, sys\nwith open('out/' + os.environ['RANK'], 'a') as stream:\n    stream.write('x')\nsys.exit(6)")

    assert launch([], num_processes=2, max_restarts=3) == 6
    assert outputs() == {"0": "x", "1": "x"}


def test_a_signal_that_was_passed_on_is_no_reason_to_start_anew(install: Install) -> None:
    """D1: somebody wants it to end."""
    python = sys.executable
    install("import os, time; from pathlib import Path; open('out/' + os.environ['RANK'], 'a').write('x'); time.sleep(60)")
    driver_script = DRIVER.replace("num_processes=2", "num_processes=2, max_restarts=3")
    with subprocess.Popen([python, "-c", driver_script, sys.executable], start_new_session=True) as driver:
        wait_for(lambda: outputs() == {"0": "x", "1": "x"})
        driver.terminate()
        assert driver.wait(timeout=30) == 128 + signal.SIGTERM
    assert outputs() == {"0": "x", "1": "x"}


def wait_for(condition: Callable[[], bool], *, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.smoke
@pytest.mark.parametrize("reaction", ["", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_no_rank_outlives_the_launcher(install: Install, reaction: str) -> None:
    """D7: neither one that dies of the request to end, nor one that heeds it, nor one that does not."""
    python = sys.executable
    install(f"""
import os, signal, sys, time
from pathlib import Path
from mtkit import distributed
distributed.GRACE_S = 0.5
{reaction}
distributed.watch_launcher()
Path("out", os.environ["RANK"]).write_text(str(os.getpid()))
while True:
    time.sleep(0.1)
""")
    with subprocess.Popen([python, "-c", DRIVER, sys.executable], start_new_session=True) as driver:
        wait_for(lambda: len(outputs()) == 2 and all(outputs().values()))
        driver.kill()
    pids = [int(text) for text in outputs().values()]
    wait_for(lambda: not any(map(is_alive, pids)), seconds=10.0)


def test_a_rank_that_hangs_shows_where(install: Install, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """D6: when another has given up waiting for it."""
    monkeypatch.setattr(distributed, "GRACE_S", 0.3)
    install("""
import os, sys, time
from pathlib import Path
from mtkit.distributed import watch_launcher
watch_launcher()
def wait_for_godot():
    Path("out", "hangs").touch()
    time.sleep(60)
if os.environ["RANK"] == "1":
    wait_for_godot()
while not Path("out", "hangs").exists():
    time.sleep(0.02)
sys.exit(1)
""")

    assert launch([], num_processes=2, max_restarts=3) == 1
    assert "in wait_for_godot" in capfd.readouterr().err


def test_a_process_that_was_not_launched_watches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MTKIT_LAUNCHER", raising=False)
    before = threading.active_count()
    watch_launcher()
    assert threading.active_count() == before
