"""Arrays in files without a name: the operating system keeps the pages in use in memory, and the rest on disk.

A file belongs to one array. Its disk space is allocated before it is mapped: a full disk is an error at that time, and not a signal
later in a compiled loop. A file without a name disappears when the process ends, however it ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from typing import Any

import numpy as np

from store_actors.engine.arrays import Bytes
from store_actors.spilling.spill_folder import checked_folder

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class MappedFile:
    """A file without a name in a folder, which is created again if it was removed; it grows.

    Raises
    ------
    MemoryLimitError
        The folder was removed and cannot be created, or is on a file system in memory.
    OSError
        The disk is full.
    """

    def __init__(self, folder: str) -> None:
        self.size = 0
        # The file is deleted once its descriptor is closed and no process maps it any more.
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            # The folder always looks empty, so a program that deletes old files may have removed it.
            self._file = tempfile.TemporaryFile(dir=checked_folder(folder), buffering=0)  # noqa: SIM115

    def grow(self, size: int) -> None:
        """Grow the file to at least `size` bytes; the new bytes are zeros.

        Raises
        ------
        OSError
            The disk is full; the file is unchanged.
        """
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if size <= self.size:
            return
        try:
            os.posix_fallocate(self._file.fileno(), self.size, size - self.size)
        except OSError:
            os.ftruncate(self._file.fileno(), self.size)
            raise
        self.size = size

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._file.fileno()


class Mapping:
    """A whole file, mapped into memory as long as an array of it exists."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.size = file.size
        self._address: int | None = None
        address = _libc.mmap(None, self.size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file.fileno(), 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._address = address
        # Otherwise the system reads and maps up to megabytes around each page. :meth:`fetch` asks for whole ranges.
        self._advise(mmap.MADV_RANDOM)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.size,), "typestr": "|u1", "data": (self._address, False)}

    def array(self) -> Bytes:
        """Return the bytes of the mapping as an array."""
        return np.asarray(self)

    def drop(self) -> None:
        """Remove the mapping's pages from the process's memory. A page that is used again is read from the file; no data is lost.

        Other threads may read and write the array meanwhile: the operating system keeps written pages, and maps a page again when it
        is accessed.
        """
        self._advise(mmap.MADV_DONTNEED)

    def fetch(self) -> None:
        """Ask the operating system to read all pages that are not in memory, in order, before they are used."""
        self._advise(mmap.MADV_WILLNEED)

    def _advise(self, advice: int) -> None:
        _libc.madvise(self._address, self.size, advice)

    def __del__(self) -> None:
        if self._address is not None:
            _libc.munmap(self._address, self.size)


def mapping_of(array: np.ndarray[Any, Any]) -> Mapping | None:
    """Return the mapping that has an array's data, also for a view of an array; None if there is none."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, Mapping) else None
