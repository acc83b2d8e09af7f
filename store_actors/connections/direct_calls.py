"""Direct connections to a store actor, for queries of a few keys and tasks of other nodes: the store actor's side, and the messages.

The reader's side is :mod:`statefleet.reads.sources`. A query over a direct connection takes less CPU than an empty call of Ray.
No reader depends on these connections. One without a connection, or whose connection breaks or is slow to answer, asks by a call of
Ray, which reports what became of the store actor. So the same keys may be asked for twice.

A task of a continuous query (``SealedChannel.scala``) sends :data:`TASK` first. It is answered the format of what follows, which is
that of :mod:`store_actors.connections.hand_over`, cut into messages wherever the sender likes.

Only processes that got the key by Ray are answered. Neither side sends the key: each proves to the other that it has it. Every message
carries a code that only an owner of the key can make, of this connection, this direction, the message's number and its content. So a
process between the two can read and cut what passes, and cannot change, repeat or reorder it. It is not encrypted.

Arrow Flight was measured in their place (pyarrow 26, 2,000 calls of each in turn, a row of one key, with a token). At the median a call
took 0.71 ms, 0.79 with TLS, and 0.12 here; both sides together 0.74 ms of a core, and 0.14 here. A forked process, as Spark's Python
workers are, waits without end for its first answer once its parent had a connection.
"""

from __future__ import annotations

import hmac
import io
import logging
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from coordinator.runtime.runtime import Clock, Runtime

log = logging.getLogger(__name__)

#: Connections of a store actor at once, each with a thread that waits.
_MOST = 128
#: Calls that are answered at the same time, as many as by Ray: batches need the process too.
_AT_ONCE = 8
#: The length of a message, which :class:`multiprocessing.connection.Connection` sends before it.
_FRAME = struct.Struct("!i")
#: Seconds without a new connection after the process had no file or thread for one.
_PAUSE_S = 1.0
#: Connections at once whose caller has not proved that it has the key. They count apart: strangers take no connection of a caller.
#: All tasks of a query come at the same moment.
_STRANGERS = 128
#: Seconds without a sign of the other machine, each of some more, and how many, until a connection on which nothing is under way ends.
_QUIET_S, _ASK_S, _ASK_TIMES = 30, 10, 3
#: The first message of a task.
TASK = b"task"
#: The two sides' proofs differ: no process can pass the proof of one caller on to another one as a store actor's.
_CALLER, _STORE_ACTOR = b"caller", b"store actor"
#: Bytes of the random number that each side sends for a connection, of a proof, and of a message's code.
_NONCE_BYTES, _PROOF_BYTES, _CODE_BYTES = 32, 32, 16


@dataclass(frozen=True, slots=True)
class DirectAddress:
    """The address at which an incarnation of a store actor answers."""

    host: str
    port: int
    #: Secret that both sides prove to have.
    key: bytes = field(repr=False)


class DirectServer:
    """The store actor's side.

    Parameters
    ----------
    answer
        Returns the answer to a call. An error of it is logged and ends the connection: the caller asks again by Ray, which reports it.
    serve_task
        Serves the task of a connection until that ends.
    proof_s
        Seconds that a stranger has for the whole proof, and a caller to receive an answer.

    Raises
    ------
    OSError
        No port of `host` can be listened to.
    """

    def __init__(
        self,
        host: str,
        key: bytes,
        answer: Callable[[bytes], bytes],
        serve_task: Callable[[DirectMessages], None],
        runtime: Runtime,
        *,
        proof_s: float = 5.0,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=_MOST)
        #: Where callers connect.
        self.address = DirectAddress(host, self._listening.getsockname()[1], key)
        self._answer, self._serve_task = answer, serve_task
        self._proof_s = proof_s
        self._clock = runtime.clock
        self._start_thread = runtime.threads.start
        self._guard = runtime.threads.lock()
        self._connected = 0
        #: Connections whose caller has not proved that it has the key, the oldest first.
        self._strangers: list[Connection] = []
        #: A thread answers a call while it has taken one of these.
        self._turns: SimpleQueue[None] = SimpleQueue()
        for _ in range(_AT_ONCE):
            self._turns.put(None)
        self._start_thread(self._accept, "statefleet-direct")

    def _accept(self) -> None:
        accept_each(self._listening, self._take, self._clock, "a connection was not taken; look-ups go by Ray")

    def _take(self, caller: socket.socket) -> None:
        connection = _connection(caller, self._proof_s)
        with self._guard:
            if len(self._strangers) == _STRANGERS:
                # A proof takes milliseconds, a JVM's first one some hundred: a stranger that needs longer gives way to the next one.
                _cut(self._strangers.pop(0))
            self._strangers.append(connection)
        try:
            self._start_thread(partial(self._serve, connection), "statefleet-direct-caller")
        except RuntimeError:
            self._no_stranger(connection)
            connection.close()
            raise

    def _no_stranger(self, connection: Connection) -> None:
        with self._guard, suppress(ValueError):
            self._strangers.remove(connection)

    def _serve(self, connection: Connection) -> None:
        try:
            with connection:
                messages = self._proved(connection)
                # A caller may have connected for later.
                messages.wait_for_next()
                message = messages.receive()
                if message == TASK:
                    self._serve_task(messages)
                else:
                    self._serve_caller(messages, message)
        except Exception:  # the caller left or had no key, or the call failed, which Ray reports
            log.debug("a connection ended", exc_info=True)

    def _serve_caller(self, messages: DirectMessages, call: bytes) -> None:
        """Answer calls until the caller leaves, unless there are `_MOST` of them, who have Ray, too. Tasks do not count."""
        with self._guard:
            if self._connected >= _MOST:
                return
            self._connected += 1
        try:
            while True:
                messages.send(self._answered(call))
                call = messages.receive()
        finally:
            with self._guard:
                self._connected -= 1

    def _proved(self, connection: Connection) -> DirectMessages:
        try:
            return _greeted(connection, self.address.key, self._clock.elapsed_s, self._proof_s)
        finally:
            self._no_stranger(connection)

    def _answered(self, call: bytes) -> bytes:
        turn = self._turns.get()
        try:
            return self._answer(call)
        except Exception:
            log.exception("a call failed")
            raise
        finally:
            self._turns.put(turn)


class DirectMessages:
    """Messages of a connection, each with its code.

    Parameters
    ----------
    sends, receives
        Keys of the codes of either direction, of this connection only.
    """

    def __init__(self, connection: Connection, sends: bytes, receives: bytes) -> None:
        self._connection = connection
        self._sends, self._receives = sends, receives
        self._sent = self._received = 0
        self.poll, self.close = connection.poll, connection.close

    def send(self, content: bytes) -> None:
        """Send a message."""
        self._connection.send_bytes(self._coded(content))

    def _coded(self, content: bytes) -> bytes:
        code = _code(self._sends, self._sent, content)
        self._sent += 1
        return code + content

    def sealed(self, content: bytes) -> bytes:
        """Return the next message as the bytes that are sent, for :meth:`own_socket`."""
        message = self._coded(content)
        return _FRAME.pack(len(message)) + message

    def wait_for_next(self, seconds: float = 0.0) -> None:
        """Have :meth:`receive` wait so long, or without an end."""
        _wait_at_most(self._connection, socket.SO_RCVTIMEO, seconds)

    def wait_without_end(self) -> None:
        """Have sending and receiving wait as long as the other side is there."""
        self.wait_for_next()
        _wait_at_most(self._connection, socket.SO_SNDTIMEO, 0.0)

    def own_socket(self) -> socket.socket:
        """Return the connection as a socket of its own, which has to be closed, too."""
        return socket.socket(fileno=os.dup(self._connection.fileno()))

    def receive(self) -> bytes:
        """Return the next message.

        Raises
        ------
        AuthenticationError
            It is not the next one that the other side sent.
        OSError, EOFError
            The connection broke.
        """
        message = self._connection.recv_bytes()
        code, content = message[:_CODE_BYTES], message[_CODE_BYTES:]
        if not hmac.compare_digest(code, _code(self._receives, self._received, content)):
            raise AuthenticationError("a message is not the next one that the other side sent")
        self._received += 1
        return content


class MessageBytes(io.RawIOBase):
    """The contents of all further messages, one after the other; errors as of :meth:`DirectMessages.receive`."""

    def __init__(self, messages: DirectMessages) -> None:
        self._messages = messages
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        try:
            while not self._left:
                self._left = memoryview(self._messages.receive())
        except EOFError:
            return 0
        size = min(len(target), len(self._left))
        target[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


def accept_each(listening: socket.socket, take: Callable[[socket.socket], None], clock: Clock, failure: str) -> None:
    """Pass each connection of a listening socket to `take`, until :func:`end_listening`. One that cannot be taken is closed."""
    while True:
        try:
            connection, _ = listening.accept()
            try:
                take(connection)
            except BaseException:
                connection.close()
                raise
        except (OSError, RuntimeError):  # no file, or no thread, for it
            if listening.fileno() < 0:
                return
            log.exception(failure)
            clock.sleep(_PAUSE_S)


def end_listening(listening: socket.socket) -> None:
    """Close a socket, and end the thread that takes its connections; those that were taken stay."""
    with socket.socket(fileno=listening.detach()) as closing, suppress(OSError):
        closing.shutdown(socket.SHUT_RDWR)


def _code(key: bytes, number: int, content: bytes) -> bytes:
    # Java has it, too.
    return hmac.digest(key, number.to_bytes(8, "big") + content, "sha256")[:_CODE_BYTES]


def _greeted(connection: Connection, key: bytes, elapsed_s: Callable[[], float], proof_s: float) -> DirectMessages:
    """Return the messages of a connection, after the proofs: a number of the store actor; the caller's number and proof; its proof.

    Raises
    ------
    AuthenticationError
        The other side does not know the key, or takes too long.
    OSError, EOFError
        The connection broke.
    """
    until_s = elapsed_s() + proof_s
    nonce = os.urandom(_NONCE_BYTES)
    connection.send_bytes(nonce)
    answer = _received_until(connection, _NONCE_BYTES + _PROOF_BYTES, until_s, elapsed_s)
    numbers = nonce + answer[:_NONCE_BYTES]
    _check(answer[_NONCE_BYTES:], _derived(key, _CALLER, numbers))
    connection.send_bytes(_derived(key, _STORE_ACTOR, numbers))
    return DirectMessages(connection, *_keys(key, numbers))


def _received_until(connection: Connection, size: int, until_s: float, elapsed_s: Callable[[], float]) -> bytes:
    """Return a message of `size` bytes, all of which arrive before `until_s`: the kernel's limit starts again with each byte."""
    data = b""
    while len(data) < _FRAME.size + size:
        remaining_s = until_s - elapsed_s()
        if remaining_s <= 0 or not connection.poll(remaining_s):
            raise AuthenticationError("the proof took too long")
        piece = os.read(connection.fileno(), _FRAME.size + size - len(data))
        if not piece:
            raise EOFError
        data += piece
    if _FRAME.unpack_from(data) != (size,):
        raise AuthenticationError("this is no proof")
    return data[_FRAME.size :]


def _derived(key: bytes, purpose: bytes, numbers: bytes) -> bytes:
    """Return bytes that only an owner of the key can compute, for one purpose and one connection."""
    return hmac.digest(key, purpose + numbers, "sha256")


def _keys(key: bytes, numbers: bytes) -> tuple[bytes, bytes]:
    """Return the keys of the codes that the store actor and the caller send."""
    return _derived(key, b"codes of the store actor", numbers), _derived(key, b"codes of the caller", numbers)


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise AuthenticationError("the other side does not know the key")


def connect(address: DirectAddress, patience_s: float) -> DirectMessages:
    """Connect to a store actor, and return the messages of a connection on which both sides have proved to have the key.

    Raises
    ------
    AuthenticationError
        The other side does not have the key.
    OSError, EOFError
        There is no connection, it broke, or nothing moved on it for `patience_s` seconds.
    """
    connection = _connection(socket.create_connection((address.host, address.port), patience_s), patience_s)
    try:
        numbers = connection.recv_bytes(_NONCE_BYTES) + (nonce := os.urandom(_NONCE_BYTES))
        connection.send_bytes(nonce + _derived(address.key, _CALLER, numbers))
        _check(connection.recv_bytes(_PROOF_BYTES), _derived(address.key, _STORE_ACTOR, numbers))
    except BaseException:
        connection.close()
        raise
    receives, sends = _keys(address.key, numbers)
    return DirectMessages(connection, sends, receives)


def _connection(connected: socket.socket, timeout_s: float) -> Connection:
    """Return a connection of a socket; sending and receiving raise OSError if nothing moves for `timeout_s`."""
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Ends a connection whose machine is gone.
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _QUIET_S), (socket.TCP_KEEPINTVL, _ASK_S), (socket.TCP_KEEPCNT, _ASK_TIMES)
    ):  # fmt: skip
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connection = Connection(connected.detach())
    for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        _wait_at_most(connection, way, timeout_s)
    return connection


def _cut(connection: Connection) -> None:
    """End a connection that another thread waits for."""
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate, suppress(OSError):
        duplicate.shutdown(socket.SHUT_RDWR)


def _wait_at_most(connection: Connection, way: int, seconds: float) -> None:
    """Set the kernel's time limit of a direction, which costs a call nothing; 0 is none."""
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, way, struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000)))
