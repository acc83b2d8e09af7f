"""The connection of a Python worker that calls a user's function for a shard of a continuous query.

It begins as any of :mod:`store_actors.connections.hand_over`. Then follow frames, each with its kind in a byte, an epoch, a watermark,
and a table as an Arrow stream after its length. To the worker: the rows of a piece, or the end of an epoch. From it, in the same order:
what they emit; or the text of an error, and then the connection ends.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import pyarrow as pa

from coordinator.model.errors import StoreUnavailableError
from coordinator.runtime.runtime import Runtime
from store_actors.connections.hand_over import LENGTH, SECRET_BYTES, address_of, secret_of
from store_actors.connections.sender import FrameSender

# A worker has nothing of shards.
if TYPE_CHECKING:
    from store_actors.epochs.functions import FunctionShard

PIECE, SEAL, _FAILED = 1, 2, 3
#: Kind, epoch, watermark, and the bytes that follow.
_HEAD = struct.Struct(">bqqi")


class Frame(NamedTuple):
    """A piece, or the end of an epoch; or what the worker emits for it."""

    kind: int
    epoch: int
    watermark_ms: int
    content: bytes

    @property
    def rows(self) -> pa.Table:
        return pa.ipc.open_stream(self.content).read_all()


def read_frame(source: BinaryIO) -> Frame | None:
    """Return the next frame; None at the end of the connection."""
    head = source.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    kind, epoch, watermark_ms, size = _HEAD.unpack(head)
    content = source.read(size)
    return Frame(kind, epoch, watermark_ms, content) if len(content) == size else None


def written(kind: int, epoch: int, watermark_ms: int, rows: pa.Table | None) -> bytes:
    """Return a frame as it is sent."""
    sink = BytesIO()
    if rows is not None:
        with pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_table(rows)
    return _HEAD.pack(kind, epoch, watermark_ms, sink.tell()) + sink.getvalue()


class WorkerConnection:
    """The store actor's end, as :class:`~store_actors.epochs.functions.FunctionWorker`."""

    def __init__(self, worker: socket.socket, runtime: Runtime) -> None:
        sender = FrameSender(worker, runtime)
        self._send, self.finish = sender.send, sender.finish

    def take(self, rows: pa.Table) -> None:
        self._send(written(PIECE, 0, 0, rows))

    def seal(self, epoch: int, watermark_ms: int) -> None:
        self._send(written(SEAL, epoch, watermark_ms, None))

    def fail(self, error: BaseException) -> None:
        text = str(error).encode()
        self._send(_HEAD.pack(_FAILED, 0, 0, len(text)) + text, is_last=True)

    def serve(self, shard: FunctionShard, source: BinaryIO) -> str:
        """Take what the worker emits until it ends the connection; return why it did."""
        shard.attach(self)
        while (frame := read_frame(source)) is not None:
            if frame.kind == _FAILED:
                return frame.content.decode()
            if frame.kind == SEAL:
                shard.end_epoch(frame.epoch, frame.rows)
            else:
                shard.emit(frame.rows)
        return "the process that calls the function has ended"


class FunctionConnection:
    """The worker's end.

    Parameters
    ----------
    sockets, host, actor
        Where the store actor is found; see :func:`~store_actors.connections.hand_over.address_of`.
    request
        What :class:`~store_actors.connections.epoch_stream.EpochServer` is asked.

    Raises
    ------
    StoreUnavailableError
        The store actor is not there, or does not prove that it is.
    """

    def __init__(self, sockets: str, host: str, actor: int, request: Mapping[str, Any]) -> None:
        address = address_of(sockets, host, actor)
        try:
            pid, secret = secret_of(Path(address))
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(f"{address}.{pid}")
            self._source = self._socket.makefile("rb")
            challenge = os.urandom(SECRET_BYTES)
            self._socket.sendall(challenge)
            if not hmac.compare_digest(self._source.read(SECRET_BYTES), hmac.digest(secret, challenge, "sha256")):
                raise PermissionError(f"{address} is not a store actor's")
        except OSError as error:
            raise StoreUnavailableError(
                "the store actor of a shard is not there; committed versions are safe, and the query goes on from them once it is",
                cause=error,
            ) from error
        text = json.dumps({**request, "operator_bytes": 0}).encode()
        self._socket.sendall(LENGTH.pack(len(text)) + text)

    def next(self) -> Frame | None:
        """Return the next frame; None once the run has ended."""
        frame = read_frame(self._source)
        return None if frame is None or frame.kind == _FAILED else frame

    def answer(self, frame: Frame, emitted: pa.Table) -> None:
        """Send what a frame's rows, or the end of its epoch, emit."""
        self._socket.sendall(written(frame.kind, frame.epoch, frame.watermark_ms, emitted))

    def fail(self, error: BaseException) -> None:
        """Tell why the run cannot go on."""
        text = f"{type(error).__name__}: {error}".encode()
        self._socket.sendall(_HEAD.pack(_FAILED, 0, 0, len(text)) + text)

    def close(self) -> None:
        self._source.close()
        self._socket.close()
