"""Keys of any number of columns and of any type that Spark groups by: each operator against a dict, through versions and reloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import ROW_COLUMN, Accumulator, Field, OperatorKind, StateSchema
from coordinator.model.type_names import has_map, string_to_type, type_to_string
from store_actors.engine import versions
from store_actors.keyed.shard import KeyedShard
from store_actors.messages.requests import ShardInput
from store_actors.operators.deduplicate import DeduplicateShard
from store_actors.operators.join import JoinShard
from store_actors.operators.join_schema import join_schema
from store_actors.operators.make_shard import OperatorShard, make_shard
from store_actors.operators.top import top_shard
from store_actors.operators.top_schema import top_schema
from tests.unit.nested_values import NESTED, identity, values

COUNT = Accumulator(AccumulatorKind.COUNT_ROWS, (), (Field("n", "int64", False),))
TIMES = (Field("session_start", "timestamp"), Field("session_end", "timestamp"))
VALUE = Field("v", "int64")
WIDTHS = [1, 30, 31, 32, 33, 94, 95, 96, 130]
SECOND = 1_000_000

Key = tuple[Any, ...]
#: Names and types of key columns, and the keys of the rows of two batches.
Case = tuple[tuple[Field, ...], list[list[Key]]]


def fields_of(types: list[str]) -> tuple[Field, ...]:
    return tuple(Field(f"k{index}", kind) for index, kind in enumerate(types))


@st.composite
def many_columns(draw: st.DrawFn, widths: list[int] = WIDTHS) -> Case:
    """Keys that are equal in all columns except a few."""
    width = draw(st.sampled_from(widths))
    fields = fields_of(["int8"] * width)
    columns = st.sampled_from(sorted({0, 30, 31, 32, 93, 94, 95, width - 1} & set(range(width))))
    differences = st.dictionaries(columns, st.sampled_from([None, 0, 1]), max_size=3)
    keys = differences.map(lambda changed: tuple(changed.get(column, 0) for column in range(width)))
    return fields, draw(st.lists(st.lists(keys, max_size=10), min_size=2, max_size=2))


@st.composite
def any_types(draw: st.DrawFn) -> Case:
    """Keys of arrays and structs of any type, and of arrays of these."""
    kinds = draw(st.lists(NESTED.filter(lambda kind: not has_map(type_to_string(kind))), min_size=1, max_size=2))
    types = ["string", *map(type_to_string, kinds)]
    keys = st.tuples(st.sampled_from(["a", None]), *map(values, kinds))
    return fields_of(types), draw(st.lists(st.lists(keys, max_size=10), min_size=2, max_size=2))


CASE = st.one_of(many_columns(), any_types())


@pytest.fixture(autouse=True)
def _compacting() -> Iterator[None]:
    """Drop unused strings with each version."""
    small, versions._SMALL_POOL = versions._SMALL_POOL, -(1 << 40)
    yield
    versions._SMALL_POOL = small


def table_of(fields: tuple[Field, ...], keys: list[Key], **columns: list[Any]) -> pa.Table:
    arrays = [pa.array([key[index] for key in keys], string_to_type(field.type)) for index, field in enumerate(fields)]
    return pa.table([*arrays, *map(pa.array, columns.values())], names=[*(field.name for field in fields), *columns])


def keys_in(fields: tuple[Field, ...], rows: pa.Table) -> list[str]:
    columns = [rows.column(field.name).to_pylist() for field in fields]
    return [identity(key) for key in zip(*columns, strict=True)]


class Run:
    """An operator's shard in batches; each batch is aborted and repeated, and the shard is reloaded after each batch."""

    def __init__(self, schema: StateSchema) -> None:
        self.schema = schema
        self.shard: OperatorShard = make_shard(schema, 0)

    def batch(self, *tables: pa.Table) -> pa.Table:
        """Run a batch and return the rows that it emits."""
        tables = tuple(
            table.cast(input_schema) for table, input_schema in zip(tables, self.schema.input_schemas(), strict=False)
        )
        padded = (*tables, *(input_schema.empty_table() for input_schema in self.schema.input_schemas()[len(tables) :]))
        rows, version = ShardInput(padded, sum(map(len, tables))), self.shard.version + 1
        self.shard.apply(rows, 0, version)
        self.shard.abort()
        change = self.shard.apply(rows, 0, version)
        self.shard.commit()
        loaded = make_shard(self.schema, 0)
        snapshot = self.shard.snapshot()
        loaded.load(snapshot.append_column("__change", pa.array([0] * len(snapshot), pa.int8())), version, 0)
        self.shard = loaded
        return self.shard.output(change.delta) if change.emitted is None else change.emitted


def of_keys(fields: tuple[Field, ...], rows: pa.Table, column: str) -> dict[str, int]:
    """Return a column by key."""
    return dict(zip(keys_in(fields, rows), rows.column(column).to_pylist(), strict=True))


@given(case=CASE, in_sessions=st.booleans())
@settings(max_examples=60, deadline=None)
def test_groups_and_sessions(case: Case, in_sessions: bool) -> None:
    fields, batches = case
    schema = StateSchema(fields, (), (COUNT,), None, None, "update")
    if in_sessions:
        keys = (*fields, Field(ROW_COLUMN, "int64", nullable=False))
        span = tuple(Accumulator(AccumulatorKind.VALUE, (field.name,), (field,)) for field in TIMES)
        schema = StateSchema(keys, TIMES, (*span, COUNT), None, None, "complete", OperatorKind.SESSION)
    run = Run(schema)
    model: Counter[str] = Counter()
    for keys_of_batch in batches:
        rows = table_of(fields, keys_of_batch)
        for name, at in (("session_start", 0), ("session_end", 10)) if in_sessions else ():
            times = pa.array([at * SECOND] * len(keys_of_batch), pa.timestamp("us", "UTC"))
            rows = rows.append_column(name, times)
        run.batch(rows)
        model.update(map(identity, keys_of_batch))
        snapshot = run.shard.snapshot()
        assert of_keys(fields, snapshot, "n") == model
        assert len(snapshot) == len(model)


@given(case=CASE)
@settings(max_examples=30, deadline=None)
def test_duplicates(case: Case) -> None:
    fields, batches = case
    schema = StateSchema(fields, (), (), None, None, "append", operator=OperatorKind.DEDUPLICATE)
    run = Run(schema)
    assert isinstance(run.shard, DeduplicateShard)
    known_keys: set[str] = set()
    for keys in batches:
        emitted = keys_in(fields, run.batch(table_of(fields, keys)))
        assert sorted(emitted) == sorted(set(map(identity, keys)) - known_keys)
        known_keys.update(emitted)


@given(case=CASE)
@settings(max_examples=30, deadline=None)
def test_the_last_of_each_key(case: Case) -> None:
    fields, batches = case
    schema = top_schema(fields, (VALUE,), 1, [{"column": "v", "descending": True, "nulls_first": False}], rank=False)
    run = Run(schema)
    assert isinstance(run.shard, type(top_shard(schema)))
    model: dict[str, int] = {}
    for number, keys in enumerate(batches):
        numbers = [100 * number + index for index in range(len(keys))]
        run.batch(table_of(fields, keys, v=pa.array(numbers, pa.int64())))
        model |= dict(zip(map(identity, keys), numbers, strict=True))
        assert of_keys(fields, run.shard.snapshot(), "v") == model


@given(case=CASE, join_type=st.sampled_from(["inner", "left_outer"]), null_safe=st.booleans())
@settings(max_examples=30, deadline=None)
def test_joins(case: Case, join_type: str, null_safe: bool) -> None:
    fields, (left, right) = case
    options = {"join_type": join_type, "output": [["l0"], ["r0"]]}
    options["null_safe"] = [field.name for field in fields] if null_safe else []
    run = Run(join_schema(fields, (Field("l0", "int64"),), (Field("r0", "int64"),), options))
    assert isinstance(run.shard, JoinShard)
    sides = [
        table_of(fields, keys, **{name: pa.array(range(len(keys)), pa.int64())})
        for keys, name in ((left, "l0"), (right, "r0"))
    ]
    first = run.batch(sides[0], sides[1].slice(0, len(right) // 2))
    second = run.batch(sides[0].slice(0, 0), sides[1].slice(len(right) // 2))
    pairs = Counter((row["l0"], row["r0"]) for rows in (first, second) for row in rows.to_pylist())
    expected = [
        (number, right_number)
        for number, left_key in enumerate(left)
        for right_number, right_key in enumerate(right)
        if identity(left_key) == identity(right_key) and (null_safe or None not in left_key)
    ]
    assert pairs == Counter(expected)


@given(case=CASE, data=st.data())
@settings(max_examples=30, deadline=None)
def test_keyed_stores(case: Case, data: st.DataObject) -> None:
    fields, batches = case
    shard = KeyedShard(fields, (VALUE,))
    model: dict[str, tuple[Key, int]] = {}
    for number, keys in enumerate(batches):
        before = dict(model)
        reader = shard.read()
        handle = shard.begin(shard.version)
        numbers = [100 * number + index for index in range(len(keys))]
        handle.put(table_of(fields, keys, v=pa.array(numbers, pa.int64())))
        model |= {identity(key): (key, value) for key, value in zip(keys, numbers, strict=True)}
        removed = [key for key, _ in list(model.values())[::3]]
        assert handle.remove(table_of(fields, removed)) == len(removed)
        for key in removed:
            del model[identity(key)]
        handle.commit()
        for opened, expected in ((shard.read(), model), (reader, before)):
            table = opened.iterator().read_all()
            assert of_keys(fields, table, "v") == {name: value for name, (_, value) in expected.items()}
            for columns in {1, len(fields), data.draw(st.integers(1, len(fields)))}:
                prefixes = [key[:columns] for key, _ in list(expected.values())[:2]]
                table = opened.prefix_scan(table_of(fields[:columns], prefixes)).read_all()
                starts = set(map(identity, prefixes))
                found_keys = sorted(keys_in(fields, table))
                assert found_keys == sorted(
                    name for name, (key, _) in expected.items() if identity(key[:columns]) in starts
                )


def test_maps_cannot_be_keys_and_arrays_have_no_ranges() -> None:
    for kind in ("map<string,int8>", "array<map<string,int8>>", 'struct<"a":map<string,int8>>'):
        with pytest.raises(InvalidRequestError, match="no maps in it, as in Spark"):
            KeyedShard((Field("k", kind),), (VALUE,))
    with pytest.raises(InvalidRequestError, match="of an atomic type"):
        KeyedShard((Field("k", "array<int8>"),), (VALUE,)).read().range_scan("k", [1])


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_values_of_any_type_are_kept(data: st.DataObject) -> None:
    kind = data.draw(NESTED)
    field, key = Field("v", type_to_string(kind)), (Field("k", "int64"),)
    shard, model = KeyedShard(key, (field,)), {}
    for _ in range(2):
        batch = data.draw(st.dictionaries(st.integers(0, 5), values(kind), max_size=5))
        handle = shard.begin(shard.version)
        handle.put(pa.table({"k": pa.array(batch, pa.int64()), "v": pa.array(batch.values(), kind)}))
        handle.commit()
        model |= batch
    snapshot = shard.snapshot()
    assert snapshot.schema.field("v").type == kind
    stored = dict(zip(snapshot.column("k").to_pylist(), snapshot.column("v").to_pylist(), strict=True))
    assert {key_number: identity(value) for key_number, value in stored.items()} == {
        key_number: identity(value) for key_number, value in model.items()
    }
