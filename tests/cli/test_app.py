"""The command line as a whole: how it starts, what it offers, and how it ends."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from mtkit import __version__
from mtkit.cli.app import IDLE_SPINS, app
from tests.helpers import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden" / "command_surface.txt"
START_LIMIT_S = 0.3
START_LIMIT_RATIO = 3.0
SLOW_IMPORTS = ("torch", "datasets", "sacrebleu", "sentencepiece")

FAILING = """
import atexit, ctypes, gc, os, sys, time
import typer
from mtkit import errors
from mtkit.cli import console
from mtkit.cli.app import app, main
from mtkit.files import open_lines, open_output

@app.command("fail")
def fail(kind: str) -> None:
    raise getattr(errors, kind)("a.en:3: is \\x1b[31mwrong", hint="Mend it.")

@app.command("stop")
def stop(interrupted: str) -> None:
    raise errors.StoppedError("saved", interrupted=interrupted == "yes")

@app.command("break")
def break_(kind: str) -> None:
    raise {"bug": ZeroDivisionError("our fault"), "memory": MemoryError(),
           "torch": RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
           "pipe": BrokenPipeError(32, "Broken pipe"), "eof": EOFError(),
           "space": OSError(28, "No space left on device")}[kind]

@app.command("wait")
def wait() -> None:
    console.say("ready")
    time.sleep(60)

@app.command("write")
def write(path: str) -> None:
    with open_output(path) as output:
        output.write("line")
        wait()

@app.command("train-tokenizer")
def train_tokenizer() -> None:
    import sentencepiece
    from mtkit.data import tokenizer

    class Trainer:
        def train(**_options):
            console.say("ready")
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):  # waits for ever, and no signal disturbs it
                ctypes.CDLL(None).pthread_mutex_lock(mutex)

    sentencepiece.SentencePieceTrainer = Trainer
    tokenizer.train_tokenizer([("a", "b")], tokenizer.TokenizerConfig())

@app.command("many")
def many() -> None:
    with open_output("-") as output:
        for _ in range(1_000_000):
            output.write("line")

@app.command("say")
def say(ending: str) -> None:
    for _ in range(100_000):
        console.say("line")
    with open_output("-") as output:
        output.write("saved")
    if ending == "interrupted":
        raise errors.StoppedError("saved", interrupted=True)

@app.command("copy")
def copy() -> None:
    with open_lines("-") as lines, open_output("-") as output:
        for line in lines:
            output.write(line)

@app.command("chat")
def chat() -> None:
    for _ in range(1000):
        console.say("line")
        console.warn("line")
    console.print_json({"a": 1})

@app.command("report")
def report() -> None:
    console.print_json({"a": 1})

@app.command("leave")
def leave() -> None:
    atexit.register(lambda: print(gc.get_freeze_count() > 0))

@app.command("load")
def load(library: str) -> None:
    ctypes.CDLL(library)

main()
"""
"""The real application with commands that end in every possible way."""


def clean_environment() -> dict[str, str]:
    """The environment without what makes rich color its output, and without coverage, which would be timed too."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("COV", "GITHUB_")) and name not in ("FORCE_COLOR", "PY_COLORS", "CLICOLOR_FORCE", "PYTHONUNBUFFERED")
    }


def run(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    options = {"stdin": subprocess.DEVNULL, "env": clean_environment(), "timeout": 60, **options}
    return subprocess.run(arguments, capture_output=True, text=True, check=False, **options)


def mtkit(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run(sys.executable, "-m", "mtkit", *arguments)


@pytest.fixture
def failing(tmp_path: Path) -> str:
    """A script with the application and commands that fail."""
    (tmp_path / "failing.py").write_text(FAILING)
    return str(tmp_path / "failing.py")


def run_failing(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run(sys.executable, script, *arguments, env=measured_environment())


def measured_environment() -> dict[str, str]:
    """The environment with coverage, if there is any; stdout has its usual buffer."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def commands(command: Any, path: tuple[str, ...] = ("mtkit",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group below `command`, with the words that call it."""
    yield path, command
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from commands(child, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


# --- how it starts --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
def test_it_starts_at_once(arguments: list[str]) -> None:
    def seconds(*command: str) -> float:
        """Processor time, which other load on the machine does not lengthen as it does the time on the clock."""
        with subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, env=clean_environment()) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_utime + usage.ru_stime

    # A slow or shared machine takes longer for everything: then what counts is the time beside that of the library the command line is made of.
    pairs = [(seconds("-m", "mtkit", *arguments), seconds("-c", "import typer")) for _ in range(5)]
    assert min(ours for ours, _ in pairs) <= max(START_LIMIT_S, START_LIMIT_RATIO * min(typers for _, typers in pairs))


def test_no_help_text_imports_anything_slow() -> None:
    script = f"""
import contextlib, io, sys
from mtkit.cli.app import app
for path in {[[*path[1:], "--help"] for path in COMMANDS] + [["--version"]]!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        app(path)
print([name for name in {SLOW_IMPORTS!r} if name in sys.modules])
"""
    assert run(sys.executable, "-c", script).stdout == "[]\n"


@pytest.mark.parametrize(
    ("set_by_user", "spins"), [({}, str(IDLE_SPINS)), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "active"}, "30000000000")]
)
def test_idle_threads_sleep_unless_the_user_decides(failing: str, set_by_user: dict[str, str], spins: str) -> None:
    """GNU OpenMP reads its settings when it is loaded, which torch does as it is imported."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    libraries = list(Path(torch.origin).parent.glob("lib/libgomp*"))
    if not libraries:
        pytest.skip("this torch uses another OpenMP than GNU's")
    environment = {name: value for name, value in measured_environment().items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    shown = run(sys.executable, failing, "load", str(libraries[0]), env=environment | set_by_user | {"OMP_DISPLAY_ENV": "verbose"}).stderr

    assert f"GOMP_SPINCOUNT = '{spins}'" in shown


def test_nothing_is_searched_for_garbage_as_it_ends(failing: str) -> None:
    """With torch imported, that takes most of a second."""
    assert run_failing(failing, "leave").stdout == "True\n"


def test_version() -> None:
    result = mtkit("--version")

    assert (result.stdout, result.stderr, result.returncode) == (f"mtkit {__version__}\n", "", 0)


def test_the_script_and_the_module_are_the_same() -> None:
    script = Path(sys.executable).with_name("mtkit")
    if not script.exists():
        pytest.skip("mtkit is not installed beside this Python")

    assert run(str(script), "--version").stdout == mtkit("--version").stdout


def test_without_a_command_it_helps_and_fails() -> None:
    result = mtkit()

    assert "Usage:" in result.stdout + result.stderr
    assert result.returncode == 2


def test_a_pipe_gets_no_colors() -> None:
    assert "\x1b" not in mtkit("--help").stdout
    assert "\x1b" not in mtkit("no-such-command").stderr


def test_the_shell_completes(tmp_path: Path) -> None:
    def complete(words: str) -> list[str]:
        place = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1), "_MTKIT_COMPLETE": "complete_bash"}
        script = "from mtkit.cli.app import app; app(prog_name='mtkit')"
        return run(sys.executable, "-c", script, env={**clean_environment(), **place}).stdout.split()

    assert complete("mtkit --ver") == ["--version"]
    names = {path[1] for path in COMMANDS if len(path) > 1}
    assert set(complete("mtkit ")) == names


# --- what it offers -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_help_text_has_an_example_that_fits(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*path[1:], "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    command = COMMANDS[path]
    if getattr(command, "commands", None) and len(path) > 1:
        return  # a group: its commands have theirs

    epilog = command.epilog or ""
    assert re.match(r"Examples?: ", epilog), f"{' '.join(path)} has no example"
    assert "Example" in result.stdout
    calls = [call for call in re.split(r"\bmtkit (?=[a-z])", epilog)[1:] if f"mtkit {call}".startswith(" ".join(path))]
    assert calls, f"the example shows no `{' '.join(path)}`"
    for call in calls:
        check_options(path, call)


def check_options(path: tuple[str, ...], call: str) -> None:
    """Look whether the options of an example are those of the command that it calls."""
    words = re.split(r"[|·;<>]", call)[0].split()
    called = path if len(path) > 1 else max((other for other in COMMANDS if other[1:] == tuple(words[: len(other) - 1])), key=len)
    known = {option for parameter in COMMANDS[called].params for option in [*parameter.opts, *parameter.secondary_opts]}
    used = {word.split("=")[0] for word in words if re.fullmatch(r"-[a-z]|--[a-z].*", word)}
    assert used <= known, f"the example of {' '.join(path)} has unknown options: {used - known}"


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_everything_is_explained(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    unexplained = [parameter.name for parameter in command.params if not getattr(parameter, "help", None)]
    assert command.help
    assert not unexplained


@pytest.mark.parametrize("name", ["device", "threads"])
def test_an_option_of_several_commands_is_the_same_in_all(name: str) -> None:
    found = [parameter for command in COMMANDS.values() for parameter in command.params if f"--{name}" in parameter.opts]
    assert len(found) > 2
    assert len({(parameter.help, parameter.min, parameter.max) for parameter in found}) == 1


def surface() -> str:
    """Every command with its arguments and options, as text to be compared."""
    lines = []
    for path, command in COMMANDS.items():
        lines.append(" ".join(path))
        described = []
        for parameter in command.params:
            if parameter.name in ("install_completion", "show_completion", "help"):
                continue
            many = "..." if parameter.nargs == -1 or getattr(parameter, "multiple", False) else ""
            required = " required" if parameter.required else ""
            if parameter.param_type_name == "argument":
                described.append(f"  {parameter.name.upper()}{many}{required}")
            else:
                value = "" if parameter.is_flag else f" VALUE{many}"
                described.append(f"  {', '.join([*parameter.opts, *parameter.secondary_opts])}{value}{required}")
        lines += sorted(described)
    return "\n".join(lines) + "\n"


def test_the_surface_is_the_pinned_one() -> None:
    present = surface()
    if os.environ.get("MTKIT_UPDATE_GOLDEN"):
        GOLDEN.write_text(present)
    pinned = GOLDEN.read_text() if GOLDEN.exists() else ""

    assert present == pinned, (
        "The commands or options have changed. People have scripts that call them: if the change is meant, note it in CHANGELOG.md, "
        "accept it with `make golden`, and commit tests/golden/command_surface.txt."
    )


# --- how it ends ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "code"),
    [("MTKitError", 1), ("UsageError", 2), ("ConfigError", 2), ("DataError", 3), ("ArtefactError", 4), ("ResourceError", 5), ("DivergedError", 6)],
)
def test_an_error_is_a_message_a_hint_and_a_code(failing: str, kind: str, code: int) -> None:
    result = run_failing(failing, "fail", kind)

    assert (result.stdout, result.stderr, result.returncode) == ("", "error: a.en:3: is \\x1b[31mwrong\nMend it.\n", code)


@pytest.mark.parametrize(("interrupted", "code"), [("yes", 130), ("no", 75)])
def test_a_stopped_run_has_its_own_codes(failing: str, interrupted: str, code: int) -> None:
    assert run_failing(failing, "stop", interrupted).returncode == code


def test_debug_adds_the_traceback_and_keeps_the_code(failing: str) -> None:
    result = run_failing(failing, "--debug", "fail", "DataError")

    assert result.stderr.startswith("Traceback (most recent call last):")
    assert "raise getattr(errors, kind)" in result.stderr
    assert result.stderr.endswith("Mend it.\n")
    assert result.returncode == 3


@pytest.mark.parametrize(
    ("kind", "last"), [("bug", "ZeroDivisionError: our fault"), ("pipe", "RuntimeError: the way to"), ("eof", "RuntimeError: the way to")]
)
def test_an_unexpected_exception_keeps_its_traceback(failing: str, kind: str, last: str) -> None:
    result = run_failing(failing, "break", kind)

    assert result.stderr.startswith("Traceback (most recent call last):")
    assert "in break_" in result.stderr
    assert result.stderr.rstrip().split("\n")[-1].startswith(last)
    assert result.returncode == 1


@pytest.mark.parametrize("kind", ["memory", "torch"])
def test_out_of_memory(failing: str, kind: str) -> None:
    result = run_failing(failing, "break", kind)

    assert (result.stderr, result.returncode) == ("error: out of memory\n", 5)


def test_a_full_disk_wherever_it_is_noticed(failing: str) -> None:
    """B50."""
    result = run_failing(failing, "break", "space")

    assert (result.stderr, result.returncode) == ("error: No space left on device\nFree some space and run the command again.\n", 5)


def test_wrong_usage(failing: str) -> None:
    for arguments in (["no-such-command"], ["fail"], ["fail", "--no-such-option"]):
        result = run_failing(failing, *arguments)
        assert "Traceback" not in result.stderr
        assert (result.stdout, result.returncode) == ("", 2)


@pytest.mark.parametrize("debug", [False, True])
def test_ctrl_c(failing: str, debug: bool) -> None:
    command = [failing, *(["--debug"] if debug else []), "wait"]
    code, message = send(signal.SIGINT, *command)
    assert code == 130
    assert message.endswith("error: interrupted\n")
    assert ("Traceback" in message) == debug


def send(number: signal.Signals, *command: str | Path) -> tuple[int, str]:
    """Send a signal to a command that has said `ready`; returns its exit code and what else it said."""
    with subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True, env=measured_environment()) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        time.sleep(0.3)  # until it waits
        process.send_signal(number)
        try:
            return process.wait(timeout=30), process.stderr.read()
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_nothing_half_written_stays_after_a_signal(failing: str, tmp_path: Path, number: signal.Signals, code: int) -> None:
    message = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    output = tmp_path / "outputs"
    output.mkdir()
    assert send(number, failing, "write", output / "out") == (code, f"error: {message}\n")
    assert not list(output.iterdir())


def test_a_signal_that_is_ignored_stays_so(failing: str) -> None:
    """As `nohup` has it."""
    ignoring = (
        f"import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.executable, [sys.executable, {failing!r}, 'wait'])"
    )
    with subprocess.Popen([sys.executable, "-c", ignoring], stderr=subprocess.PIPE, text=True, env=measured_environment()) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_does_not_wait_for_sentencepiece(failing: str, number: signal.Signals, code: int) -> None:
    assert send(number, failing, "train-tokenizer")[0] == code


def test_a_reader_that_goes_ends_it_quietly(failing: str) -> None:
    command = [sys.executable, failing, "many"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=measured_environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 141


@pytest.mark.parametrize(("ending", "code"), [("done", 0), ("interrupted", 130)])
def test_a_reader_of_messages_that_goes_does_not_end_the_work(failing: str, ending: str, code: int) -> None:
    """Ctrl-C ends the `tee` behind `mtkit train 2>&1 | tee log` as well, and the run is still to be saved."""
    with subprocess.Popen([sys.executable, failing, "say", ending], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == b"line\n"
        process.stderr.close()
        assert process.stdout.read() == b"saved\n"
        assert process.wait(timeout=30) == code


def shell(failing: str, command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of `failing` with redirections."""
    words = f'exec "$1" "$2" {command}'
    return run("sh", "-c", words, "sh", sys.executable, failing, env=measured_environment(), stdin=None)


def test_stdout_that_is_closed(failing: str) -> None:
    for command in ("report", "many"):
        result = shell(failing, f"{command} >&-")
        assert (result.stderr, result.returncode) == ("error: stdout: cannot be written: Bad file descriptor\n", 1)


def test_stdin_that_is_closed(failing: str) -> None:
    result = shell(failing, "copy <&-")

    assert result.stderr.startswith("error: stdin:1: reading failed: [Errno 9] Bad file descriptor\n")
    assert (result.stdout, result.returncode) == ("", 3)


def test_streams_that_are_closed_and_not_needed(failing: str) -> None:
    assert (shell(failing, "report 2>&-").returncode, shell(failing, "report 2>&-").stdout) == (0, '{\n  "a": 1\n}\n')
    assert shell(failing, "fail DataError <&- >&- 2>&-").returncode == 3


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_stdout_that_is_full(failing: str) -> None:
    for command in ("report", "many"):
        result = shell(failing, f"{command} > /dev/full")
        assert result.stderr.startswith("error: stdout: cannot be written: No space left on device\n")
        assert "Traceback" not in result.stderr
        assert result.returncode == 5


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["--version", "--help", "report --help"])
def test_stdout_that_is_full_of_help(failing: str, words: str) -> None:
    result = shell(failing, f"{words} > /dev/full")
    assert (result.returncode, result.stderr.count("\n")) == (5, 2)
    assert result.stderr.startswith("error: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_messages_that_cannot_be_written_do_not_end_the_work(failing: str) -> None:
    result = shell(failing, "chat 2> /dev/full")
    assert (result.returncode, result.stdout) == (0, '{\n  "a": 1\n}\n')
    assert shell(failing, "fail DataError 2> /dev/full").returncode == 3
    assert shell(failing, "chat 2< /dev/null").returncode == 0  # open, but for reading


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["no-such-command"], 2), (["inspect", "nothing-here"], 4)])
def test_a_rank_ends_with_the_same_code_and_output(words: list[str], code: int) -> None:
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    alone, rank = (subprocess.run([sys.executable, "-m", "mtkit", *words], env=env, capture_output=True, check=False) for env in (None, environment))
    assert (rank.returncode, rank.stdout, rank.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    assert rank.returncode == code


# --- the standard streams -------------------------------------------------------------------------------------------------------------

STREAMS = """
import os, sys
from mtkit.cli.app import _make_streams_dependable

_make_streams_dependable()
sys.stderr.write(f"{type(sys.stdout.buffer).__name__} {os.get_blocking(0)} {os.get_blocking(1)}")
sys.stdout.write("text")
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_all_that_is_written_arrives_and_pauses_are_waited_for(unbuffered: str) -> None:
    descriptors = [os.pipe(), os.pipe()]
    for descriptor in (descriptors[0][0], descriptors[1][1]):
        os.set_blocking(descriptor, False)
    environment = {**measured_environment(), "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", STREAMS]
    result = subprocess.run(
        command, stdin=descriptors[0][0], stdout=descriptors[1][1], stderr=subprocess.PIPE, text=True, env=environment, cwd=REPOSITORY, check=True
    )
    assert result.stderr == "BufferedWriter True True"
    assert os.read(descriptors[1][0], 100) == b"text"
    for pair in descriptors:
        for descriptor in pair:
            os.close(descriptor)


def test_a_path_that_cannot_be_looked_at_is_named() -> None:
    result = CliRunner().invoke(app, ["translate", "x" * 300])
    assert result.exit_code == 1
    assert result.stderr.endswith("x: File name too long\n")


def test_numbers_of_processes_that_do_not_fit_are_wrong_usage() -> None:
    environment = {**measured_environment(), "RANK": "2", "WORLD_SIZE": "2"}
    result = run(sys.executable, "-m", "mtkit", "--version", env=environment)
    assert (result.returncode, result.stderr) == (2, "error: RANK=2 does not fit WORLD_SIZE=2\n")
