"""The store actors' hash of stored keys beside Spark's own: where the two differed, a row would be on another shard than its key."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from store_actors.engine.spark_hash import spark_hash
from tests.unit.nested_values import ATOMIC, NESTED, values

TYPES = [
    *ATOMIC,
    pa.int16(),
    pa.int32(),
    pa.timestamp("us"),
    pa.decimal128(18, 3),
    pa.decimal128(19, 0),
    pa.decimal128(5, 5),
]
#: Room for the digits of every decimal.
CONTEXT = Context(prec=60)
INTEGERS = {pa.int8(): 8, pa.int16(): 16, pa.int32(): 32, pa.int64(): 64}


def has_map(kind: pa.DataType) -> bool:
    return pa.types.is_map(kind) or any(has_map(kind.field(index).type) for index in range(kind.num_fields))


def any_value(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Return a strategy for any value of a type, where few will not do: text of every length, numbers of every size."""
    if pa.types.is_string(kind):
        return st.none() | st.text(max_size=20)
    if pa.types.is_binary(kind):
        return st.none() | st.binary(max_size=20)
    if kind in INTEGERS:
        bits = INTEGERS[kind] - 1
        return st.none() | st.integers(-(1 << bits), (1 << bits) - 1)
    if pa.types.is_floating(kind):
        return st.none() | st.sampled_from([-0.0, math.nan, -math.nan, math.inf]) | st.floats(width=kind.bit_width)
    if pa.types.is_decimal(kind):
        largest = 10**kind.precision - 1
        unscaled = st.sampled_from([0, -1, 127, 128, -128, -129, 1 << 31, -(1 << 31), largest, -largest])
        unscaled = unscaled.filter(lambda number: abs(number) <= largest) | st.integers(-largest, largest)
        return st.none() | unscaled.map(lambda number: Decimal(number).scaleb(-kind.scale, CONTEXT))
    return values(kind)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    kinds = draw(
        st.lists(st.sampled_from(TYPES) | NESTED.filter(lambda kind: not has_map(kind)), min_size=1, max_size=4)
    )
    rows = draw(st.integers(1, 12))
    columns = [pa.array(draw(st.lists(any_value(kind), min_size=rows, max_size=rows)), kind) for kind in kinds]
    return pa.table(columns, names=[f"k{number}" for number in range(len(kinds))])


def hashed_by_spark(spark: SparkSession, table: pa.Table) -> list[list[int]]:
    """Return the hash of all columns together, then of each alone, row by row."""

    def given_rows(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from table.combine_chunks().to_batches()

    frame = spark.range(0, 1, 1, 1).mapInArrow(given_rows, from_arrow_schema(table.schema))
    names = table.column_names
    hashes = [F.hash(*names), *(F.hash(name) for name in names)]
    return [
        list(row)
        for row in frame.select(*(column.alias(f"h{number}") for number, column in enumerate(hashes))).collect()
    ]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(table=tables(), cut=st.integers(0, 11))
def test_every_type_of_key_hashes_as_in_spark(spark: SparkSession, table: pa.Table, cut: int) -> None:
    expected = hashed_by_spark(spark, table)
    for columns, hashes in zip(
        [table.column_names, *([name] for name in table.column_names)], zip(*expected, strict=True), strict=True
    ):
        assert spark_hash(table, columns).tolist() == list(hashes)
        # As it lies in slices and chunks, too.
        assert spark_hash(table.slice(cut), columns).tolist() == list(hashes)[cut:]
        chunks = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
        assert spark_hash(chunks, columns).tolist() == list(hashes)


def test_no_columns_hash_to_the_seed() -> None:
    assert spark_hash(pa.table({"v": [1, 2]}), []).tolist() == [42, 42]
    assert spark_hash(pa.table({"v": pa.array([], pa.int32())}), ["v"]).dtype == np.int32
