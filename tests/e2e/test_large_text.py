"""A line of 100 MB, a million blank lines and input without end, through every command that reads text, within the memory that a short text takes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.toy import Pipeline, mtkit_environment

pytestmark = [pytest.mark.slow, pytest.mark.reliability]

MB = 1 << 20
WORDS = b"one two three four five six seven eight nine zero "
COMMANDS = {
    "encode": "tokenizer encode {tokenizer} --side src --input {text}",
    "translate": "translate {average} --input {text} --threads 1 --beam-size 1 --set max_source_length=20 --quiet",
    "score": "score --ref {text} {text} --bootstrap 0 --metrics bleu --force",
    "preprocess": "preprocess --train {text} {text} --tokenizer {tokenizer} --workers 1 --output {output}",
    "train a tokenizer": "tokenizer train {text} {text} --vocab-size 290 --output {output}",
}


def run(command: str, pipeline: Pipeline, text: Path, output: Path) -> tuple[int, float, Path]:
    """Exit code, largest memory in MB, and stdout of a command."""
    filled = command.format(tokenizer=pipeline.tokenizer, average=pipeline.average, text=text, output=output)
    stdout = output.with_suffix(".stdout")
    with open(stdout, "wb") as stream, open(output.with_suffix(".stderr"), "wb") as messages:
        process = subprocess.Popen(
            [sys.executable, "-m", "mtkit", *filled.split()], stdin=subprocess.DEVNULL, stdout=stream, stderr=messages, env=mtkit_environment()
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_maxrss / 1024, stdout


def write(path: Path, parts: Iterator[bytes]) -> Path:
    with open(path, "wb") as stream:
        stream.writelines(parts)
    return path


def long_line(path: Path, size: int, text: bytes) -> Path:
    """A line of so many bytes in the middle of a text."""
    return write(path, iter([text, *[WORDS * (MB // len(WORDS))] * (size // MB), b"\n", text]))


@pytest.mark.parametrize("name", COMMANDS)
def test_memory_does_not_grow_with_the_longest_line(pipeline: Pipeline, tmp_path: Path, name: str) -> None:
    text = (pipeline.text / "dev.en").read_bytes()
    peaks = []
    for size in (8 * MB, 100 * MB):
        path = long_line(tmp_path / f"{size}.txt", size, text)
        code, peak, stdout = run(COMMANDS[name], pipeline, path, tmp_path / f"out-{size}")
        assert code == 0, stdout.with_suffix(".stderr").read_text()
        if name in ("encode", "translate"):
            assert stdout.read_bytes().count(b"\n") == 2 * text.count(b"\n") + 1
        peaks.append(peak)
    assert peaks[1] < peaks[0] + 40, f"{peaks} MB for lines of 8 and of 100 MB"


@pytest.mark.parametrize("name", ["encode", "translate", "preprocess", "score"])
def test_a_million_blank_lines(pipeline: Pipeline, tmp_path: Path, name: str) -> None:
    text = (pipeline.text / "dev.en").read_bytes()
    path = write(tmp_path / "blank.txt", iter([text, *[b"\n \n\t\n\r\n" * 1000] * 250, text]))
    code, peak, stdout = run(COMMANDS[name], pipeline, path, tmp_path / "out")
    assert code == 0, stdout.with_suffix(".stderr").read_text()
    assert peak < 1500
    if name in ("encode", "translate"):
        lines = stdout.read_bytes().split(b"\n")[:-1]
        num_text = text.count(b"\n")
        assert len(lines) == 1_000_000 + 2 * num_text
        assert not any(lines[num_text:-num_text])
        assert all(lines[:num_text])
        assert lines[:num_text] == lines[-num_text:]


@pytest.mark.parametrize("arguments", ["translate {average} --threads 1", "tokenizer encode {tokenizer} --side src"])
def test_input_without_end_is_answered_as_it_comes(pipeline: Pipeline, arguments: str) -> None:
    """`yes | mtkit ... | head -3` ends, quietly, when the reader leaves."""
    filled = arguments.format(average=pipeline.average, tokenizer=pipeline.tokenizer).split()
    with subprocess.Popen(
        [sys.executable, "-c", "import sys\nwhile True: sys.stdout.write('One two three.\\n')"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as endless:
        try:
            with subprocess.Popen(
                [sys.executable, "-m", "mtkit", *filled],
                stdin=endless.stdout,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=mtkit_environment(),
            ) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                first = [process.stdout.readline() for _ in range(3)]
                process.stdout.close()
                assert process.wait(60) == 141
                assert b"Traceback" not in process.stderr.read()
        finally:
            endless.kill()
    assert len(set(first)) == 1
    assert first[0].strip()
