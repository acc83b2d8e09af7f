"""Batches that Spark's tasks hand over to the store actor of their node, over a unix socket, without a Python worker of Spark's.

A task sends random bytes, and gets the proof that this process has the secret in its file (``HandOver.scala`` is the task's side). It
then sends a request (JSON after its length), the operator (JSON), and the rows of its shards, one shard after another, and no more.
The answer has the rows that the shards emit, and how many rows and bytes they are; or the text of an error, after its length. It
begins as soon as some shards have committed: the task sends the rows of others when it has used what came. The rows of a shard are
an Arrow stream; or, where all of their types allow it, they are in Spark's own format
(:mod:`~store_actors.engine.unsafe_rows`), after an Arrow stream that only has their schema. After them the task says which
shard it was, how many rows it had and in how many bytes. A shard gets its rows only if all of that is so.

The socket is in a folder below /tmp that is this user's alone. Others can put a folder of their own there before there is one, and
where /tmp lacks the sticky bit at any time. So both sides look who is there. The store actor takes connections of processes of its own
user only, as the kernel knows them, before it reads a byte. Tasks look at the folder as they have it open, read the file in that, and
send nothing to a process that does not have its secret.
"""

from __future__ import annotations

import base64
import hmac
import io
import json
import logging
import os
import socket
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import psutil
import pyarrow as pa

from coordinator.model.names import fleet_id_of
from coordinator.runtime.runtime import Runtime
from store_actors.client.operator_task import HandedOver
from store_actors.connections.direct_calls import DirectMessages, MessageBytes, accept_each, end_listening
from store_actors.connections.sender import FrameSender
from store_actors.engine import unsafe_rows

log = logging.getLogger(__name__)

#: What follows: rows, the end of the answer, or the text of an error; after rows there is another of these.
_ROWS, _DONE, _FAILED, _UNSAFE_ROWS = b"\0", b"\1", b"\2", b"\3"
LENGTH = struct.Struct(">i")
#: The end of a shard's rows: the shard, and how many rows and bytes they are. And that of an answer: its rows and bytes.
_SHARD_END, _ANSWER_END = struct.Struct(">iqq"), struct.Struct(">qq")
#: Process, user and group of the other side of a connection, as Linux has them.
_CREDENTIALS = struct.Struct("3i")
#: Bytes of the secret, and of what a task sends for its proof.
SECRET_BYTES = 32
#: Raised with each change of what is sent (``Connection.scala`` has the same): a task and a store actor of two releases do not talk.
FORMAT = "9"
#: How the folders of sockets begin; each user has one for each session of Ray.
_FOLDERS = "/tmp/statefleet-"
#: Bytes of a store actor's file, at most.
_FACTS_BYTES = 100
_BUFFER_BYTES = 1 << 18
#: Bytes of a message at most.
_MESSAGE_BYTES = 1 << 16
#: Bytes of a request and of an operator at most; both grow with what a query has of shards and columns, and have some kilobytes.
_MOST_BYTES = 16 << 20
#: Bytes that are read at once: what a length says is only reserved as it arrives.
_PIECE_BYTES = 32 << 20
#: Seconds that a task may be silent before its rows.
_REQUEST_S = 30.0
#: Connections that wait to be taken.
_WAITING = 1024


def sockets_of(session_folder: str, uri: str, uid: int | None = None) -> str:
    """Return how the paths of a fleet's sockets begin, on each node.

    Not in Ray's folder of the session, where every user of the machine may rename what others have.

    Parameters
    ----------
    uid
        The user of Ray's processes; by default this process's.
    """
    uid = os.geteuid() if uid is None else uid
    return f"{_FOLDERS}{uid}-{zlib.crc32(session_folder.encode()):08x}/{fleet_id_of(uri)}-"


def address_of(sockets: str, host: str, number: int = 0) -> str:
    """Return the path of the file by which tasks find a store actor of a node.

    The file has the id of the process, whose socket has the same path followed by that id; the number of the format in which the
    process talks; and the secret that it proves to have.
    """
    # Nodes can be on one machine. A checksum is short, whatever the address.
    address = f"{sockets}{zlib.crc32(host.encode()):08x}"
    return f"{address}-{number}" if number else address


#: Does the work of a task; yields the rows that its shards emit.
Serve = Callable[[HandedOver], Iterator[pa.RecordBatch]]
#: Serves a task of a continuous query, whose request and operator were read, until it ends the connection.
ServeEpochs = Callable[[Mapping[str, Any], bytes, BinaryIO, FrameSender], None]


class HandOverServer:
    """Answers the tasks of this node.

    Parameters
    ----------
    address
        Path by which tasks find the socket (:func:`address_of`). What an earlier process left there is replaced.
    request_s, rows_s
        Seconds that a task may be silent before its rows, and among them: they may come from far away.

    Raises
    ------
    OSError
        The folder is not this user's alone, or cannot be made or written.
    """

    def __init__(
        self,
        address: str,
        serve: Serve,
        serve_epochs: ServeEpochs,
        runtime: Runtime,
        *,
        request_s: float = _REQUEST_S,
        rows_s: float = 600.0,
    ) -> None:
        self._serve_task, self._serve_epochs = serve, serve_epochs
        self._request_s, self._rows_s = request_s, rows_s
        self._runtime, self._start_thread, self._clock = runtime, runtime.threads.start, runtime.clock
        self._address, self._path = Path(address), Path(f"{address}.{os.getpid()}")
        self._secret = os.urandom(SECRET_BYTES)
        self._facts = f"{os.getpid()} {FORMAT} {base64.b64encode(self._secret).decode()}"
        self._listening = self._published()

    def _published(self) -> socket.socket:
        _make_private(self._address.parent)
        self._path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(str(self._path))
            listening.listen(_WAITING)
            self._start_thread(partial(self._accept, listening), "statefleet-hand-over")
            # Tasks see it when the socket can be connected to.
            unseen = Path(f"{self._address}.new")
            unseen.unlink(missing_ok=True)
            with open(os.open(unseen, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(self._facts)
            unseen.replace(self._address)
        except BaseException:
            end_listening(listening)
            raise
        self._remove_left()
        return listening

    def _remove_left(self) -> None:
        """Remove what processes left that have ended."""
        for folder in self._address.parent.parent.glob(f"{self._address.parent.name.rpartition('-')[0]}-*"):
            if not _is_private(folder):
                continue
            for left in folder.glob("*.*"):
                address, _, pid = str(left).rpartition(".")
                is_earlier = address == str(self._address) and left != self._path
                if is_earlier or (pid.isdigit() and not psutil.pid_exists(int(pid))):
                    with suppress(OSError):
                        left.unlink()
                        if not is_earlier and _read_facts(Path(address)).startswith(f"{pid} "):
                            Path(address).unlink()
            with suppress(OSError):  # others are in it
                folder.rmdir()

    def publish_again(self) -> None:
        """Have tasks find the socket again if someone has deleted it, its file or their folder, or put another folder there.

        Raises an OSError as the constructor does.
        """
        _make_private(self._address.parent)
        try:
            # A later process of this store actor has the file: this one was given up.
            if _read_facts(self._address) != self._facts or self._is_reached():
                return
        except FileNotFoundError:
            pass
        # Tasks that are connected stay so.
        before, self._listening = self._listening, self._published()
        end_listening(before)
        log.warning(
            "what tasks find this process by was deleted; it is there again, and nothing was lost [socket=`%s`]",
            self._address,
        )

    def _is_reached(self) -> bool:
        """Return whether the socket is there, and this process listens on it."""
        with socket.socket(socket.AF_UNIX) as task:
            task.setblocking(False)
            try:
                task.connect(str(self._path))
            except BlockingIOError:  # many wait
                return True
            except OSError:
                return False
            return True

    def _accept(self, listening: socket.socket) -> None:
        accept_each(listening, self._take, self._clock, "a task that hands rows over was not taken; Spark tries again")

    def _take(self, task: socket.socket) -> None:
        self._start_thread(partial(self._serve, task), "statefleet-hand-over-task")

    def _serve(self, task: socket.socket) -> None:
        try:
            task.settimeout(self._request_s)
            with task, _file(task, "rb") as source, _file(task, "wb") as buffered:
                _, user, _ = _CREDENTIALS.unpack(
                    task.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
                if user != os.geteuid():
                    log.warning("a process of another user was refused [uid=`%d` socket=`%s`]", user, self._path)
                    return
                challenge = source.read(SECRET_BYTES)
                if len(challenge) < SECRET_BYTES:
                    return
                sink = _Counting(buffered)
                sink.write(hmac.digest(self._secret, challenge, "sha256"))
                sink.flush()
                answers = _Answers(sink, self._serve_task, lambda: task.settimeout(None))
                with answers.telling():
                    pieces = _Pieces(source)
                    request, operator = _read_request(pieces)
                    if _is_of_frames(request):
                        task.settimeout(None)
                        self._serve_epochs(request, operator, source, FrameSender(task, self._runtime))
                        return
                    task.settimeout(self._rows_s)
                    answers.write(request, operator, pieces)
        except OSError:
            log.debug("a task ended before it had its answer", exc_info=True)


@dataclass(frozen=True, slots=True)
class _Answers:
    """Answers a task that hands a batch over."""

    sink: _Counting
    serve_task: Serve
    #: Has the connection wait without an end.
    be_patient: Callable[[], None]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the task an error, which it raises, so that Spark shows it."""
        try:
            yield
        except Exception as error:
            log.debug("a batch that was handed over failed", exc_info=True)
            text = f"{type(error).__name__}: {error}".encode()
            self.sink.write(_FAILED + LENGTH.pack(len(text)) + text)

    def write(self, request: Mapping[str, Any], operator: bytes, source: _Pieces) -> None:
        """Write the rows that the task's shards emit, and their end."""
        rows = _received(source, request["shards"], request["unsafe_rows"])
        work = HandedOver(operator, request["batch"], request["attempt"], request["executor"], request["shards"], rows)
        emitted, count, begin, sink = self.serve_task(work), 0, self.sink.size, self.sink
        first = next(emitted, None)
        # The task may take long with its results, before it sends more.
        self.be_patient()
        # An error ends the rows, too; the task sees by the byte after them that there should be more.
        if first is not None and request["unsafe_results"] and unsafe_rows.are_supported(first.schema):
            sink.write(_UNSAFE_ROWS)
            begin = sink.size
            try:
                for batch in chain([first], emitted):
                    unsafe_rows.write_blocks(batch, cast(BinaryIO, sink))
                    sink.flush()
                    count += batch.num_rows
            finally:
                unsafe_rows.write_end(cast(BinaryIO, sink))
        elif first is not None:
            sink.write(_ROWS)
            begin = sink.size
            with pa.ipc.new_stream(sink, first.schema) as answer:
                for batch in chain([first], emitted):
                    answer.write_batch(batch)
                    # The task waits for the rest of what it has begun to read.
                    sink.flush()
                    count += batch.num_rows
        size = sink.size - begin
        _check_end(rows)
        sink.write(_DONE + _ANSWER_END.pack(count, size))


def _is_of_frames(request: Mapping[str, Any]) -> bool:
    """Return whether a connection is of a continuous query's task, or of a Python worker's calls."""
    return "tasks" in request or "is_worker" in request


def serve_remote_task(messages: DirectMessages, serve_task: Serve, serve_epochs: ServeEpochs, runtime: Runtime) -> None:
    """Serve a task that is on another node, until it ends its connection."""
    messages.wait_for_next(_REQUEST_S)
    messages.send(FORMAT.encode())
    with (
        messages.own_socket() as task,
        io.BufferedReader(MessageBytes(messages), _BUFFER_BYTES) as source,
        io.BufferedWriter(_MessageSink(messages), _BUFFER_BYTES) as buffered,
    ):
        answers = _Answers(_Counting(buffered), serve_task, messages.wait_without_end)
        with answers.telling():
            pieces = _Pieces(source)
            request, operator = _read_request(pieces)
            # From here on a task may wait long, for rows and for a sink.
            messages.wait_without_end()
            if _is_of_frames(request):
                serve_epochs(request, operator, source, FrameSender(task, runtime, messages.sealed))
            else:
                answers.write(request, operator, pieces)


class _MessageSink(io.RawIOBase):
    def __init__(self, messages: DirectMessages) -> None:
        self._messages = messages

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        content = bytes(memoryview(data)[:_MESSAGE_BYTES])
        self._messages.send(content)
        return len(content)


def _read_request(source: _Pieces) -> tuple[dict[str, Any], bytes]:
    request = json.loads(_read(source, *LENGTH.unpack(_read(source, LENGTH.size))))
    return request, _read(source, request["operator_bytes"])


def _make_private(folder: Path) -> None:
    """Make a folder if there is none.

    Raises
    ------
    PermissionError
        It is not this user's alone.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder):
        facts = folder.lstat()
        raise PermissionError(
            f"{folder} is not this user's alone: its owner is {facts.st_uid}, and its mode {stat.filemode(facts.st_mode)}; remove it, "
            "upon which it is made again"
        )


def _is_private(folder: Path) -> bool:
    # A link may lead to a folder of this user's that others have chosen.
    facts = folder.lstat()
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077


def _read_facts(address: Path) -> str:
    """Return what a store actor's file says; in another user's folder it may be anything."""
    descriptor = os.open(address, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(descriptor, _FACTS_BYTES).decode(errors="replace")
    finally:
        os.close(descriptor)


def secret_of(address: Path) -> tuple[str, bytes]:
    """Return the id of the process of a store actor's file, and its secret.

    Raises
    ------
    OSError
        The folder is not this user's alone, or has no such file; or the store actor is of another release.
    """
    if not _is_private(address.parent):
        raise PermissionError(f"{address.parent} is not this user's alone")
    pid, written_format, secret = _read_facts(address).split(" ")
    if written_format != FORMAT:
        raise OSError(
            f"the store actor at {address} is of another release: use one release for the fleet and its queries"
        )
    return pid, base64.b64decode(secret)


def _received(source: _Pieces, shards: Sequence[int], are_unsafe: bool) -> Iterator[pa.Table]:
    """Yield the rows of each of a task's shards, once it is sure that these are all."""
    schema = None
    if are_unsafe:
        schema = _arrow_rows(source).schema
        if not schema.names:
            raise ValueError("malformed rows: they have no columns, so nothing says how many there are")
    for number, shard in enumerate(shards):
        begin = source.size
        if schema is None:
            rows = _arrow_rows(source)
        else:
            # The last column is the route.
            rows = pa.Table.from_batches(unsafe_rows.read_blocks(cast(BinaryIO, source), schema, 1), schema)
        came = shard, rows.num_rows, source.size - begin
        sent = _SHARD_END.unpack(_read(source, _SHARD_END.size))
        if came != sent:
            raise ValueError(
                "these are not the rows that the task sent, and none of the shard count: (shard, rows, bytes) that were sent are "
                f"{sent}, and {came} came"
            )
        if number == len(shards) - 1 and source.read(1):
            raise ValueError(
                f"these are not the rows that the task sent: something follows those of shard {shard}, its last one"
            )
        yield rows


def _arrow_rows(source: _Pieces) -> pa.Table:
    # Nothing is compressed, for which threads would have to be woken.
    return pa.ipc.open_stream(source, options=pa.ipc.IpcReadOptions(use_threads=False)).read_all()


def _check_end(rows: Iterator[pa.Table]) -> None:
    if next(rows, None) is not None:
        raise ValueError("the operator left rows of the task's shards unread")


def hand_over_server(
    address: str, serve_task: Serve, serve_epochs: ServeEpochs, runtime: Runtime, *, again_s: float = 5.0
) -> None:
    """Start the server of a process, and see to it that tasks find it: on a full disk, and after someone cleared the folder away.

    Parameters
    ----------
    again_s
        Seconds until a server that could not be started is tried again, and after which it is looked whether tasks still find it.
    """

    def serve() -> None:
        server: HandOverServer | None = None
        logged = ""
        while True:
            try:
                if server is None:
                    server = HandOverServer(address, serve_task, serve_epochs, runtime)
                else:
                    server.publish_again()
                logged = ""
            except Exception as error:  # no caller gets the error of a thread
                if logged != str(error):
                    log.exception(
                        "Spark's tasks cannot hand rows over to this process; it is tried again [socket=`%s`]", address
                    )
                logged = str(error)
            runtime.clock.sleep(again_s)

    runtime.threads.start(serve, "statefleet-hand-over-address")


class _Pieces(io.RawIOBase):
    """What a task sends. However much is asked for, no more is reserved than has arrived, and one piece."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self.size = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(min(size, _PIECE_BYTES))
        if len(data) == _PIECE_BYTES:
            pieces, left = [data], size - len(data)
            while left and (data := self._source.read(min(left, _PIECE_BYTES))):
                pieces.append(data)
                left -= len(data)
            data = b"".join(pieces)
        self.size += len(data)
        return data


class _Counting(io.RawIOBase):
    """What a task is sent."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self.size = 0

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        self._sink.flush()

    def write(self, data: Any) -> int:
        self._sink.write(data)
        size = memoryview(data).nbytes
        self.size += size
        return size


def _read(source: _Pieces, size: int) -> bytes:
    if not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"this is no request: a part of it has {size} bytes")
    data = source.read(size)
    if len(data) < size:
        raise EOFError("the task ended in the middle of its request")
    return data


def _file(connected: socket.socket, mode: Literal["rb", "wb"]) -> BinaryIO:
    return cast(BinaryIO, connected.makefile(mode, _BUFFER_BYTES))
