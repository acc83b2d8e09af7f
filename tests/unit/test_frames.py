"""Keys and rows in pandas have the types that converting each key alone gives: a null of another key changes none of them."""

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


def typed_text(value: Any) -> str:
    """Return a value's text with its types at any depth; a NaN equals itself."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {typed_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple) or (hasattr(value, "tolist") and getattr(value, "ndim", 0)):
        return f"{type(value).__name__} of {getattr(value, 'dtype', '')} [{', '.join(map(typed_text, value))}]"
    return f"{type(value).__name__} {value!r}"


@pytest.mark.parametrize(("kind", "values"), VALUES, ids=[str(kind)[:30] for kind, _ in VALUES])
def test_each_key_has_the_types_that_it_has_alone(kind: pa.DataType, values: list[Any]) -> None:
    keys = pa.table({"k": pa.array(values, kind)})
    single_keys = [next(FORM.keys(keys.slice(index, 1).combine_chunks())) for index in range(len(keys))]
    assert [typed_text(key) for key in FORM.keys(keys)] == [typed_text(key) for key in single_keys]


@pytest.mark.parametrize(("kind", "values"), VALUES, ids=[str(kind)[:30] for kind, _ in VALUES])
def test_rows_of_each_key_have_the_types_that_they_have_alone(kind: pa.DataType, values: list[Any]) -> None:
    key_numbers = [0, 1, 1, 2, 3, 3, 0, 2]
    rows = pa.table(
        {"k": pa.array(key_numbers, pa.int64()), "v": pa.array([values[number] for number in key_numbers], kind)}
    )

    def frames(table: pa.Table) -> dict[int, tuple[str, list[str]]]:
        groups = Groups.of(table, ["k"])
        values_by_key = {}
        for key, parts in zip(groups.keys.column("k").to_pylist(), FORM.rows(groups), strict=True):
            (frame,) = parts
            values_by_key[key] = (str(frame["v"].dtype), [typed_text(value) for value in frame["v"]])
        return values_by_key

    together = frames(rows)
    for key in set(key_numbers):
        of_key = pa.array([number == key for number in key_numbers])
        assert together[key] == frames(rows.filter(of_key).combine_chunks())[key]


def test_rows_have_their_times_where_every_key_has_a_null_of_its_own() -> None:
    times = pa.array([1, 2], pa.timestamp("us", tz="UTC"))
    groups = Groups.of(pa.table({"k": ["a", "b"], "n": pa.array([None, None], pa.int32()), "t": times}), ["k"])
    assert [frame["t"].item().microsecond for parts in FORM.rows(groups) for frame in parts] == [1, 2]
