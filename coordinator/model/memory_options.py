"""Options of a store actor's memory: its limit, and the folder for state beyond the limit."""

from __future__ import annotations

import re
from dataclasses import dataclass

from coordinator.model.errors import InvalidRequestError

UNITS = {"": 1, "B": 1}
UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}
UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """The memory options that a fleet's store actors are started with.

    Attributes
    ----------
    limit
        Bytes of memory of each store actor's process; None: as much as its state takes.
    spill_dir
        Folder on a local disk of every node for what does not fit; None: Ray's session folder of the node.
    """

    limit: int | None = None
    spill_dir: str | None = None

    @classmethod
    def of(cls, limit: int | str | None, spill_dir: str | None) -> MemoryOptions:
        """Return the options that a user gave: a limit in bytes, or as text with a unit (``"2GiB"``, ``"500MB"``).

        Raises
        ------
        InvalidRequestError
            The limit is not a size, or there is a spill folder without a limit.
        """
        if limit is None and spill_dir is not None:
            raise InvalidRequestError(
                "without a memory limit nothing is spilled; nothing was changed; give memory_limit, too, or leave spill_dir out",
                spill_dir=spill_dir,
            )
        return cls(None if limit is None else _size(limit), spill_dir)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory and disk that a store actor takes."""

    #: Bytes that it may take; None without a limit.
    memory_limit: int | None
    #: Bytes of memory that its process has, without Ray's shared object store.
    resident_bytes: int
    #: Bytes of its state that are in files only.
    spilled_bytes: int


def _size(option: int | str) -> int:
    size = -1
    if isinstance(option, str):
        match = _SIZE.fullmatch(option)
        if match is not None and match[2] in UNITS:
            size = int(float(match[1]) * UNITS[match[2]])
    elif type(option) is int:
        size = option
    if size <= 0:
        raise InvalidRequestError(
            'a memory limit is a number of bytes above 0, or text such as "2GiB" or "500MB"; nothing was changed',
            memory_limit=option,
        )
    return size
