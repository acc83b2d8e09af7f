"""Tasks that hand rows over, in a JVM without a query, to a real or a strange store actor: what they send, take and refuse."""

from __future__ import annotations

import base64
import hmac
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError

from coordinator.runtime.runtime import Runtime
from store_actors.client.operator_task import HandedOver
from store_actors.connections.direct_calls import DirectServer
from store_actors.connections.hand_over import FORMAT, HandOverServer, address_of, serve_remote_task
from tests.unit.jvm import PACKAGE, Jvm
from tests.unit.no_epochs import no_epochs

HOST = "10.0.0.1"
#: Bytes of a block of a request, and rows of a number and a route that it holds, after its length.
BLOCK = 1 << 18
FULL = (BLOCK - 4) // 24
#: Rows of a record batch.
ARROW = 1 << 16
#: Bytes of a request that are kept, to be sent again.
KEPT = 1 << 22
ANSWERED_NOTHING = b"\1" + bytes(16)
KEY = bytes(range(32))


def failed(text: str) -> bytes:
    return b"\2" + len(text).to_bytes(4) + text.encode()


def echo(work: HandedOver) -> Iterator[pa.RecordBatch]:
    """Yield the rows that the shards get."""
    for rows in work.rows:
        values = rows["v"].to_pylist()
        assert values == list(range(values[0], values[0] + len(rows))) if values else True
        yield from rows.to_batches(max_chunksize=5000)


@pytest.fixture
def sockets() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield f"{folder}/statefleet-0-session/fleet-"


@pytest.fixture
def server(sockets: str) -> HandOverServer:
    return HandOverServer(address_of(sockets, HOST), echo, no_epochs, Runtime())


class Handed:
    """A task of a JVM, with its rows."""

    def __init__(
        self,
        jvm: Jvm,
        sockets: str,
        counts: list[int],
        *,
        second: str = "",
        texts: Sequence[bytes] = (),
        port: int | None = None,
    ) -> None:
        self.shards = list(range(0, 2 * len(counts), 2))
        routes = list(jvm.own("Shards").routes(2 * len(counts)))
        columns = {"v": "bigint", **({"second": second} if second else {})}
        of_routes = {routes[shard]: count for shard, count in zip(self.shards, counts, strict=True)}
        rows, kind = jvm.rows({**columns, "__route": "int"}, of_routes, texts), jvm.struct(columns)
        of_tasks = jvm.gateway.new_array(jvm.gateway.jvm.int, 1, len(counts))
        for index, shard in enumerate(self.shards):
            of_tasks[0][index] = shard
        self.sent = jvm.named("org.apache.spark.util.CollectionAccumulator")()
        work = jvm.own("HandOver")(
            sockets,
            b"{}",
            "{}",
            of_tasks,
            "{}",
            self._places(jvm, port),
            jvm.ints(routes),
            kind,
            kind,
            "UTC",
            self.sent,
        )
        self.context = jvm.new_task()
        self.emitted = jvm.own("HandOverTask")(work, 0, rows, self.context, HOST)

    def _places(self, jvm: Jvm, port: int | None) -> Any:
        """Return where the shards are: on this node, or at a port of another machine."""
        option = jvm.named("scala.Option")
        places = jvm.gateway.new_array(option, 1)
        direct = None if port is None else jvm.own("DirectAddress")("127.0.0.1", port, base64.b64encode(KEY).decode())
        host = HOST if port is None else "10.0.0.2"
        places[0] = option.apply(jvm.own("Place")(host, 0, option.empty(), option.apply(direct)))
        return places

    def rows_sent(self) -> dict[int, int]:
        """Return the number of rows that the driver is told of each shard."""
        return {int(pair[0]): int(pair[1]) for pair in self.sent.value()}


@pytest.fixture
def handed(jvm: Jvm, sockets: str) -> Iterator[Callable[..., Handed]]:
    made: list[Handed] = []

    def make(counts: list[int], **options: Any) -> Handed:
        made.append(Handed(jvm, sockets, counts, **options))
        return made[-1]

    yield make
    for task in made:
        task.context.markTaskCompleted(jvm.named("scala.Option").empty())


def count(task: Handed) -> int:
    return int(task.emitted.size())


@pytest.mark.parametrize(
    "counts",
    [
        [0], [1], [FULL - 1], [FULL], [FULL + 1], [2 * FULL], [0, 0, 0], [1, 0, 1], [FULL, 0, FULL + 1],
        [KEPT // 24 - 1], [KEPT // 24 + FULL + 1, 1], [5 * KEPT // 24, 0, 3],
    ],
)  # fmt: skip
def test_every_row_goes_there_and_comes_back(
    server: HandOverServer, handed: Callable[..., Handed], counts: list[int]
) -> None:
    task = handed(counts)
    assert count(task) == sum(counts)
    assert task.rows_sent() == dict(zip(task.shards, counts, strict=True))


@pytest.fixture
def port() -> int:
    """Return the port of a store actor of another machine."""
    serve = partial(serve_remote_task, serve_task=echo, serve_epochs=no_epochs, runtime=Runtime())
    return DirectServer("127.0.0.1", KEY, lambda call: call, serve, Runtime()).address.port


@pytest.mark.parametrize(
    "counts", [[0], [1], [FULL + 1], [0, 1, 0], [KEPT // 24 + FULL + 1, 1], [5 * KEPT // 24, 0, 3]]
)
@pytest.mark.parametrize("second", ["", "decimal(20,0)"])
def test_rows_go_to_a_store_actor_of_another_machine_and_come_back(
    port: int, handed: Callable[..., Handed], counts: list[int], second: str
) -> None:
    task = handed(counts, port=port, second=second)
    assert count(task) == sum(counts)
    assert task.rows_sent() == dict(zip(task.shards, counts, strict=True))


def test_an_error_of_a_store_actor_of_another_machine_is_told(handed: Callable[..., Handed]) -> None:
    def fails(work: HandedOver) -> Iterator[pa.RecordBatch]:
        yield from next(work.rows).to_batches()
        raise ValueError("it does not suit")

    serve = partial(serve_remote_task, serve_task=fails, serve_epochs=no_epochs, runtime=Runtime())
    port = DirectServer("127.0.0.1", KEY, lambda call: call, serve, Runtime()).address.port
    with pytest.raises(Py4JJavaError, match="ValueError: it does not suit"):
        count(handed([3, 3], port=port))


def test_a_task_of_another_machine_without_an_address_is_refused(jvm: Jvm, sockets: str) -> None:
    addresses, option = jvm.module(f"{PACKAGE}.StoreActorAddress"), jvm.named("scala.Option")
    with pytest.raises(Py4JJavaError, match=r"on another machine \(10\.0\.0\.1\) than a store actor \(10\.0\.0\.2\)"):
        addresses.holder(sockets, jvm.own("Place")("10.0.0.2", 0, option.empty(), option.empty()), HOST)


def test_a_task_takes_the_socket_of_its_own_node_or_else_of_its_machine_or_else_an_address(
    jvm: Jvm, sockets: str
) -> None:
    addresses, option = jvm.module(f"{PACKAGE}.StoreActorAddress"), jvm.named("scala.Option")
    place = jvm.own("Place")("10.0.0.2", 1, option.empty(), option.apply(jvm.own("DirectAddress")("10.0.0.2", 1, "")))

    def found() -> tuple[str, int, bool]:
        at = addresses.nearest(sockets, option.apply(place), HOST, "{}", False).at()
        return at.host(), at.actor(), at.direct().isEmpty()

    Path(sockets).parent.mkdir()
    assert found() == ("10.0.0.2", 1, False)
    Path(address_of(sockets, "10.0.0.2")).touch()
    assert found() == ("10.0.0.2", 1, True)
    Path(address_of(sockets, HOST)).touch()
    assert found() == (HOST, 1, True), "it takes rows of all shards"
    assert not addresses.holder(sockets, place, HOST).at().direct().isEmpty(), "another one has the shard"


@pytest.mark.parametrize(
    ("counts", "second"),
    [
        *(((counts, "decimal(20,0)")) for counts in ([0], [1], [ARROW - 1, 1], [ARROW], [ARROW + 1, 0, 2])),
        ([ARROW + 1], "interval day to second"),
        ([ARROW + 1], "interval year to month"),
        ([ARROW + 1], "struct<i: interval day to second>"),
    ],
)
def test_rows_that_spark_has_elsewhere_in_memory_go_as_arrow(
    server: HandOverServer, handed: Callable[..., Handed], counts: list[int], second: str
) -> None:
    task = handed(counts, second=second)
    assert count(task) == sum(counts)
    assert task.rows_sent() == dict(zip(task.shards, counts, strict=True))


@pytest.mark.parametrize(
    "size", [0, 1, 8, 63, 64, 65, BLOCK - 53, BLOCK - 52, BLOCK - 51, BLOCK - 44, BLOCK, 3 * BLOCK]
)
def test_a_text_of_any_size_goes_there_and_comes_back(
    server: HandOverServer, handed: Callable[..., Handed], size: int
) -> None:
    task = handed([3], second="string", texts=[b"before", b"x" * size, b"after"])
    texts = [str(task.emitted.next().getUTF8String(1).toString()) for _ in range(3)]
    assert texts == ["before", "x" * size, "after"]
    assert not task.emitted.hasNext()


# -- strange store actors


class Strange:
    """A store actor's socket that takes connections one by one, and does with each what the next of some functions does."""

    def __init__(
        self, sockets: str, *serve: Callable[[socket.socket], None], facts: str = f"{{pid}} {FORMAT} cw=="
    ) -> None:
        address = Path(address_of(sockets, HOST))
        address.parent.mkdir(mode=0o700)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"{address}.{os.getpid()}")
        self._listening.listen()
        # The secret is b"s".
        address.write_text(facts.format(pid=os.getpid()))
        self._serve = serve
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for serve in self._serve:
            task, _ = self._listening.accept()
            with task, suppress(OSError):
                serve(task)


def proved(task: socket.socket, secret: bytes = b"s") -> None:
    task.sendall(hmac.digest(secret, task.recv(32, socket.MSG_WAITALL), "sha256"))


def until_end(task: socket.socket) -> bytes:
    received = bytearray()
    while piece := task.recv(1 << 20):
        received += piece
    return bytes(received)


def answers(answer: bytes) -> Callable[[socket.socket], None]:
    def serve(task: socket.socket) -> None:
        proved(task)
        until_end(task)
        task.sendall(answer)

    return serve


def lost_at_once(task: socket.socket) -> None:
    proved(task)
    task.recv(10)


def test_a_request_is_sent_again_if_the_store_actor_was_lost(sockets: str, handed: Callable[..., Handed]) -> None:
    received: list[bytes] = []

    def second(task: socket.socket) -> None:
        proved(task)
        received.append(until_end(task))
        task.sendall(ANSWERED_NOTHING)

    Strange(sockets, lost_at_once, second)
    assert count(handed([2])) == 0
    assert b'"shards": [0]' in received[0]


def test_a_large_request_is_not_sent_again(sockets: str, handed: Callable[..., Handed]) -> None:
    def takes_some(task: socket.socket) -> None:
        proved(task)
        for _ in range(6):
            task.recv(1 << 20, socket.MSG_WAITALL)

    Strange(sockets, takes_some)
    with pytest.raises(Py4JJavaError, match="was lost in the middle of a batch"):
        count(handed([3 * KEPT // 24]))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "was lost in the middle of a batch"),
        (b"\7", "they begin with 7"),
        (b"\1" + bytes(15), "was lost in the middle of a batch"),
        (b"\1" + (1).to_bytes(8) + bytes(8), "1 rows in 0 bytes were sent, and 0 in 0 came"),
        (b"\1" + bytes(8) + (1).to_bytes(8), "0 rows in 1 bytes were sent, and 0 in 0 came"),
        (ANSWERED_NOTHING + b"x", "something follows their end"),
        (b"\3" + (16).to_bytes(4) + bytes(16) + bytes(4) + ANSWERED_NOTHING, "0 rows in 0 bytes were sent, and 1 in 24 came"),
        (b"\3" + (-1).to_bytes(4, signed=True), "a block of -1 bytes is among them"),
        (b"\3" + (8).to_bytes(4) + bytes(8), "a row of 16 bytes is among them"),
        (b"\3" + bytes(4) + b"\5", "something else follows them"),
        (failed("what went wrong"), "what went wrong"),
        (failed("what went wrong")[:-1], "was lost in the middle of a batch"),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_whole_is_refused(
    sockets: str, handed: Callable[..., Handed], answer: bytes, message: str
) -> None:
    Strange(sockets, answers(answer))
    with pytest.raises(Py4JJavaError, match=message):
        # Too many to be sent again, where no answer comes.
        count(handed([2 * KEPT // 24]))


@pytest.mark.parametrize("size", [0, 64])
def test_a_row_that_says_it_is_of_another_size_is_refused(
    sockets: str, handed: Callable[..., Handed], size: int
) -> None:
    Strange(sockets, answers(b"\3" + (8).to_bytes(4) + struct.pack("<Q", size)))
    with pytest.raises(Py4JJavaError, match=f"a row of {size} bytes is among them"):
        count(handed([1], second="string", texts=[b"x"]))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ANSWERED_NOTHING, "they ended before all rows of the task's shards were sent"),
        # Such as of a function that the store actor's release does not have.
        (failed("ValueError: it does not suit"), "ValueError: it does not suit"),
    ],
)
def test_an_answer_before_all_rows_were_sent_is_refused(
    sockets: str, handed: Callable[..., Handed], answer: bytes, message: str
) -> None:
    def hasty(task: socket.socket) -> None:
        proved(task)
        task.recv(10)
        task.sendall(answer)
        time.sleep(5)

    Strange(sockets, hasty)
    with pytest.raises(Py4JJavaError, match=message):
        count(handed([3 * KEPT // 24]))


def test_another_process_gets_nothing(sockets: str, handed: Callable[..., Handed]) -> None:
    received: list[bytes] = []

    def other(task: socket.socket) -> None:
        proved(task, b"another")
        received.append(until_end(task))

    Strange(sockets, other)
    with pytest.raises(
        Py4JJavaError, match="the process that answers in the place of this node's store actor is another one"
    ):
        count(handed([2]))
    assert not b"".join(received)


@pytest.mark.parametrize("facts", ["{pid}", "{pid} 2 cw==", "{pid} 5 cw==", "{pid} 12 30 2"])
def test_another_release_is_refused(sockets: str, handed: Callable[..., Handed], facts: str) -> None:
    """Also one that wrote no format, or other facts."""
    Strange(sockets, facts=facts)
    with pytest.raises(Py4JJavaError, match="the fleet was started by another release"):
        count(handed([2]))


def test_a_folder_that_others_can_enter_is_refused(
    sockets: str, server: HandOverServer, handed: Callable[..., Handed]
) -> None:
    Path(sockets).parent.chmod(0o755)
    with pytest.raises(Py4JJavaError, match=r"is not this user's alone; .*mode rwxr-xr-x"):
        count(handed([2]))


def test_a_link_in_the_place_of_the_folder_is_refused(
    sockets: str, server: HandOverServer, handed: Callable[..., Handed]
) -> None:
    folder = Path(sockets).parent
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))
    with pytest.raises(Py4JJavaError, match="it is no folder"):
        count(handed([2]))


def test_a_process_that_does_not_say_who_it_is_is_given_up(jvm: Jvm, sockets: str) -> None:
    Strange(sockets, lambda task: time.sleep(10))
    address = jvm.named("java.nio.file.Paths").get(
        address_of(sockets, HOST), jvm.gateway.new_array(jvm.gateway.jvm.String, 0)
    )
    with pytest.raises(Py4JJavaError, match="did not say in time who it is"):
        jvm.module(f"{PACKAGE}.Connection").near(address, jvm.task, 1)


def test_a_task_waits_for_a_store_actor_that_says_nothing_until_it_is_cancelled(
    sockets: str, handed: Callable[..., Handed]
) -> None:
    def silent(task: socket.socket) -> None:
        proved(task)
        until_end(task)
        time.sleep(30)

    Strange(sockets, silent)
    task = handed([2])
    begun = time.monotonic()
    threading.Timer(2, lambda: task.context.markInterrupted("cancelled")).start()
    with pytest.raises(Py4JJavaError, match="TaskKilledException"):
        count(task)
    assert 2 <= time.monotonic() - begun < 10


def test_a_lost_store_actor_is_known_to_a_driver_that_has_not_loaded_the_jar(jvm: Jvm) -> None:
    """Spark's scheduler reads why a task failed with its own classes, and else says that it does not know."""
    sent = jvm.named("java.io.ByteArrayOutputStream")()
    jvm.named("java.io.ObjectOutputStream")(sent).writeObject(jvm.own("Lost")("has gone", None, "of another node"))
    source = jvm.named("java.io.ByteArrayInputStream")(sent.toByteArray())
    error = jvm.named("java.io.ObjectInputStream")(source).readObject()
    assert error.getClass().getName() == "java.io.IOException"
    assert "of another node has gone" in error.getMessage()
