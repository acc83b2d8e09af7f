"""Keys and rows in pandas are, for each key, what converting that key alone gives: a null elsewhere changes none of its types."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from spark_jobs.functions.frames import PandasForm
from spark_jobs.functions.groups import Groups

FORM = PandasForm(T.StructType(), "UTC", safe=False, by_name=True, max_rows=1000)
PAIR = pa.struct([("n", pa.int64()), ("s", pa.string())])

VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int32(), [1, None, 3, 4]),
    (pa.bool_(), [True, False, None, True]),
    (pa.float64(), [1.5, None, 2.5, float("nan")]),
    (pa.string(), ["a", None, "b", ""]),
    (PAIR, [{"n": 1, "s": "a"}, {"n": None, "s": "b"}, None, {"n": 4, "s": None}]),
    (
        pa.struct([("inner", PAIR)]),
        [{"inner": {"n": 1, "s": "a"}}, {"inner": None}, None, {"inner": {"n": 2, "s": "b"}}],
    ),
    (pa.list_(pa.int64()), [[1, 2], [3, None], None, []]),
    (pa.list_(PAIR), [[{"n": 1, "s": "a"}], [None], None, [{"n": 2, "s": None}]]),
    (pa.map_(pa.string(), pa.int64()), [[("a", 1)], [("b", None)], None, []]),
]


def told(value: Any) -> str:
    """A value with its types, at any depth; a NaN equals itself."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {told(one)}' for key, one in value.items())}}}"
    if isinstance(value, list | tuple) or (hasattr(value, "tolist") and getattr(value, "ndim", 0)):
        return f"{type(value).__name__} of {getattr(value, 'dtype', '')} [{', '.join(map(told, value))}]"
    return f"{type(value).__name__} {value!r}"


@pytest.mark.parametrize(("kind", "values"), VALUES, ids=[str(kind)[:30] for kind, _ in VALUES])
def test_each_key_is_as_if_it_were_alone(kind: pa.DataType, values: list[Any]) -> None:
    keys = pa.table({"k": pa.array(values, kind)})
    alone = [next(FORM.keys(keys.slice(place, 1).combine_chunks())) for place in range(len(keys))]
    assert [told(key) for key in FORM.keys(keys)] == [told(key) for key in alone]


@pytest.mark.parametrize(("kind", "values"), VALUES, ids=[str(kind)[:30] for kind, _ in VALUES])
def test_rows_of_each_key_are_as_if_they_were_alone(kind: pa.DataType, values: list[Any]) -> None:
    places = [0, 1, 1, 2, 3, 3, 0, 2]
    rows = pa.table({"k": pa.array(places, pa.int64()), "v": pa.array([values[place] for place in places], kind)})

    def frames(given: pa.Table) -> dict[int, tuple[str, list[str]]]:
        groups = Groups.of(given, ["k"])
        found = {}
        for key, parts in zip(groups.keys.column("k").to_pylist(), FORM.rows(groups), strict=True):
            (frame,) = parts
            found[key] = (str(frame["v"].dtype), [told(value) for value in frame["v"]])
        return found

    together = frames(rows)
    for key in set(places):
        mine = pa.array([place == key for place in places])
        assert together[key] == frames(rows.filter(mine).combine_chunks())[key]
