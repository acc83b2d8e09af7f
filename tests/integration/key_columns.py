"""Key columns of every type, as SQL."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

#: Columns made of a number; few values of each, nulls at every level, and floats that are equal in more than one form.
COLUMNS = {
    "strings": "case i % 4 when 0 then null else array(null, '', cast(i % 3 as string)) end",
    "doubles": "array(case i % 5 when 0 then double('NaN') when 1 then -0.0d when 2 then 0.0d when 3 then null else 1.5d end)",
    "structs": "array(struct(i % 2 as a, case i % 3 when 0 then null else struct(array(i % 2) as b, date'2024-02-29' as c) end as d))",
    "inner": "array(array(i % 2), array(), case when i % 3 = 0 then null else array(null, 7) end)",
    "months": "case i % 4 when 0 then null else make_ym_interval(i % 2, i % 3) end",
    "years": "cast(make_ym_interval(i % 3, 0) as interval year)",
    "spans": "case i % 4 when 0 then null else make_dt_interval(i % 2, 0, 0, 0.000001) end",
    "hours": "cast(make_dt_interval(i % 2, 5) as interval day to hour)",
    "many_months": "array(make_ym_interval(i % 2, 1), null)",
    "months_in": "struct(make_ym_interval(i % 2, 1) as m, array(struct(make_ym_interval(0, i % 2) as m)) as a)",
    "large": "try_cast(concat(repeat('9', 33), i % 2, '.0001') as decimal(38, 4))",
    "bytes": "case i % 3 when 0 then cast('' as binary) when 1 then cast(unhex('00') as binary) end",
    "floats": "case i % 4 when 0 then float('NaN') when 1 then -0.0f when 2 then 0.0f end",
    "times": "array(timestamp'2024-02-29 01:02:03.000004', timestamp_micros(i % 2))",
    "nothing": "null",
    "nothings": "array(null)",
}


def with_columns(frame: DataFrame, columns: Mapping[str, str]) -> DataFrame:
    return frame.select("i", *(F.expr(sql).alias(name) for name, sql in columns.items()))
