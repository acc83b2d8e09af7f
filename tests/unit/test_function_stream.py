"""Shards of users' functions in continuous queries: what their workers get, in which order, and when results leave."""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Callable
from contextlib import closing
from functools import partial
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest

from coordinator.model.errors import FencedError, InvalidRequestError, OperationOutOfOrderError, StoreUnavailableError
from coordinator.model.identities import TaskIdentity
from coordinator.runtime.runtime import Runtime
from store_actors.connections.direct_calls import DirectServer
from store_actors.connections.epoch_stream import Beats, EpochServer
from store_actors.connections.function_stream import (
    PIECE,
    SEAL,
    Frame,
    FunctionConnection,
    WorkerConnection,
    read_frame,
    written,
)
from store_actors.connections.hand_over import HandOverServer, address_of, serve_remote_task
from store_actors.connections.sender import FrameSender
from store_actors.epochs.barrier import Marker
from store_actors.epochs.functions import FunctionRuns, FunctionShard
from store_actors.epochs.shard import Piece
from store_actors.messages.requests import ShardInput
from store_actors.serving.metrics import StoreMetrics
from tests.clocks import until
from tests.unit.aggregation_fleet import Link, counts, rows
from tests.unit.keyed_fleet import KeyedFleet


class Worker:
    """A worker's end in the store actor."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.errors: list[BaseException] = []
        self.fail = self.errors.append

    def take(self, rows: pa.Table) -> None:
        self.got.append(rows.num_rows)

    def seal(self, epoch: int, watermark_ms: int) -> None:
        self.got.append((epoch, watermark_ms))


class Calls:
    """What a worker calls, as far as it does; `told` are the errors of which it learned besides."""

    has_ended = False

    def __init__(self, tell_failed: Callable[[BaseException], None]) -> None:
        self.tell_failed = tell_failed

    def end(self) -> None:
        self.has_ended = True

    def filled_stores(self, task: TaskIdentity, names: tuple[str, ...]) -> tuple[str, ...]:
        return names[task.batch_id :]

    def session_call(self, session_id: str, store: str, method: str, args: tuple[Any, ...], writes: Any) -> Any:
        if method == "fail":
            raise InvalidRequestError("there is no such operation", session_id=session_id)
        return args[0], method, writes


def results(values: str) -> pa.Table:
    return pa.table({"v": list(values), "n": [1] * len(values)})


def shard_of_two_tasks() -> tuple[FunctionShard, Worker, Link, Link]:
    """Return a shard whose results leave by the first of two tasks."""
    shard, worker, links = FunctionShard(5, 2, 0, Runtime().threads), Worker(), (Link(), Link())
    for number, link in enumerate(links):
        shard.join(number, link)
    return shard, worker, *links


def test_a_worker_gets_pieces_and_ends_of_epochs_in_their_order() -> None:
    shard, worker, first, second = shard_of_two_tasks()
    shard.take(0, 5, Piece(rows("abc"), first))
    shard.mark(Marker(0, 5, 3, 70), first)
    shard.take(0, 6, Piece(rows("a"), first))
    shard.take(1, 5, Piece(rows("ab"), second))
    assert worker.got == [], "it is not there yet"
    shard.attach(worker)
    assert worker.got == [3, 2]
    shard.mark(Marker(1, 5, 2, 60), second)
    assert worker.got == [3, 2, (5, 70), 1], "a task that is ahead is held back"
    assert (first.ended, second.ended) == ([], [5])
    shard.emit(results("abc"))
    shard.emit(results("ab"))
    assert (first.answered, second.answered) == (3, 2)
    shard.end_epoch(5, results("z"))
    assert first.results == [{"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1}, {"z": 1}]
    assert first.ended == [5]
    assert second.results == []


def test_other_rows_than_were_sent_end_the_epoch() -> None:
    shard, worker, first, _ = shard_of_two_tasks()
    shard.attach(worker)
    shard.take(0, 5, Piece(rows("ab"), first))
    with pytest.raises(OperationOutOfOrderError, match="another number of rows"):
        shard.mark(Marker(0, 5, 3), first)


def test_all_of_a_run_learn_that_it_has_ended_and_none_joins_it() -> None:
    runs, link, worker = FunctionRuns(Runtime().threads), Link(), Worker()
    shards = runs.shards("s", "run", 0, 1, [0, 1], link)
    assert runs.shards("s", "run", 0, 1, [1], None)[1] is shards[1]
    shards[1].attach(worker)
    runs.end("s", "run", "the reason")
    runs.end("s", "run", "another one")
    for errors in (link.errors, worker.errors):
        assert ["the reason" in str(error) for error in errors] == [True]
    for use in (
        lambda: shards[0].join(0, link),
        lambda: shards[1].attach(worker),
        lambda: shards[1].take(0, 0, Piece(rows("a"), link)),
    ):
        with pytest.raises(FencedError, match="the reason"):
            use()


def test_what_a_worker_sends_answers_the_tasks_until_it_fails() -> None:
    store, remote = socket.socketpair()
    remote.settimeout(20)
    shard, _, first, _ = shard_of_two_tasks()
    connection, ended = WorkerConnection(FrameSender(store, Runtime()), Calls), list[str]()  # type: ignore[arg-type]
    thread = Thread(target=lambda: ended.append(connection.serve(shard, store.makefile("rb"))))
    thread.start()
    source = remote.makefile("rb")
    table = pa.table({"v": ["a"]})
    shard.take(0, 5, Piece(ShardInput((table,), 1), first))
    piece = read_frame(source)
    assert piece is not None
    assert (piece.kind, piece.rows) == (PIECE, table)
    remote.sendall(written(PIECE, 0, 0, results("a")))
    until(lambda: first.answered == 1)
    for number in range(2):
        shard.mark(Marker(number, 5, 1 - number, 9), first)
    seal = read_frame(source)
    assert seal is not None
    assert (seal.kind, seal.epoch, seal.watermark_ms) == (SEAL, 5, 9)
    remote.sendall(written(SEAL, 5, 9, pa.table({})))
    until(lambda: 5 in first.ended[1:])
    assert first.results[0] == counts(results("a"))
    remote.sendall(written(3, 0, 0, None)[:-4] + len(b"why").to_bytes(4, "big") + b"why")
    thread.join(20)
    assert ended == ["why"]
    remote.close()


@pytest.mark.parametrize("is_near", [True, False])
def test_a_worker_calls_the_store_actor_while_pieces_come(tmp_path: Path, is_near: bool) -> None:
    runtime, link, made = Runtime(), Link(), list[Calls]()
    functions = FunctionRuns(runtime.threads)

    def calls(tell_failed: Callable[[BaseException], None]) -> Calls:
        made.append(Calls(tell_failed))
        return made[-1]

    # No operator is served.
    epochs = EpochServer(None, functions, StoreMetrics(), runtime, lambda: None, calls, Beats(runtime))  # type: ignore[arg-type]
    sockets = f"{tmp_path}/private/"
    direct = None
    if is_near:
        HandOverServer(address_of(sockets, "host", 0), lambda *_: None, epochs.serve, runtime)
    else:
        serve = partial(serve_remote_task, serve_task=lambda *_: iter(()), serve_epochs=epochs.serve, runtime=runtime)
        server = DirectServer("127.0.0.1", bytes(32), lambda call: call, serve, runtime)
        direct = {"host": "127.0.0.1", "port": server.address.port, "key": base64.b64encode(bytes(32)).decode()}
    batch = {"run_id": "run", "batch_id": 5}
    asked = {"is_worker": True, "state": "s", "batch": batch, "tasks": 1, "shards": [0]}
    with closing(FunctionConnection(sockets, "host", 0, direct, asked)) as connection:
        task = KeyedFleet().request(0).task
        assert connection.call("filled_stores", task, ("a", "b")) == ("a", "b")
        (shard,) = functions.shards("s", "run", 5, 1, [0], link).values()
        shard.join(0, link)
        for values in ("ab", "c"):
            shard.take(0, 5, Piece(rows(values), link))
        keys, batch_of_keys = pa.table({"k": ["a", None]}), pa.record_batch({"k": [1]})
        asked_of_session = ("session 0", "default", "multi_get", (keys,), (("default", "put", (batch_of_keys,)),))
        assert connection.call("session_call", *asked_of_session) == [
            keys,
            "multi_get",
            [["default", "put", [batch_of_keys]]],
        ]
        pieces = [connection.next() for _ in range(2)]
        assert [piece.rows.num_rows for piece in pieces if piece is not None] == [2, 1]
        with pytest.raises(InvalidRequestError, match="no such operation"):
            connection.call("session_call", "session 0", "default", "fail", (), ())
        with pytest.raises(StoreUnavailableError, match="the run of the query has ended"):
            connection.call("forget_all")
        assert connection.next() is None
    until(lambda: made[0].has_ended)
    assert "malformed call: of forget_all" in str(link.errors[0])


def test_a_worker_whose_epoch_is_not_committed_is_told_and_one_of_a_batch_only_calls(tmp_path: Path) -> None:
    runtime, made = Runtime(), list[Calls]()

    def calls(tell_failed: Callable[[BaseException], None]) -> Calls:
        made.append(Calls(tell_failed))
        return made[-1]

    epochs = EpochServer(
        None,  # type: ignore[arg-type]
        FunctionRuns(runtime.threads),
        StoreMetrics(),
        runtime,
        lambda: None,
        calls,  # type: ignore[arg-type]
        Beats(runtime),
    )
    sockets = f"{tmp_path}/private/"
    HandOverServer(address_of(sockets, "host", 0), lambda *_: None, epochs.serve, runtime)
    task = KeyedFleet().request(0).task
    with closing(FunctionConnection(sockets, "host", 0, None, {"is_worker": True})) as connection:
        assert connection.call("filled_stores", task, ("a",)) == ("a",)
        made[0].tell_failed(StoreUnavailableError("the disk is full"))
        with pytest.raises(StoreUnavailableError, match="has ended"):
            connection.call("filled_stores", task, ("a",))
    with closing(FunctionConnection(sockets, "host", 0, None, {"is_worker": True})) as connection:
        connection.answer(Frame(PIECE, 0, 0, b""), results("a"))
        assert connection.next() is None, "it has no shard whose results these could be"
    until(lambda: all(one.has_ended for one in made))


def test_half_a_frame_is_none() -> None:
    whole = written(PIECE, 1, 2, results("ab"))
    for size in (0, 1, 20, 21, len(whole) - 1):
        assert read_frame(BytesIO(whole[:size])) is None
    frame = read_frame(BytesIO(whole))
    assert frame is not None
    assert frame.rows == results("ab")


def test_a_worker_does_not_talk_to_a_store_actor_of_another_release(tmp_path: Path) -> None:
    sockets = f"{tmp_path}/private/"
    address = Path(address_of(sockets, "host", 0))
    address.parent.mkdir(mode=0o700)
    for written_format in ("8", "10"):
        address.write_text(f"{os.getpid()} {written_format} cw==")
        with pytest.raises(StoreUnavailableError, match="is of another release"):
            FunctionConnection(sockets, "host", 0, None, {})
