"""Faults on purpose, for tests of what survives them. Nothing here does anything unless two variables of the environment ask for it.

`MTKIT_FAULT` is one or several faults, with commas between them, each `ACTION@POINT:COUNT`, with `MTKIT_ALLOW_FAULTS=1` beside it:

    kill@artefact.rename:2      SIGKILL when this point is reached for the second time
    ENOSPC@atomic.fsync:1       the system's error of this name
    oom@step:3+                 out of memory at the third time and from then on
    hang@step:5/1               waits for ever, on rank 1 only

A point is `atomic.write`, `atomic.fsync`, `atomic.rename`, `atomic.dirsync` (a file, see `files.py`), `artefact.fsync`, `artefact.rename`,
`artefact.dirsync` (a directory, see `artefacts.py`), `retention.rename`, `retention.remove`, `metrics`, `save`, `valid`,
`valid.translate`, `init`, `try`, `step`; `*` is each of them.
"""

import errno
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

_FAULT = re.compile(r"(?P<action>kill|hang|oom|E[A-Z0-9]+)@(?P<point>[a-z.]+|\*):(?P<count>[0-9]+)(?P<onward>\+?)(/(?P<rank>[0-9]+))?")


@dataclass(kw_only=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        action: `kill`, `hang`, `oom` or the name of an errno.
        point: Where, or `*`.
        count: How often the point is reached before it happens, that time included.
        onward: Whether it happens each time from then on.
        num_reached: How often the point was reached so far.
    """

    action: str
    point: str
    count: int
    onward: bool
    num_reached: int = 0


def parse(environment: Mapping[str, str]) -> list[Fault]:
    """The faults that the environment of a process asks for; none unless it also allows them."""
    text = environment.get("MTKIT_FAULT", "")
    if not text or environment.get("MTKIT_ALLOW_FAULTS") != "1":
        return []
    faults = []
    for part in text.split(","):
        match = _FAULT.fullmatch(part)
        if match is None or (match["action"].startswith("E") and not hasattr(errno, match["action"])):
            raise ValueError(f"MTKIT_FAULT: {part!r} is no fault")
        if match["rank"] in (None, environment.get("RANK", "0")):
            faults.append(Fault(action=match["action"], point=match["point"], count=int(match["count"]), onward=bool(match["onward"])))
    return faults


def arm(environment: Mapping[str, str]) -> None:
    """Let the faults of an environment happen from now on, in the place of those before."""
    _armed[:] = parse(environment)


def reach(point: str) -> None:
    """Say that a point is reached; what is asked for happens.

    Raises:
        OSError: Asked for.
        torch.OutOfMemoryError: Asked for.
    """
    here = [fault for fault in _armed if fault.point in (point, "*")]
    for fault in here:
        fault.num_reached += 1
    for fault in here:
        if fault.num_reached == fault.count or (fault.onward and fault.num_reached > fault.count):
            _happen(fault.action)


def _happen(action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while action in ("kill", "hang"):
        time.sleep(60.0)
    if action == "oom":
        import torch

        raise torch.OutOfMemoryError("asked for by MTKIT_FAULT")
    number = getattr(errno, action)
    raise OSError(number, os.strerror(number))


_armed = parse(os.environ)
