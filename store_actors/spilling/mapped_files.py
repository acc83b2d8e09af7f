"""Arrays that lie in files without a name: the operating system keeps in memory what is used of them, and the rest on disk.

A file belongs to one array. Its room is allocated before it is mapped, so a full disk is an error here and not a signal later, in the
middle of a compiled loop. It has no name, so nothing of it is left when the process ends, however it ends.
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

__all__ = ["MappedFile", "Mapping", "mapping_of"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class MappedFile:
    """A file without a name in a folder, which grows.

    Parameters
    ----------
    folder
        On a local disk; made if it is not there any more.

    Raises
    ------
    MemoryLimitError
        It is not there and cannot be made, or would lie in memory.
    OSError
        There is no room.
    """

    def __init__(self, folder: str) -> None:
        self.size = 0
        # Its descriptor is closed, and with it the file is gone, once no process maps it any more.
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            # The folder always looks empty, so what cleans a disk by age takes it.
            self._file = tempfile.TemporaryFile(dir=checked_folder(folder), buffering=0)  # noqa: SIM115

    def grow(self, size: int) -> None:
        """Have at least so many bytes, zeros beyond those that there were.

        Raises
        ------
        OSError
            There is no room; the file is as it was.
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
        """Its descriptor."""
        return self._file.fileno()


class Mapping:
    """All of a file as memory, for as long as an array of it exists."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.size = file.size
        self._address: int | None = None
        address = _libc.mmap(None, self.size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file.fileno(), 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._address = address
        # Or the system reads and maps up to megabytes round each page: :meth:`fetch` asks for whole ranges.
        self._advise(mmap.MADV_RANDOM)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.size,), "typestr": "|u1", "data": (self._address, False)}

    def array(self) -> Bytes:
        """Its bytes."""
        return np.asarray(self)

    def drop(self) -> None:
        """Take none of the process's memory: what is used again comes back from the file, and nothing of it is lost.

        Readers and writers of it meanwhile are not disturbed: the file and its mapping are one to the operating system, which keeps
        what was written, and takes the access up again.
        """
        self._advise(mmap.MADV_DONTNEED)

    def fetch(self) -> None:
        """Have the operating system read all of it that it does not have, in order and ahead of who uses it."""
        self._advise(mmap.MADV_WILLNEED)

    def _advise(self, advice: int) -> None:
        _libc.madvise(self._address, self.size, advice)

    def __del__(self) -> None:
        if self._address is not None:
            _libc.munmap(self._address, self.size)


def mapping_of(array: np.ndarray[Any, Any]) -> Mapping | None:
    """The mapping that an array, or what it is a view of, lies in."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, Mapping) else None
