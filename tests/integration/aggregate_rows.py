"""Rows with a column of each type that Spark aggregates."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests.integration.streams import Feed

UTC = dt.UTC
ROWS = pa.schema(
    [
        pa.field("k", pa.string()),
        pa.field("t", pa.timestamp("us", tz="UTC")),
        pa.field("b", pa.bool_()),
        pa.field("i8", pa.int8()),
        pa.field("i16", pa.int16()),
        pa.field("i32", pa.int32()),
        pa.field("i64", pa.int64()),
        pa.field("f32", pa.float32()),
        pa.field("f64", pa.float64()),
        pa.field("d", pa.decimal128(10, 2)),
        pa.field("d38", pa.decimal128(38, 3)),
        pa.field("s", pa.string()),
        pa.field("bin", pa.binary()),
        pa.field("day", pa.date32()),
        pa.field("dti", pa.duration("us")),
    ]
)


def row(n: int) -> tuple[Any, ...]:
    """Return row `n`: groups k0..k2, some null values, a NaN and both zeros; each ``i64`` and ``f64`` is unique."""
    time = dt.datetime(2024, 1, 1, tzinfo=UTC) + dt.timedelta(seconds=n)
    if n % 7 == 3:
        return (f"k{n % 3}", time, *([None] * (len(ROWS) - 2)))
    return (
        None if n % 11 == 4 else f"k{n % 3}",
        time,
        n % 2 == 0,
        n * 37 % 100 - 50,
        -n,
        n * 7919 % 1000,
        n * 10**12 - 5,
        n * 0.75 % 5,
        float("nan") if n == 31 else math.sin(n) * 10 if n else -0.0,
        Decimal(n * 37 % 100) / 4,
        Decimal(n) * 10**20,
        f"text-{n * 5 % 4}",
        bytes([n * 31 % 256, 0]),
        dt.date(2020, 1, 1) + dt.timedelta(days=n * 17 % 30),
        dt.timedelta(seconds=n * 13 % 29, microseconds=n),
    )


def stream(feed: Feed) -> DataFrame:
    """Return the rows as a stream, with columns of types that no file format has."""
    return feed.stream().select(
        "*",
        F.expr("make_ym_interval(0, i32)").alias("ym"),
        F.expr("if(i32 is null, null, named_struct('p', i32 % 3, 'q', s, 'r', d))").alias("st"),
        F.expr("if(i32 is null, null, array(s, if(b, null, 'x'), cast(i8 as string)))").alias("arr"),
        F.expr("if(i32 is null, null, map(s, i32))").alias("mp"),
        # With what Spark knows to be there, what Arrow does not carry, and a place in each where nulls are.
        F.expr(
            "if(i32 is null, null, named_struct('n', 1, 'a', array(named_struct('y', make_ym_interval(0, i8)))))"
        ).alias("deep"),
        F.expr("if(i32 is null, null, array(f64, -f64, if(b, null, f32)))").alias("fs"),
    )


#: Sketches of 0, 1 and 2, and of two texts, in two precisions; and one with registers.
_FEW = ("cbd7c2042bf2fb06862ff90d" + "00" * 20, "2f823b049fd52f09" + "00" * 24)


COARSE = [f"x'0201070603000{count}08{few}'" for count, few in zip("32", _FEW, strict=True)]
