"""Batches that Spark's tasks hand over to the store actor of their node, over a unix socket, without a Python worker of Spark's.

A task sends a request (JSON with its length), its pickled function, the rows of its shards as an Arrow stream, and the number of rows
of each shard. The answer is an Arrow stream of the rows that the shards emit, or the text of an error (``HandOver.java`` is the task's
side). The function is the one that Spark's plan has for a Python worker; here it calls this process's shards directly.

The socket is in a folder that only this user can enter, so a function that is unpickled comes from a process of the same user.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

import pyarrow as pa

from coordinator.model.names import fleet_id_of
from coordinator.runtime.runtime import Runtime
from store_actors.direct_calls import accept_each
from store_actors.local_calls import LocalActors

__all__ = ["HandOverServer", "HandedOver", "socket_of", "sockets_of"]

log = logging.getLogger(__name__)

#: What follows in an answer: rows, nothing, or the text of an error. After rows there is another of these.
_ROWS, _DONE, _FAILED = b"\0", b"\1", b"\2"
_LENGTH = struct.Struct(">i")
#: Bytes of a socket's path at most, and of its end, which :func:`socket_of` adds.
_PATH_BYTES, _END_BYTES = 107, 13
_BUFFER_BYTES = 1 << 18


def sockets_of(session_folder: str, uri: str) -> str | None:
    """Return how the paths of a fleet's sockets begin, on each node; None if they would be too long.

    Parameters
    ----------
    session_folder
        Ray's folder of the session, which has the same path on each node.
    """
    prefix = f"{session_folder}/statefleet-{os.getuid()}/{fleet_id_of(uri)}-"
    return prefix if len(prefix.encode()) + _END_BYTES <= _PATH_BYTES else None


def socket_of(sockets: str, host: str) -> str:
    """Return the path of the socket of a node's store actor."""
    # Nodes can be on one machine. A checksum is short, whatever the address.
    return f"{sockets}{zlib.crc32(host.encode()):08x}.sock"


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The work of a task.

    Attributes
    ----------
    batch
        The batch as Spark's driver describes it, without the shard.
    attempt, executor
        Spark's id of the task attempt, and ``host:pid`` of its executor.
    shards, counts
        The task's shards, and how many rows each has.
    rows
        The rows of all shards, in the order of `shards`.
    """

    batch: dict[str, Any]
    attempt: int
    executor: str
    shards: Sequence[int]
    counts: Sequence[int]
    rows: pa.Table


class _Function(Protocol):
    def handed_over(self, work: HandedOver, actors: LocalActors) -> Iterator[pa.RecordBatch]:
        """Yield the rows that the shards of a task emit."""


class HandOverServer:
    """Answers the tasks of this node.

    Parameters
    ----------
    path
        Path of the socket. A socket that an earlier process left there is replaced.
    actors
        The fleet's actors, as functions call them.

    Raises
    ------
    OSError
        The folder is not this user's alone, or cannot be made.
    """

    def __init__(self, path: str, actors: LocalActors, runtime: Runtime) -> None:
        folder = Path(path).parent
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.stat()
        if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
            raise PermissionError(f"other users can enter {folder}")
        with suppress(FileNotFoundError):
            os.unlink(path)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen()
        self._actors = actors
        self._start_thread, self._clock = runtime.threads.start, runtime.clock
        self._start_thread(self._accept, "statefleet-hand-over")

    def _accept(self) -> None:
        accept_each(
            self._listening, self._take, self._clock, "a task that hands rows over was not taken; Spark tries again"
        )

    def _take(self, task: socket.socket) -> None:
        self._start_thread(partial(self._serve, task), "statefleet-hand-over-task")

    def _serve(self, task: socket.socket) -> None:
        try:
            with task, _file(task, "rb") as source, _file(task, "wb") as sink:
                try:
                    self._answer(source, sink)
                    sink.write(_DONE)
                except Exception as error:
                    # The task raises it, and Spark shows it.
                    log.debug("a batch that was handed over failed", exc_info=True)
                    sink.write(_FAILED + f"{type(error).__name__}: {error}".encode())
        except OSError:
            log.debug("a task ended before it had its answer", exc_info=True)

    def _answer(self, source: BinaryIO, sink: BinaryIO) -> None:
        emitted = self._emitted(source)
        if (first := next(emitted, None)) is None:
            return
        sink.write(_ROWS)
        # An error ends the stream, too; the task sees by the byte after it that there should be more.
        with pa.ipc.new_stream(sink, first.schema) as answer:
            answer.write_batch(first)
            for batch in emitted:
                answer.write_batch(batch)

    def _emitted(self, source: BinaryIO) -> Iterator[pa.RecordBatch]:
        (length,) = _LENGTH.unpack(source.read(_LENGTH.size))
        request = json.loads(source.read(length))
        function = _unpickled(source.read(request["function_bytes"]))
        rows = pa.ipc.open_stream(source).read_all()
        shards = request["shards"]
        counts = struct.unpack(f">{len(shards)}q", source.read(8 * len(shards)))
        work = HandedOver(request["batch"], request["attempt"], request["executor"], shards, counts, rows)
        return function.handed_over(work, self._actors)


def _file(connected: socket.socket, mode: Literal["rb", "wb"]) -> BinaryIO:
    return cast(BinaryIO, connected.makefile(mode, _BUFFER_BYTES))


@lru_cache(maxsize=64)
def _unpickled(function: bytes) -> _Function:
    # With the type of its results, as PySpark pickles a function.
    unpickled: _Function = pickle.loads(function)[0]
    return unpickled
