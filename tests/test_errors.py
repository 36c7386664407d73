"""The errors and the exit codes that design.md promises for them."""

import inspect

import pytest

from mtkit import errors
from mtkit.errors import (
    ArtefactError,
    ConfigError,
    DataError,
    DivergedError,
    MTKitError,
    ResourceError,
    StoppedError,
    UsageError,
)

EXIT_CODES = {
    MTKitError: 1,
    UsageError: 2,
    ConfigError: 2,
    DataError: 3,
    ArtefactError: 4,
    ResourceError: 5,
    DivergedError: 6,
}


@pytest.mark.parametrize(("kind", "code"), EXIT_CODES.items())
def test_exit_code(kind: type[MTKitError], code: int) -> None:
    assert kind("what, where, why").exit_code == code


def test_every_error_has_an_exit_code_that_is_tested() -> None:
    kinds = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)}

    assert kinds == {*EXIT_CODES, StoppedError}


@pytest.mark.parametrize(("interrupted", "code"), [(True, 130), (False, 75)])
def test_stopping_tells_ctrl_c_from_a_request(interrupted: bool, code: int) -> None:
    assert StoppedError("saved runs/x at step 10", interrupted=interrupted).exit_code == code
    assert StoppedError.exit_code == 1, "the code belongs to the instance"


def test_text_is_the_message_and_the_hint() -> None:
    assert str(DataError("a.en:3: empty")) == "a.en:3: empty"
    assert str(DataError("a.en:3: empty", hint="Remove it.")) == "a.en:3: empty\nRemove it."
    assert DataError("a.en:3: empty").hint is None
