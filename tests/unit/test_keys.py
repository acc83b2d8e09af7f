"""Keys of any number of columns and of any type that Spark groups by: each operator against a dict, through versions and reloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.errors import InvalidRequestError
from coordinator.model.nested_types import has_map
from coordinator.model.schema import ROW_COLUMN, Accumulator, AccumulatorKind, Field, OperatorKind, StateSchema
from coordinator.model.type_names import string_to_type, type_to_string
from store_actors.engine import versions
from store_actors.keyed.shard import KeyedShard
from store_actors.messages import ShardInput
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
    return tuple(Field(f"k{place}", kind) for place, kind in enumerate(types))


@st.composite
def many_columns(draw: st.DrawFn, widths: list[int] = WIDTHS) -> Case:
    """Keys that are the same in all columns but a few."""
    width = draw(st.sampled_from(widths))
    fields = fields_of(["int8"] * width)
    place = st.sampled_from(sorted({0, 30, 31, 32, 93, 94, 95, width - 1} & set(range(width))))
    differences = st.dictionaries(place, st.sampled_from([None, 0, 1]), max_size=3)
    keys = differences.map(lambda some: tuple(some.get(column, 0) for column in range(width)))
    return fields, draw(st.lists(st.lists(keys, max_size=10), min_size=2, max_size=2))


@st.composite
def any_types(draw: st.DrawFn) -> Case:
    """Keys of arrays and structs of anything, and of arrays of these."""
    kinds = draw(st.lists(NESTED.filter(lambda kind: not has_map(type_to_string(kind))), min_size=1, max_size=2))
    types = ["string", *map(type_to_string, kinds)]
    keys = st.tuples(st.sampled_from(["a", None]), *map(values, kinds))
    return fields_of(types), draw(st.lists(st.lists(keys, max_size=10), min_size=2, max_size=2))


CASE = st.one_of(many_columns(), any_types())


@pytest.fixture(autouse=True)
def _compacting() -> Iterator[None]:
    """Strings that no version has are dropped with each version."""
    small, versions._SMALL_POOL = versions._SMALL_POOL, -(1 << 40)
    yield
    versions._SMALL_POOL = small


def table_of(fields: tuple[Field, ...], keys: list[Key], **columns: list[Any]) -> pa.Table:
    arrays = [pa.array([key[place] for key in keys], string_to_type(one.type)) for place, one in enumerate(fields)]
    return pa.table([*arrays, *map(pa.array, columns.values())], names=[*(one.name for one in fields), *columns])


def keys_in(fields: tuple[Field, ...], rows: pa.Table) -> list[str]:
    columns = [rows.column(one.name).to_pylist() for one in fields]
    return [identity(key) for key in zip(*columns, strict=True)]


class Run:
    """An operator's shard in batches; it is loaded anew after each of them, and an abandoned batch comes before."""

    def __init__(self, schema: StateSchema) -> None:
        self.schema = schema
        self.shard: OperatorShard = make_shard(schema, 0)

    def batch(self, *tables: pa.Table) -> pa.Table:
        """Rows that the batch emits."""
        tables = tuple(one.cast(wanted) for one, wanted in zip(tables, self.schema.input_schemas(), strict=False))
        padded = (*tables, *(one.empty_table() for one in self.schema.input_schemas()[len(tables) :]))
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


@given(case=CASE)
@settings(max_examples=30, deadline=None)
def test_groups(case: Case) -> None:
    fields, batches = case
    run = Run(StateSchema(fields, (), (COUNT,), None, None, "update"))
    model: Counter[str] = Counter()
    for keys in batches:
        run.batch(table_of(fields, keys))
        model.update(map(identity, keys))
        found = run.shard.snapshot()
        assert dict(zip(keys_in(fields, found), found.column("n").to_pylist(), strict=True)) == model


@given(case=CASE)
@settings(max_examples=30, deadline=None)
def test_sessions(case: Case) -> None:
    fields, batches = case
    keys = (*fields, Field(ROW_COLUMN, "int64", nullable=False))
    span = tuple(Accumulator(AccumulatorKind.VALUE, (one.name,), (one,)) for one in TIMES)
    run = Run(StateSchema(keys, TIMES, (*span, COUNT), None, None, "complete", OperatorKind.SESSION))
    model: Counter[str] = Counter()
    for some in batches:
        times = [pa.array([at * SECOND] * len(some), pa.timestamp("us", "UTC")) for at in (0, 10)]
        rows = table_of(fields, some).append_column("session_start", times[0]).append_column("session_end", times[1])
        run.batch(rows)
        model.update(map(identity, some))
        found = run.shard.snapshot()
        assert dict(zip(keys_in(fields, found), found.column("n").to_pylist(), strict=True)) == model
        assert len(found) == len(model)


@given(case=CASE)
@settings(max_examples=30, deadline=None)
def test_duplicates(case: Case) -> None:
    fields, batches = case
    schema = StateSchema(fields, (), (), None, None, "append", operator=OperatorKind.DEDUPLICATE)
    run = Run(schema)
    assert isinstance(run.shard, DeduplicateShard)
    seen: set[str] = set()
    for keys in batches:
        emitted = keys_in(fields, run.batch(table_of(fields, keys)))
        assert sorted(emitted) == sorted(set(map(identity, keys)) - seen)
        seen.update(emitted)


@given(case=CASE)
@settings(max_examples=30, deadline=None)
def test_the_last_of_each_key(case: Case) -> None:
    fields, batches = case
    schema = top_schema(fields, (VALUE,), 1, [{"column": "v", "descending": True, "nulls_first": False}], rank=False)
    run = Run(schema)
    assert isinstance(run.shard, type(top_shard(schema)))
    model: dict[str, int] = {}
    for number, keys in enumerate(batches):
        numbers = [100 * number + place for place in range(len(keys))]
        run.batch(table_of(fields, keys, v=pa.array(numbers, pa.int64())))
        model |= dict(zip(map(identity, keys), numbers, strict=True))
        found = run.shard.snapshot()
        assert dict(zip(keys_in(fields, found), found.column("v").to_pylist(), strict=True)) == model


@given(case=CASE, join_type=st.sampled_from(["inner", "left_outer"]), null_safe=st.booleans())
@settings(max_examples=30, deadline=None)
def test_joins(case: Case, join_type: str, null_safe: bool) -> None:
    fields, (left, right) = case
    options = {"join_type": join_type, "output": [["l0"], ["r0"]]}
    options["null_safe"] = [one.name for one in fields] if null_safe else []
    run = Run(join_schema(fields, (Field("l0", "int64"),), (Field("r0", "int64"),), options))
    assert isinstance(run.shard, JoinShard)
    sides = [
        table_of(fields, keys, **{name: pa.array(range(len(keys)), pa.int64())})
        for keys, name in ((left, "l0"), (right, "r0"))
    ]
    first = run.batch(sides[0], sides[1].slice(0, len(right) // 2))
    second = run.batch(sides[0].slice(0, 0), sides[1].slice(len(right) // 2))
    found = Counter((row["l0"], row["r0"]) for rows in (first, second) for row in rows.to_pylist())
    expected = [
        (number, other)
        for number, one in enumerate(left)
        for other, two in enumerate(right)
        if identity(one) == identity(two) and (null_safe or None not in one)
    ]
    assert found == Counter(expected)


@given(case=CASE, data=st.data())
@settings(max_examples=30, deadline=None)
def test_keyed_stores(case: Case, data: st.DataObject) -> None:
    fields, batches = case
    shard = KeyedShard(fields, (VALUE,))
    model: dict[str, tuple[Key, int]] = {}
    for number, keys in enumerate(batches):
        before = dict(model)
        reader = shard.read()
        with shard.begin(shard.version) as handle:
            numbers = [100 * number + place for place in range(len(keys))]
            handle.put(table_of(fields, keys, v=pa.array(numbers, pa.int64())))
            model |= {identity(key): (key, one) for key, one in zip(keys, numbers, strict=True)}
            gone = [key for key, _ in list(model.values())[::3]]
            assert handle.remove(table_of(fields, gone)) == len(gone)
            for key in gone:
                del model[identity(key)]
            handle.commit()
        for one, expected in ((shard.read(), model), (reader, before)):
            found = one.iterator().read_all()
            told = dict(zip(keys_in(fields, found), found.column("v").to_pylist(), strict=True))
            assert told == {name: value for name, (_, value) in expected.items()}
            for columns in {1, len(fields), data.draw(st.integers(1, len(fields)))}:
                prefixes = [key[:columns] for key, _ in list(expected.values())[:2]]
                found = one.prefix_scan(table_of(fields[:columns], prefixes)).read_all()
                starts = set(map(identity, prefixes))
                told = sorted(keys_in(fields, found))
                assert told == sorted(name for name, (key, _) in expected.items() if identity(key[:columns]) in starts)


def test_maps_are_no_keys_and_arrays_are_in_no_range() -> None:
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
        some = data.draw(st.dictionaries(st.integers(0, 5), values(kind), max_size=5))
        with shard.begin(shard.version) as handle:
            handle.put(pa.table({"k": pa.array(some, pa.int64()), "v": pa.array(some.values(), kind)}))
            handle.commit()
        model |= some
    found = shard.snapshot()
    assert found.schema.field("v").type == kind
    told = dict(zip(found.column("k").to_pylist(), found.column("v").to_pylist(), strict=True))
    assert {one: identity(value) for one, value in told.items()} == {
        one: identity(value) for one, value in model.items()
    }
