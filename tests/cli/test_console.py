"""What a person sees, and what a program reads."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtkit.cli import console

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=8,
)


def test_what_is_said_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("3 pairs")
    console.say("4 pairs", quiet=True)
    console.warn("a.en:3: empty")
    console.report_error("a.en: cannot be read", None)
    console.report_error("a.en: cannot be read", "Look for it.")

    assert capsys.readouterr() == (
        "",
        "3 pairs\nwarning: a.en:3: empty\nerror: a.en: cannot be read\nerror: a.en: cannot be read\nLook for it.\n",
    )


@given(json_values)
def test_json_is_a_document_on_stdout(value: Any) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        stream = _Capture()
        monkeypatch.setattr(sys, "stdout", stream)
        console.print_json(value)
    assert json.loads(stream.data) == value
    assert stream.data.endswith(b"\n")


class _Capture:
    """Stands in for sys.stdout, whose bytes it keeps."""

    def __init__(self) -> None:
        self.buffer = self
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def flush(self) -> None:
        pass


def test_json_is_utf8_in_any_locale() -> None:
    script = "from mtkit.cli import console; console.print_json({chr(252): chr(0x2028)})"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, check=True)

    assert result.stdout.decode() == '{\n  "ü": "\u2028"\n}\n'


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_has_no_numbers_that_are_none(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.print_json(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain äöü 中文 😀\ttab\nline", "plain äöü 中文 😀\ttab\nline"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\rb\x07\x7f", "a\\rb\\x07\\x7f"),
        ("a\u202eb\u2028c\u200b", "a\\u202eb\\u2028c\\u200b"),
        ("\udcff", "\\udcff"),
    ],
)
def test_foreign_text_cannot_steer_the_terminal(text: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert console.escape_control(text) == expected
    for function in (console.say, console.warn, lambda message: console.report_error("x", message)):
        function(text)
        assert capsys.readouterr().err.endswith(f"{expected}\n")
