"""Values of every type that an accumulator takes."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int8": st.integers(-128, 127),
    "int16": st.integers(-(2**15), 2**15 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0])),
    "float64": st.one_of(st.floats(), st.sampled_from([0.0, -0.0])),
    "string": st.text(max_size=6),
    "binary": st.binary(max_size=6),
    "date32": st.dates(dt.date(1900, 1, 1), dt.date(2200, 1, 1)),
    "timestamp": st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1), timezones=st.just(dt.UTC)),
    "timestamp_ntz": st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1)),
    "duration": st.timedeltas(dt.timedelta(days=-1000), dt.timedelta(days=1000)),
    "decimal(7,2)": st.decimals(Decimal("-99999.99"), Decimal("99999.99"), places=2),
    "decimal(38,0)": st.integers(-(10**38) + 1, 10**38 - 1).map(Decimal),
}
