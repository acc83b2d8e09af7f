"""The resident memory of a process, and returning unused memory to the system."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

import pyarrow as pa

_libc = ctypes.CDLL(None)
#: Of ``mallopt``: from which size on a block is a mapping of its own, which goes back as it is freed; and how many arenas there are, of
#: which each keeps what its threads freed.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_OWN_MAPPING, _ARENAS = 1 << 18, 2
_KINDS = (b"RssAnon:", b"RssFile:")
_STATUS = Path("/proc/self/status")


class ResidentMemory:
    """Memory of this process (``/proc/self/status``), without what it shares with others, as Ray's object store."""

    def __init__(self) -> None:
        self._file = os.open(_STATUS, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> tuple[int, int]:
        """Return the bytes that belong to the process alone, and the bytes of files that it has mapped."""
        text = os.pread(self._file, 1 << 13, 0)
        own_bytes, files = (1024 * int(text.split(kind, 1)[1].split(None, 1)[0]) for kind in _KINDS)
        return own_bytes, files

    def __del__(self) -> None:
        os.close(self._file)


def resident_bytes() -> int:
    """Return the bytes of memory of this process; on a system without ``/proc``, such as macOS, the most that it has had."""
    if not _STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return sum(ResidentMemory().read())


def keep_nothing_back() -> None:
    """Have what is freed go back to the operating system at once, whichever thread freed it, rather than be kept for the next use.

    Arrow's own allocators keep what each thread freed for that thread: with many threads each cache stays at its peak.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    _libc.mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING)
    _libc.mallopt(_M_ARENA_MAX, _ARENAS)


def give_back() -> None:
    """Return memory to the operating system that allocators keep for later."""
    pa.default_memory_pool().release_unused()
    _libc.malloc_trim(0)
