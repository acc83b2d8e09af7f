"""Connections of tasks to store actors of other nodes: what both sides have to prove, and messages that were changed on their way."""

from __future__ import annotations

import base64
import io
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from coordinator.runtime.runtime import Runtime
from store_actors.connections.direct_calls import DirectMessages, DirectServer, MessageBytes
from store_actors.connections.hand_over import FORMAT
from tests.clocks import until
from tests.unit.jvm import Jvm

KEY = bytes(range(32))


class Store:
    """A store actor, which sends in one message what a task has sent before it ended that, backwards."""

    def __init__(self, written_format: str = FORMAT) -> None:
        self._format = written_format
        self.port = DirectServer("127.0.0.1", KEY, lambda call: call, self.serve, Runtime()).address.port

    def serve(self, messages: DirectMessages) -> None:
        messages.send(self._format.encode())
        with messages.own_socket() as task, io.BufferedReader(MessageBytes(messages)) as source:
            task.sendall(messages.sealed(source.read()[::-1]))


def connected(jvm: Jvm, port: int, key: bytes = KEY) -> Any:
    address = jvm.own("DirectAddress")("127.0.0.1", port, base64.b64encode(key).decode())
    assert base64.b64encode(key).decode() not in address.toString()
    return jvm.module("org.apache.spark.sql.statefleet.SealedChannel").connected(address, jvm.task)


def answer(jvm: Jvm, channel: Any, content: bytes) -> bytes:
    """Send something, and return as much of what comes."""
    buffers = jvm.named("java.nio.ByteBuffer")
    sent, received = buffers.wrap(content), buffers.allocate(len(content))

    def is_sent() -> bool:
        channel.write(sent)
        channel.flush()
        return not sent.hasRemaining() and bool(channel.isFlushed())

    until(is_sent)
    channel.socket().shutdownOutput()
    until(lambda: channel.read(received) < 0 or not received.hasRemaining())
    return bytes(received.array()[: received.position()])


@pytest.mark.parametrize("size", [1, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 5 << 20])
def test_all_that_is_sent_comes_in_its_order(jvm: Jvm, size: int) -> None:
    content = (b"0123456789" * (size // 10 + 1))[:size]
    assert answer(jvm, connected(jvm, Store().port), content) == content[::-1]


def test_neither_side_talks_to_one_without_the_key(jvm: Jvm) -> None:
    with pytest.raises(Py4JJavaError, match="cannot be reached from here"):
        connected(jvm, Store().port, bytes(32))
    store = Store()
    with pytest.raises(Py4JJavaError, match="is another one; nothing was sent to it"):
        connected(jvm, relay(store.port, lambda name, number: (name, number) == ("store", 1)))


def test_a_task_that_is_cut_off_in_a_crowd_tries_again(jvm: Jvm) -> None:
    store = Store()
    assert answer(jvm, connected(jvm, relay(store.port, lambda *_: False, refused=2)), b"abc") == b"cba"


@pytest.mark.parametrize("written_format", ["8", "10", "90"])
def test_a_store_actor_of_another_release_is_refused(jvm: Jvm, written_format: str) -> None:
    with pytest.raises(Py4JJavaError, match="another release of Statefleet"):
        connected(jvm, Store(written_format).port)


def test_a_message_that_was_changed_on_its_way_is_refused(jvm: Jvm) -> None:
    with pytest.raises(Py4JJavaError, match="not the next one that the store actor sent"):
        answer(jvm, connected(jvm, relay(Store().port, lambda name, number: (name, number) == ("store", 3))), b"abc")
    # The store actor ends the connection.
    port = relay(Store().port, lambda name, number: (name, number) == ("task", 2))
    assert answer(jvm, connected(jvm, port), b"abc") == b""


def relay(port: int, is_changed: Any, refused: int = 0) -> int:
    """Return where the messages of a store actor and a task are passed on, some of them with another last bit.

    Parameters
    ----------
    refused
        How many connections are ended before.
    """
    listening = Listener(("127.0.0.1", 0))

    def run() -> None:
        for _ in range(refused):
            listening.accept().close()
        task, store = listening.accept(), Client(("127.0.0.1", port))
        for name, giving, taking in (("task", task, store), ("store", store, task)):
            threading.Thread(target=pass_on, args=(name, giving, taking), daemon=True).start()

    def pass_on(name: str, giving: Connection, taking: Connection) -> None:
        for number, message in enumerate(messages(giving)):
            with suppress(OSError):
                taking.send_bytes(message[:-1] + bytes([message[-1] ^ is_changed(name, number)]))
        with suppress(OSError), socket.socket(fileno=os.dup(taking.fileno())) as ended:
            ended.shutdown(socket.SHUT_WR)

    threading.Thread(target=run, daemon=True).start()
    return int(listening.address[1])


def messages(giving: Connection) -> Iterator[bytes]:
    with suppress(EOFError, OSError):
        while True:
            yield giving.recv_bytes()
