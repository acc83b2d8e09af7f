"""transformWithState without Spark: states, timers and times to live against dicts, and the order of work in a batch."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import GroupedData
from pyspark.sql import types as T

from coordinator.ledger.compatibility import continued
from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import DEFAULT_STORE, StateStoreId
from coordinator.model.schema import Accumulator, Field
from spark_jobs.api.stateful import StatefulGroupedData
from spark_jobs.functions.user_state_task import GroupView
from spark_jobs.plan.keys import KeyTree
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.transform.block import Block
from spark_jobs.transform.processor import ExpiredTimerInfo, StatefulProcessor, StatefulProcessorHandle, TimerValues
from spark_jobs.transform.states import ListState, MapState, ValueState
from spark_jobs.transform.task import OpenProcessor, ProcessorProgram, RowForm
from spark_jobs.transform.variables import TimeMode, accumulators_of, processor_stores
from store_actors.client.state_store import StateStore
from store_actors.engine.memory import HEAP
from store_actors.engine.versions import CHANGE_COLUMN, UPDATED
from store_actors.keyed.shard import KeyedShard
from store_actors.messages.requests import StoreSpec
from store_actors.serving.store_formats import KeyedFormat
from tests.unit.keyed_fleet import answer

KEY = T.StructType().add("k", T.StringType())
ROWS = T.StructType().add("k", T.StringType()).add("v", T.LongType())
OUTPUT = T.StructType().add("k", T.StringType()).add("out", T.StringType())
KEYS = (Field("k", "string"),)
VIEW = GroupView((("k", KeyTree(leaf="k")),), (("k", "k"), ("v", "v")))
ROW_FORM = RowForm(OUTPUT, KEY, ROWS, 1000)
NONE, PROCESSING, EVENT = TimeMode.NONE, TimeMode.PROCESSING_TIME, TimeMode.EVENT_TIME

TYPES = {"int": T.IntegerType(), "bigint": T.LongType(), "string": T.StringType(), "double": T.DoubleType()}
TYPES |= {"timestamp": T.TimestampType(), "binary": T.BinaryType(), "array<int>": T.ArrayType(T.IntegerType())}


class Schemas(dict[str, T.DataType]):
    """Types of a few DDL strings, as Spark's parser has them, without a JVM."""

    def __missing__(self, ddl: str) -> T.DataType:
        if ddl in TYPES:
            return TYPES[ddl]
        return T.StructType([T.StructField(name, TYPES[kind]) for name, kind in map(str.split, ddl.split(","))])


Init = Callable[[Any, StatefulProcessorHandle], None]
Handler = Callable[..., Iterable[Any]]


class FunctionProcessor(StatefulProcessor):
    """A processor made of functions of (self, key, rows or time, timer values)."""

    def __init__(self, init: Init, rows: Handler, timer: Handler | None = None) -> None:
        self._init, self._rows, self._timer = init, rows, timer
        self.closed = 0

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self._init(self, handle)

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Any], timerValues: TimerValues) -> Iterable[Any]:
        return self._rows(self, key, rows, timerValues)

    def handleExpiredTimer(
        self, key: tuple[Any, ...], timerValues: TimerValues, expiredTimerInfo: Any
    ) -> Iterable[Any]:
        if self._timer is None:
            return super().handleExpiredTimer(key, timerValues, expiredTimerInfo)
        return self._timer(self, key, expiredTimerInfo.getExpiryTimeInMs(), timerValues)


class ProcessorQuery:
    """A processor on one partition, batch by batch, directly on keyed shards."""

    def __init__(self, processor: StatefulProcessor, mode: TimeMode = NONE) -> None:
        self.processor, self.mode = processor, mode
        self.shards: dict[str, tuple[StoreSpec, KeyedShard]] = {}
        self.store_calls: list[str] = []

    def _open(self, specs: list[StoreSpec]) -> dict[str, Any]:
        for spec in specs:
            present = self.shards.get(spec.name)
            if present is None or present[0] != spec:
                shard = KeyedShard(spec.keys, spec.values, spec.due)
                if present is not None:
                    rows = present[1].snapshot()
                    change = pa.array([UPDATED] * rows.num_rows, pa.int8())
                    written = rows.append_column(CHANGE_COLUMN, change)
                    shard.load(KeyedFormat(spec, 0, HEAP).adopted(written, "f"), 1)
                self.shards[spec.name] = spec, shard
        return {spec.name: (s := self.shards[spec.name][1]).begin(s.version) for spec in specs}

    def batch(
        self,
        *rows: tuple[Any, Any],
        now_ms: int = 1000,
        watermark: tuple[int, int] = (-1, -1),
    ) -> list[Any]:
        """Run a batch, and return its output rows; `watermark` is the one before and the one after."""
        block = Block(["k"])
        handle = StatefulProcessorHandle(block, self.mode, Schemas())
        self.processor.init(handle)
        handle.end_of_init()
        handles = self._open(processor_stores(handle.variables, KEYS))
        scans: dict[int, Iterator[Any]] = {}

        def ask(kind: str, *args: Any) -> Any:
            if kind == "next_batch":
                return next(scans[args[0]], None)
            if kind == "session_call":
                self.store_calls.append(f"{args[0]} {args[1]}")
            result = answer(handles, kind, *args)
            if kind != "session_call" or args[1] != "prefix_scan":
                return result
            scans[len(scans)] = iter(result)
            return len(scans) - 1

        store = StateStore(ask, StateStoreId("file:///x/s", 0, 0), 0)
        block.open(store, now_ms)
        program = ProcessorProgram(b"", VIEW, ROW_FORM, self.mode, (), {}, None, "", has_watermark=True)
        work = OpenProcessor(program, self.processor, handle, block, (), ())
        before, after = (TimerValues(now_ms, watermark_ms) for watermark_ms in watermark)
        out = list(work.process(table(rows), before))
        if self.mode is not NONE:
            at = after if self.mode is EVENT else before
            out += work.fire_timers(watermark[1] if self.mode is EVENT else now_ms, at)
        work.evict()
        store.commit()
        return [tuple(row.values()) for part in out for row in part.to_pylist()]

    def stored(self, store: str) -> list[dict[str, Any]]:
        return sorted(self.shards[store][1].snapshot().to_pylist(), key=repr)


def table(rows: Iterable[tuple[Any, Any]]) -> pa.Table:
    listed = list(rows)
    keys, values = [row[0] for row in listed], [row[1] for row in listed]
    return pa.table({"k": pa.array(keys, pa.string()), "v": pa.array(values, pa.int64())})


# -- states against models --------------------------------------------------------------------------------------------

LETTERS = st.sampled_from(["a", "a", "b"])
NUMBERS = st.one_of(st.none(), st.integers(-3, 3))
TTL = 10


class Model:
    """The expected states of a variable: entries with the time from which they are expired."""

    def __init__(self, ttl: int | None) -> None:
        self.ttl = ttl
        self.entries: dict[Any, dict[Any, tuple[Any, float]]] = {}
        self.numbers = iter(range(1 << 30))

    def live(self, key: Any, now: int) -> dict[Any, Any]:
        return {name: value for name, (value, until) in self.entries.get(key, {}).items() if until > now}

    def put(self, key: Any, name: Any, value: Any, now: int) -> None:
        entries = self.entries.setdefault(key, {})
        # A put does not update an expired entry, it makes a new one.
        if name in entries and entries[name][1] <= now:
            del entries[name]
        entries[name] = value, (now + self.ttl if self.ttl else float("inf"))


VALUE_OPS = st.tuples(st.just("value"), LETTERS, st.one_of(st.just(("clear",)), st.tuples(st.just("update"), NUMBERS)))
LIST_OPS = st.tuples(
    st.just("list"),
    LETTERS,
    st.one_of(
        st.just(("clear",)),
        st.tuples(st.just("appendValue"), NUMBERS),
        st.tuples(st.sampled_from(["put", "appendList"]), st.lists(NUMBERS, min_size=1, max_size=3)),
        st.just(("get",)),
    ),
)
MAP_OPS = st.tuples(
    st.just("map"),
    LETTERS,
    st.one_of(
        st.just(("clear",)),
        st.tuples(st.just("updateValue"), st.sampled_from([float("nan"), 1.0, 2.0, None]), NUMBERS),
        st.tuples(st.just("removeKey"), st.sampled_from([float("nan"), 1.0, 2.0, None])),
    ),
)
BATCHES = st.lists(
    st.tuples(st.integers(0, 15), st.lists(st.one_of(VALUE_OPS, LIST_OPS, MAP_OPS, MAP_OPS), min_size=2, max_size=12)),
    min_size=2,
    max_size=6,
)


def operate(processor: Any, kind: str, operation: tuple[Any, ...]) -> None:
    name, *args = operation
    if name == "get":
        list(processor.list.get())
    elif kind == "list" and args:
        processor.list.__getattribute__(name)([(v,) for v in args[0]] if isinstance(args[0], list) else (args[0],))
    else:
        getattr(getattr(processor, kind), name)(*((arg,) for arg in args))


def mirror(models: dict[str, Model], kind: str, key: str, operation: tuple[Any, ...], now: int) -> None:
    model, (name, *args) = models[kind], operation
    if name in ("clear", "put") or (kind == "value" and name == "update"):
        model.entries[key] = {}
    if kind == "list" and args:
        for value in args[0] if isinstance(args[0], list) else [args[0]]:
            model.put(key, next(model.numbers), value, now)
    elif name == "update":
        model.put(key, "", args[0], now)
    elif name == "updateValue":
        model.put(key, str(args[0]), args[1], now)
    elif name == "removeKey":
        model.entries.get(key, {}).pop(str(args[0]), None)


def look(processor: Any, models: dict[str, Model], key: str, now: int) -> None:
    value, elements, entries = (models[kind].live(key, now) for kind in ("value", "list", "map"))
    assert processor.value.get() == ((value[""],) if value else None)
    assert processor.value.exists() == bool(value)
    assert processor.list.exists() == bool(elements)
    assert list(processor.list.get()) == [(element,) for element in elements.values()]
    assert processor.map.exists() == bool(entries)
    assert {str(k[0]): v[0] for k, v in processor.map.iterator()} == entries
    assert sorted(map(str, next(zip(*processor.map.keys(), strict=True), ()))) == sorted(entries)
    assert sorted(repr(tuple(row)) for row in processor.map.values()) == sorted(repr((v,)) for v in entries.values())
    for map_key in (float("nan"), 1.0, 2.0, None):
        assert processor.map.containsKey((map_key,)) == (str(map_key) in entries)
        assert processor.map.getValue((map_key,)) == ((entries[str(map_key)],) if str(map_key) in entries else None)


@settings(max_examples=70, deadline=None)
@given(ttl=st.sampled_from([None, TTL]), batches=BATCHES, peek=st.booleans())
def test_states_equal_dicts(ttl: int | None, batches: list[Any], peek: bool) -> None:
    def init(self: Any, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("v", "x int", ttl)
        self.list = handle.getListState("l", "x int", ttl)
        self.map = handle.getMapState("m", "u double", "x int", ttl)

    def work(self: Any, key: Any, rows: Any, times: TimerValues) -> list[Any]:
        for row in rows:
            kind, _, operation = operations[row.v]
            operate(self, kind, operation)
            mirror(models, kind, key[0], operation, times.getCurrentProcessingTimeInMs())
            if peek:
                look(self, models, key[0], times.getCurrentProcessingTimeInMs())
        look(self, models, key[0], times.getCurrentProcessingTimeInMs())
        return []

    models = {kind: Model(ttl) for kind in ("value", "list", "map")}
    query, now = ProcessorQuery(FunctionProcessor(init, work), PROCESSING), 100
    for passed, operations in batches:
        now += passed
        query.batch(*((op[1], index) for index, op in enumerate(operations)), now_ms=now)
        live = {kind: sum(len(models[kind].live(key, now)) for key in "abc") for kind in models}
        rows = {kind: query.stored(f"{kind}.{kind[0]}") for kind in models}
        assert len(rows["value"]) == live["value"]
        for kind in ("list", "map"):
            elements = [row for row in rows[kind] if row["place"] >= 0]
            assert len(elements) == live[kind], "expired entries are removed, also of keys without rows"
            assert {row["k"] for row in rows[kind] if row["place"] < 0} == {row["k"] for row in elements}


#: The end of time.
NEVER = (1 << 63) - 1
DELAYS = st.one_of(st.integers(-6, 12), st.just(NEVER))


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(
        st.tuples(
            st.sampled_from([*range(9), 1 << 55]),
            st.lists(st.tuples(LETTERS, st.sampled_from(["register", "delete"]), DELAYS), max_size=8),
        ),
        max_size=6,
    )
)
def test_timers_fire_once_in_order_as_those_of_a_dict(batches: list[Any]) -> None:
    def work(self: Any, key: Any, rows: Any, times: TimerValues) -> list[Any]:
        timers = model.setdefault(key[0], set())
        for row in rows:
            _, action, delta = operations[row.v]
            at = min(times.getCurrentProcessingTimeInMs() + delta, NEVER)
            if action == "register":
                self.handle.registerTimer(at)
                timers.add(at)
            else:
                self.handle.deleteTimer(at)
                timers.discard(at)
            assert list(self.handle.listTimers()) == sorted(timers)
        return []

    def expired(self: Any, key: Any, at: int, times: TimerValues) -> list[Any]:
        assert at in list(self.handle.listTimers())
        assert times.getCurrentProcessingTimeInMs() == now
        return [(key[0], str(at))]

    model: dict[str, set[int]] = {}
    query, now = ProcessorQuery(FunctionProcessor(lambda *_: None, work, expired), PROCESSING), 100
    for passed, operations in batches:
        now += passed
        out = query.batch(*((op[0], index) for index, op in enumerate(operations)), now_ms=now)
        due = sorted((at, key) for key, timers in model.items() for at in timers if at <= now)
        assert [int(at) for _, at in out] == [at for at, _ in due]
        assert sorted((int(at), key) for key, at in out) == due
        for at, key in due:
            model[key].discard(at)
        assert [
            row["timer_ms"] for row in sorted(query.stored(DEFAULT_STORE), key=lambda row: row["timer_ms"])
        ] == sorted(at for timers in model.values() for at in timers)


# -- a batch ----------------------------------------------------------------------------------------------------------


def counting(init_extra: Init | None = None) -> tuple[Init, Handler]:
    def init(self: Any, handle: StatefulProcessorHandle) -> None:
        self.count = handle.getValueState("count", "n bigint")
        if init_extra is not None:
            init_extra(self, handle)

    def work(self: Any, key: Any, rows: Any, times: TimerValues) -> Iterator[Any]:
        n = (self.count.get() or (0,))[0] + sum(1 for _ in rows)
        self.count.update((n,))
        yield (key[0], str(n))

    return init, work


def test_event_time_timers_go_by_the_watermark_with_the_batch_included() -> None:
    def work(self: Any, key: Any, rows: Any, times: TimerValues) -> Iterator[Any]:
        self.handle.registerTimer(times.getCurrentWatermarkInMs())
        self.handle.registerTimer(50)
        return iter([(key[0], str(times.getCurrentWatermarkInMs()))])

    def expired(self: Any, key: Any, at: int, times: TimerValues) -> Iterator[Any]:
        # A timer that is registered or deleted now counts from the next batch on.
        self.handle.registerTimer(at)
        self.handle.registerTimer(at + 1)
        yield (f"{key[0]} at {at}", str(times.getCurrentWatermarkInMs()))

    query = ProcessorQuery(FunctionProcessor(lambda *_: None, work, expired), EVENT)
    assert query.batch(("a", 1), watermark=(0, 10)) == [("a", "0"), ("a at 0", "10")]
    assert query.batch(watermark=(10, 49)) == [("a at 1", "49")]
    assert query.batch(watermark=(49, 50)) == [("a at 2", "50"), ("a at 50", "50")]


def test_indices_of_removed_elements_are_used_again() -> None:
    def init(self: Any, handle: StatefulProcessorHandle) -> None:
        self.map = handle.getMapState("m", "u bigint", "x bigint")
        self.list = handle.getListState("l", "x bigint", 25)

    def work(self: Any, key: Any, rows: Any, times: TimerValues) -> list[Any]:
        (row,) = rows
        self.map.updateValue((row.v,), (row.v,))
        self.map.removeKey((row.v - 2,))
        self.list.appendValue((row.v,))
        assert [n for (n,) in self.list.get()] == list(range(max(0, row.v - 2), row.v + 1))
        return []

    query = ProcessorQuery(FunctionProcessor(init, work), PROCESSING)
    for n in range(30):
        query.batch(("a", n), now_ms=1000 + 10 * n)
        indices = {row["place"] for row in query.stored("map.m")}
        assert len(indices) == min(n, 1) + 2
        assert max(indices) <= 2
        (head,) = (row for row in query.stored("list.l") if row["place"] < 0)
        assert head["end"] - head["begin"] <= 4, "expired elements are not looked up again"


def test_the_calls_of_the_store_do_not_grow_with_the_keys_of_a_batch() -> None:
    def more(self: Any, handle: StatefulProcessorHandle) -> None:
        self.list = handle.getListState("l", "x bigint")
        self.unused = handle.getMapState("m", "x int", "y int")

    init, count = counting(more)

    def work(self: Any, key: Any, rows: Any, times: TimerValues) -> Iterable[Any]:
        listed = list(rows)
        self.list.appendList([(row.v,) for row in listed])
        return count(self, key, iter(listed), times)

    query = ProcessorQuery(FunctionProcessor(init, work))
    for _ in range(2):
        query.store_calls.clear()
        assert len(query.batch(*((f"k{i}", i) for i in range(5000)))) == 5000
        assert query.store_calls == ["value.count multi_get", "list.l multi_get"], "writes go with the next call"


def test_values_of_any_type_come_back_as_they_were() -> None:
    pair = T.StructType().add("x", T.IntegerType()).add("t", T.TimestampType())
    kind = T.StructType().add("a", T.ArrayType(pair)).add("m", T.MapType(T.StringType(), T.LongType()))
    kind = kind.add("t", T.TimestampType()).add("d", T.DoubleType())
    time = datetime(2024, 2, 3, 4, 5, 6, 789)
    given_value = ([T.Row(x=1, t=time), None], {"a": 5}, time, 1.5)

    def init(self: Any, handle: StatefulProcessorHandle) -> None:
        self.value, self.list = handle.getValueState("v", kind), handle.getListState("l", kind)
        self.map = handle.getMapState("m", "t timestamp, b binary", kind)

    def work(self: Any, key: Any, rows: Any, times: TimerValues) -> Iterator[Any]:
        if (self.value.get() or (None,) * 4)[1] is None:
            value = ([*given_value[0]], {**given_value[1]}, *given_value[2:])
            for update in (self.value.update, self.list.appendValue):
                update(value)
                assert self.value.get() == given_value
            self.map.updateValue((time, b"x"), value)
            value[0].clear()
        assert self.value.get() == given_value
        assert list(self.list.get()) == [given_value]
        assert dict(self.map.iterator()) == {(time, b"x"): given_value}
        assert self.map.getValue([time, b"x"]) == given_value
        yield (key[0], "seen")

    query = ProcessorQuery(FunctionProcessor(init, work))
    assert query.batch(("a", 1)) == query.batch(("a", 1)) == [("a", "seen")]


# -- PySpark's own classes -------------------------------------------------------------------------------------------

of_pyspark_4 = pytest.mark.skipif(not SPARK.PROCESSOR_CLASSES, reason="PySpark 3.5 has no transformWithState")


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [(parameter.name, parameter.default) for parameter in inspect.signature(function).parameters.values()]


@of_pyspark_4
@pytest.mark.parametrize(
    "ours",
    [StatefulProcessor, StatefulProcessorHandle, TimerValues, ExpiredTimerInfo, ValueState, ListState, MapState],
)
def test_every_method_of_pysparks_class_is_there_with_its_arguments(ours: type) -> None:
    theirs = getattr(importlib.import_module("pyspark.sql.streaming.stateful_processor"), ours.__name__)
    methods = {name: parameters(method) for name, method in vars(theirs).items() if not name.startswith("_")}
    assert {name: parameters(getattr(ours, name)) for name in methods} == methods


@of_pyspark_4
@pytest.mark.parametrize("name", ["transformWithState", "transformWithStateInPandas"])
def test_grouped_data_is_called_as_pysparks(name: str) -> None:
    assert parameters(getattr(StatefulGroupedData, name)) == parameters(getattr(GroupedData, name))


# -- refused calls --------------------------------------------------------------------------------------------------


def in_init(mode: TimeMode, use: Callable[[StatefulProcessorHandle], Any]) -> StatefulProcessorHandle:
    handle = StatefulProcessorHandle(Block(), mode, Schemas())
    use(handle)
    return handle


@pytest.mark.parametrize(
    ("mode", "use", "message"),
    [
        (NONE, lambda h: h.getValueState("v", "int"), "struct of at least one column"),
        (NONE, lambda h: h.getValueState("a/b", "x int"), "name is a folder"),
        (NONE, lambda h: h.getValueState("v", "x int", 5), "processing time; use timeMode ProcessingTime"),
        (EVENT, lambda h: h.getListState("v", "x int", 5), "processing time; use timeMode ProcessingTime"),
        (PROCESSING, lambda h: h.getValueState("v", "x int", -5), "positive"),
        (NONE, lambda h: (h.getValueState("v", "x int"), h.getListState("v", "x int")), "have this name"),
        (NONE, lambda h: h.getMapState("v", "x array<int>", "x int"), "atomic"),
        (NONE, lambda h: (h.deleteIfExists("v"), h.getValueState("v", "x int")), "in the next one"),
        (NONE, lambda h: (h.end_of_init(), h.getValueState("v", "x int")), "in init only"),
        (NONE, lambda h: (h.end_of_init(), h.deleteIfExists("v")), "in init only"),
        (NONE, lambda h: h.getValueState("v", "x int").get(), "belong to a key"),
        (NONE, lambda h: h.getListState("v", "x int").appendValue((1,)), "belong to a key"),
        (NONE, lambda h: h.getMapState("v", "x int", "x int").clear(), "belong to a key"),
        (PROCESSING, lambda h: h.registerTimer(5), "belong to a key"),
        (NONE, lambda h: h.listTimers(), "no timers with timeMode None"),
    ],
)
def test_calls_that_init_may_not_make_are_refused(mode: TimeMode, use: Any, message: str) -> None:
    with pytest.raises(PySparkRuntimeError, match=message) as refused:
        in_init(mode, use)
    assert isinstance(refused.value, InvalidRequestError)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda p: p.value.update(5), "takes a tuple"),
        (lambda p: p.value.update((1, 2)), "takes a tuple"),
        (lambda p: p.value.update(("x",)), "does not fit its column"),
        (lambda p: p.list.put([]), "use clear"),
        (lambda p: p.list.appendList([]), "use clear"),
        (lambda p: p.handle.getValueState("w", "x int"), "in init only"),
        (lambda p: p.handle.registerTimer(1 << 63), "milliseconds"),
    ],
)
def test_calls_that_a_handler_may_not_make_are_refused(use: Any, message: str) -> None:
    def init(self: Any, handle: StatefulProcessorHandle) -> None:
        self.value, self.list = handle.getValueState("v", "x int"), handle.getListState("l", "x int")

    def work(self: Any, key: Any, rows: Any, times: TimerValues) -> list[Any]:
        use(self)
        return []

    with pytest.raises(PySparkRuntimeError, match=message):
        ProcessorQuery(FunctionProcessor(init, work), PROCESSING).batch(("a", 1))


@pytest.mark.parametrize(
    "emitted", [None, 5, "ab", T.Row(k="a", out="b"), [("a",)], [5], [("a", 5)], [T.Row(k="k", o="out")]]
)
def test_output_that_is_not_rows_of_its_columns_is_refused(emitted: Any) -> None:
    says = r"iterator of Rows|takes a tuple|does not fit|a Row whose fields are not its columns"
    with pytest.raises(InvalidRequestError, match=says):
        ProcessorQuery(FunctionProcessor(lambda *_: None, lambda *_: emitted)).batch(("a", 1))


def test_a_deleted_variable_cannot_be_used() -> None:
    def delete(self: Any, handle: StatefulProcessorHandle) -> None:
        self.deleted_list = handle.getListState("gone", "x int")
        handle.deleteIfExists("gone")
        handle.deleteIfExists("never")

    init, count = counting(delete)

    def work(self: Any, key: Any, rows: Any, times: TimerValues) -> Iterable[Any]:
        with pytest.raises(InvalidRequestError, match="deleted this state variable"):
            self.deleted_list.exists()
        assert self.handle.deleted == {"gone", "never"}
        return count(self, key, rows, times)

    query = ProcessorQuery(FunctionProcessor(init, work))
    assert query.batch(("a", 1)) == [("a", "1")]
    assert set(query.shards) == {DEFAULT_STORE, "value.count"}


# -- another schema ---------------------------------------------------------------------------------------------------


def described(use: Callable[[StatefulProcessorHandle], Any]) -> tuple[Accumulator, ...]:
    return accumulators_of(in_init(PROCESSING, use).variables)


def first_variables(h: StatefulProcessorHandle) -> None:
    h.getValueState("v", "x int")
    h.getMapState("m", "u int", "x int")


@pytest.mark.parametrize(
    "later",
    [
        lambda h: None,
        lambda h: h.getListState("new", "y int"),
        lambda h: h.getValueState("v", "new string, x bigint"),
        lambda h: (h.getMapState("m", "u bigint", "x int, y int"), h.getValueState("v", "y int", 5)),
    ],
)
def test_variables_and_their_columns_come_and_go(later: Any) -> None:
    continued(described(first_variables), described(later))
    continued(described(later), described(lambda h: None))


@pytest.mark.parametrize(
    "later",
    [
        lambda h: h.getListState("v", "x int"),
        lambda h: h.getValueState("v", "x string"),
        lambda h: h.getMapState("m", "u string", "x int"),
        lambda h: h.getMapState("m", "u int, w int", "x int"),
    ],
)
def test_a_variable_does_not_become_another(later: Any) -> None:
    with pytest.raises(ValueError):
        continued(described(first_variables), described(later))


def test_values_are_read_under_a_wider_schema_with_more_columns_and_a_time_to_live() -> None:
    def work(self: Any, key: Any, rows: Any, times: TimerValues) -> Iterator[Any]:
        yield (key[0], str((self.value.get(), list(self.list.get()))))
        if any(row.v for row in rows):
            self.value.update((1,))
            self.list.appendValue((2,))

    def init(self: Any, handle: StatefulProcessorHandle) -> None:
        self.value, self.list = handle.getValueState("v", "x int"), handle.getListState("l", "x int")

    def wider(self: Any, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("v", "y string, x bigint", 10)
        self.list = handle.getListState("l", "x bigint, y string", 10)

    def add(self: Any, key: Any, rows: Any, times: TimerValues) -> Iterator[Any]:
        yield (key[0], str((self.value.get(), list(self.list.get()))))
        if any(row.v for row in rows):
            self.list.appendValue((3, "z"))

    query = ProcessorQuery(FunctionProcessor(init, work), PROCESSING)
    assert query.batch(("a", 1), now_ms=0) == [("a", "(None, [])")]
    query.processor = FunctionProcessor(wider, add)
    assert query.batch(("a", 1), now_ms=100) == [("a", "(Row(y=None, x=1), [Row(x=2, y=None)])")]
    assert query.batch(("a", 0), now_ms=105) == [("a", "(Row(y=None, x=1), [Row(x=2, y=None), Row(x=3, y='z')])")]
    # Values that were written without a time to live have none.
    assert query.batch(("a", 0), now_ms=110) == [("a", "(Row(y=None, x=1), [Row(x=2, y=None)])")]
    assert len([row for row in query.stored("list.l") if row["place"] >= 0]) == 1


def states_of(processor: Any, handle: StatefulProcessorHandle) -> None:
    processor.value = handle.getValueState("v", "n int, s string")
    processor.list = handle.getListState("l", "n int, s string")
    processor.map = handle.getMapState("m", "id string", "n int, s string")


def test_values_of_the_same_batch_and_of_earlier_ones_are_read_as_rows_with_the_states_fields() -> None:
    def work(self: Any, key: Any, rows: Any, times: TimerValues) -> Iterator[Any]:
        if any(row.v for row in rows):
            self.value.update((1, "a"))
            self.list.put([(2, "b")])
            self.list.appendValue(T.Row(s="c", n=3))
            self.map.updateValue(("x",), T.Row(s="d", n=4))
        elements = list(self.list.get())
        ((under, value),) = self.map.iterator()
        read = [self.value.get(), *elements, value, self.map.getValue(("x",)), next(self.map.values())]
        fields = [(row.n, row.s) for row in read]
        assert fields == [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (4, "d"), (4, "d")]
        assert under.id == next(self.map.keys()).id == "x"
        yield (key[0], "as rows")

    query = ProcessorQuery(FunctionProcessor(states_of, work), NONE)
    assert query.batch(("a", 1)) == [("a", "as rows")]
    assert query.batch(("a", 0)) == [("a", "as rows")]


def test_fields_of_rows_are_taken_by_their_names() -> None:
    def work(self: Any, key: Any, rows: Any, times: TimerValues) -> Iterator[Any]:
        yield T.Row(out="this is out", k="this is k")
        yield T.Row("k", "out")("k", "in order")
        yield {"out": "a dict", "k": "k"}

    query = ProcessorQuery(FunctionProcessor(states_of, work), NONE)
    assert query.batch(("a", 1)) == [("this is k", "this is out"), ("k", "in order"), ("k", "a dict")]


@pytest.mark.parametrize(
    "value",
    [(1.5, "a"), (1.0, "a"), (1 << 31, "a"), (True, "a"), ("1", "a"), (1, 2), (1, b"a")],
    ids=repr,
)
@pytest.mark.parametrize("method", ["update", "appendValue", "put", "updateValue"])
def test_a_value_that_does_not_fit_is_refused_at_its_call(value: tuple[Any, ...], method: str) -> None:
    def work(self: Any, key: Any, rows: Any, times: TimerValues) -> Iterator[Any]:
        calls = {
            "update": lambda: self.value.update(value),
            "appendValue": lambda: self.list.appendValue(value),
            "put": lambda: self.list.put([value]),
            "updateValue": lambda: self.map.updateValue(("x",), value),
        }
        with pytest.raises(InvalidRequestError, match=r"does not fit its column.*nothing was changed.*cast it"):
            calls[method]()
        yield (key[0], str((self.value.exists(), self.list.exists(), self.map.exists())))

    query = ProcessorQuery(FunctionProcessor(states_of, work), NONE)
    assert query.batch(("a", 1)) == [("a", "(False, False, False)")]
