"""Errors out of nowhere: memory is exhausted before some line of the project's code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import store_actors

__all__ = ["Fault", "memory_exhausted"]

_ROOT = str(Path(store_actors.__path__[0]))


class Fault:
    """Whether the error came, which it does only if so many lines were run."""

    came = False


@contextmanager
def memory_exhausted(lines: int, folders: tuple[str, ...] = ("engine", "keyed")) -> Iterator[Fault]:
    """Raise a MemoryError, once, after so many lines of these rooms of the store actors.

    Every allocation stands in some line, and compiled loops are left at the line that calls them.
    """
    left, fault = lines, Fault()
    within = tuple(f"{_ROOT}/{folder}/" for folder in folders)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(within):
            return None
        if event == "line":
            left -= 1
            if left < 0 and not fault.came:
                fault.came = True
                raise MemoryError
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        yield fault
    finally:
        sys.settrace(former)
