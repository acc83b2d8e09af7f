"""Calls of a store actor by a direct connection, for look-ups of a few keys: less CPU than an empty call of Ray takes.

Nothing depends on them. A reader without a connection, or whose connection breaks or is slow to answer, asks by a call of Ray, which
reports what became of the store actor. So the same keys may be asked for twice.

Only processes that got the key by Ray are answered. Neither side sends the key: each proves to the other that it has it. Every message
carries a code that only an owner of the key can make, of this connection, this direction, the message's number and its content. So a
process between the two can read and cut what passes, and cannot change, repeat or reorder it. It is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
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

from coordinator.runtime.runtime import Runtime

__all__ = ["DirectAddress", "DirectAnswers", "DirectCalls"]

log = logging.getLogger(__name__)

#: Connections of a store actor at once, each with a thread that waits.
_MOST = 128
#: Calls that are worked on at once, as many as those of Ray: batches need the process too.
_AT_ONCE = 8
#: How long a message is, before it (:class:`multiprocessing.connection.Connection`).
_FRAME = struct.Struct("!i")
#: Seconds without a new connection when there are no files or threads left for one.
_PAUSE_S = 1.0
#: Connections at once on which nobody has proved anything yet, in their own places: strangers take none of those who have.
_STRANGERS = 16
#: What either side proves is not what the other one does: nobody can pass the proof of one caller on to another as a store actor's.
_CALLER, _STORE_ACTOR = b"caller", b"store actor"
#: Seconds that a stranger has for the whole proof, and a caller to take an answer.
_PROOF_S = 5.0
#: Bytes of a number that either side makes up for a connection, of a proof, and of a message's code.
_NONCE_BYTES, _PROOF_BYTES, _CODE_BYTES = 32, 32, 16
#: Seconds that a caller waits for a connection or for an answer until it asks by Ray.
_PATIENCE_S = 1.0
#: Seconds until it tries again where no connection came about.
_AGAIN_S = 30.0
#: Unused connections of a caller to one store actor.
_SPARE = 4
#: Seconds after which connections are closed that nobody used: their store actor may be gone for good.
_IDLE_S = 300.0


@dataclass(frozen=True, slots=True)
class DirectAddress:
    """Where a life of a store actor answers.

    Attributes
    ----------
    key
        What both sides prove to have.
    """

    host: str
    port: int
    key: bytes = field(repr=False)


class DirectAnswers:
    """The store actor's side.

    Parameters
    ----------
    host
        Address of this node, at which other nodes reach it.
    key
        Nobody can guess it.
    answer
        Answers a call. What it raises is logged, and left to Ray to tell: it is asked again by a call of Ray.

    Raises
    ------
    OSError
        There is no port.
    """

    def __init__(self, host: str, key: bytes, answer: Callable[[bytes], bytes], runtime: Runtime) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=_MOST)
        #: Where callers find it.
        self.address = DirectAddress(host, self._listening.getsockname()[1], key)
        self._answer = answer
        self._clock = runtime.clock
        self._start_thread = runtime.threads.start
        self._guard = runtime.threads.lock()
        self._connected = 0
        #: Those who have proved nothing yet, the oldest first.
        self._strangers: list[Connection] = []
        #: Whoever has one works.
        self._turns: SimpleQueue[None] = SimpleQueue()
        for _ in range(_AT_ONCE):
            self._turns.put(None)
        self._start_thread(self._accept, "statefleet-direct")

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listening.accept()
                with caller:
                    self._take(caller)
            except (OSError, RuntimeError):  # no file, or no thread, for it
                log.exception("a connection was not taken; look-ups go by Ray")
                self._clock.sleep(_PAUSE_S)

    def _take(self, caller: socket.socket) -> None:
        # So that one is let go of whose machine is gone.
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = _connection(caller, _PROOF_S)
        with self._guard:
            if len(self._strangers) == _STRANGERS:
                # A proof takes milliseconds: who needs longer makes room for the next one.
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
                if messages is None:
                    return
                try:
                    _wait_at_most(connection, socket.SO_RCVTIMEO, 0.0)
                    while True:
                        messages.send(self._answered(messages.receive()))
                finally:
                    with self._guard:
                        self._connected -= 1
        except Exception:  # it left, was a stranger, or is told by Ray what is wrong
            log.debug("a connection ended", exc_info=True)

    def _proved(self, connection: Connection) -> _Messages | None:
        """What a caller says who has proved that it knows the key; None if there is no place for one more."""
        try:
            messages = _greeted(connection, self.address.key, self._clock.elapsed_s)
        finally:
            self._no_stranger(connection)
        with self._guard:
            if self._connected >= _MOST:
                return None
            self._connected += 1
            return messages

    def _answered(self, asked: bytes) -> bytes:
        turn = self._turns.get()
        try:
            return self._answer(asked)
        except Exception:
            log.exception("a call failed")
            raise
        finally:
            self._turns.put(turn)


@dataclass(slots=True)
class _Life:
    """A life of a store actor, as callers know it."""

    instance_id: str
    #: Connections that nobody uses now.
    spare: list[_Messages] = field(default_factory=list)
    is_connecting: bool = False
    #: No connection is tried before.
    not_before_s: float = 0.0
    used_s: float = 0.0

    def forget(self) -> None:
        """Close what nobody uses."""
        while self.spare:
            self.spare.pop().close()


class DirectCalls:
    """The callers' side: the connections of one process. Thread-safe.

    Nobody waits for a connection: who finds none asks by Ray, and has one made for the next.

    Parameters
    ----------
    address_of
        Asks a store actor, by its name, for its address; None if it has none now.
    """

    def __init__(self, address_of: Callable[[str], DirectAddress | None], runtime: Runtime) -> None:
        self._address_of = address_of
        self._clock = runtime.clock
        self._threads = runtime.threads
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._guard = self._threads.lock()
        #: By the name of the store actor.
        self._lives: dict[str, _Life] = {}
        self._pid = os.getpid()

    def begin(self, actor_name: str, instance_id: str, asked: bytes) -> Callable[[], bytes | None] | None:
        """Ask a life of a store actor.

        Returns
        -------
        Callable or None
            Waits for the answer, which is None if it is Ray that must be asked; None if there is no connection.
        """
        life, connection = self._taken(actor_name, instance_id)
        if connection is None:
            return None
        try:
            connection.send(asked)
        except OSError:
            self._forget(life, connection)
            return None
        return partial(self._received, life, connection)

    def _received(self, life: _Life, connection: _Messages) -> bytes | None:
        try:
            # The kernel's limit begins anew with every signal.
            if not connection.poll(_PATIENCE_S):
                raise TimeoutError("no answer")
            answered = connection.receive()
        except TimeoutError:
            # It has much to do, or hangs: nobody else need wait for as long.
            life.not_before_s = self._clock.elapsed_s() + _AGAIN_S
            self._forget(life, connection)
            return None
        except (OSError, EOFError):
            self._forget(life, connection)
            return None
        except AuthenticationError:
            log.warning("an answer of a store actor was changed on its way, and is not used; its look-ups go by Ray")
            life.not_before_s = self._clock.elapsed_s() + _AGAIN_S
            self._forget(life, connection)
            return None
        with self._guard:
            if len(life.spare) < _SPARE:
                life.spare.append(connection)
        return answered

    def _taken(self, actor_name: str, instance_id: str) -> tuple[_Life, _Messages | None]:
        if self._pid != os.getpid():
            # On its parent's connections a process that was forked would take the parent's answers; its lock may be held for ever.
            self._begin_anew()
        now_s = self._clock.elapsed_s()
        with self._guard:
            life = self._lives.get(actor_name)
            if life is None or life.instance_id != instance_id:
                if life is not None:
                    life.forget()
                self._forget_idle(now_s - _IDLE_S)
                life = self._lives[actor_name] = _Life(instance_id)
            life.used_s = now_s
            if life.spare:
                return life, life.spare.pop()
            if not life.is_connecting and life.not_before_s <= now_s:
                self._threads.start(partial(self._connect, actor_name, life), "statefleet-connect")
                life.is_connecting, life.not_before_s = True, now_s + _AGAIN_S
            return life, None

    def _forget_idle(self, horizon_s: float) -> None:
        """Of store actors that nobody asked since then nothing is kept."""
        for actor_name, life in list(self._lives.items()):
            if life.used_s < horizon_s:
                life.forget()
                del self._lives[actor_name]

    def _connect(self, actor_name: str, life: _Life) -> None:
        connection = None
        try:
            address = self._address_of(actor_name)
            connection = None if address is None else _connected(address)
        except Exception:  # whatever it is, Ray does without
            log.info("no connection to %s; its look-ups go by Ray", actor_name, exc_info=True)
        with self._guard:
            life.is_connecting = False
            if connection is not None:
                life.spare.append(connection)
                life.not_before_s = 0.0

    def _forget(self, life: _Life, connection: _Messages) -> None:
        """Close a connection, and all that nobody uses: they broke with it, or are as slow."""
        connection.close()
        with self._guard:
            life.forget()


class _Messages:
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
        code = _code(self._sends, self._sent, content)
        self._sent += 1
        self._connection.send_bytes(code + content)

    def receive(self) -> bytes:
        """The next message.

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


def _code(key: bytes, number: int, content: bytes) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little") + content, key=key, digest_size=_CODE_BYTES).digest()


def _greeted(connection: Connection, key: bytes, elapsed_s: Callable[[], float]) -> _Messages:
    """The store actor's side of the proof: its number; the caller's number and proof; its own proof.

    Raises
    ------
    AuthenticationError
        The other side does not know the key, or takes too long.
    OSError, EOFError
        The connection broke.
    """
    until_s = elapsed_s() + _PROOF_S
    own = os.urandom(_NONCE_BYTES)
    connection.send_bytes(own)
    answered = _received_until(connection, _NONCE_BYTES + _PROOF_BYTES, until_s, elapsed_s)
    numbers = own + answered[:_NONCE_BYTES]
    _check(answered[_NONCE_BYTES:], _derived(key, _CALLER, numbers))
    connection.send_bytes(_derived(key, _STORE_ACTOR, numbers))
    return _Messages(connection, *_keys(key, numbers))


def _received_until(connection: Connection, size: int, until_s: float, elapsed_s: Callable[[], float]) -> bytes:
    """A message of few bytes, which may come in pieces, all of them before a time: the kernel's limit begins anew with each byte."""
    data = b""
    while len(data) < _FRAME.size + size:
        left_s = until_s - elapsed_s()
        if left_s <= 0 or not connection.poll(left_s):
            raise AuthenticationError("the proof took too long")
        piece = os.read(connection.fileno(), _FRAME.size + size - len(data))
        if not piece:
            raise EOFError
        data += piece
    if _FRAME.unpack_from(data) != (size,):
        raise AuthenticationError("this is no proof")
    return data[_FRAME.size :]


def _derived(key: bytes, purpose: bytes, numbers: bytes) -> bytes:
    """What only who has the key can compute, for one purpose and one connection."""
    return hmac.digest(key, purpose + numbers, "sha256")


def _keys(key: bytes, numbers: bytes) -> tuple[bytes, bytes]:
    """Keys of the codes that the store actor and the caller send."""
    return _derived(key, b"codes of the store actor", numbers), _derived(key, b"codes of the caller", numbers)


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise AuthenticationError("the other side does not know the key")


def _connected(address: DirectAddress) -> _Messages:
    """A connection on which both sides have proved themselves."""
    connection = _connection(socket.create_connection((address.host, address.port), _PATIENCE_S), _PATIENCE_S)
    try:
        numbers = connection.recv_bytes(_NONCE_BYTES) + (own := os.urandom(_NONCE_BYTES))
        connection.send_bytes(own + _derived(address.key, _CALLER, numbers))
        _check(connection.recv_bytes(_PROOF_BYTES), _derived(address.key, _STORE_ACTOR, numbers))
    except BaseException:
        connection.close()
        raise
    receives, sends = _keys(address.key, numbers)
    return _Messages(connection, sends, receives)


def _connection(connected: socket.socket, patience_s: float) -> Connection:
    """Whose sends and receipts raise OSError if nothing moves for so long."""
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(connected.detach())
    for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        _wait_at_most(connection, way, patience_s)
    return connection


def _cut(connection: Connection) -> None:
    """End a connection that another thread waits for."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same, suppress(OSError):
        same.shutdown(socket.SHUT_RDWR)


def _wait_at_most(connection: Connection, way: int, seconds: float) -> None:
    """The kernel's own limit, which costs a call nothing; 0 is none."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, way, struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000)))
