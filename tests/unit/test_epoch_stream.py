"""The frames between tasks of a continuous query and a store actor's process."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from threading import Event, Thread
from typing import Any

import pyarrow as pa
import pytest

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import StateStoreError
from coordinator.model.identities import TaskIdentity
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import Runtime, Threads
from store_actors.client.operator_task import OperatorTask
from store_actors.connections import epoch_stream
from store_actors.connections.epoch_stream import Beats, EpochServer, EpochStream
from store_actors.connections.sender import FrameSender
from store_actors.engine import unsafe_rows
from store_actors.epochs.functions import FunctionRuns
from store_actors.epochs.runs import EpochRuns, RunRequest
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.partitions import Partitions
from tests.clocks import until
from tests.unit.aggregation_fleet import SCHEMA, AggregationFleet, Link

SENT = pa.schema([("v", pa.string())])
BATCH = {"query_id": "query", "run_id": "run", "batch_id": 0, "late_ms": 0, "evict_ms": 0, "time_ms": None}
NEVER = -(2**63)


class Task:
    """A task's side of a connection to a server; `request` has what is not as of other tasks."""

    def __init__(self, server: EpochServer, number: int, **request: Any) -> None:
        self._socket, other = socket.socketpair()
        self._socket.settimeout(20)
        self.answers = self._socket.makefile("rb")
        facts = {
            "batch": BATCH, "attempt": 0, "executor": "host:1", "task": number, "tasks": 2, "shards": [0],
            "unsafe_rows": True, "unsafe_results": True, **request,
        }  # fmt: skip
        operator = OperatorTask(SCHEMA, StateMetadata("s", "", 1, "update", SCHEMA)).to_json().encode()

        def serve() -> None:
            # An error was sent to the task.
            with (
                suppress(StateStoreError, ValueError, OSError, EOFError),
                other,
                other.makefile("rb") as source,
            ):
                server.serve(facts, operator, source, FrameSender(other, server.runtime))

        self._thread = Thread(target=serve, daemon=True)
        self._thread.start()
        stream = BytesIO()
        pa.ipc.new_stream(stream, SENT).close()
        self.send(stream.getvalue())

    def send(self, content: bytes) -> None:
        self._socket.sendall(content)

    def piece(self, values: str, epoch: int = 0, shard: int = 0, rows: int | None = None) -> None:
        self.piece_of(list(values), epoch, shard, rows)

    def piece_of(self, values: list[str], epoch: int = 0, shard: int = 0, rows: int | None = None) -> None:
        routed = pa.record_batch({"v": pa.array(values, pa.string()), "route": pa.array([0] * len(values), pa.int32())})
        content = b"".join(block.tobytes() for _, block in unsafe_rows.blocks(routed))
        head = struct.pack(">biqii", 1, shard, epoch, len(values) if rows is None else rows, len(content))
        self.send(head + content)

    def mark(self, rows: int, epoch: int = 0) -> None:
        self.send(struct.pack(">bqqqiiq", 2, epoch, NEVER, 5_000_000, 1, 0, rows))

    def _read(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.answers.read(struct.calcsize(form)))

    def answered(self) -> tuple[int, dict[str, int]]:
        """Return the number of rows that are answered, and the counts that were emitted for them."""
        kind, answered, rows, size = self._read(">biii")
        assert kind == 1
        schema = pa.schema([("v", pa.string()), ("n", pa.int64())])
        emitted = (
            unsafe_rows.decoded(self.answers.read(size), schema, 0) if size else pa.RecordBatch.from_pylist([], schema)
        )
        assert emitted.num_rows == rows
        return answered, {row["v"]: row["n"] for row in emitted.to_pylist()}

    def has_answers(self) -> bool:
        return bool(select.select([self._socket], [], [], 0)[0])

    def marked(self) -> int:
        kind, epoch = self._read(">bq")
        assert kind == 2
        return int(epoch)

    def told(self) -> str:
        """Return the error that the task is told, which then ends the connection."""
        kind, size = self._read(">bi")
        assert kind == 3
        return self.answers.read(size).decode()

    def failed(self) -> str:
        text = self.told()
        assert self.answers.read() == b"", "nothing follows an error"
        return text

    def close(self) -> None:
        self.answers.close()
        self._socket.close()
        self._thread.join(20)
        assert not self._thread.is_alive()


class Served:
    def __init__(self) -> None:
        self.fleet, runtime = AggregationFleet(), Runtime()
        partitions = Partitions(self.fleet.objects, self.fleet.coordinator)
        runs = EpochRuns(
            partitions,
            lambda tasks, _: [self.fleet.coordinator.lease(task, "a") for task in tasks],
            lambda _: True,
            runtime,
        )
        self.metrics = StoreMetrics()
        self.server = EpochServer(
            runs, FunctionRuns(runtime.threads), self.metrics, runtime, lambda: None, None, Beats(runtime)
        )
        self.tasks: list[Task] = []

    def task(self, number: int, **request: Any) -> Task:
        self.tasks.append(Task(self.server, number, **request))
        return self.tasks[-1]


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    for task in served.tasks:
        task.close()


def test_pieces_of_two_tasks_become_one_version(served: Served) -> None:
    first, second = served.task(0), served.task(1)
    first.piece("aab")
    assert first.answered() == (3, {"a": 2, "b": 1})
    second.piece("a")
    assert second.answered() == (1, {})
    assert first.answered() == (0, {"a": 3}), "results of a shard leave by one task"
    second.mark(1)
    assert second.marked() == 0
    second.piece("b", epoch=1)
    first.piece("a")
    assert first.answered() == (1, {"a": 4})
    first.mark(4)
    assert first.marked() == 0, "once the epoch of the other task has ended"
    assert first.answered() == (0, {"b": 2})
    assert second.answered() == (1, {})
    metrics = served.metrics
    assert (metrics.pieces, metrics.piece_rows, metrics.latency_s) == (4, 6, 0.005)
    assert metrics.folding_s > 0
    until(lambda: len(served.fleet.deltas()) == 1)


def test_rows_of_other_types_are_sent_as_arrow_has_them(served: Served) -> None:
    task = served.task(0, unsafe_rows=False, unsafe_results=False)
    for _ in range(2):
        content = BytesIO()
        with pa.ipc.new_stream(content, SENT) as stream:
            for values in ("ab", "a"):
                stream.write_batch(pa.record_batch({"v": list(values)}, SENT))
        size = len(content.getvalue())
        task.send(struct.pack(">biqii", 1, 0, 0, 3, size) + content.getvalue())
    for times in (1, 2):
        kind, answered, rows, size = struct.unpack(">biii", task.answers.read(13))
        emitted = pa.ipc.open_stream(task.answers.read(size)).read_all().to_pylist()
        assert (kind, answered, rows) == (1, 3, 2)
        assert sorted((row["v"], row["n"]) for row in emitted) == [("a", 2 * times), ("b", times)]


def test_the_task_by_which_results_leave_may_join_last(served: Served) -> None:
    second = served.task(1)
    second.piece("ab")
    second.piece("a")
    until(lambda: served.metrics.pieces == 2)
    assert not second.has_answers()
    first = served.task(0)
    assert [second.answered() for _ in range(2)] == [(2, {}), (1, {})]
    assert [first.answered() for _ in range(2)] == [(0, {"a": 1, "b": 1}), (0, {"a": 2})]


def test_a_slow_sink_stops_the_tasks_of_its_shards_and_gets_all_in_order(served: Served) -> None:
    first, second = served.task(0), served.task(1)
    wide = [f"{number:05}" + "x" * 1000 for number in range(200)]
    for _ in range(20):
        # The answers do not fit into the connection, and nobody reads them.
        first.piece_of(wide)
    until(lambda: served.metrics.pieces == 20)
    second.piece("a")
    until(lambda: served.metrics.pieces == 21)
    assert not second.has_answers()
    for times in range(1, 21):
        assert first.answered() == (200, dict.fromkeys(wide, times))
    assert first.answered() == (0, {"a": 1})
    assert second.answered() == (1, {})


@pytest.mark.parametrize(
    ("send", "why"),
    [
        (lambda task: task.piece("ab", rows=3), "3 rows were sent, and 2 came"),
        (lambda task: task.piece(""), "it has 0 bytes"),
        (lambda task: task.piece("a", shard=7), "shard 7"),
        (lambda task: task.piece("a", epoch=2), "an epoch that it had ended, or that has not begun"),
        (lambda task: task.mark(1), "another number of rows came"),
        (lambda task: task.send(b"\x09"), "its kind is 9"),
        (lambda task: task.send(struct.pack(">biqii", 1, 0, 0, 1, 16) + b"\xff" * 16), "malformed row block"),
    ],
    ids=["rows", "empty", "shard", "epoch", "marker", "kind", "bytes"],
)
def test_what_is_malformed_ends_the_run_and_nothing_of_it_counts(served: Served, send: Any, why: str) -> None:
    first, second = served.task(0), served.task(1)
    second.piece("a")
    second.answered()
    first.answered()
    send(first)
    assert why in first.failed()
    second.piece("a")
    assert "epoch does not count" in second.failed()
    assert served.fleet.deltas() == []


def test_a_task_that_ends_in_the_middle_of_a_frame_ends_the_run(served: Served) -> None:
    first, second = served.task(0), served.task(1)
    second.piece("a")
    second.answered()
    first.send(b"\1\0\0")
    first.close()
    second.piece("a")
    assert "a task of the run has ended" in second.failed()


def test_a_run_that_may_not_have_its_shards_is_told_why(served: Served) -> None:
    served.fleet.apply(0, "a")
    task = served.task(0, batch=BATCH | {"query_id": "another"})
    assert "belongs to another query" in task.failed()


def test_tasks_with_nothing_to_send_learn_that_the_commit_of_their_epoch_failed(served: Served) -> None:
    first, second = served.task(0), served.task(1)
    served.fleet.coordinator.lose_answers = 1
    first.mark(0)
    second.mark(0)
    assert (first.marked(), second.marked()) == (0, 0)
    assert "the answer was lost" in first.told()
    assert "the answer was lost" in second.told()


def test_tasks_with_nothing_to_send_learn_that_a_newer_run_has_begun(served: Served) -> None:
    first = served.task(0)
    first.piece("a")
    first.answered()
    newer = served.task(0, batch=BATCH | {"run_id": "newer"})
    newer.piece("ab")
    assert newer.answered() == (2, {"a": 1, "b": 1})
    assert "a newer run of the query has begun" in first.told()


def test_a_task_that_comes_as_its_run_ends_leaves_no_shard_open() -> None:
    fleet, runtime, may_lease = AggregationFleet(), Runtime(), Event()
    partitions = Partitions(fleet.objects, fleet.coordinator)

    def lease(tasks: Sequence[TaskIdentity], _: StateMetadata) -> list[LeaseGrant]:
        assert may_lease.wait(20)
        return [fleet.coordinator.lease(task, "a") for task in tasks]

    runs = EpochRuns(partitions, lease, lambda _: True, runtime)
    task = TaskIdentity("s", "query", "run", 0, 0, 0, "host:1")
    run = RunRequest(StateMetadata("s", "query", 1, "update", SCHEMA), SCHEMA, {0: task}, (0, 3))
    may_lease.set()
    of_first, of_second = runs.join(run, Link()), runs.join(run, Link())
    runs.leave(run, of_first, "it is lost")
    may_lease.clear()
    late = ThreadPoolExecutor(1).submit(runs.join, run, Link())
    until(lambda: late.running())
    runs.leave(run, of_second, "it is lost, too")
    may_lease.set()
    partition = partitions.cache.of(fleet.coordinator.lease(task, "a").lease.store_id)
    runs.leave(run, late.result(20), "it learns that")
    assert partition.writer is None


class Noting:
    """A shard that notes what is asked of it."""

    def __init__(self, number: int, asked: list[str]) -> None:
        self._number, self._asked = number, asked

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self._asked.append(f"{name} {self._number}")


def test_no_commit_takes_turns_with_the_seal_of_another_shard() -> None:
    asked: list[str] = []
    shards: Any = {number: Noting(number, asked) for number in (0, 1)}
    marker = struct.pack(">bqqqi", 2, 0, NEVER, 0, 2) + struct.pack(">iqiq", 0, 0, 1, 0)
    task: Any = None
    stream = EpochStream(0, task, lambda _: pytest.fail("no rows were sent"), shards, StoreMetrics(), lambda: 0.0)
    stream.take_all(BytesIO(marker))
    assert asked == ["mark 0", "mark 1", "seal 0", "seal 1", "commit 0", "commit 1"]


def test_a_task_without_rows_is_sent_something_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_stream, "_BEAT_S", 0.01)
    served = Served()
    task = served.task(0)
    assert [task.answered() for _ in range(3)] == [(0, {})] * 3
    task.close()


class NoThreads(Threads):
    """Threads of a process that can start no more."""

    def start(self, target: Any, name: str) -> None:
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_frame_that_cannot_be_sent_ends_the_connection_and_nothing_follows_it(is_lost: bool) -> None:
    here, there = socket.socketpair()
    sender, called = FrameSender(here, Runtime(threads=NoThreads())), list[int]()
    if is_lost:
        there.close()
        sender.send(b"lost", lambda: called.append(0))
    else:
        with pytest.raises(RuntimeError, match="can't start"):
            sender.send(bytes(1 << 24), lambda: called.append(0))
    sender.send(b"next", lambda: called.append(1))
    sender.finish()
    assert 1 not in called
    if not is_lost:
        assert {*there.makefile("rb").read()} == {0}, "the beginning of the frame, and no more"
