"""Unexpected errors: memory is exhausted before a line of the project's code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import store_actors

_ROOT = str(Path(store_actors.__path__[0]))


class Fault:
    """The planned error: `was_raised` is set once it is raised, which needs enough lines to be run."""

    was_raised = False


@contextmanager
def memory_exhausted(lines: int) -> Iterator[Fault]:
    """Raise a MemoryError once, after a number of lines of the engine and of keyed stores.

    Every allocation is made in a line of Python; a compiled loop counts as the line that calls it.
    """
    lines_to_go, fault = lines, Fault()
    within = f"{_ROOT}/engine/", f"{_ROOT}/keyed/"

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines_to_go
        if not frame.f_code.co_filename.startswith(within):
            return None
        if event == "line":
            lines_to_go -= 1
            if lines_to_go < 0 and not fault.was_raised:
                fault.was_raised = True
                raise MemoryError
        return trace

    previous_trace = sys.gettrace()
    sys.settrace(trace)
    try:
        yield fault
    finally:
        sys.settrace(previous_trace)
