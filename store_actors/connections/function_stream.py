"""The connection of a Python worker that calls a user's function for a shard of a continuous query.

It begins as any of :mod:`store_actors.connections.hand_over`. Then follow frames, each with its kind in a byte, an epoch, a watermark,
and a table as an Arrow stream after its length. To the worker: the rows of a piece, or the end of an epoch. From it, in the same order:
what they emit; or the text of an error, and then the connection ends.

Between these the worker calls methods of the store actor, for its session on the state: a call through Ray wakes a dozen threads, each
behind all else that runs on the node (:mod:`store_actors.connections.session_calls`).
"""

from __future__ import annotations

import base64
import hmac
import io
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias

import pyarrow as pa

from coordinator.model.errors import StoreUnavailableError
from coordinator.runtime.runtime import Clock, Retry
from store_actors.connections.direct_calls import TASK, DirectAddress, MessageBytes, connect
from store_actors.connections.hand_over import FORMAT, LENGTH, SECRET_BYTES, address_of, secret_of
from store_actors.connections.sender import FrameSender
from store_actors.connections.session_calls import answered, decoded_answer, encoded_call
from store_actors.messages.wire import as_stream

# A worker has nothing of shards.
if TYPE_CHECKING:
    from store_actors.connections.worker_calls import WorkerCalls
    from store_actors.epochs.functions import FunctionShard

#: Makes the calls of a worker.
MakeCalls: TypeAlias = "Callable[[Callable[[BaseException], None]], WorkerCalls]"
PIECE, SEAL, _FAILED, _CALL, _ANSWER = 1, 2, 3, 4, 5
#: Kind, epoch, watermark, and the bytes that follow.
_HEAD = struct.Struct(">bqqi")
#: Seconds for the proofs of a connection to another node.
_PATIENCE_S = 40.0
#: Seconds for which it is tried again where the other side ends the connection.
_TRIES_S = 10.0


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
    content = b"" if rows is None else as_stream(rows)
    return _HEAD.pack(kind, epoch, watermark_ms, len(content)) + content


def _plain(kind: int, content: bytes) -> bytes:
    return _HEAD.pack(kind, 0, 0, len(content)) + content


class WorkerConnection:
    """The store actor's end, as :class:`~store_actors.epochs.functions.FunctionWorker`.

    Parameters
    ----------
    make_calls
        Makes what has the methods that the worker calls, and is told how the worker learns that an epoch was not committed.
    """

    def __init__(self, worker: FrameSender, make_calls: MakeCalls) -> None:
        self._send, self.finish = worker.send, worker.finish
        self._calls = make_calls(self.fail)

    def take(self, rows: pa.Table) -> None:
        self._send(written(PIECE, 0, 0, rows))

    def seal(self, epoch: int, watermark_ms: int) -> None:
        self._send(written(SEAL, epoch, watermark_ms, None))

    def fail(self, error: BaseException) -> None:
        self._send(_plain(_FAILED, str(error).encode()), is_last=True)

    def serve(self, shard: FunctionShard | None, source: BinaryIO) -> str:
        """Take what the worker emits for a shard of a continuous query, and its calls, until it ends the connection; return why."""
        if shard is not None:
            shard.attach(self)
        try:
            while (frame := read_frame(source)) is not None:
                if frame.kind == _FAILED:
                    return frame.content.decode()
                if frame.kind == _CALL:
                    self._send(_plain(_ANSWER, answered(self._calls, frame.content)))
                elif shard is None:
                    raise ValueError(f"malformed call: a frame of kind {frame.kind}")
                elif frame.kind == SEAL:
                    shard.end_epoch(frame.epoch, frame.rows)
                else:
                    shard.emit(frame.rows)
        finally:
            self._calls.end()
        return "the process that calls the function has ended"


class FunctionConnection:
    """The worker's end.

    Parameters
    ----------
    sockets, host, actor
        Where the store actor is found; see :func:`~store_actors.connections.hand_over.address_of`.
    direct
        Where it is found from another node: host, port, and the key in Base64; None on its own node.
    request
        What :class:`~store_actors.connections.epoch_stream.EpochServer` is asked.

    Raises
    ------
    StoreUnavailableError
        The store actor is not there, or does not prove that it is.
    """

    def __init__(
        self, sockets: str, host: str, actor: int, direct: Mapping[str, Any] | None, request: Mapping[str, Any]
    ) -> None:
        try:
            if direct is None:
                self._connect(address_of(sockets, host, actor))
            else:
                self._connect_to(DirectAddress(direct["host"], direct["port"], base64.b64decode(direct["key"])))
        except (OSError, EOFError, AuthenticationError) as error:
            raise StoreUnavailableError(
                "the store actor of a shard is not there; committed versions are safe, and the query goes on from them once it is",
                cause=error,
            ) from error
        #: What came before the answer to a call.
        self._early: deque[Frame] = deque()
        self._is_over = False
        text = json.dumps({**request, "operator_bytes": 0}).encode()
        self._send(LENGTH.pack(len(text)) + text)

    def _connect(self, address: str) -> None:
        pid, secret = secret_of(Path(address))
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(f"{address}.{pid}")
        self._source: BinaryIO = connected.makefile("rb")
        self._send: Callable[[bytes], None] = connected.sendall
        self._close = connected.close
        challenge = os.urandom(SECRET_BYTES)
        connected.sendall(challenge)
        if not hmac.compare_digest(self._source.read(SECRET_BYTES), hmac.digest(secret, challenge, "sha256")):
            raise PermissionError(f"{address} is not a store actor's")

    def _connect_to(self, address: DirectAddress) -> None:
        retry = Retry(Clock(), _TRIES_S, first_pause_s=0.1, longest_pause_s=1.0)
        while True:
            try:
                messages = connect(address, _PATIENCE_S)
                break
            except (OSError, EOFError):  # many come at once
                if retry.is_over:
                    raise
            retry.pause()
        self._source = io.BufferedReader(MessageBytes(messages))
        self._send, self._close = messages.send, messages.close
        messages.send(TASK)
        if messages.receive() != FORMAT.encode():
            raise PermissionError(
                "the store actor is of another release: use one release for the fleet and its queries"
            )
        messages.wait_without_end()

    def next(self) -> Frame | None:
        """Return the next piece, or end of an epoch; None once the run has ended."""
        return self._early.popleft() if self._early else self._read()

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method of the store actor returns.

        Raises
        ------
        StoreUnavailableError
            The run has ended, or the store actor is gone.
        StateStoreError
            The method raised it.
        """
        with suppress(OSError):
            self._send(_plain(_CALL, encoded_call(method, arguments)))
        while (frame := self._read()) is not None:
            if frame.kind == _ANSWER:
                return decoded_answer(method, frame.content)
            self._early.append(frame)
        raise StoreUnavailableError(
            "the run of the query has ended, or the store actor of a shard is gone; the open epoch does not count; committed versions "
            "are safe, and the query goes on from them",
            method=method,
        )

    def _read(self) -> Frame | None:
        frame = None if self._is_over else read_frame(self._source)
        self._is_over = frame is None or frame.kind == _FAILED
        return None if self._is_over else frame

    def answer(self, frame: Frame, emitted: pa.Table) -> None:
        """Send what a frame's rows, or the end of its epoch, emit."""
        self._send(written(frame.kind, frame.epoch, frame.watermark_ms, emitted))

    def fail(self, error: BaseException) -> None:
        """Tell why the run cannot go on."""
        with suppress(OSError):
            self._send(_plain(_FAILED, f"{type(error).__name__}: {error}".encode()))

    def close(self) -> None:
        self._source.close()
        self._close()
