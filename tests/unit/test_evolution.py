"""Changes of a query's aggregates that are allowed, and what they do to the existing state."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from msgspec import structs
from pyspark.sql import types as T

from coordinator.ledger import compatibility
from coordinator.ledger.compatibility import changes, check_metadata, continued, same_state
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import FencedError, NewerFormatError, StateMismatchError, SumOverflowError
from coordinator.model.identities import StateStoreId, StateStoreProviderId
from coordinator.model.schema import Accumulator, Field, OperatorKind, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.type_names import is_wider, spark_type
from spark_jobs.plan.storable import spark_field, state_field
from store_actors.engine.versions import CHANGE_COLUMN
from store_actors.messages.requests import ApplyRequest, ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.serving.files import encode_snapshot, schema_of
from store_actors.serving.store_formats import evolve_groups
from tests.stored_shards import stored_rows
from tests.unit.aggregation_fleet import SCHEMA, AggregationFleet, LocalCoordinator
from tests.unit.ledger_harness import data_of
from tests.unit.service_harness import HERE, QueriedCoordinator

KINDS = AccumulatorKind


def accumulator(kind: AccumulatorKind, meaning: str, *types: str, inputs: tuple[str, ...] = ("v",)) -> Accumulator:
    """Return an accumulator with state fields of these types; :func:`schema` gives the fields distinct names."""
    return Accumulator(kind, inputs, tuple(Field("", name) for name in types), meaning)


def schema(*accumulators: Accumulator, mode: str = "update") -> StateSchema:
    named = tuple(
        structs.replace(
            item,
            state=tuple(structs.replace(state_field, name=f"a{n}_{m}") for m, state_field in enumerate(item.state)),
        )
        for n, item in enumerate(accumulators)
    )
    return StateSchema((Field("k", "string"),), (Field("v", "int64"),), named, None, None, mode)


COUNT = accumulator(KINDS.COUNT_ROWS, "Count(1)", "int64", inputs=())
SUM = accumulator(KINDS.SUM_INT, "Sum(v)", "int64")
#: The sum in ANSI mode, which is on by default in Spark 4.
CHECKED_SUM = accumulator(KINDS.SUM_INT_CHECKED, "Sum(v)", "int64", "bool")
MIN = accumulator(KINDS.MIN, "Min(v)", "int64")
SMALL_MIN = accumulator(KINDS.MIN, "Min(v)", "int32")
MAX = accumulator(KINDS.MAX, "Max(v)", "int64")
LIST = accumulator(KINDS.COLLECT_LIST, "CollectList(v)", "list<int32>")
WIDER_LIST = accumulator(KINDS.COLLECT_LIST, "CollectList(v)", "list<int64>")
SET = accumulator(KINDS.COLLECT_SET, "CollectSet(d)", "list<decimal(12,2)>")
WIDER_SET = accumulator(KINDS.COLLECT_SET, "CollectSet(d)", "list<decimal(22,2)>")


def metadata(of: StateSchema) -> StateMetadata:
    return StateMetadata(
        "s", "query", 1, of.output_mode, msgspec.json.decode(msgspec.json.encode(of), type=StateSchema)
    )


# -- the rule ---------------------------------------------------------------------------------------------------------


def sources_of(previous: list[Accumulator], new: list[Accumulator]) -> list[int | None]:
    return continued(*(schema(*items).accumulators for items in (previous, new)))


def test_aggregates_are_found_again_by_what_they_mean() -> None:
    assert sources_of([COUNT, SUM], [COUNT, SUM]) == [0, 1]
    assert sources_of([COUNT, SUM], [MAX, SUM, COUNT]) == [None, 1, 0]
    assert sources_of([COUNT, SUM, MIN], [MIN]) == [2]
    assert sources_of([COUNT, SMALL_MIN], [MIN, COUNT]) == [1, 0]
    assert sources_of([LIST, SET], [WIDER_SET, WIDER_LIST]) == [1, 0]
    assert sources_of([COUNT], [structs.replace(COUNT, kind=KINDS.COUNT_VALID, inputs=("v",))]) == [0]


def test_a_cast_in_the_query_distinguishes_two_aggregates_and_may_become_wider() -> None:
    as_int, as_long = structs.replace(SMALL_MIN, cast="INT"), structs.replace(MIN, cast="BIGINT")
    assert sources_of([as_int, COUNT], [COUNT, as_long]) == [1, 0]
    assert sources_of([SMALL_MIN], [as_long]) == [0]
    assert sources_of([SUM, structs.replace(SUM, cast="INT")], [structs.replace(SUM, cast="INT"), SUM]) == [1, 0]
    # Two aggregates are gone and one is new: it is unknown which one it continues.
    assert sources_of([COUNT, as_int, SMALL_MIN], [COUNT, as_long]) == [0, None]


@pytest.mark.parametrize(
    ("previous", "new", "reason"),
    [
        ([COUNT, MIN], [COUNT, SMALL_MIN], r"Min\(v\) cannot become int32, it is int64"),
        ([COUNT, MIN], [COUNT, structs.replace(SMALL_MIN, cast="INT")], "cannot become int32"),
        ([COUNT, SUM], [COUNT, accumulator(KINDS.SUM_FLOAT, "Sum(v)", "float64")], "cannot go on as sum_float"),
        # A sum that is null after an overflow is another function.
        (
            [CHECKED_SUM],
            [accumulator(KINDS.SUM_INT_OR_NULL, "Sum(v)", "int64", "bool")],
            "cannot go on as sum_int_or_null",
        ),
        ([WIDER_LIST], [LIST], r"cannot become list<int32>, it is list<int64>"),
        ([SUM], [MAX], "not one of the aggregates"),
        ([COUNT, structs.replace(SUM, meaning="")], [COUNT], "does not say what its columns mean"),
    ],
)
def test_a_change_that_is_not_the_same_aggregate_in_a_wider_type_is_refused(
    previous: list[Accumulator], new: list[Accumulator], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        sources_of(previous, new)
    with pytest.raises(StateMismatchError, match=reason) as error:
        check_metadata(metadata(schema(*previous)), metadata(schema(*new)))
    assert {"existing", "asked"} <= error.value.context.keys()
    assert all(item.state[0].type in str(error.value.context["existing"]) for item in previous)
    assert all(item.state[0].type in str(error.value.context["asked"]) for item in new)


def test_new_and_dropped_aggregates_are_reported() -> None:
    before, after = schema(COUNT, SUM), schema(MAX, COUNT)
    assert changes(before, after) == ("max: Max(v) int64", "sum_int: Sum(v) int64")
    assert changes(before, before) == ("", "")


def test_nullability_input_names_and_the_number_of_shards_by_keys_may_change() -> None:
    """The check raises nothing."""
    renamed = structs.replace(schema(SUM), keys=(Field("k", "string", False),), inputs=(Field("w", "int64"),))
    renamed = structs.replace(renamed, accumulators=(structs.replace(renamed.accumulators[0], inputs=("w",)),))
    check_metadata(metadata(schema(SUM)), structs.replace(metadata(renamed), num_shards=8))


#: A state of each operator, by the name that users know. Output modes and keys differ, too, as they do between queries.
OPERATORS = {
    "an aggregation": metadata(schema(COUNT)),
    "an aggregation by session windows": metadata(
        structs.replace(schema(COUNT, mode="append"), operator=OperatorKind.SESSION)
    ),
    "dropDuplicates": metadata(structs.replace(schema(mode="append"), operator=OperatorKind.DEDUPLICATE)),
    "dropDuplicatesWithinWatermark": metadata(
        structs.replace(schema(COUNT, mode="append"), operator=OperatorKind.DEDUPLICATE)
    ),
    "a join of two streams": metadata(structs.replace(schema(mode="append"), operator=OperatorKind.JOIN)),
    "topN": metadata(structs.replace(schema(), operator=OperatorKind.TOP, options={"n": 1, "ties": "first"})),
    "keepLast": metadata(structs.replace(schema(), operator=OperatorKind.TOP, options={"n": 1, "ties": "last"})),
    "limit": metadata(structs.replace(schema(COUNT, mode="append"), keys=(), operator=OperatorKind.LIMIT)),
    "applyInPandasWithState or applyInArrowWithState": metadata(
        structs.replace(schema(), operator=OperatorKind.GROUP_STATE)
    ),
    "transformWithState": metadata(structs.replace(schema(), operator=OperatorKind.TRANSFORM)),
    "a keyed state store": StateMetadata("s", "query", 1, "keyed"),
}


@pytest.mark.parametrize("queried_name", OPERATORS)
@pytest.mark.parametrize("existing", OPERATORS)
def test_another_operator_is_the_reason_before_differences_that_follow_from_it(
    existing: str, queried_name: str
) -> None:
    stored, queried = OPERATORS[existing], structs.replace(OPERATORS[queried_name], num_shards=3)
    if existing == queried_name:
        check_metadata(stored, OPERATORS[queried_name])
        return
    with pytest.raises(StateMismatchError, match=f"made by {existing}, and the query asks for {queried_name}") as error:
        check_metadata(stored, queried)
    assert error.value.context == {"existing": existing, "asked": queried_name, "state": "s"}


def test_every_kind_of_operator_has_a_name_that_users_know() -> None:
    assert set(compatibility._OPERATORS) == set(OperatorKind)


def test_a_state_from_before_there_were_other_operators_is_an_aggregation() -> None:
    data = metadata(schema(COUNT)).to_json()
    del data["schema"]["operator"]
    stored = StateMetadata.from_json(data)
    check_metadata(stored, metadata(schema(COUNT)))
    with pytest.raises(StateMismatchError, match="made by an aggregation"):
        check_metadata(stored, OPERATORS["limit"])


def test_a_schema_with_a_kind_of_a_later_release_is_refused_by_its_name() -> None:
    data = metadata(schema(COUNT)).to_json()
    for path in (
        {"operator": "teleport"},
        {"accumulators": [{**data["schema"]["accumulators"][0], "kind": "teleport"}]},
    ):
        with pytest.raises(NewerFormatError, match=r"later release.*kind=`teleport`"):
            StateMetadata.from_json({**data, "schema": {**data["schema"], **path}})


BY_KEY = metadata(schema(COUNT))
BY_ANOTHER_KEY = metadata(structs.replace(schema(COUNT), keys=(Field("k", "int64"),)))
GLOBAL = metadata(structs.replace(schema(COUNT), keys=()))
KEYED = structs.replace(BY_KEY, output_mode="keyed", schema=None)


@pytest.mark.parametrize(
    ("existing", "asked", "reason"),
    [
        (BY_KEY, BY_ANOTHER_KEY, "keys differ.*existing=`k string` asked=`k int64`"),
        (BY_KEY, metadata(structs.replace(schema(COUNT), expiry_key="k")), "expiry_key differ"),
        # It is refused for its keys, and not for its one shard.
        (structs.replace(BY_KEY, num_shards=4), GLOBAL, "keys differ.*existing=`k string` asked=``"),
        (structs.replace(GLOBAL, num_shards=4), GLOBAL, "one shard by nature.*existing=`4` asked=`1`"),
        (structs.replace(KEYED, num_shards=4), KEYED, "a function's or a program's own.*existing=`4` asked=`1`"),
        (BY_KEY, metadata(schema(COUNT, mode="append")), "another output mode.*existing=`update` asked=`append`"),
    ],
)  # fmt: skip
def test_another_state_is_refused_by_what_differs(existing: StateMetadata, asked: StateMetadata, reason: str) -> None:
    with pytest.raises(StateMismatchError, match=reason):
        check_metadata(existing, asked)


def test_a_wider_type_holds_every_value() -> None:
    assert is_wider("int8", "float32")
    assert is_wider("int32", "float64")
    assert is_wider("decimal(10,2)", "decimal(12,2)")
    assert is_wider("list<int32>", "list<int64>")
    assert not is_wider("list<int32>", "int64")
    assert not is_wider("int32", "list<int64>")
    assert not is_wider("int64", "float64")
    assert not is_wider("int32", "float32")
    assert not is_wider("decimal(10,2)", "decimal(12,3)")
    assert not is_wider("timestamp", "timestamp_ntz")


# -- rows -------------------------------------------------------------------------------------------------------------


SUM_OF_DECIMALS = accumulator(KINDS.SUM_DECIMAL, "Sum(d)", "decimal(12,2)", "bool")
WIDER_SUM_OF_DECIMALS = accumulator(KINDS.SUM_DECIMAL, "Sum(d)", "decimal(22,2)", "bool")
NEW = [
    COUNT,
    SUM,
    accumulator(KINDS.SUM_FLOAT, "f", "float64"),
    WIDER_SUM_OF_DECIMALS,
    accumulator(KINDS.MAX, "s", "string"),
    accumulator(KINDS.FIRST, "first", "string", "bool"),
    accumulator(KINDS.LAST_VALID, "last", "int64", "bool"),
    accumulator(KINDS.MOMENTS, "m", "float64", "float64", "float64"),
    WIDER_LIST,
    WIDER_SET,
]
#: By what happens: the accumulators before and after, the state of a group before, and its state after, in their order.
CHANGED = {
    "new ones begin as in a new group": (
        [MIN], [*NEW, MIN], [7],
        [0, None, None, Decimal("0.00"), True, None, None, False, None, False, 0.0, 0.0, 0.0, [], [], 7],
    ),
    "what stays in any order and wider": (
        [COUNT, SMALL_MIN, SUM_OF_DECIMALS], [WIDER_SUM_OF_DECIMALS, MIN],
        [3, -5, Decimal("1.25"), False], [Decimal("1.25"), False, -5],
    ),
    "lists whose elements become wider": (
        [LIST, SET], [WIDER_SET, WIDER_LIST], [[1, 2, 1], [Decimal("1.25")]], [[Decimal("1.25")], [1, 2, 1]],
    ),
    "a sum in ANSI mode": ([COUNT, SUM], [CHECKED_SUM, COUNT], [3, 7], [7, False, 3]),
    "a sum of nothing in ANSI mode": ([COUNT, SUM], [CHECKED_SUM, COUNT], [3, None], [0, True, 3]),
    "a sum no more in ANSI mode": ([CHECKED_SUM, COUNT], [COUNT, SUM], [7, False, 3], [3, 7]),
    "a sum of nothing no more in ANSI mode": ([CHECKED_SUM, COUNT], [COUNT, SUM], [0, True, 3], [3, None]),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED)
def test_groups_are_as_the_changed_query_has_them(case: str) -> None:
    *sides, before, after = CHANGED[case]
    previous, new = (schema(*items) for items in sides)
    names, keys = previous.row_schema().names, ("a", None)
    groups = [dict(zip(names, [key, *before], strict=True)) for key in keys]
    change = pa.Table.from_pylist(groups, schema=previous.row_schema())
    change = change.append_column(CHANGE_COLUMN, pa.array([0, 0], pa.int8()))
    rows = evolve_groups(change, previous, new, "file")
    assert rows.schema.names == [*new.row_schema().names, CHANGE_COLUMN]
    assert rows.schema.types[:-1] == new.row_schema().types
    assert [list(row.values()) for row in rows.to_pylist()] == [[key, *after, 0] for key in keys]
    # A batch may have changed nothing in a shard.
    assert evolve_groups(change.slice(0, 0), previous, new, "file") == rows.slice(0, 0)
    shard = AggregateShard(new)
    shard.load(rows, 1, 0)
    assert shard.snapshot().to_pylist() == rows.drop_columns([CHANGE_COLUMN]).to_pylist()
    with pytest.raises(StateMismatchError, match=r"key columns are fixed.*written=`k string; .*asked="):
        evolve_groups(rows, previous, structs.replace(new, keys=(Field("k", "int64"),)), "file")


# -- a state and its runs ---------------------------------------------------------------------------------------------


class EvolvingQuery(AggregationFleet):
    """A query that changes from run to run; the first schema creates the state."""

    def __init__(self, first: StateSchema) -> None:
        super().__init__()
        self.created = metadata(first)
        self.coordinator = LocalCoordinator(self.objects, self.created)
        self.store = self.new_store()

    def request(self, batch: int, run: str = "run-1", schema: StateSchema = SCHEMA, **where: Any) -> ApplyRequest:
        self.coordinator.queried = metadata(schema)
        return super().request(batch, run, schema, **where)

    def run(self, batch: int, run: str, of: StateSchema, **values: int) -> dict[str, tuple[Any, ...]]:
        """Run a batch with one value a key, and return the rows that it emits."""
        batch_rows = pa.table({"k": list(values), "v": list(values.values())}, schema=of.raw_schema())
        request = self.request(batch, run, of)
        emitted, _ = self.store.apply(request, ShardInput.of_raw(of, *batch_rows.to_batches()))
        assert emitted.schema.names == of.row_schema().names
        return rows_by_key(emitted)

    def all(self, of: StateSchema, version: int) -> dict[str, tuple[Any, ...]]:
        """Return the rows of a version as another process reads them from the files."""
        store_id = self.request(version, "reader", of).lease.store_id
        return rows_by_key(stored_rows(self.new_store(), store_id, version, of))

    def ledger(self) -> StateLedger:
        return StateLedger.from_json("x/s", self.coordinator.read(data_of))


def rows_by_key(rows: pa.Table) -> dict[str, tuple[Any, ...]]:
    return {row.pop("k"): tuple(row.values()) for row in rows.to_pylist()}


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_sum_that_is_checked_from_a_run_on_overflows_from_there(in_memory: bool) -> None:
    first, second = schema(SUM, COUNT), schema(CHECKED_SUM, COUNT)
    query = EvolvingQuery(first)
    query.run(0, "run-1", first, a=5, b=2**63 - 2)
    if not in_memory:
        query.store = query.new_store()
    assert query.run(1, "run-2", second, a=1, c=2) == {"a": (6, False, 2), "c": (2, False, 1)}
    with pytest.raises(SumOverflowError, match="long overflow"):
        query.run(2, "run-2", second, b=2)
    assert query.run(2, "run-3", first, b=2) == {"b": (-(2**63), 2)}
    assert query.all(first, 3) == {"a": (6, 2), "b": (-(2**63), 2), "c": (2, 1)}


def test_an_unchanged_query_finds_its_state_in_memory_and_a_changed_delay_reads_it_again() -> None:
    first = schema(COUNT)
    query = EvolvingQuery(first)
    query.run(0, "run-1", first, a=5)
    query.run(1, "run-2", first, a=5)
    assert query.store.metrics.deltas_loaded == 0
    assert query.run(2, "run-3", structs.replace(first, delay_ms=1000), a=5) == {"a": (3,)}
    assert query.store.metrics.deltas_loaded == 2


def test_the_newest_schema_is_in_the_log_once_and_in_its_checkpoints() -> None:
    first, second = schema(COUNT), schema(SUM, COUNT)
    query = EvolvingQuery(first)
    query.run(0, "run-1", first, a=5)
    assert query.ledger().described(query.created) == query.created
    assert query.ledger().load_plans(0, 1).plans["default"].schemas == ()
    for batch in (1, 2):
        query.run(batch, "run-2", second, a=6)
    ledger = query.ledger()
    assert ledger.described(query.created) == metadata(second)
    ((epoch, newest),) = ledger.load_plans(0, 3).plans["default"].schemas
    assert newest == second
    assert [entry.epoch >= epoch for entry in ledger.entries(0)] == [False, True, True]


def test_a_state_without_fingerprints_continues_unchanged_and_refuses_changes() -> None:
    def nameless(item: Accumulator) -> Accumulator:
        return structs.replace(item, meaning="")

    old, new = schema(nameless(COUNT), nameless(SUM)), schema(COUNT, SUM)
    query = EvolvingQuery(old)
    query.run(0, "run-1", old, a=5)
    assert query.run(1, "run-2", new, a=6) == {"a": (2, 11)}
    query.store = query.new_store()
    assert query.run(2, "run-3", new, a=1) == {"a": (3, 12)}
    with pytest.raises(StateMismatchError, match="does not say what its columns mean"):
        query.run(3, "run-4", schema(SUM, COUNT), a=1)
    assert same_state(old, new)


async def test_a_query_that_is_taken_back_is_not_refused_before_it_starts() -> None:
    first, second = (structs.replace(metadata(schema(COUNT, item)), num_shards=2) for item in (SMALL_MIN, MIN))
    coordinator = QueriedCoordinator()

    async def batch(run: str, number: int, of: StateMetadata, *shards: int) -> None:
        for shard in shards:
            await coordinator.commit(run, number, created=of, shard=shard)

    await batch("run-1", 0, first, 0, 1)
    await batch("run-2", 1, second, 0)
    await coordinator.check_state(first)
    await batch("run-2", 1, second, 1)
    # The batch may have to be repeated: its run has not reported since.
    await coordinator.check_state(first)
    # Once the query starts, its checkpoint tells which it is.
    await coordinator.check_state(first, 1)
    with pytest.raises(StateMismatchError, match="cannot become int32"):
        await coordinator.check_state(first, 2)
    await batch("run-2", 2, second, 0, 1)
    with pytest.raises(StateMismatchError, match="cannot become int32"):
        await coordinator.check_state(first)
    await coordinator.check_state(second)
    # At a start the owner of the state and the output mode are checked.
    await coordinator.check_start("s", "query", "update")
    await coordinator.check_start("s", "query", None)
    await coordinator.check_start("another", "", "complete")
    for query in ("", "another"):
        with pytest.raises(StateMismatchError, match=f"belongs to another query.*query_id=`{query}`"):
            await coordinator.check_start("s", query, "update")
    with pytest.raises(StateMismatchError, match=r"output mode.*existing=`update` asked=`complete`"):
        await coordinator.check_start("s", "query", "complete")


async def test_a_state_of_a_temporary_checkpoint_is_dropped_once_its_run_is_over() -> None:
    async def batch(query: str, number: int, *, is_temporary: bool) -> int:
        run = f"run-of-{query}"
        commit = await coordinator.commit(run, number, query=query, is_temporary=is_temporary)
        provider = StateStoreProviderId(StateStoreId("memory:///s", 0, 0), run)
        await coordinator._instances.report(provider, HERE, [])
        return int(commit.base_version)

    coordinator = QueriedCoordinator()
    for number in range(3):
        assert await batch("first", number, is_temporary=True) == number
    with pytest.raises(StateMismatchError, match="belongs to another query"):
        await coordinator.check_start("s", "", "update")
    await coordinator.check_start("s", "first", "update")
    await coordinator.deactivate_instances("run-of-first")
    with pytest.raises(StateMismatchError, match="another output mode"):
        await coordinator.check_start("s", "", "append")
    # A restarted coordinator knows from the log that the checkpoint is temporary, and has no report of the run.
    coordinator = coordinator.restarted()
    await coordinator.check_start("s", "", "update")
    assert await batch("second", 0, is_temporary=False) == 0
    with pytest.raises(FencedError):
        await batch("first", 3, is_temporary=True)
    await coordinator.deactivate_instances("run-of-second")
    with pytest.raises(StateMismatchError, match="belongs to another query"):
        await coordinator.check_start("s", "", "update")
    assert await batch("second", 1, is_temporary=False) == 1


# -- Spark's types ----------------------------------------------------------------------------------------------------

SPARK_TYPES: list[tuple[T.DataType, dict[str, Any]]] = [
    (T.BooleanType(), {}),
    (T.ByteType(), {}),
    (T.ShortType(), {}),
    (T.IntegerType(), {}),
    (T.LongType(), {}),
    (T.FloatType(), {}),
    (T.DoubleType(), {}),
    (T.StringType(), {}),
    (T.StringType(), {"__CHAR_VARCHAR_TYPE_STRING": "varchar(12)"}),
    (T.BinaryType(), {}),
    (T.DateType(), {}),
    (T.TimestampType(), {}),
    (T.TimestampNTZType(), {}),
    (T.DecimalType(12, 3), {}),
    (T.DayTimeIntervalType(), {}),
    (T.DayTimeIntervalType(T.DayTimeIntervalType.HOUR, T.DayTimeIntervalType.MINUTE), {}),
]


def test_files_have_every_type_as_spark_has_it() -> None:
    fields = [
        T.StructField(f"k{n}", kind, nullable=n % 2 == 0, metadata=facts) for n, (kind, facts) in enumerate(SPARK_TYPES)
    ]
    keys = tuple(
        state_field(struct_field.name, struct_field.dataType, struct_field.nullable, metadata=struct_field.metadata)
        for struct_field in fields
    )
    of = structs.replace(schema(COUNT), keys=keys)
    assert [spark_field(key).dataType for key in keys] == [struct_field.dataType for struct_field in fields]
    (data,) = (piece.data for piece in encode_snapshot([], 1, 0, of, {}, {}))
    rows = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    file_type = T.StructType.fromJson(json.loads(rows.schema.metadata[b"statefleet"])["spark"])
    assert file_type == T.StructType([*fields, T.StructField("a0_0", T.LongType())])
    assert [struct_field.metadata for struct_field in file_type][:-1] == [facts for _, facts in SPARK_TYPES]
    assert schema_of(rows) == of


def test_what_a_column_is_to_its_query_is_no_part_of_its_type() -> None:
    field = state_field("k", T.TimestampType(), metadata={"spark.watermarkDelayMs": 10, "spark.timeWindow": True})
    assert field == Field("k", "timestamp")


def test_a_keyed_store_has_its_spark_types_by_its_arrow_types() -> None:
    of = StateSchema.keyed((Field("k", "int32", False),), (Field("d", "decimal(10,2)"), Field("t", "duration")))
    assert T.StructType.fromJson(of.spark_schema()) == T.StructType(
        [
            T.StructField("k", T.IntegerType(), False),
            T.StructField("d", T.DecimalType(10, 2)),
            T.StructField("t", T.DayTimeIntervalType()),
        ]
    )
    assert spark_type("timestamp_ntz") == "timestamp_ntz"


def test_files_from_before_spark_types_and_meanings_are_read() -> None:
    of = schema(structs.replace(COUNT, meaning=""))
    rows = pa.table({"k": ["a"], "a0_0": [1]}, schema=of.row_schema())
    (data,) = (piece.data for piece in encode_snapshot([rows], 1, 0, of, {}, {}))
    rows = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    facts = json.loads(rows.schema.metadata[b"statefleet"])
    del facts["spark"]
    for field in [*facts["schema"]["keys"], *facts["schema"]["inputs"], *facts["schema"]["accumulators"][0]["state"]]:
        del field["spark"]
    for name in ("meaning", "cast"):
        del facts["schema"]["accumulators"][0][name]
    old = rows.replace_schema_metadata({b"statefleet": json.dumps(facts).encode()})
    assert schema_of(old) == of
    assert evolve_groups(old, schema_of(old), schema(COUNT), "file") is old
