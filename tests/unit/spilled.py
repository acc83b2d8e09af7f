"""The engine with all of its arrays in files, which are dropped from the process's memory again and again."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from coordinator.model.identities import StateStoreId
from store_actors.engine import table
from store_actors.engine.memory import HEAP
from store_actors.spilling.memory_keeper import MemoryKeeper
from store_actors.spilling.region import PieceSizes, Region


def open_files(folder: Path) -> int:
    """Return how many files of a folder are open; other threads' sockets and files are not counted."""
    gc.collect()
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder}/")
    return count


def tiny_region(folder: str) -> Region:
    """Return memory in which every array, however small, is a file, and pieces have few rows."""
    sizes = PieceSizes(array=1, piece=1 << 10, snapshot=1 << 10)
    return Region(StateStoreId("s", 0, 3), folder, sizes, MemoryKeeper(1 << 50))


@contextmanager
def everything_spilled(folder: str) -> Iterator[Region]:
    """Put every array that the engine makes by default in a file, and drop it from memory now and then between any two steps."""
    region, step_numbers = tiny_region(folder), count(1)

    def step(_: Any, remaining: int) -> int:
        number = next(step_numbers)
        if number % 20 == 0:
            region.drop()
        return max(1, min(remaining, 1 + number % 4))

    def of_region(name: str) -> Any:
        return lambda _, *args: getattr(region, name)(*args)

    replaced = {name: of_region(name) for name in ("zeros", "larger", "copied", "kept", "check")}
    kind = type(HEAP)
    with (
        patch.multiple(kind, step=step, piece_bytes=1 << 10, is_slow_at_random=True, **replaced),
        patch.object(table, "_SORTED", 1),
    ):
        yield region
