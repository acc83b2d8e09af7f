"""Calls of a store actor by a connection of their own: a look-up of one key takes less than an empty call of Ray.

Nothing depends on them. Who has no connection, or whose connection breaks or is slow to answer, asks by a call of Ray, which is told
what became of the store actor. What is asked for may therefore be asked twice.

Only who was told the key by Ray is answered. Neither side sends it: each proves to the other that it has it.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue

from coordinator.surroundings import Surroundings

__all__ = ["DirectAddress", "DirectAnswers", "DirectCalls"]

log = logging.getLogger(__name__)

#: Connections of a store actor at once, each with a thread that waits.
_MOST = 128
#: Calls that are worked on at once, as many as those of Ray: batches need the process too.
_AT_ONCE = 8
#: Seconds without a new connection when there are no files or threads left for one.
_PAUSE_S = 1.0
#: What either side proves is not what the other one does: nobody can pass the proof of one caller on to another as a store actor's.
_CALLER, _STORE_ACTOR = b"caller", b"store actor"
#: Seconds that a stranger has for each part of the proof, and a caller to take an answer.
_PROOF_S = 5.0
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

    def __init__(self, host: str, key: bytes, answer: Callable[[bytes], bytes], surroundings: Surroundings) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=_MOST)
        #: Where callers find it.
        self.address = DirectAddress(host, self._listening.getsockname()[1], key)
        self._answer = answer
        self._clock = surroundings.clock
        self._start_thread = surroundings.threads.start
        self._guard = surroundings.threads.lock()
        self._connected = 0
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
            if self._connected < _MOST:
                self._start_thread(partial(self._serve, connection), "statefleet-direct-caller")
                self._connected += 1
                return
        connection.close()

    def _serve(self, connection: Connection) -> None:
        try:
            with connection:
                deliver_challenge(connection, self.address.key + _CALLER)
                answer_challenge(connection, self.address.key + _STORE_ACTOR)
                _wait_at_most(connection, socket.SO_RCVTIMEO, 0.0)
                while True:
                    connection.send_bytes(self._answered(connection.recv_bytes()))
        except Exception:  # it left, was a stranger, or is told by Ray what is wrong
            log.debug("a connection ended", exc_info=True)
        finally:
            with self._guard:
                self._connected -= 1

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
    spare: list[Connection] = field(default_factory=list)
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

    def __init__(self, address_of: Callable[[str], DirectAddress | None], surroundings: Surroundings) -> None:
        self._address_of = address_of
        self._clock = surroundings.clock
        self._threads = surroundings.threads
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
            connection.send_bytes(asked)
        except OSError:
            self._forget(life, connection)
            return None
        return partial(self._received, life, connection)

    def _received(self, life: _Life, connection: Connection) -> bytes | None:
        try:
            # The kernel's limit begins anew with every signal.
            if not connection.poll(_PATIENCE_S):
                raise TimeoutError("no answer")
            answered = connection.recv_bytes()
        except TimeoutError:
            # It has much to do, or hangs: nobody else need wait for as long.
            life.not_before_s = self._clock.elapsed_s() + _AGAIN_S
            self._forget(life, connection)
            return None
        except (OSError, EOFError):
            self._forget(life, connection)
            return None
        with self._guard:
            if len(life.spare) < _SPARE:
                life.spare.append(connection)
        return answered

    def _taken(self, actor_name: str, instance_id: str) -> tuple[_Life, Connection | None]:
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

    def _forget(self, life: _Life, connection: Connection) -> None:
        """Close a connection, and all that nobody uses: they broke with it, or are as slow."""
        connection.close()
        with self._guard:
            life.forget()


def _connected(address: DirectAddress) -> Connection:
    """A connection on which both sides have proved themselves."""
    connection = _connection(socket.create_connection((address.host, address.port), _PATIENCE_S), _PATIENCE_S)
    try:
        answer_challenge(connection, address.key + _CALLER)
        deliver_challenge(connection, address.key + _STORE_ACTOR)
    except BaseException:
        connection.close()
        raise
    return connection


def _connection(connected: socket.socket, patience_s: float) -> Connection:
    """Whose sends and receipts raise OSError if nothing moves for so long."""
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(connected.detach())
    for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        _wait_at_most(connection, way, patience_s)
    return connection


def _wait_at_most(connection: Connection, way: int, seconds: float) -> None:
    """The kernel's own limit, which costs a call nothing; 0 is none."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, way, struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000)))
