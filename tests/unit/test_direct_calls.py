"""Calls of a store actor over direct connections: which callers are answered, and what a caller does without an answer."""

from __future__ import annotations

import gc
import io
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import pytest

from coordinator.runtime.runtime import Runtime
from statefleet.reads import sources
from statefleet.reads.sources import DirectClient
from store_actors.connections import direct_calls
from store_actors.connections.direct_calls import (
    TASK,
    DirectAddress,
    DirectMessages,
    DirectServer,
    MessageBytes,
    connect,
)
from tests.clocks import LaterClock, until

KEY = bytes(range(32))


class EchoActor:
    """Answers each request doubled; the request `slow` waits for `resume`, and `bad` fails."""

    def __init__(self) -> None:
        self.resume = threading.Event()
        self.requests: list[bytes] = []
        self.direct = self.listening()

    def listening(self, proof_s: float = 5.0) -> DirectServer:
        """Return another server of its own."""
        return DirectServer("127.0.0.1", KEY, self.answer, self.serve_task, Runtime(), proof_s=proof_s)

    def serve_task(self, messages: DirectMessages) -> None:
        """Send what the task sends back, in reverse."""
        with io.BufferedReader(MessageBytes(messages)) as source, messages.own_socket() as task:
            task.sendall(messages.sealed(source.read()[::-1]))

    def answer(self, request: bytes) -> bytes:
        self.requests.append(request)
        if request == b"slow":
            assert self.resume.wait(30)
        if request == b"bad":
            raise ValueError("a question that nobody can answer")
        return 2 * request


class Caller:
    """A process with its connections."""

    def __init__(self, address: DirectAddress | None) -> None:
        self.address = address
        self.looked_up = 0
        self.clock = LaterClock()
        self.calls = DirectClient(self._address_of, Runtime(clock=self.clock))

    def _address_of(self, actor_name: str) -> DirectAddress | None:
        self.looked_up += 1
        return self.address

    def ask_at_once(self, request: bytes) -> bytes | None:
        waiting = self.calls.begin("actor", "first", request)
        return None if waiting is None else waiting()

    def ask(self, request: bytes, instance_id: str = "first", actor: str = "actor") -> bytes | None:
        """Call over a connection, if one can be made; until there is one, Ray would make the call."""
        waiting = self.calls.begin(actor, instance_id, request)
        if waiting is None:
            until(lambda: not any(incarnation.is_connecting for incarnation in self.calls._incarnations.values()))
            waiting = self.calls.begin(actor, instance_id, request)
        return None if waiting is None else waiting()


@pytest.fixture
def actor() -> Iterator[EchoActor]:
    actor = EchoActor()
    yield actor
    actor.resume.set()


def test_calls_are_answered_by_one_connection(actor: EchoActor) -> None:
    caller = Caller(actor.direct.address)
    for request in (b"x", b"", bytes(1 << 20), b"y"):
        assert caller.ask(request) == 2 * request
    assert caller.looked_up == 1
    assert actor.direct._connected == 1


def test_calls_of_several_threads_have_a_connection_each(actor: EchoActor) -> None:
    caller = Caller(actor.direct.address)
    with ThreadPoolExecutor(16) as threads:
        requests = [str(number).encode() for number in range(2000)]
        # A caller that finds no connection while another is being made calls through Ray.
        for request, answer in zip(requests, threads.map(caller.ask, requests), strict=True):
            assert answer in (2 * request, None)
    assert caller.ask(b"x") == b"xx"


def test_a_call_that_fails_is_left_to_ray_and_does_not_end_the_others(
    actor: EchoActor, caplog: pytest.LogCaptureFixture
) -> None:
    caller = Caller(actor.direct.address)
    assert caller.ask(b"x") == b"xx"
    assert caller.ask(b"bad") is None
    until(lambda: "a call failed" in caplog.text)
    assert caller.ask(b"y") == b"yy"
    until(lambda: actor.direct._connected == 1)


def test_tasks_have_connections_for_as_long_as_they_like_however_many_callers_there_are(
    actor: EchoActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_calls, "_MOST", 1)
    caller, another = (connect(actor.direct.address, 5) for _ in range(2))
    caller.send(b"1")
    assert caller.receive() == b"11"
    another.send(b"2")
    with pytest.raises((EOFError, OSError)):
        another.receive()
    tasks = [connect(actor.direct.address, 5) for _ in range(3)]
    for number, task in enumerate(tasks):
        for part in (TASK, b"ab", b"", bytes(100_000), b"%d" % number):
            task.send(part)
    for number, task in enumerate(tasks):
        with task.own_socket() as connected:
            connected.shutdown(socket.SHUT_WR)
        assert task.receive() == b"%d" % number + bytes(100_000) + b"ba"
        task.close()
    caller.send(b"3")
    assert caller.receive() == b"33"


def test_callers_without_the_key_are_not_answered(actor: EchoActor) -> None:
    stranger = Caller(replace(actor.direct.address, key=bytes(32)))
    assert stranger.ask(b"x") is None
    with socket.create_connection((actor.direct.address.host, actor.direct.address.port)) as raw:
        raw.settimeout(30)
        raw.sendall(b"\0\0\0\1x" * 10)
        received = b""
        with suppress(ConnectionResetError):
            while part := raw.recv(1 << 16):
                received += part
    assert KEY not in received
    assert actor.requests == []
    assert Caller(actor.direct.address).ask(b"x") == b"xx"


def test_the_proof_of_one_caller_proves_nothing_to_another(actor: EchoActor) -> None:
    """An impostor sends two callers the same number, and sends each the proof of the other."""
    with Listener(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(2) as threads:
        address = DirectAddress("127.0.0.1", int(listening.address[1]), KEY)
        asking = [threads.submit(Caller(address).ask, b"x") for _ in range(2)]
        with listening.accept() as first, listening.accept() as second:
            for connection in (first, second):
                connection.send_bytes(bytes(32))
            (_, one_proof), (_, other_proof) = (
                (message[:32], message[32:]) for message in (first.recv_bytes(), second.recv_bytes())
            )
            first.send_bytes(other_proof)
            second.send_bytes(one_proof)
            for connection in (first, second):
                with pytest.raises((EOFError, OSError)):
                    connection.recv_bytes()
        assert [call.result(30) for call in asking] == [None, None]


def test_a_slow_store_actor_is_not_waited_for_again_and_its_answer_is_not_taken_for_another_one(
    actor: EchoActor,
) -> None:
    caller = Caller(actor.direct.address)
    assert caller.ask(b"x") == b"xx"
    caller.calls.patience_s = 0.1
    assert caller.ask_at_once(b"slow") is None
    for _ in range(3):
        assert caller.ask(b"x") is None
    assert caller.looked_up == 1
    actor.resume.set()
    caller.clock.later_s = sources._AGAIN_S
    for request in (b"x", b"y"):
        assert caller.ask(request) == 2 * request


def test_callers_do_not_wait_for_a_connection(actor: EchoActor) -> None:
    """Otherwise each unreachable store actor would cost a look-up of keys in all of them a second."""
    caller = Caller(actor.direct.address)
    resume, find = threading.Event(), caller.calls._address_of

    def slow(actor_name: str) -> DirectAddress | None:
        assert resume.wait(30)
        return find(actor_name)

    caller.calls._address_of = slow
    assert [caller.ask_at_once(b"x") for _ in range(3)] == [None] * 3
    resume.set()
    until(lambda: caller.ask_at_once(b"x") == b"xx")
    assert caller.looked_up == 1


#: What another program on the port of a dead store actor says first; nothing, such as of a stopped process, whose machine still accepts
#: connections for it; a number, and a made-up proof.
GREETINGS = [
    b"\0\0\0\5hello", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\0", b"",
    b"\0\0\0\x20" + bytes(32) + b"\0\0\0\x20" + bytes(32),
]  # fmt: skip


@pytest.mark.parametrize("greeting", GREETINGS)
def test_another_program_on_the_port_is_not_used(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with listening.accept()[0] as connection, suppress(ConnectionResetError):
                connection.sendall(greeting)
                connection.recv(1 << 10)

        threading.Thread(target=serve, daemon=True).start()
        caller = Caller(DirectAddress("127.0.0.1", listening.getsockname()[1], KEY))
        caller.calls.patience_s = 0.1 if greeting == b"" else caller.calls.patience_s
        assert caller.ask(b"x") is None
        assert caller.looked_up == 1


def test_signals_do_not_keep_a_caller_waiting(actor: EchoActor) -> None:
    """A profiler sends signals, for example: each restarts the kernel's time limit."""
    caller = Caller(actor.direct.address)
    assert caller.ask(b"x") == b"xx"
    caller.calls.patience_s = 0.3
    signals: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda *_: signals.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        started = time.monotonic()
        assert caller.ask(b"slow") is None
        assert signals
        assert time.monotonic() - started < 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_an_interrupted_caller_closes_nothing_of_others(actor: EchoActor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that is closed twice belongs to another file the second time."""
    limit = direct_calls._wait_at_most

    def interrupted(connection: Connection, *options: Any) -> None:
        limit(connection, *options)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    monkeypatch.setattr(direct_calls, "_wait_at_most", interrupted)
    with pytest.raises(KeyboardInterrupt):
        direct_calls.connect(actor.direct.address, 1.0)
    opened = [socket.socket() for _ in range(8)]
    gc.collect()
    assert all(opened_socket.getsockname() for opened_socket in opened)
    for opened_socket in opened:
        opened_socket.close()


def test_connections_of_store_actors_that_are_gone_are_closed_in_time(actor: EchoActor) -> None:
    caller = Caller(actor.direct.address)
    for number in range(3):
        assert caller.ask(b"x", "life", f"gone-{number}") == b"xx"
    assert sum(len(incarnation.spare) for incarnation in caller.calls._incarnations.values()) == 3
    caller.clock.later_s = sources._IDLE_S + 1
    assert caller.ask(b"x") == b"xx"
    assert [len(incarnation.spare) for incarnation in caller.calls._incarnations.values()] == [1]
    assert caller.ask(b"x", "another") == b"xx"


def test_silent_strangers_are_disconnected(actor: EchoActor) -> None:
    listening = actor.listening(proof_s=0.2)
    address = (listening.address.host, listening.address.port)
    silent = [socket.create_connection(address) for _ in range(150)]
    for connection in silent:
        connection.settimeout(30)
        while connection.recv(1 << 10):
            pass
        connection.close()
    until(lambda: listening._connected == 0)
    assert Caller(listening.address).ask(b"x") == b"xx"


def test_a_crowd_that_sends_its_proof_slowly_keeps_no_caller_out(actor: EchoActor) -> None:
    address = (actor.direct.address.host, actor.direct.address.port)
    proven = Caller(actor.direct.address)
    assert proven.ask(b"x") == b"xx"
    crowd = [socket.create_connection(address) for _ in range(3 * direct_calls._STRANGERS)]
    for connection in crowd:
        with suppress(OSError):
            connection.sendall(b"\0")
    assert proven.ask(b"y") == b"yy", "those who have proved themselves stay"
    assert Caller(actor.direct.address).ask(b"z") == b"zz", "who proves itself at once is let in"
    assert len(actor.direct._strangers) <= direct_calls._STRANGERS
    for connection in crowd:
        connection.close()


def test_a_stranger_who_sends_a_byte_now_and_then_has_the_time_of_one_proof(actor: EchoActor) -> None:
    listening = actor.listening(proof_s=0.5)
    with socket.create_connection((listening.address.host, listening.address.port)) as slow:
        slow.settimeout(30)
        slow.recv(1 << 10)
        with pytest.raises(OSError):  # noqa: PT012 - it is shut out in the middle
            for _ in range(300):
                slow.sendall(b"\0")
                time.sleep(0.1)


class Relay:
    """Relays the messages of two sides to each other, as `change` returns them."""

    def __init__(self, address: DirectAddress, change: Callable[[str, int, bytes], list[bytes]]) -> None:
        self._listening = Listener(("127.0.0.1", 0))
        self.address = replace(address, port=int(self._listening.address[1]))
        self._behind, self._change = (address.host, address.port), change
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        while True:
            caller, actor = self._listening.accept(), Client(self._behind)
            for name, giving, taking in (("caller", caller, actor), ("actor", actor, caller)):
                threading.Thread(target=self._one_way, args=(name, giving, taking), daemon=True).start()

    def _one_way(self, name: str, giving: Connection, taking: Connection) -> None:
        with suppress(EOFError, OSError):
            for number in itertools.count():
                for message in self._change(name, number, giving.recv_bytes()):
                    taking.send_bytes(message)


#: Messages of each side before its first authenticated one: the caller's proof; the actor's number and proof.
FIRST = {"caller": 1, "actor": 2}


def flipped(message: bytes) -> bytes:
    return message[:-1] + bytes([message[-1] ^ 1])


@pytest.mark.parametrize("who", FIRST)
@pytest.mark.parametrize("how", ["changed", "repeated", "of another connection", "cut"])
def test_a_message_that_was_changed_on_its_way_is_refused(actor: EchoActor, who: str, how: str) -> None:
    messages: list[bytes] = []

    def change(name: str, number: int, message: bytes) -> list[bytes]:
        if name != who or number < FIRST[who]:
            return [message]
        messages.append(message)
        match how:
            case "changed":
                return [flipped(message)]
            case "repeated":
                return [messages[0]]
            case "of another connection":
                return [message[:16] + b"zz" if len(messages) > 1 else message]
            case _:
                return [message[:-1]]

    relay = Relay(actor.direct.address, change)
    caller = Caller(relay.address)
    answers = [caller.ask(request) for request in (b"a", b"b")]
    honest = [b"aa", b"bb"]
    assert all(answer in (None, right) for answer, right in zip(answers, honest, strict=True))
    assert None in answers
    assert set(actor.requests) <= {b"a", b"b"}


def test_a_reflected_message_is_no_answer(actor: EchoActor) -> None:
    with Listener(("127.0.0.1", 0)) as listening:
        address = (actor.direct.address.host, actor.direct.address.port)

        def reflect() -> None:
            with listening.accept() as caller, Client(address) as store_actor:
                caller.send_bytes(store_actor.recv_bytes())
                store_actor.send_bytes(caller.recv_bytes())
                caller.send_bytes(store_actor.recv_bytes())
                with suppress(OSError, EOFError):
                    caller.send_bytes(caller.recv_bytes())

        threading.Thread(target=reflect, daemon=True).start()
        caller = Caller(replace(actor.direct.address, port=int(listening.address[1])))
        assert caller.ask(b"x") is None
    assert actor.requests == []


def test_where_there_is_no_connection_it_is_tried_again_after_a_while(actor: EchoActor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        nobody = DirectAddress("127.0.0.1", listening.getsockname()[1], KEY)
    caller = Caller(nobody)
    for _ in range(3):
        assert caller.ask(b"x") is None
    assert caller.looked_up == 1
    caller.address = actor.direct.address
    assert caller.ask(b"x") is None
    # Another incarnation of the store actor is tried at once.
    assert caller.ask(b"x", "second") == b"xx"
    assert caller.ask(b"x", "first") is not None
    caller.address = None
    assert caller.ask(b"x", "third") is None
    caller.address = actor.direct.address
    caller.clock.later_s = sources._AGAIN_S
    assert caller.ask(b"x", "third") == b"xx"


def test_a_process_that_was_forked_has_connections_of_its_own(actor: EchoActor) -> None:
    """Workers of a data loader, for example: on the parent's connections, each would take the answers of the other."""
    caller = Caller(actor.direct.address)
    assert caller.ask(b"x") == b"xx"
    (incarnation,) = caller.calls._incarnations.values()
    (connection,) = incarnation.spare
    reading, writing = os.pipe()
    is_held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with caller.calls._guard:
            is_held.set()
            done.wait(30)

    holding = threading.Thread(target=hold)
    holding.start()
    is_held.wait(30)
    child = os.fork()
    if child == 0:
        os.write(writing, caller.ask(b"child") or b"none")
        os._exit(0)
    done.set()
    holding.join()
    assert os.read(reading, 100) == b"childchild"
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    assert caller.ask(b"y") == b"yy"
    assert incarnation.spare == [connection]
    assert caller.looked_up == 1


def test_only_some_calls_are_worked_on_at_once(actor: EchoActor) -> None:
    callers = [Caller(actor.direct.address) for _ in range(direct_calls._AT_ONCE + 4)]
    with ThreadPoolExecutor(len(callers)) as threads:
        for caller in callers:
            caller.calls.patience_s = 30.0
        waiting = [threads.submit(caller.ask, b"slow") for caller in callers]
        until(lambda: actor.direct._connected == len(callers) and len(actor.requests) == direct_calls._AT_ONCE)
        time.sleep(0.2)
        assert len(actor.requests) == direct_calls._AT_ONCE
        actor.resume.set()
        assert [call.result(30) for call in waiting] == [b"slowslow"] * len(callers)


def test_a_connection_that_finds_no_thread_is_not_the_last(
    actor: EchoActor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(direct_calls, "_PAUSE_S", 0.01)
    start = actor.direct._start_thread

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    actor.direct._start_thread = no_thread  # type: ignore[method-assign]
    assert Caller(actor.direct.address).ask(b"x") is None
    until(lambda: "a connection was not taken" in caplog.text)
    actor.direct._start_thread = start  # type: ignore[method-assign]
    assert actor.direct._connected == 0
    assert Caller(actor.direct.address).ask(b"x") == b"xx"


def test_the_key_is_not_shown(actor: EchoActor) -> None:
    assert str(KEY) not in repr(actor.direct.address)
