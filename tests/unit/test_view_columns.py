"""Columns in which readers see a state's rows, and look-ups by keys of these columns."""

from __future__ import annotations

import datetime as dt
import json
import math
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from msgspec import structs

from coordinator.ledger.records import SchemaChanged
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import Accumulator, Field, OperatorKind, StateSchema
from coordinator.model.state_metadata import StateMetadata
from spark_jobs.plan.view_components import ViewComponent
from store_actors.messages.requests import StoreSpec
from store_actors.operators.view_columns import ViewColumns

Node = dict[str, Any]


def column(name: str) -> Node:
    return {"op": "column", "name": name}


SUM = Accumulator(AccumulatorKind.SUM_FLOAT, ("v0",), (Field("a0_sum", "float64"),), "Sum(`v`)")
COUNT = Accumulator(AccumulatorKind.COUNT_ROWS, (), (Field("a1_count", "int64", False),), "Count(1)")
MODE = Accumulator(
    AccumulatorKind.COUNTED,
    ("v1",),
    (Field("a2_values", "counts<string>", False),),
    "Mode(`s`)",
    result=(Field("a2_values", "string"),),
)
WINDOW: Node = {"op": "struct", "names": ["start", "end"], "args": [column("k0_0"), column("k0_1")], "null": "k0_null"}
AVERAGE: Node = {"op": "/", "args": [column("a0_sum"), {"op": "cast", "type": "float64", "args": [column("a1_count")]}]}
GROUPS = StateSchema(
    keys=(
        Field("k0_null", "bool", False),
        Field("k0_0", "timestamp"),
        Field("k0_1", "timestamp"),
        Field("k1", "float64"),
    ),
    inputs=(),
    accumulators=(SUM, COUNT, MODE),
    expiry_key="k0_1",
    delay_ms=1000,
    output_mode="update",
    shown={
        "": {
            "columns": [
                {"name": "window", "value": WINDOW, "key": True},
                {"name": "x", "value": column("k1"), "key": True},
                {"name": "avg(v)", "value": AVERAGE},
                {"name": "usual", "value": column("a2_values")},
            ],
            "not_shown": [{"name": "text", "why": "because"}],
        }
    },
)
NOON = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)
MINUTE = {"start": NOON, "end": NOON + dt.timedelta(minutes=1)}


def rows(schema: StateSchema, *values: tuple[Any, ...]) -> pa.Table:
    columns = zip(*values, strict=True)
    arrays = [pa.array(list(column), field.type) for column, field in zip(columns, schema.row_schema(), strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema.row_schema())


COUNTED = [{"value": "a", "count": 1}, {"value": "b", "count": 3}]
STATE = pa.concat_tables(
    [
        rows(GROUPS, (False, NOON, MINUTE["end"], 1.5, 7.0, 2, COUNTED)),
        rows(GROUPS, (True, None, None, None, None, 0, [])),
    ]
)


def test_only_the_needed_columns_are_requested() -> None:
    view = ViewColumns.of(GROUPS)
    assert view.needed(None) == tuple(GROUPS.row_schema().names)
    assert view.needed(["usual"]) == ("a2_values",)
    assert view.needed(["avg(v)", "window"]) == ("k0_null", "k0_0", "k0_1", "a0_sum", "a1_count")
    for names in (["usual"], ["avg(v)", "window"], ["x"]):
        part = view.rows(STATE.select(view.needed(names)), names)
        assert part == view.rows(STATE, None).select(names)
    with pytest.raises(InvalidRequestError, match=r"no columns.*nowhere.*window"):
        view.needed(["x", "nowhere"])
    with pytest.raises(InvalidRequestError, match="no columns"):
        view.rows(STATE, ["nowhere"])


def test_states_without_a_description_are_shown_as_they_are() -> None:
    top = StateSchema(
        (Field("k0", "string"), Field("__row", "int64", False)), (), (SUM, MODE), None, None, "update", OperatorKind.TOP
    )
    view = ViewColumns.of(top)
    assert view.schema == top.row_schema().remove_metadata() or view.schema.names == top.row_schema().names
    state = rows(top, ("a", 1, 2.5, COUNTED))
    assert view.rows(state, None).to_pylist() == state.to_pylist()
    assert view.keys == ("k0",)
    assert ViewColumns.parts_of(top) == ()


def test_a_part_of_a_state_without_parts_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="leave its name out"):
        ViewColumns.of(GROUPS, "left")


def test_a_tree_that_cannot_be_evaluated_is_refused() -> None:
    description = {"": {"columns": [{"name": "x", "value": {"op": "later", "args": []}}]}}
    with pytest.raises(InvalidRequestError, match="cannot be computed"):
        ViewColumns.of(structs.replace(GROUPS, shown=description))


# -- keys ---------------------------------------------------------------------------------------------------------------


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def test_keys_of_the_view_become_those_of_the_state() -> None:
    view = ViewColumns.of(GROUPS)
    of_state = STATE.select([field.name for field in GROUPS.keys]).to_pylist()
    assert view.key_leaves(view.rows(STATE, ["x", "window"])).to_pylist() == of_state
    view_keys = pa.table({"x": [2, None], "window": [{"end": NOON, "start": NOON}, None]})
    leaves = view.key_leaves(view_keys)
    assert leaves.schema == pa.schema([field.arrow() for field in GROUPS.keys])
    assert leaves.to_pylist() == [
        {"k0_null": False, "k0_0": NOON, "k0_1": NOON, "k1": 2.0},
        {"k0_null": True, "k0_0": None, "k0_1": None, "k1": None},
    ]
    nothing = view.key_leaves(pa.table({"x": pa.nulls(1), "window": pa.nulls(1)}))
    assert nothing.to_pylist() == leaves.slice(1).to_pylist()


def test_floats_are_found_as_spark_groups_them() -> None:
    kinds = ["float64", "float32", "array<float64>", 'struct<"a":array<float32>>']
    fields = tuple(Field(f"k{number}", kind) for number, kind in enumerate(kinds))
    described = {"": {"columns": [{"name": field.name, "value": column(field.name), "key": True} for field in fields]}}
    schema = StateSchema(fields, (), (), None, None, "update", shown=described)
    other_nan = struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf8\xff")[0]
    types = [pa.float64(), pa.float64(), pa.list_(pa.float64()), pa.struct([("a", pa.list_(pa.float32()))])]
    values = [[-0.0, other_nan], [-0.0, 0.1], [[-0.0, None, other_nan], None], [{"a": [-0.0]}, None]]
    keys = pa.table(
        {field.name: pa.array(of_field, kind) for field, of_field, kind in zip(fields, values, types, strict=True)}
    )
    leaves = ViewColumns.of(schema).key_leaves(keys).to_pydict()
    assert [bits(value) for value in leaves["k0"]] == [bits(0.0), bits(math.nan)]
    assert leaves["k1"] == [0.0, struct.unpack("<f", struct.pack("<f", 0.1))[0]]
    assert [bits(leaves["k2"][0][index]) for index in (0, 2)] == [bits(0.0), bits(math.nan)]
    assert leaves["k2"][1] is None
    assert repr(leaves["k3"]) == "[{'a': [0.0]}, None]"
    as_they_are = (
        ViewColumns.of(structs.replace(schema, operator=OperatorKind.DEDUPLICATE)).key_leaves(keys).to_pydict()
    )
    assert repr([as_they_are["k0"][0], as_they_are["k2"][0][0]]) == "[-0.0, -0.0]"


def test_a_null_struct_that_equals_nothing_is_a_null_leaf() -> None:
    keys = (
        Field("k0_null", "bool"),
        Field("k0_0", "timestamp"),
        Field("k0_1", "timestamp"),
        Field("__row", "int64", False),
    )
    schema = structs.replace(
        GROUPS, keys=keys, shown={"": {"columns": [{"name": "window", "value": WINDOW, "key": True}]}}
    )
    leaves = ViewColumns.of(schema).key_leaves(pa.table({"window": [MINUTE, None]}))
    assert leaves.column("k0_null").to_pylist() == [False, None]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"x": [1.0]}, r"missing=`\['window'\]`"),
        ({"x": [1.0], "window": [MINUTE], "y": [1]}, r"unknown=`\['y'\]`"),
        ({"x": ["1"], "window": [MINUTE]}, "key=`x` type=`double` given=`string`"),
        ({"x": [True], "window": [MINUTE]}, "key=`x`"),
        ({"x": [1.0], "window": [NOON]}, "key=`window`"),
        ({"x": [1.0], "window": [{"start": NOON}]}, "key=`window`"),
    ],
)
def test_keys_of_other_names_or_types_are_refused(keys: dict[str, list[Any]], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        ViewColumns.of(GROUPS).key_leaves(pa.table(keys))


def test_numbers_times_and_texts_are_cast_within_their_kind() -> None:
    kinds = {"i": "int32", "d": "decimal(10,2)", "t": "timestamp", "s": "string", "day": "date32", "b": "binary"}
    fields = tuple(Field(name, kind) for name, kind in kinds.items())
    described = {"": {"columns": [{"name": field.name, "value": column(field.name), "key": True} for field in fields]}}
    view = ViewColumns.of(StateSchema(fields, (), (), None, None, "update", shown=described))
    keys = {
        "i": pa.array([7], pa.int64()),
        "d": pa.array([Decimal("1.5")]),
        "t": pa.array([NOON.replace(tzinfo=None)], pa.timestamp("s")),
        "s": pa.array(["x"]).dictionary_encode(),
        "day": pa.array([NOON.date()]),
        "b": pa.array([b"y"], pa.large_binary()),
    }
    assert view.key_leaves(pa.table(keys)).to_pylist() == [
        {"i": 7, "d": Decimal("1.50"), "t": NOON, "s": "x", "day": NOON.date(), "b": b"y"}
    ]
    with pytest.raises(InvalidRequestError, match=r"key=`i` type=`int32`.*reason="):
        view.key_leaves(pa.table({**keys, "i": pa.array([2**40])}))


# -- descriptions in the schema -------------------------------------------------------------------------------


def renamed(schema: StateSchema, name: str) -> StateSchema:
    description = json.loads(json.dumps(schema.shown))
    description[""]["columns"][2]["name"] = name
    return structs.replace(schema, shown=description)


def metadata(schema: StateSchema) -> StateMetadata:
    return StateMetadata("s", "query", 1, "update", schema)


def test_a_new_description_alone_is_logged_once() -> None:
    ledger = StateLedger("x/s")
    task = TaskIdentity("s", "query", "run", 0, 0, 0, "executor")

    def decided(schema: StateSchema) -> list[Any]:
        records = ledger.decide_schema(task, metadata(GROUPS.undescribed()), metadata(schema))
        for record in records:
            ledger.fold(record)
        return records

    (record,) = decided(GROUPS)
    assert isinstance(record, SchemaChanged)
    assert record.schema.shown == GROUPS.shown
    assert decided(GROUPS) == []
    assert len(decided(renamed(GROUPS, "mean"))) == 1


def test_columns_with_a_name_in_use_are_renamed_or_left_out() -> None:
    part = ViewComponent(store=StoreSpec("value.x", (Field("k0", "string"),), (Field("s_n", "int32"),), None))
    for name in ("user", "user", "at"):
        part.key(name, column("k0"))
    part.value("user", column("s_n"), of="x")
    part.value("n", column("s_n"))
    part.value("n", column("k0"))
    part.extra("n", column("s_n"))
    part.leave_out("text", "because")
    description = part.to_json()
    assert [column["name"] for column in description["columns"]] == ["user", "user_2", "at", "x.user", "n", "__n"]
    assert description["not_shown"] == [
        {"name": "n", "why": "another column has this name"},
        {"name": "text", "why": "because"},
    ]
    # It equals the description that is read from the log. Otherwise each start would log another one.
    assert json.loads(json.dumps(description)) == description
    assert ViewColumns(GROUPS, description).store == part.store
