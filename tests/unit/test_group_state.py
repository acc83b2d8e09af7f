"""User-defined state per key, without Spark: timeouts and removes, grouping of rows, storage of state, and pandas frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import PySparkRuntimeError, PySparkTypeError
from pyspark.sql import types as T
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import StateStoreId
from coordinator.model.schema import Field
from spark_jobs.functions.frames import PandasCalls, PandasForm
from spark_jobs.functions.groups import EXISTS, TIMEOUT, Groups, StateColumns
from spark_jobs.functions.state_batch import BatchClock, StateBatch
from spark_jobs.functions.user_state_task import ArrowCalls, Calls, GroupStateProgram, GroupView
from spark_jobs.plan.keys import KeyTree
from spark_jobs.plan.spark_version import SPARK
from store_actors.client.state_store import StateStore
from store_actors.keyed.shard import KeyedShard
from tests.unit.keyed_fleet import answer

NONE, PROCESSING, EVENT = (
    GroupStateTimeout.NoTimeout,
    GroupStateTimeout.ProcessingTimeTimeout,
    GroupStateTimeout.EventTimeTimeout,
)
STATE = T.StructType([T.StructField("n", T.LongType())])
OUTPUT = T.StructType([T.StructField("k", T.StringType()), T.StructField("n", T.LongType())])
COLUMNS = StateColumns(SPARK.arrow_schema(STATE))
KEYS = (Field("k", "string"),)
VIEW = GroupView((("k", KeyTree(leaf="k")),), (("k", "k"), ("v", "v")))


def clock(
    conf: str = NONE, watermark_ms: int | None = None, now_ms: int = 1000, *, timed_out: bool = False
) -> BatchClock:
    return BatchClock(conf, watermark_ms, now_ms, timed_out)


def three(clock: BatchClock, values: list[int | None] | None = None) -> StateBatch:
    """Return the state of three keys."""
    stored = [None] * 3 if values is None else values
    array = pa.array(stored, pa.int64())
    exists = array.is_valid().to_numpy(zero_copy_only=False)
    return StateBatch(COLUMNS, [array], exists, np.full(3, -1), np.arange(4), clock)


def in_pandas(function: Callable[..., Any], state: T.StructType = STATE, max_rows: int = 10_000) -> PandasCalls:
    return PandasCalls(function, state, PandasForm(OUTPUT, "UTC", safe=False, by_name=True, max_rows=max_rows))


class FunctionQuery:
    """A function on one partition, batch by batch, directly on a keyed shard."""

    def __init__(self, calls: Calls, conf: str, columns: StateColumns = COLUMNS) -> None:
        self.shard = KeyedShard(KEYS, (*columns.fields, EXISTS, TIMEOUT), TIMEOUT.name)
        self._calls, self._conf, self._columns = calls, conf, columns
        self.requests: list[str] = []

    def batch(self, *rows: tuple[Any, Any], watermark: tuple[int, int] | None = None, now_ms: int = 1000) -> list[Any]:
        """Run a batch of rows with the watermark before and after it, and return the emitted rows, sorted."""
        handle = self.shard.begin(self.shard.version)

        def ask(kind: str, *args: Any) -> Any:
            if kind == "session_call":
                self.requests.append(args[1])
            return answer({"default": handle}, kind, *args)

        store = StateStore(ask, StateStoreId("file:///x/s", 0, 0, "default"), handle.version)
        stores = (self._columns.group_store(KEYS),)
        work = GroupStateProgram(self._calls, VIEW, self._columns, stores, self._conf, watermark is not None)
        keys, values = [row[0] for row in rows], [row[1] for row in rows]
        table = pa.table({"k": pa.array(keys, pa.string()), "v": pa.array(values, pa.int64())})
        before, after = watermark or (None, None)
        out = list(work.process(store, table, clock(self._conf, before, now_ms)))
        out += work.process_timeouts(store, table.schema, clock(self._conf, after, now_ms, timed_out=True))
        store.commit()
        return sorted((tuple(row.values()) for part in out for row in part.to_pylist()), key=repr)

    def stored(self) -> dict[Any, Any]:
        return {row.pop("k"): row for row in self.shard.snapshot().to_pylist()}


# -- rules ------------------------------------------------------------------------------------------------------------


def do_nothing(state: GroupState) -> None:
    pass


RULES: list[Callable[[GroupState], None]] = [
    do_nothing,
    lambda state: state.update((7,)),
    lambda state: state.remove(),
    lambda state: (state.remove(), state.update((7,)))[0],
    lambda state: (state.update((7,)), state.remove())[0],
    lambda state: state.setTimeoutDuration(5),
    lambda state: (state.remove(), state.setTimeoutDuration(5))[0],
    lambda state: (state.update((7,)), state.setTimeoutDuration(5))[0],
]


@pytest.mark.parametrize("value", [None, 1])
@pytest.mark.parametrize("timeout", [-1, 900])
@pytest.mark.parametrize("rule", RULES)
def test_written_state_follows_sparks_rule_for_group_state(
    rule: Callable[[GroupState], None], timeout: int, value: int | None
) -> None:
    def function(key: Any, pdfs: Any, state: GroupState) -> list[pd.DataFrame]:
        rule(state)
        states.append(state)
        return []

    states: list[GroupState] = []
    array = pa.array([value], pa.int64())
    batch = StateBatch(
        COLUMNS, [array], np.array([value is not None]), np.array([timeout]), np.array([0, 1]), clock(PROCESSING)
    )
    rows = pa.table({"k": ["a"], "v": [1]})
    assert not list(in_pandas(function)(Groups.of(rows, ["k"]), batch))
    (spark,) = states
    written, removed, timeouts = (part[0] for part in batch.outcome())
    new = spark._timeout_timestamp
    assert timeouts == new
    assert removed == (not spark.exists and new == -1)
    assert written == ((spark._updated or spark._removed or new != timeout) and not removed)
    assert batch.exists[0] == spark.exists
    assert batch.get("n").to_pylist() == [spark.get[0] if spark.exists else None]


def test_a_batch_of_states_obeys_masks() -> None:
    state = three(clock(EVENT, 50), [1, None, 3])
    assert state.exists.tolist() == [True, False, True]
    assert state.get("n", 0).to_pylist() == [1, 0, 3]
    state.update({"n": [10, 20, 30]}, where=[False, True, True])
    state.remove(where=pa.array([None, False, True]))
    state.set_timeout_timestamp(pa.array([60, 70, 80]), where=[True, False, False])
    assert state.values.to_pydict() == {"n": [1, 20, None]}
    assert state.exists.tolist() == [True, True, False]
    written, removed, timeouts = state.outcome()
    assert (written.tolist(), removed.tolist()) == ([True, True, False], [False, False, True])
    assert timeouts.tolist() == [60, -1, -1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.set_timeout_duration(5), "other timeouts"),
        (lambda state: state.set_timeout_timestamp(49), "not before the current watermark"),
        (lambda state: state.set_timeout_timestamp([50, None, 50]), "not before the current watermark"),
        (lambda state: state.update({"m": [1, 2, 3]}), "all of its columns"),
        (lambda state: state.update({"n": [1, 2]}), "one value for each key"),
        (lambda state: state.update({"n": ["x", "y", "z"]}), "do not fit"),
        (lambda state: state.remove([True]), "one boolean for each key"),
        (lambda state: state.get("m"), "no such column"),
    ],
)
def test_a_wrong_change_is_refused_and_changes_nothing(change: Callable[[StateBatch], Any], message: str) -> None:
    state = three(clock(EVENT, 50), [1, None, 3])
    with pytest.raises(InvalidRequestError, match=message):
        change(state)
    assert state.values.to_pydict() == {"n": [1, None, 3]}
    assert not state.outcome()[0].any()


def test_without_a_watermark_asking_for_it_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="no watermark"):
        _ = three(clock()).current_watermark_ms
    with pytest.raises(InvalidRequestError, match="duration is positive"):
        three(clock(PROCESSING)).set_timeout_duration(0)


# -- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [True, False])
def test_a_timeout_is_cleared_when_the_function_runs_without_setting_it(last: bool) -> None:
    def once(keys: pa.Table, rows: pa.Table, state: StateBatch) -> pa.Table:
        if not state.exists.any():
            state.update({"n": [0] * len(state)})
            state.set_timeout_timestamp(100)
        return keys.append_column("n", pa.array([int(state.has_timed_out)] * len(state)))

    query = FunctionQuery(ArrowCalls(once, SPARK.arrow_schema(OUTPUT)), EVENT)
    assert query.batch(("a", 1), watermark=(0, 0)) == [("a", 0)]
    if last:
        assert query.batch(("a", 1), watermark=(0, 200)) == [("a", 0)], "it has rows, so it has not timed out"
    else:
        assert query.batch(watermark=(0, 100)) == [], "a time that is not before the watermark"
        assert query.batch(watermark=(100, 101)) == [("a", 1)]
    assert query.batch(watermark=(200, 300)) == []
    assert query.stored() == {"a": {"s_n": 0, "exists": True, "timeout_us": None}}


def test_a_key_that_was_removed_may_still_have_a_timeout() -> None:
    def wait(keys: pa.Table, rows: pa.Table, state: StateBatch) -> None:
        if not state.has_timed_out:
            state.remove()
            state.set_timeout_duration(10)

    query = FunctionQuery(ArrowCalls(wait, SPARK.arrow_schema(OUTPUT)), PROCESSING)
    query.batch(("a", 1), now_ms=5)
    assert query.stored() == {"a": {"s_n": None, "exists": False, "timeout_us": 15_000}}
    query.batch(now_ms=16)
    assert query.stored() == {}


LONGEST = (1 << 63) - 1
#: The largest number of milliseconds that fits into 64 bits of microseconds.
MAX_MS = LONGEST // 1000


@pytest.mark.parametrize("never", [LONGEST, LONGEST - 1, MAX_MS + 1, MAX_MS])
@pytest.mark.parametrize("conf", [PROCESSING, EVENT])
@pytest.mark.parametrize("form", ["pandas", "number", "column"])
def test_a_timeout_at_the_end_of_time_never_comes(form: str, conf: str, never: int) -> None:
    def of_one(key: Any, pdfs: Any, state: GroupState) -> Iterator[pd.DataFrame]:
        state.update((1,))
        (state.setTimeoutTimestamp if conf == EVENT else state.setTimeoutDuration)(never)
        yield pd.DataFrame({"k": [key[0]], "n": [-1 if state.hasTimedOut else 1]})

    def of_many(keys: pa.Table, rows: pa.Table, state: StateBatch) -> pa.Table:
        state.update({"n": [1] * len(state)})
        timeouts = never if form == "number" else pa.array([never] * len(state))
        (state.set_timeout_timestamp if conf == EVENT else state.set_timeout_duration)(timeouts)
        return keys.append_column("n", pa.array([-1 if state.has_timed_out else 1] * len(state)))

    query = FunctionQuery(
        in_pandas(of_one) if form == "pandas" else ArrowCalls(of_many, SPARK.arrow_schema(OUTPUT)), conf
    )
    for now_ms in (1000, 2000, 1 << 52):
        assert query.batch(("a", 1), watermark=(now_ms - 1000, now_ms), now_ms=now_ms) == [("a", 1)]
    assert query.batch(watermark=(MAX_MS, MAX_MS), now_ms=MAX_MS) == []
    assert query.stored() == {"a": {"s_n": 1, "exists": True, "timeout_us": MAX_MS * 1000}}


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_a_timeout_of_a_time_further_than_milliseconds_reach_never_comes(unit: str) -> None:
    state = three(clock(EVENT, watermark_ms=50))
    state.set_timeout_timestamp(pa.array([LONGEST, 1, 99], pa.int64()).cast(pa.timestamp(unit)), [True, False, False])
    assert state.outcome()[2].tolist() == [MAX_MS, -1, -1]


def test_the_calls_of_the_store_do_not_grow_with_the_keys_of_a_batch() -> None:
    def count(keys: pa.Table, rows: pa.Table, state: StateBatch) -> None:
        state.update({"n": np.diff(state.offsets)}, where=np.arange(len(state)) % 2 == 0)
        state.remove(where=np.arange(len(state)) % 2 == 1)

    query = FunctionQuery(ArrowCalls(count, SPARK.arrow_schema(OUTPUT)), NONE)
    query.batch(*((f"k{i}", i) for i in range(5000)))
    query.batch(*((f"k{i}", i) for i in range(5000)))
    assert query.requests == ["multi_get", "multi_get"], "writes go with the commit"


# -- columns ----------------------------------------------------------------------------------------------------------


def test_rows_are_grouped_in_the_order_in_which_they_came() -> None:
    rows = pa.table({"a": [2, None, 2, 1, None], "b": ["x", "y", "x", "x", "y"], "v": [1, 2, 3, 4, 5]})
    groups = Groups.of(rows, ["a", "b"])
    values_by_key = {
        (groups.keys["a"][i].as_py(), groups.keys["b"][i].as_py()): groups.rows["v"]
        .slice(groups.offsets[i], groups.offsets[i + 1] - groups.offsets[i])
        .to_pylist()
        for i in range(len(groups))
    }
    assert values_by_key == {(2, "x"): [1, 3], (None, "y"): [2, 5], (1, "x"): [4]}
    assert len(Groups.of(rows.slice(0, 0), ["a", "b"])) == 0
    second = groups.part(1, 3)
    assert second.offsets[0] == 0
    assert len(second) == 2


def test_rows_are_grouped_by_arrays_and_by_many_columns() -> None:
    nan = float("nan")
    lists = pa.array([[1.0, nan], None, [], [1.0, nan], [None], [], None, [1.0]], pa.list_(pa.float64()))
    rows = pa.table({"a": lists, "v": range(8)})
    groups = Groups.of(rows, ["a"])
    assert [groups.rows["v"].to_pylist()[begin:end] for begin, end in pairwise(groups.offsets)] == [
        [0, 3], [1, 6], [2, 5], [4], [7]
    ]  # fmt: skip
    assert repr(groups.keys["a"].to_pylist()) == repr([[1.0, nan], None, [], [None], [1.0]])
    wide = pa.table({f"k{column}": [0, int(column == 60), 0] for column in range(70)})
    assert np.diff(Groups.of(wide, wide.column_names).offsets).tolist() == [2, 1]


def test_state_of_any_type_comes_back_as_it_was() -> None:
    pair = T.StructType().add("x", T.IntegerType()).add("t", T.TimestampType())
    kind = T.StructType().add("a", T.ArrayType(pair)).add("m", T.MapType(T.StringType(), T.DecimalType(5, 2)))
    kind = kind.add("s", T.StructType().add("y", T.BinaryType())).add("d", T.DateType())
    kind = kind.add("t", T.TimestampType()).add("x", T.DoubleType())
    moment_of_time = datetime(2024, 2, 3, 4, 5, 6, 789)
    first = ([T.Row(x=1, t=moment_of_time), None], {"k": Decimal("1.25")}, T.Row(y=b"\0"), None, moment_of_time, 1.5)
    previous: list[Any] = []

    def keep(key: Any, pdfs: Any, state: GroupState) -> list[pd.DataFrame]:
        previous.append(state.getOption)
        state.update(first if key[0] == "a" else (None,) * 6)
        return []

    query = FunctionQuery(in_pandas(keep, kind), NONE, StateColumns(SPARK.arrow_schema(kind)))
    query.batch(("a", 1), ("b", 1))
    query.batch(("a", 1), ("b", 1))
    assert previous == [None, None, first, (None,) * 6]


def test_pandas_frames_of_a_key_do_not_depend_on_other_keys() -> None:
    frames_by_key: dict[Any, Any] = {}

    def look(key: Any, pdfs: Iterator[pd.DataFrame], state: GroupState) -> list[pd.DataFrame]:
        frames = list(pdfs)
        frames[0].loc[0, "v"] = 0
        frames_by_key[key[0]] = [(str(pdf["v"].dtype), pdf.index.tolist()) for pdf in frames]
        return []

    query = FunctionQuery(in_pandas(look, max_rows=2), NONE)
    query.batch(("a", 1), ("b", None), ("a", 2), ("b", 3), ("a", 3), (None, 4))
    assert frames_by_key == {
        "a": [("int64", [0, 1]), ("int64", [0])],
        "b": [("float64", [0, 1])],
        None: [("int64", [0])],
    }


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (pd.DataFrame({"k": ["a"], "n": [1]}), PySparkTypeError),
        (5, PySparkTypeError),
        ([5], PySparkTypeError),
        ([pd.DataFrame({"k": ["a"]})], PySparkRuntimeError),
    ],
)
def test_a_wrong_result_is_refused_as_spark_does(result: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        FunctionQuery(in_pandas(lambda *_: result), NONE).batch(("a", 1))


def test_an_arrow_result_has_the_columns_of_its_type() -> None:
    for result in (pa.table({"k": ["a"]}), "a"):
        with pytest.raises(InvalidRequestError, match=r"applyInArrowWithState|other columns"):
            FunctionQuery(ArrowCalls(lambda *_, out=result: out, SPARK.arrow_schema(OUTPUT)), NONE).batch(("a", 1))  # type: ignore[misc]
