"""Sessions on keyed stores: versions, commits of several stores together, takeovers, replays, schema evolution; no Ray."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from types import FrameType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.errors import (
    CorruptStateError,
    FencedError,
    InvalidRequestError,
    OperationOutOfOrderError,
    StateMismatchError,
    StorageUnavailableError,
    StoreUnavailableError,
    VersionNotFoundError,
    WriterBusyError,
)
from coordinator.model.identities import StateStoreId, StateStoreProviderId, TaskIdentity
from coordinator.model.schema import Field
from coordinator.model.watermarks import Watermarks
from store_actors.client.state_store import StateStore
from store_actors.keyed.table import KeyedTable
from store_actors.messages.requests import BatchFacts, OpenRequest, StoreSpec
from store_actors.serving.keyed_stores import KeyedStores
from store_actors.serving.partition import Partition
from store_actors.serving.sessions import IDLE_S, Ended, Session, Sessions
from tests.unit.aggregation_fleet import LocalCoordinator
from tests.unit.faults import memory_exhausted
from tests.unit.keyed_fleet import COUNTS, NAMES, KeyedFleet, ask, counts


def test_an_aborted_session_leaves_nothing() -> None:
    fleet = KeyedFleet({"a": 1})
    session = fleet.open(1)
    fleet.put(session, a=9, c=9)
    fleet.stores.end(session)
    with pytest.raises(OperationOutOfOrderError, match="aborted"):
        fleet.put(session, a=1)
    with pytest.raises(OperationOutOfOrderError):
        fleet.stores.commit(session)
    assert fleet.write(1, b=2) == 2
    assert fleet.read(2) == [{"k": "a", "n": 1}, {"k": "b", "n": 2}]


def out_of_memory(*_: Any) -> None:
    raise MemoryError


def test_an_abort_that_fails_leaves_the_partition_to_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = KeyedFleet({"a": 1})
    session = fleet.open(1)
    fleet.put(session, a=9)
    with monkeypatch.context() as patched:
        patched.setattr(KeyedTable, "_revert", out_of_memory)
        with pytest.raises(MemoryError):
            fleet.stores.end(session)
    retry = fleet.open(1, attempt=1)
    assert fleet.call(retry, "get", ("a",)) == {"n": 1}
    assert fleet.stores.commit(retry) == 2


@pytest.mark.parametrize("write", ["put", "put_row", "remove", "remove_where"])
def test_no_retry_continues_from_a_store_in_which_memory_ran_out(write: str) -> None:
    """The error is raised before each line in turn, until the write succeeds."""
    lines = 0
    while True:
        fleet = KeyedFleet({"a": 1, "b": 2, "c": 3})
        reader, _ = fleet.stores.open_read(fleet.request(1))
        session = fleet.open(1)
        arguments = {
            "put": (pa.record_batch({"k": ["a", "b", "d"], "n": pa.array([10, 20, 40], pa.int64())}),),
            "put_row": ({"k": "a", "n": 10},),
            "remove": (pa.record_batch({"k": ["a", "d"]}),),
            "remove_where": (pc.field("n") > 1,),
        }
        with memory_exhausted(lines) as fault, suppress(MemoryError):
            fleet.call(session, write, *arguments[write])
        base = [{"k": "a", "n": 1}, {"k": "b", "n": 2}, {"k": "c", "n": 3}]
        retry = fleet.open(1, attempt=1)
        fleet.put(retry, c=5)
        assert fleet.stores.commit(retry) == 2
        expected = [*base[:2], {"k": "c", "n": 5}]
        assert fleet.read(2) == expected, f"in memory, after {lines} lines"
        with suppress(VersionNotFoundError):
            assert fleet.call(reader, "get", ("a",)) == {"n": 1}
        fleet.stores = fleet.new_stores()
        assert fleet.read(2) == expected, f"in storage, after {lines} lines"
        if not fault.was_raised:
            break
        lines += 1
    assert lines > 20, "there was no error at all"


def test_a_prefix_scan_begins_once_no_reader_looks_into_the_partition() -> None:
    """Strings of a prefix are entered into the table, in which readers look others up."""
    fleet = KeyedFleet({"a": 1})
    session = fleet.open(1)
    ((_, partition),) = fleet.stores.partitions.cache.items()
    with ThreadPoolExecutor(1) as scanner:
        with partition.changing:
            begun = scanner.submit(fleet.call, session, "prefix_scan", pa.table({"k": ["another"]}))
            with pytest.raises(TimeoutError):
                begun.result(0.2)
        begun.result()


def test_a_committed_session_holds_nothing_of_its_delta_or_its_rows() -> None:
    fleet = KeyedFleet()
    keys = [f"key-{number}" for number in range(20_000)]

    def write(batch: int) -> None:
        session = fleet.open(batch)
        fleet.call(session, "put", pa.record_batch({"k": keys, "n": pa.array([batch] * len(keys), pa.int64())}))
        fleet.stores.commit(session)

    def resident_bytes() -> int:
        gc.collect()
        return pa.total_allocated_bytes() + tracemalloc.get_traced_memory()[0] - files()

    def files() -> int:
        return sum(info.size for info in fleet.objects.list(""))

    tracemalloc.start()
    try:
        for batch in range(4):
            write(batch)
        before = resident_bytes()
        for batch in range(4, 12):
            write(batch)
        grown = resident_bytes() - before
    finally:
        tracemalloc.stop()
    # The undo of a version is 20,000 rows of 24 bytes. Two of them are kept, and older ones are dropped.
    assert grown < 20_000 * 24


def test_opening_and_committing_takes_the_same_steps_however_many_sessions_there_were() -> None:
    fleet = KeyedFleet()

    def steps(batch: int) -> int:
        count = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        request = fleet.request(batch)
        sys.settrace(trace)
        try:
            session, _ = fleet.stores.open_update(request)
        finally:
            sys.settrace(None)
        fleet.put(session, a=batch)
        fleet.stores.commit(session)
        return count

    steps_by_batch = [steps(batch) for batch in range(60)]
    assert len(set(steps_by_batch[20:])) == 1, "none of them looks through those before"


def test_a_session_that_ended_is_known_for_a_while_and_then_forgotten() -> None:
    now = 0.0
    sessions = Sessions(threading.Lock(), iter("abcdef").__next__, lambda: now)
    fleet = KeyedFleet()
    task = fleet.request(0)

    def opened() -> tuple[str, Session]:
        session = Session(task, Partition(threading.RLock(), threading.RLock()), {}, now)
        session.partition.writer = session
        return sessions.add(session), session

    first_id, first = opened()
    now = IDLE_S + 1
    assert sessions.find(first_id) is first, "one that writes stays, however long its user takes"
    first.leave("it is committed", committed=3)
    now += IDLE_S
    second_id, _ = opened()
    assert isinstance(ended := sessions.find(first_id), Ended)
    assert ended.committed == 3
    now += IDLE_S + 1
    opened()
    assert sessions.find(first_id) is None
    assert sessions.find(second_id) is not None
    assert len(sessions) == 2


def test_a_second_writer_is_refused_and_a_retried_task_takes_over() -> None:
    fleet = KeyedFleet({"a": 1})
    first = fleet.open(1)
    fleet.put(first, a=100)
    with pytest.raises(WriterBusyError):
        fleet.open(1)
    retry = fleet.open(1, attempt=1)
    fleet.put(retry, a=2)
    with pytest.raises(FencedError, match="newer attempt"):
        fleet.put(first, a=3)
    with pytest.raises(FencedError):
        fleet.stores.commit(first)
    assert fleet.stores.commit(retry) == 2
    assert fleet.stores.commit(retry) == 2, "a lost answer is repeated"
    assert fleet.read(2) == [{"k": "a", "n": 2}]


def test_a_task_repeated_after_its_commit_adopts_the_accepted_version() -> None:
    fleet = KeyedFleet({"a": 1}, {"a": 2})
    repeated = fleet.open(1, attempt=1)
    assert fleet.call(repeated, "get", ("a",)) == {"n": 1}
    fleet.put(repeated, a=2)
    assert fleet.stores.commit(repeated) == 2
    assert fleet.metrics.adopted_commits == 1
    assert len(fleet.coordinator.plan(2).deltas) == 2
    assert fleet.write(2, b=1) == 3
    assert fleet.read(3) == [{"k": "a", "n": 2}, {"k": "b", "n": 1}]


def test_a_task_that_cannot_read_the_accepted_version_leaves_the_partition_to_its_next_attempt() -> None:
    fleet = KeyedFleet({"a": 1}, {"a": 2})
    (file,) = [info.path for info in fleet.objects.list("s/0") if "/2-" in info.path]
    content = fleet.objects.get(file)
    fleet.objects.delete(file)
    repeated = fleet.open(1, attempt=1)
    fleet.put(repeated, a=2)
    with pytest.raises(CorruptStateError, match=file):
        fleet.stores.commit(repeated)
    fleet.objects.put(file, content)
    next_attempt = fleet.open(1, attempt=1)
    assert fleet.call(next_attempt, "get", ("a",)) == {"n": 1}
    assert fleet.stores.commit(next_attempt) == 2
    assert fleet.read(2) == [{"k": "a", "n": 2}]


def test_memory_of_a_superseded_version_is_not_used_though_a_store_was_dropped_since() -> None:
    fleet = KeyedFleet()
    first_actor, second_actor = fleet.stores, fleet.new_stores()

    def write(stores: KeyedStores, actor: str, lost: str, batch: int, run: str, n: int, *specs: StoreSpec) -> Any:
        task = TaskIdentity("s", "query", run, batch, 0, 0, "executor")
        grant = fleet.coordinator.lease(task, actor, frozenset([lost]))
        session = stores.open_update(OpenRequest(task, grant.lease, grant.base_version, specs))[0]
        before = stores.call(session, "default", "get", (("a",),))
        stores.call(session, "default", "put", (counts(a=n),))
        stores.commit(session)
        return before

    write(first_actor, "a", "", 0, "run-1", 1, NAMES, COUNTS)
    write(first_actor, "a", "", 1, "run-1", 2, NAMES, COUNTS)
    assert write(second_actor, "b", "a", 1, "run-2", 20, COUNTS) == {"n": 1}
    assert write(first_actor, "a", "b", 2, "run-2", 30, COUNTS) == {"n": 20}


def test_named_stores_commit_together_and_one_may_come_later() -> None:
    fleet = KeyedFleet({"a": 1})
    session = fleet.open(1, "run-1", 0, COUNTS, NAMES)
    fleet.put(session, a=2)
    fleet.call(session, "put_row", {"id": 7, "name": "seven"}, store="names")
    before = len(fleet.objects.list("s/manifest"))
    assert fleet.stores.commit(session) == 2
    assert len(fleet.objects.list("s/manifest")) == before + 1
    assert any(info.path.startswith("s/0/0/names/2-") for info in fleet.objects.list("s"))
    fleet.write(2, a=3)  # the other store stays as it is
    assert fleet.read(3, NAMES) == [{"id": 7, "name": "seven"}]
    fleet.stores = fleet.new_stores()
    session = fleet.open(3, "run-1", 0, COUNTS, NAMES)
    assert fleet.call(session, "get", (7,), store="names") == {"name": "seven"}
    assert fleet.call(session, "get", ("a",)) == {"n": 3}
    with pytest.raises(InvalidRequestError, match="without this store"):
        fleet.call(session, "get", (7,), store="nowhere")


def test_a_reader_keeps_its_version_while_the_next_ones_are_written() -> None:
    fleet = KeyedFleet({"a": 1})
    reader, _ = fleet.stores.open_read(fleet.request(1))
    scan = fleet.call(reader, "iterator")
    fleet.write(1, a=2, b=1)
    assert fleet.call(reader, "get", ("a",)) == {"n": 1}
    assert fleet.call(reader, "get", ("b",)) is None
    batch = fleet.stores.next_batch(reader, scan)
    assert batch is not None
    assert batch.to_pylist() == [{"k": "a", "n": 1}]
    with pytest.raises(InvalidRequestError, match="release it"):
        fleet.stores.commit(reader)
    fleet.stores.end(reader)
    with pytest.raises(OperationOutOfOrderError, match="released"):
        fleet.call(reader, "get", ("a",))


WIDER = StoreSpec("default", COUNTS.keys, (Field("note", "string"), Field("n", "float64")))


@pytest.mark.parametrize("restart", [False, True])
def test_value_columns_may_be_added_dropped_and_widened(restart: bool) -> None:
    fleet = KeyedFleet()
    narrow = StoreSpec("default", COUNTS.keys, (Field("n", "int32"), Field("gone", "bool")))
    session = fleet.open(0, "run-1", 0, narrow)
    fleet.call(session, "put_row", {"k": "a", "n": 7, "gone": True})
    fleet.stores.commit(session)
    if restart:
        fleet.stores = fleet.new_stores()
    session = fleet.open(1, "run-1", 0, WIDER)
    assert fleet.call(session, "get", ("a",)) == {"note": None, "n": 7.0}
    fleet.call(session, "put_row", {"k": "b", "n": 0.5, "note": "x"})
    fleet.stores.commit(session)
    assert fleet.read(1, narrow) == [{"k": "a", "n": 7, "gone": True}]
    fleet.stores = fleet.new_stores()
    assert fleet.read(2, WIDER) == [{"k": "a", "note": None, "n": 7.0}, {"k": "b", "note": "x", "n": 0.5}]


#: Value columns that are added and dropped; one has another type when it is added again.
COLUMNS = {
    "n": Field("n", "int64"),
    "s": Field("s", "string"),
    "d": Field("d", "decimal(20,2)"),
    "x": Field("x", "int32"),
    "x as text": Field("x", "string"),
}
COLUMN_NAMES = st.sets(st.sampled_from(list(COLUMNS)), min_size=1).filter(lambda names: not {"x", "x as text"} <= names)
#: A run: its columns, the keys that each of its batches puts, and what happens before it.
RUN = st.tuples(
    COLUMN_NAMES,
    st.lists(st.sets(st.sampled_from("abc")), max_size=3),
    st.sampled_from(["", "snapshot", "restart", "snapshot and restart"]),
)


@given(runs=st.lists(RUN, min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_value_column_that_was_dropped_and_is_added_again_starts_empty(runs: list[Any]) -> None:
    fleet, batch = KeyedFleet(), 0
    model: dict[str, dict[str, Any]] = {}
    committed_types: dict[str, str] = {}
    for number, (names, batches, before) in enumerate(runs):
        fields = [COLUMNS[name] for name in sorted(names)]
        types = {field.name: field.type for field in fields}
        spec, run = StoreSpec("default", COUNTS.keys, tuple(fields)), f"run-{number}"
        fleet.run = run
        if "snapshot" in before:
            fleet.stores.partitions.maintain(1)
        if "restart" in before:
            fleet.stores = fleet.new_stores()
        if any(committed_types.get(name, kind) != kind for name, kind in types.items()):
            # Nothing was committed without the column of another type.
            with pytest.raises(StateMismatchError, match="cannot become"):
                fleet.open(batch, run, 0, spec)
            continue
        for keys in batches:
            session = fleet.open(batch, run, 0, spec)
            model = {key: {name: row.get(name) for name in types} for key, row in model.items()}
            for key in sorted(keys):
                values = {field.name: value(field, batch) for field in fields}
                fleet.call(session, "put_row", {"k": key, **values})
                model[key] = values
            batch, committed_types = fleet.stores.commit(session), types
        if batches:
            rows = {row.pop("k"): row for row in fleet.read(batch, spec)}
            assert rows == model


def value(field: Field, batch: int) -> Any:
    if field.type.startswith("decimal"):
        return Decimal(batch)
    return str(batch) if field.type == "string" else batch


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (StoreSpec("default", (Field("k", "int64"),), COUNTS.values), "key columns are fixed"),
        (StoreSpec("default", COUNTS.keys, (Field("n", "int32"),)), "n cannot become int32"),
        (StoreSpec("default", COUNTS.keys, (*COUNTS.values, Field("new", "bool", False))), "new must be nullable"),
    ],
)
def test_other_changes_are_refused_with_both_schemas(spec: StoreSpec, reason: str) -> None:
    fleet = KeyedFleet({"a": 1})
    with pytest.raises(StateMismatchError, match=rf"{reason}.*written=`k string, n int64` asked="):
        fleet.open(1, "run-1", 0, spec)
    assert fleet.write(1, a=2) == 2


def test_snapshots_are_not_written_again_and_again_after_a_round_that_stored_some_of_them() -> None:
    fleet = KeyedFleet()
    fleet.stores.commit(fleet.open(0, "run-1", 0, COUNTS, NAMES))
    put, puts = fleet.objects.put, []

    def fail_once(path: str, data: bytes) -> None:
        puts.append(path)
        if len(puts) == 2:
            raise StorageUnavailableError("the second snapshot fails")
        put(path, data)

    fleet.objects.put = fail_once  # type: ignore[method-assign]
    for _ in range(5):
        fleet.stores.partitions.maintain(1)
    assert fleet.metrics.maintenance_failures == 1
    assert fleet.metrics.snapshots_written == 2
    assert len(puts) == 4, "one round that failed, and one more"


def test_a_partition_that_is_leased_to_another_actor_is_dropped_and_its_writer_fenced() -> None:
    fleet = KeyedFleet({"a": 1})
    session = fleet.open(1)
    fleet.coordinator.is_elsewhere = True
    fleet.stores.partitions.maintain(99)
    with pytest.raises(FencedError):
        fleet.put(session, a=2)
    assert fleet.metrics.shards_unloaded == 1


# -- writes that wait for the next call -------------------------------------------------------------------------------


class UpdateSession:
    """A public handle on an update session, whose calls may be lost before they arrive."""

    def __init__(self, fleet: KeyedFleet, batch: int) -> None:
        self._fleet, self._session = fleet, fleet.open(batch, "run-1", 0, COUNTS, NAMES)
        self.calls: list[str] = []
        self.lost = False
        self.store = StateStore(self._ask, StateStoreId("file:///x/s", 0, 0), batch)

    def _ask(self, kind: str, *args: Any) -> Any:
        if self.lost:
            raise StoreUnavailableError("lost on its way")
        self.calls.append(kind)
        return ask(self._fleet.stores, self._session, kind, *args)


def test_writes_wait_for_the_next_call_and_come_before_it() -> None:
    handle = UpdateSession(fleet := KeyedFleet(), 0)
    handle.store.later("put", counts(a=1, b=2))
    handle.store.later("remove", counts(a=0).select(["k"]))
    assert handle.calls == []
    assert handle.store.store("names").get(1) is None, "the call of another store takes them along"
    assert handle.store.get("a") is None
    assert handle.store.get("b") == {"n": 2}
    handle.store.store("names").later("put", pa.record_batch({"id": [1], "name": ["x"]}))
    assert handle.store.commit() == 1
    assert handle.store.has_committed
    assert handle.calls == ["session_call"] * 3 + ["commit_session"]
    assert fleet.read(1, COUNTS, NAMES) == [{"k": "b", "n": 2}]
    assert fleet.read(1, NAMES, COUNTS) == [{"id": 1, "name": "x"}]


def test_a_write_that_waits_survives_a_call_that_is_lost() -> None:
    handle = UpdateSession(fleet := KeyedFleet(), 0)
    handle.store.later("put", counts(a=1))
    handle.lost = True
    with pytest.raises(StoreUnavailableError):
        handle.store.commit()
    handle.lost = False
    assert not handle.store.has_committed
    assert handle.store.commit() == 1
    assert fleet.read(1, COUNTS, NAMES) == [{"k": "a", "n": 1}]


def test_an_error_of_a_write_is_raised_by_the_call_that_sends_it() -> None:
    handle = UpdateSession(fleet := KeyedFleet(), 0)
    handle.store.later("put", pa.record_batch({"k": ["a"]}))
    with pytest.raises(InvalidRequestError, match="n"):
        handle.store.commit()
    assert not handle.store.has_committed
    assert fleet.request(0, attempt=1).base_version == 0


def test_leaving_a_store_aborts_it_unless_it_committed() -> None:
    fleet = KeyedFleet()

    def fail() -> None:
        with UpdateSession(fleet, 0).store as store:
            store.put(counts(a=9))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with UpdateSession(fleet, 0).store as store:
        assert store.get("a") is None
        store.put(counts(a=1))
        store.commit()
    assert fleet.read(1, COUNTS, NAMES) == [{"k": "a", "n": 1}]


# -- calls of the coordinator, and locks ------------------------------------------------------------------------------


def test_opening_asks_the_coordinator_once_for_all_stores_and_not_at_all_while_memory_is_hot() -> None:
    fleet = KeyedFleet()
    fleet.stores.commit(fleet.open(0, "run-1", 0, COUNTS, NAMES))
    assert fleet.coordinator.calls == {"open_instance": 1, "commit_all": 1}
    for batch in (1, 2):
        fleet.stores.commit(fleet.open(batch, "run-1", 0, COUNTS, NAMES))
    assert fleet.coordinator.calls == {"open_instance": 1, "commit_all": 3}
    # An aborted update leaves memory unchanged.
    fleet.stores.end(fleet.open(3, "run-1", 0, COUNTS, NAMES))
    fleet.stores.end(fleet.open(3, "run-1", 1, COUNTS, NAMES))
    assert fleet.coordinator.calls["open_instance"] == 1
    # A new run has another epoch: memory is kept after the coordinator has confirmed it.
    fleet.stores.commit(fleet.open(3, "run-2", 0, COUNTS, NAMES))
    assert fleet.coordinator.calls["open_instance"] == 2
    assert fleet.metrics.bytes_loaded == 0
    # A store is opened that is not in memory.
    fleet.stores.end(fleet.open(4, "run-2", 0, replace(COUNTS, name="further"), COUNTS))
    assert fleet.coordinator.calls["open_instance"] == 3


def test_memory_of_a_history_that_was_put_back_from_a_backup_is_not_hot() -> None:
    fleet = KeyedFleet({"a": 1}, {"a": 2})
    backup = {info.path: fleet.objects.get(info.path) for info in fleet.objects.list("s")}
    assert fleet.write(1, "run-2", a=20) == 2
    for info in fleet.objects.list("s"):
        fleet.objects.delete(info.path)
    for path, data in backup.items():
        fleet.objects.put(path, data)
    # The coordinator restarts, the store actor does not; the next run gets the epoch that run-2 had.
    restarted = LocalCoordinator(fleet.objects)
    fleet.coordinator._writer, fleet.coordinator._do = restarted._writer, restarted._do  # type: ignore[method-assign]
    assert fleet.call(fleet.open(2, "run-3"), "get", ("a",)) == {"n": 2}


def test_a_partition_is_reported_with_its_neighbours_and_stale_ones_are_dropped() -> None:
    fleet = KeyedFleet()
    first = StateStoreProviderId(StateStoreId("memory:///s", 0, 0), "run-1")
    second = StateStoreProviderId(StateStoreId("memory:///s", 0, 1), "run-1")
    fleet.write(0, a=1)
    assert fleet.coordinator.reported == [(first, ())]
    fleet.coordinator.stale = {first}
    fleet.partition = 1
    session = fleet.open(0)
    assert fleet.coordinator.reported[-1] == (second, (first,))
    fleet.stores.end(session)
    fleet.partition = 0
    # The first partition is loaded again.
    assert fleet.metrics.bytes_loaded == 0
    fleet.write(1, b=1)
    assert fleet.metrics.deltas_loaded == 1
    assert fleet.read(2) == [{"k": "a", "n": 1}, {"k": "b", "n": 1}]


def test_each_of_many_partitions_is_reported_with_a_few_others_and_all_in_turns() -> None:
    fleet = KeyedFleet()

    def open_partition(partition: int) -> set[int]:
        fleet.partition = partition
        fleet.stores.end(fleet.open(0))
        return {instance.store_id.partition_id for instance in fleet.coordinator.reported[-1][1]}

    reported = [open_partition(partition) for partition in range(200)]
    assert reported[63] == set(range(63))
    assert max(map(len, reported)) <= 64
    assert set().union(*reported[150:]) >= set(range(150))


def test_a_partition_with_an_open_update_is_not_dropped_as_stale() -> None:
    fleet = KeyedFleet()
    session = fleet.open(0)
    fleet.put(session, a=1)
    fleet.coordinator.stale = {StateStoreProviderId(StateStoreId("memory:///s", 0, 0), "run-1")}
    fleet.partition = 1
    fleet.stores.end(fleet.open(0))
    fleet.partition = 0
    assert fleet.stores.commit(session) == 1
    assert fleet.read(1) == [{"k": "a", "n": 1}]


def test_snapshots_are_encoded_and_stored_outside_the_lock() -> None:
    fleet = KeyedFleet({"a": 1})
    session = fleet.open(1)
    fleet.put(session, a=2)
    put, answers = fleet.objects.put, []

    def look(path: str, data: bytes) -> None:
        with ThreadPoolExecutor(1) as thread:
            answers.append(thread.submit(lambda: fleet.call(session, "get", ("a",))).result(timeout=10))
        put(path, data)

    fleet.objects.put = look  # type: ignore[method-assign]
    fleet.stores.partitions.maintain(1)
    assert answers == [{"n": 2}], "a call of the open update waits for nobody"
    fleet.objects.put = put  # type: ignore[method-assign]
    assert fleet.stores.commit(session) == 2
    fleet.stores = fleet.new_stores()
    assert fleet.read(1) == [{"k": "a", "n": 1}]
    assert fleet.metrics.snapshots_loaded == 1


def test_a_commit_returns_when_the_first_row_falls_due_by_processing_time() -> None:
    fleet = KeyedFleet()
    timed = StoreSpec("default", (Field("k", "string"),), (Field("at", "int64"),), "at")

    def due(batch: int, rows: dict[str, int | None], per_ms: int | None) -> int | None:
        session = fleet.open(batch, "run-1", 0, timed)
        values = pa.record_batch({"k": list(rows), "at": pa.array(rows.values(), pa.int64())})
        facts = BatchFacts(Watermarks(), len(rows), due_per_ms=per_ms)
        fleet.stores.commit(session, facts, [("default", "put", (values,))])
        plans = fleet.coordinator.load_plans("s", 0, batch + 1, ["default"])
        return plans.plans["default"].deltas[-1].due_ms

    assert due(0, {"a": 9_500, "b": 7_999, "never": None}, 1000) == 7
    assert due(1, {"b": None}, 1000) == 9
    assert due(2, {"a": None}, 1000) is None
    assert due(3, {"c": 5}, None) is None
