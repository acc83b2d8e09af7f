"""Batches that Spark's tasks hand over to the store actor of their node, over a unix socket, without a Python worker of Spark's.

A task sends a request (JSON with its length), its pickled function, and the rows of its shards, one shard after another
(``HandOver.java`` is the task's side). A byte tells it that its connection was taken: the socket of a process that hangs, or is being
ended, takes what the kernel has room for. Then follows the answer, which has the rows that the shards emit, or the text of an error. It
begins as soon as some shards have committed: the task sends the rows of others when it has used what came. The rows of a shard are an
Arrow stream, and a byte that shows that it is whole; or, where all of their types allow it, they are in Spark's own format
(:mod:`store_actors.unsafe_rows`), after an Arrow stream that only has their schema. The function is the one that Spark's plan has for a
Python worker; here it calls this process's shards directly.

The socket is in a folder that only this user can enter, so a function that is unpickled comes from a process of the same user. A file
beside it says which process answers. Tasks find by a ping (a request of no bytes) over a second connection that the process hangs, and
end it; Ray starts it again.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import pickle
import socket
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

import pyarrow as pa

from coordinator.model.names import fleet_id_of
from coordinator.runtime.runtime import Runtime
from store_actors import unsafe_rows
from store_actors.direct_calls import accept_each
from store_actors.local_calls import LocalActors

__all__ = ["HandOverServer", "HandedOver", "address_of", "hand_over_server", "sockets_of"]

log = logging.getLogger(__name__)

#: What follows: rows, nothing, or the text of an error (after rows there is another of these); and that a connection was taken.
_ROWS, _DONE, _FAILED, _UNSAFE_ROWS, _TAKEN = b"\0", b"\1", b"\2", b"\3", b"\4"
_LENGTH = struct.Struct(">i")
#: Raised with each change of what is sent (``HandOver.java`` has the same): a task and a store actor of two releases do not talk.
_FORMAT = 2
#: Bytes of a socket's path at most, and of its end: the checksum of a node, the number of the store actor and the process's id.
_PATH_BYTES, _END_BYTES = 107, 20
_BUFFER_BYTES = 1 << 18
#: Bytes of a request and of a function at most; both grow with what a query has of shards and columns, and have some kilobytes.
_MOST_BYTES = 16 << 20
#: Bytes that are read at once: what a length says is only reserved as it arrives.
_PIECE_BYTES = 32 << 20
#: Connections that wait to be taken: two for each of a node's tasks.
_WAITING = 1024
#: Seconds that a task may be silent before its rows, and among them: they may come from far away.
_REQUEST_S, _ROWS_S = 30.0, 600.0
#: Seconds until a server that could not be started is tried again.
_AGAIN_S = 5.0


def sockets_of(session_folder: str, uri: str) -> str | None:
    """Return how the paths of a fleet's sockets begin, on each node; None if they would be too long.

    Parameters
    ----------
    session_folder
        Ray's folder of the session, which has the same path on each node.
    """
    prefix = f"{session_folder}/statefleet-{os.getuid()}/{fleet_id_of(uri)}-"
    return prefix if len(prefix.encode()) + _END_BYTES <= _PATH_BYTES else None


def address_of(sockets: str, host: str, number: int = 0) -> str:
    """Return the path of the file that says which process is a store actor of a node, and when it counts as hung.

    The process's socket has its path followed by the process's id, so nobody ends one process for the silence of another. The file has
    the id, the start of the process as the kernel counts it ("-" if it does not say), the seconds without an answer to a ping, and the
    number of the format in which the process talks.
    """
    # Nodes can be on one machine. A checksum is short, whatever the address.
    address = f"{sockets}{zlib.crc32(host.encode()):08x}"
    return f"{address}-{number}" if number else address


def _process_start() -> str:
    try:
        return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # not Linux
        return "-"


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The work of a task.

    Attributes
    ----------
    batch
        The batch as Spark's driver describes it, without the shard.
    attempt, executor
        Spark's id of the task attempt, and ``host:pid`` of its executor.
    shards
        The task's shards.
    rows
        The rows of each shard, which are received when they are asked for.
    """

    batch: dict[str, Any]
    attempt: int
    executor: str
    shards: Sequence[int]
    rows: Iterator[pa.Table]


class _Function(Protocol):
    def handed_over(self, work: HandedOver, actors: LocalActors) -> Iterator[pa.RecordBatch]:
        """Yield the rows that the shards of a task emit."""


class HandOverServer:
    """Answers the tasks of this node.

    Parameters
    ----------
    address
        Path by which tasks find the socket (:func:`address_of`). What an earlier process left there is replaced.
    actors
        The fleet's actors, as functions call them.

    Raises
    ------
    OSError
        The folder is not this user's alone, or cannot be made or written.
    """

    def __init__(self, address: str, actors: LocalActors, runtime: Runtime) -> None:
        self._actors = actors
        self._start_thread, self._clock = runtime.threads.start, runtime.clock
        folder = Path(address).parent
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.stat()
        if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
            raise PermissionError(f"other users can enter {folder}")
        path = Path(f"{address}.{os.getpid()}")
        path.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX)
        try:
            self._listening.bind(str(path))
            self._listening.listen(_WAITING)
            # Tasks see it when the socket can be connected to.
            unseen = Path(f"{address}.new")
            unseen.write_text(f"{os.getpid()} {_process_start()} {math.ceil(actors.hung_after_s)} {_FORMAT}")
            unseen.replace(address)
        except BaseException:
            self._listening.close()
            raise
        for left in folder.glob(f"{Path(address).name}.*"):
            if left != path:
                left.unlink(missing_ok=True)
        self._start_thread(self._accept, "statefleet-hand-over")

    def _accept(self) -> None:
        accept_each(
            self._listening, self._take, self._clock, "a task that hands rows over was not taken; Spark tries again"
        )

    def _take(self, task: socket.socket) -> None:
        self._start_thread(partial(self._serve, task), "statefleet-hand-over-task")

    def _serve(self, task: socket.socket) -> None:
        try:
            task.settimeout(_REQUEST_S)
            with task, _file(task, "rb") as source, _file(task, "wb") as sink:
                task.sendall(_TAKEN)
                try:
                    (length,) = _LENGTH.unpack(_read(source, _LENGTH.size))
                    if length:
                        self._answer(task, cast(BinaryIO, _Pieces(source)), length, sink)
                    sink.write(_DONE)
                except Exception as error:
                    # The task raises it, and Spark shows it.
                    log.debug("a batch that was handed over failed", exc_info=True)
                    sink.write(_FAILED + f"{type(error).__name__}: {error}".encode())
        except OSError:
            log.debug("a task ended before it had its answer", exc_info=True)

    def _answer(self, task: socket.socket, source: BinaryIO, length: int, sink: BinaryIO) -> None:
        request = json.loads(_read(source, length))
        function = _unpickled(_read(source, request["function_bytes"]))
        task.settimeout(_ROWS_S)
        rows = _received(source, len(request["shards"]), request["unsafe_rows"])
        work = HandedOver(request["batch"], request["attempt"], request["executor"], request["shards"], rows)
        emitted = function.handed_over(work, self._actors)
        if (first := next(emitted, None)) is None:
            return
        # The task may take long with its results, before it sends more.
        task.settimeout(None)
        # An error ends the rows, too; the task sees by the byte after them that there should be more.
        if request["unsafe_results"] and unsafe_rows.are_supported(first.schema):
            sink.write(_UNSAFE_ROWS)
            try:
                for batch in chain([first], emitted):
                    unsafe_rows.write_blocks(batch, sink)
                    sink.flush()
            finally:
                unsafe_rows.write_end(sink)
            return
        sink.write(_ROWS)
        with pa.ipc.new_stream(sink, first.schema) as answer:
            for batch in chain([first], emitted):
                answer.write_batch(batch)
                # The task waits for the rest of what it has begun to read.
                sink.flush()


def _received(source: BinaryIO, shards: int, are_unsafe: bool) -> Iterator[pa.Table]:
    """Yield the rows of each of a task's shards."""
    if not are_unsafe:
        for _ in range(shards):
            rows = pa.ipc.open_stream(source).read_all()
            # A stream that was cut between two of its batches looks like one that has ended.
            if _read(source, 1) != _DONE:
                raise ValueError("these are no rows: something else follows a shard's Arrow stream")
            yield rows
        return
    schema = pa.ipc.open_stream(source).read_all().schema
    if not schema.names:
        raise ValueError("these are no rows: they have no columns, so nothing says how many there are")
    for _ in range(shards):
        # The last column is the route.
        yield pa.Table.from_batches(unsafe_rows.read_blocks(source, schema, 1), schema)


def hand_over_server(address: str, actors: LocalActors, runtime: Runtime) -> None:
    """Start the server of a process; it is tried again while its folder cannot be made or written, such as on a full disk."""

    def start() -> None:
        told = False
        while True:
            try:
                HandOverServer(address, actors, runtime)
            except OSError:
                if not told:
                    log.exception(
                        "Spark's tasks cannot hand rows over to this process; it is tried again [socket=`%s`]", address
                    )
                told = True
                runtime.clock.sleep(_AGAIN_S)
            else:
                return

    runtime.threads.start(start, "statefleet-hand-over-start")


class _Pieces(io.RawIOBase):
    """What a task sends. However much is asked for, no more is reserved than has arrived, and one piece."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(min(size, _PIECE_BYTES))
        if len(data) < _PIECE_BYTES:
            return data
        pieces, left = [data], size - len(data)
        while left and (data := self._source.read(min(left, _PIECE_BYTES))):
            pieces.append(data)
            left -= len(data)
        return b"".join(pieces)


def _read(source: BinaryIO, size: int) -> bytes:
    """Return the next bytes of a request."""
    if not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"this is no request: a part of it has {size} bytes")
    data = source.read(size)
    if len(data) < size:
        raise EOFError("the task ended in the middle of its request")
    return data


def _file(connected: socket.socket, mode: Literal["rb", "wb"]) -> BinaryIO:
    return cast(BinaryIO, connected.makefile(mode, _BUFFER_BYTES))


@lru_cache(maxsize=64)
def _unpickled(function: bytes) -> _Function:
    # With the type of its results, as PySpark pickles a function.
    unpickled: _Function = pickle.loads(function)[0]
    return unpickled
