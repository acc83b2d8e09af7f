"""Every accumulator over every type that it takes, raw and merged, undone and loaded again, against plain Python."""

from __future__ import annotations

import datetime as dt
import math
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import SumOverflowError
from coordinator.model.schema import Accumulator, Field
from coordinator.model.type_names import counts_type, has_map, string_to_type, type_to_string
from store_actors.engine.accumulator_rules import RULES, StateForm
from store_actors.engine.op_code_kernels import OpCode
from store_actors.engine.table import GroupTable
from store_actors.operators.aggregate import AggregateShard
from store_actors.operators.aggregate_results import results_of
from store_actors.operators.session_windows import SessionShard
from tests.unit.accumulator_cases import CASES, by_ordering, counted, few_bins, histogram, of_any_type
from tests.unit.accumulator_inputs import (
    VALUES,
    Given,
    Inputs,
    Rows,
    aggregate_parts,
    batch_of,
    combined_or_not,
    input_of,
    of,
    schema_of,
)
from tests.unit.nested_values import NESTED, identity, values
from tests.unit.session_machine import input_of as session_input
from tests.unit.session_machine import schema_of as session_schema

K = AccumulatorKind


def check_row(inputs: Inputs, row: dict[str, Any], given_rows: Given) -> None:
    """Compare what all accumulators of the same inputs emit of a group."""
    for (item, expected_of), placed in zip(inputs.accumulators, inputs.schema.accumulators, strict=True):
        results = [row[field.name] for field in placed.emitted]
        expected = expected_of(given_rows)
        for result, wanted in zip(results, expected if len(results) > 1 else [expected], strict=True):
            # By sign and type, too, unless it is approximate, or any of several.
            is_same = (
                identity(wanted) == identity(result) if isinstance(wanted, float | list | dict) else wanted == result
            )
            assert is_same, (item.kind, result, wanted)


def check(inputs: Inputs, parts: list[Rows], *, combined: bool) -> None:
    """Compare what accumulators emit of rows that begin with a key."""
    row_of_key = aggregate_parts(inputs.schema, parts, combined=combined)
    assert row_of_key.keys() == {key for part in parts for key, *_ in part}
    for k, row in row_of_key.items():
        check_row(
            inputs, row, Given([[tuple(of_key) for key, *of_key in part if key == k] for part in parts], combined)
        )


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_all_bits_of_a_nan_are_one_value(name: str) -> None:
    bits = (0x7FF8000000000000, 0xFFF8000000000000, 0x7FF8000020000000)
    nans = [struct.unpack("<d", struct.pack("<Q", number))[0] for number in bits]
    check(CASES[name], [[(1, 0.0), (1, nans[0]), (1, nans[1])], [(1, 0.0), (1, nans[2])]], combined=False)


@combined_or_not
@pytest.mark.parametrize("name", CASES)
def test_an_accumulator_comes_to_what_plain_python_does(name: str, combined: bool) -> None:
    @settings(max_examples=CASES[name].examples, deadline=None)
    @given(parts=CASES[name].parts)
    def compare(parts: list[Rows]) -> None:
        check(CASES[name], parts, combined=combined)

    compare()


#: Sums that leave their type do so by the way in which rows are put together. Of types and orderings a few stand for all: sessions are
#: merged by the same steps as combined rows.
OF_SESSIONS = [
    name
    for name, inputs in CASES.items()
    if not ({K.SUM_DECIMAL, K.SUM_INT_OR_NULL} & {item.kind for item, _ in inputs.accumulators})
    and (name not in VALUES or name in ("int64", "float64", "string", "decimal(7,2)"))
    and (" by " not in name or name in ("string by int64", "string by float64", "a text by a pair"))
]


@pytest.mark.parametrize("name", OF_SESSIONS)
def test_sessions_that_merge_come_to_what_their_rows_do_in_order(name: str) -> None:
    """Rows of a key touch each other, and are one session in the end; each comes with any of the batches."""
    inputs = CASES[name]
    schema = session_schema((Field("k", "int64"),), inputs.schema.inputs, inputs.schema.accumulators, "complete")
    values_or_nulls = [st.one_of(st.none(), of_column) for of_column in inputs.values]
    rows_with_batch = st.tuples(st.integers(1, 4), st.integers(0, 1), *values_or_nulls)

    @settings(max_examples=15, deadline=None)
    @given(rows=st.lists(rows_with_batch, min_size=1, max_size=15))
    def compare(rows: list[tuple[Any, ...]]) -> None:
        shard = SessionShard(schema)
        for number in range(1, 5):
            placed = [
                (k, 5 * at, 5 * at + 5, *of_row)
                for k in (0, 1)
                for at, (batch, of_row) in enumerate((of, values) for of, key, *values in rows if key == k)
                if batch == number
            ]
            given_rows = session_input(schema, zip(*placed, strict=True) if placed else [()] * len(schema.raw_schema()))
            shard.apply(given_rows, 0, number)
            shard.abort()
            shard.apply(given_rows, 0, number)
            shard.commit()
        merged = {row["k"]: row for row in results_of(shard.snapshot(), schema).to_pylist()}
        assert len(merged) == shard.snapshot().num_rows == len({k for _, k, *_ in rows})
        for k, row in merged.items():
            check_row(inputs, row, Given([[tuple(of_row) for _, key, *of_row in rows if key == k]], False))

    compare()


#: Types as state stores them: every value inside may be null.
KINDS = NESTED.map(lambda kind: string_to_type(type_to_string(kind).replace(" not null", "")))


@combined_or_not
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_arrays_maps_and_structs_are_values_and_orderings(combined: bool, data: st.DataObject) -> None:
    orderings = st.one_of(KINDS.filter(lambda kind: not has_map(type_to_string(kind))), st.just(pa.decimal128(38, 4)))
    kind, by = data.draw(KINDS), data.draw(orderings)
    name, by_name = type_to_string(kind), type_to_string(by)
    for inputs in (of_any_type(name, values(kind)), by_ordering(name, by_name, values(kind), values(by))):
        check(inputs, data.draw(inputs.parts), combined=combined)


def test_the_table_has_every_kind_that_is_folded_and_every_step() -> None:
    kinds, codes = set(), set()
    for inputs in CASES.values():
        layout = GroupTable(inputs.schema).layout
        kinds |= {item.kind for item, _ in inputs.accumulators}
        codes |= {OpCode(step[0]) for steps in (layout.raw, layout.partial) for step in steps.operations}
    # A sum that fails its batch is a sum that is null for good, and has a test below.
    assert kinds | {K.SUM_INT_CHECKED} >= {kind for kind, rule in RULES.items() if rule.form is StateForm.FOLDED}
    assert codes == set(OpCode)


@pytest.mark.parametrize("unknown", [-1, max(OpCode) + 1, 2**40])
@pytest.mark.parametrize("name", CASES)
def test_no_loop_takes_a_code_that_it_does_not_know(name: str, unknown: int) -> None:
    """As a new code that the compiled loops forget: in each step's place, with values and with nulls."""
    inputs = CASES[name]

    @settings(max_examples=2, deadline=None)
    @given(row=st.tuples(*inputs.values))
    def refuse(row: tuple[Any, ...]) -> None:
        rows = [row, *({i: (*row[:i], None, *row[i + 1 :]) for i in range(len(row))}.values())]
        for number in range(len(GroupTable(inputs.schema).layout.raw.operations)):
            for each in rows:
                table = GroupTable(inputs.schema)
                table.layout.raw.operations[number, 0] = unknown
                with pytest.raises(ValueError, match="no accumulator has a step of this code"):
                    table.accumulate(table.encode(batch_of(inputs.schema, [(0, *each)])), 1)

    refuse()


# -- keys and flags ---------------------------------------------------------------------------------------------------


def rows_by_key(accumulator: Accumulator, type_name: str, parts: list[list[Any]]) -> pa.Table:
    """Return the rows of a table that was fed keys of a type, which are its values, too."""
    schema = schema_of(accumulator, types=[type_name], key=type_name)
    table = GroupTable(schema)
    for part in parts:
        table.accumulate(table.encode(batch_of(schema, [(key, key) for key in part])), 1)
    return table.decode(table.rows[table.live()])


# Floats reach the fleet normalised (-0.0 is 0.0): the plan normalises them.
@pytest.mark.parametrize("type_name", sorted(name for name in VALUES if not name.startswith("float")))
def test_every_type_is_a_key_and_null_is_a_group(type_name: str) -> None:
    @settings(max_examples=15, deadline=None)
    @given(keys=st.lists(st.one_of(st.none(), VALUES[type_name]), min_size=1, max_size=40))
    def compare(keys: list[Any]) -> None:
        table = rows_by_key(Accumulator(K.COUNT_ROWS, (), (Field("n", "int64", False),)), type_name, [keys])
        counts = {row["k"]: row["n"] for row in table.to_pylist()}
        assert counts == {key: keys.count(key) for key in keys}
        assert table.num_rows == len(counts)

    compare()


def test_many_groups_grow_the_table_and_keep_every_row() -> None:
    keys = [list(range(start, start + 5000)) for start in range(0, 50_000, 2500)]
    table = rows_by_key(Accumulator(K.SUM_INT, ("v0",), (Field("s", "int64"),)), "int64", keys)
    sums = dict(zip(table.column("k").to_pylist(), table.column("s").to_pylist(), strict=True))
    assert len(sums) == 52_500
    assert all(total == key * (2 if 2500 <= key < 50_000 else 1) for key, total in sums.items())


def test_more_flags_than_one_word_holds() -> None:
    maxima = (Accumulator(K.MAX, (f"v{number}",), (Field(f"m{number}", "int64"),)) for number in range(100))
    numbers = [number if number % 3 else None for number in range(100)]
    rows = aggregate_parts(schema_of(*maxima, types=["int64"] * 100), [[(0, *numbers)]], combined=False)
    assert list(rows[0].values())[1:] == numbers


# -- what no random rows come to --------------------------------------------------------------------------------------


def test_a_batch_that_overflows_a_strict_sum_is_refused() -> None:
    schema = schema_of(
        Accumulator(K.SUM_INT_CHECKED, ("v0",), (Field("s", "int64"), Field("e", "bool", False))), types=["int64"]
    )
    shard = AggregateShard(schema)
    shard.apply(input_of(schema, [(0, 2**62), (0, None)], combined=False), 0, 1)
    shard.commit()
    with pytest.raises(SumOverflowError, match=r"\[ARITHMETIC_OVERFLOW\] long overflow"):
        shard.apply(input_of(schema, [(0, 2**62)], combined=False), 0, 2)


def test_the_two_nearest_bins_become_one() -> None:
    inputs = Inputs(["float64"], [], [histogram("float64", 3, few_bins)])
    (row,) = aggregate_parts(
        inputs.schema, [[(0, value) for value in (10.0, 1.0, 4.0, 4.5, 20.0)]], combined=False
    ).values()
    # 4.0 and 4.5 are nearest, then 1.0 and their merged bin.
    bins = [(each["x"], each["y"]) for each in row["a0_0"]]
    assert bins == [(pytest.approx(9.5 / 3), 3.0), (10.0, 1.0), (20.0, 1.0)]


def test_a_group_with_few_distinct_values_stays_small() -> None:
    shard = AggregateShard(Inputs(["int64"], [], counted("int64")).schema)
    for number in range(1, 201):
        rows: Rows = [(0, value % 5) for value in range(number, number + 50)]
        shard.apply(input_of(shard.schema, rows, combined=number % 2 == 0), 0, number)
        shard.commit()
    (row,) = shard.snapshot().to_pylist()
    assert sum(each["count"] for each in row["a0_0"]) == 200 * 50
    assert len(row["a0_0"]) <= 16


@pytest.mark.parametrize(
    ("type_name", "values", "rule", "median"),
    [
        ("date32", [dt.date(2020, 1, day) for day in (3, 1, 2)], 1, dt.date(2020, 1, 2)),
        # Truncated to whole microseconds, as Spark does.
        ("duration", [dt.timedelta(microseconds=us) for us in (1, 4)], 0, dt.timedelta(microseconds=2)),
    ],
)
def test_percentiles_of_dates_and_intervals_are_dates_and_intervals(
    type_name: str, values: list[Any], rule: int, median: Any
) -> None:
    options, result = {"percentages": [0.5], "rule": rule}, [f"list<{type_name}>"]
    item = of(K.COUNTED, [f"{counts_type(type_name)}!"], len, result=result, **options)
    (row,) = aggregate_parts(
        Inputs([type_name], [], [item]).schema, [[(0, value) for value in values]], combined=False
    ).values()
    assert row["a0_0"] == [median]


def test_results_of_no_groups_have_the_types_of_results() -> None:
    for inputs in CASES.values():
        results = results_of(AggregateShard(inputs.schema).snapshot(), inputs.schema)
        assert results.num_rows == 0
        for item in inputs.schema.accumulators:
            for field in item.emitted:
                assert results.schema.field(field.name).type == string_to_type(field.type)


FLOATS = pa.list_(pa.field("element", pa.float32()))
NUMBERS = pa.struct([pa.field("d", pa.decimal128(38, 0)), pa.field("l", FLOATS)])


@pytest.mark.parametrize(
    ("kind", "ordered"),
    [
        (FLOATS, [[], [None], [None, 1.0], [-math.inf], [-0.0, 1.0], [0.0, 2.0], [math.inf], [math.nan, 0.0]]),
        (
            NUMBERS,
            [
                {"d": None, "l": [math.nan]},
                {"d": Decimal(-(2**70)), "l": None},
                {"d": Decimal(-(2**64)) - 1, "l": []},
                {"d": Decimal(-(2**64)), "l": []},
                {"d": Decimal(-1), "l": None},
                {"d": Decimal(0), "l": [1.0]},
                {"d": Decimal(2**63), "l": None},
                {"d": Decimal(2**63), "l": [1.0]},
                {"d": Decimal(2**70), "l": None},
            ],
        ),
        (pa.list_(pa.list_(pa.string())), [[[]], [[None]], [[""]], [["a"], []], [["a"], ["b"]], [["a", ""]], [["ä"]]]),
        (pa.list_(pa.int8()), [[-128], [-1], [0], [127]]),
    ],
)
def test_each_pair_is_in_order(kind: pa.DataType, ordered: list[Any]) -> None:
    name = type_to_string(kind)
    schema = schema_of(
        Accumulator(K.MAX, ("v0",), (Field("largest", name),)),
        Accumulator(K.MIN, ("v0",), (Field("smallest", name),)),
        types=[name],
    )
    for index, smaller in enumerate(ordered):
        for larger in ordered[index + 1 :]:
            for pair in ([(0, smaller), (0, larger)], [(0, larger), (0, smaller)]):
                (row,) = aggregate_parts(schema, [pair], combined=False).values()
                assert identity([row["smallest"], row["largest"]]) == identity([smaller, larger])
