"""The large arrays of one partition's state, in files without a name: the operating system keeps the pages in use in memory.

A file belongs to one array. Its disk space is allocated before it is mapped: a full disk is an error at that time, and not a signal
later in a compiled loop. A file without a name disappears when the process ends, however it ends.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from humanize import naturalsize

from coordinator.model.errors import MemoryLimitError
from coordinator.model.identities import StateStoreId
from store_actors.engine.arrays import Bytes
from store_actors.engine.memory import Memory, Shape, blocks
from store_actors.spilling.memory_keeper import MemoryKeeper
from store_actors.spilling.spill_folder import checked_folder, free_bytes

Item = TypeVar("Item", bound=np.generic)

#: Smallest number of random accesses that is taken for the first step of a batch.
_DENSE = 1 << 10
#: If a batch may access at least 1 / _SPARSE of the state's pages, all pages are read in order: as fast as that part at random.
_SPARSE = 16
#: Advice in errors that are not about the folder's capacity.
_REMEDIES = {
    errno.EMFILE: "raise the limit of open files of the store actors (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (fs.file-max)",
    errno.ENOMEM: "raise the machine's limit of mappings of a process (vm.max_map_count)",
}
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


@dataclass(frozen=True, slots=True)
class PieceSizes:
    """Sizes of arrays in files, and of pieces of data, under a memory limit."""

    #: Bytes from which on an array is in a file.
    array: int
    #: ``piece``, ``snapshot``: ``piece_bytes`` and ``snapshot_bytes`` of :class:`~store_actors.engine.memory.Memory`.
    piece: int
    snapshot: int


class Region(Memory):
    """The memory of one partition, under a memory limit: its large arrays are in files."""

    is_slow_at_random = True

    def __init__(self, store_id: StateStoreId, folder: str, sizes: PieceSizes, keeper: MemoryKeeper) -> None:
        self._store_id = store_id
        self._folder = folder
        self._keeper = keeper
        self._threshold = sizes.array
        self.piece_bytes = sizes.piece
        self.snapshot_bytes = sizes.snapshot
        #: Version that is being made or loaded, for errors.
        self.version = 0
        #: Whether a batch has begun and has made no large step yet.
        self.is_new_batch = False
        # Two threads of a partition may make arrays at the same time: one applies a batch, the other reads an older version.
        self._guard = threading.Lock()
        self._mappings: WeakSet[Mapping] = WeakSet()

    @property
    def facts(self) -> dict[str, Any]:
        """Return the fields of errors about this region."""
        return {
            "state": self._store_id.state_name,
            "shard": self._store_id.partition_id,
            "version": self.version,
        }

    def zeros(self, shape: Shape, dtype: type[Item]) -> npt.NDArray[Item]:
        shape = (shape,) if isinstance(shape, int) else shape
        size = prod(shape) * np.dtype(dtype).itemsize
        if size < self._threshold:
            return np.zeros(shape, dtype)
        return _shaped(self._grown(None, size), shape, dtype)

    def larger(self, array: npt.NDArray[Item], used: int, length: int) -> npt.NDArray[Item]:
        mapping, shape = mapping_of(array), (length, *array.shape[1:])
        if mapping is None:
            copy = self.zeros(shape, array.dtype.type)
            copy[:used] = array[:used]
            return copy
        # It grows without a copy.
        return _shaped(self._grown(mapping.file, prod(shape) * array.itemsize), shape, array.dtype.type)

    def copied(self, array: npt.NDArray[Item]) -> npt.NDArray[Item]:
        copy = self.zeros(array.shape, array.dtype.type)
        for block in blocks(self, array):
            copy[block] = array[block]
        return copy

    def kept(self, array: npt.NDArray[Item]) -> npt.NDArray[Item]:
        if array.nbytes < self._threshold or mapping_of(array) is not None:
            return array
        copy = self.copied(array)
        mapping = mapping_of(copy)
        assert mapping is not None, "an array of this size lies in a file"
        mapping.drop()
        return copy

    def kept_table(self, table: pa.Table) -> pa.Table:
        """Return a copy, in a file, of a table that is seldom read from now on; the table itself if it is small or the disk is full."""
        if table.nbytes < self._threshold:
            return table
        size = pa.MockOutputStream()
        _write(size, table)
        try:
            buffer = self.zeros(size.size(), np.uint8)
        except MemoryLimitError:
            # The batch is committed already: it is too late to refuse it.
            return table
        _write(pa.FixedSizeBufferWriter(pa.py_buffer(buffer)), table)
        mapping = mapping_of(buffer)
        if mapping is not None:
            mapping.drop()
        return pa.ipc.open_stream(pa.py_buffer(buffer)).read_all()

    def step(self, count: int) -> int:
        """Return how many of `count` random accesses are allowed before the next call; see :meth:`MemoryKeeper.step`.

        If the first large step of a batch may need many of the state's pages, all pages are read in order first.
        """
        if self.is_new_batch and count >= _DENSE:
            self.is_new_batch = False
            if 2 * mmap.PAGESIZE * count >= self.nbytes // _SPARSE:
                for mapping in self._all():
                    mapping.fetch()
        return self._keeper.step(count)

    def check(self, more: int) -> None:
        self._keeper.check(more, self.facts)

    def drop(self) -> None:
        """Remove the region's pages from the process's memory."""
        for mapping in self._all():
            mapping.drop()

    @property
    def nbytes(self) -> int:
        """Bytes of the region's files."""
        return sum({mapping.file: mapping.file.size for mapping in self._all()}.values())

    def _all(self) -> list[Mapping]:
        with self._guard:
            return list(self._mappings)

    def _grown(self, file: MappedFile | None, size: int) -> Bytes:
        """Grow a file (None: a new one) to `size` bytes; return its content."""
        try:
            file = MappedFile(self._folder) if file is None else file
            file.grow(size)
            mapping = Mapping(file)
        except OSError as error:
            raise self._no_space(size, error) from error
        with self._guard:
            self._mappings.add(mapping)
        return mapping.array()

    def _free_bytes(self) -> int | None:
        """Return the bytes that can still be written in the folder; None if the system does not say."""
        with suppress(OSError):
            return free_bytes(self._folder)
        return None

    def _no_space(self, size: int, error: OSError) -> MemoryLimitError:
        remedy = _REMEDIES.get(error.errno or 0, "give the spill folder more room (spill_dir), or use more nodes")
        return MemoryLimitError(
            f"a shard's state does not fit its store actor's spill folder: an array of {naturalsize(size)} has no room there "
            f"({error.strerror}); the batch was not counted, and nothing that was is lost; {remedy}, or raise memory_limit, "
            "and start the query again",
            **self.facts,
            bytes=size,
            spill_dir=self._folder,
            free_bytes=self._free_bytes(),
            memory_limit=self._keeper.limit,
        )


def _shaped(content: Bytes, shape: tuple[int, ...], dtype: type[Item]) -> npt.NDArray[Item]:
    size = prod(shape) * np.dtype(dtype).itemsize
    return content[:size].view(dtype).reshape(shape)


def _write(sink: Any, table: pa.Table) -> None:
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
