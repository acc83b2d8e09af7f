"""The examples of docs/operators.md, run as they stand."""

from __future__ import annotations

import ast
import datetime as dt
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from statefleet.fleet import Fleet
from tests.code_blocks import blocks_of
from tests.integration.streams import Feed, Run, short_list

#: By the name of the state.
EXAMPLES = {
    re.search(r'name="([^"]+)"', block.code)[1]: block.code  # type: ignore[index]
    for block in blocks_of("tests/integration/test_docs.py::test_example")
}
TIME = pa.timestamp("us", tz="UTC")
STREAMS = {
    "clicks": pa.schema([("user", pa.string()), ("page", pa.string()), ("ts", TIME), ("ms", pa.int64())]),
    "buys": pa.schema([("buyer", pa.string()), ("at", TIME), ("amount", pa.int64())]),
}


def noon(seconds: int) -> dt.datetime:
    return dt.datetime(2025, 6, 1, 12, tzinfo=dt.UTC) + dt.timedelta(seconds=seconds)


#: Rows of the first batch, and of the second one.
ROWS: dict[str, tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]] = {
    "clicks": (
        [("ann", "/", noon(0), 30), ("ann", "/a", noon(5), 70), ("bob", "/", noon(20), 10), ("ann", "/", noon(0), 30)],
        [("eve", "/", noon(3600), 1)],
    ),
    "buys": ([("ann", noon(10), 5)], [("zoe", noon(3600), 2)]),
}


class Named:
    """A fleet in which every state's name is this test's own."""

    def __init__(self, fleet: Fleet, prefix: str) -> None:
        self._fleet, self._prefix = fleet, prefix

    def stateful(self, df: DataFrame, *, name: str, **options: Any) -> Any:
        return self._fleet.stateful(df, name=f"{self._prefix}-{name}", shards=2, **options)


@pytest.mark.parametrize("example", short_list(EXAMPLES, ["hits", "pages"]))
def test_example(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, example: str) -> None:
    code = EXAMPLES[example]
    feeds = {stream: Feed(tmp_path / stream, schema) for stream, schema in STREAMS.items()}
    for stream, feed in feeds.items():
        feed.add(ROWS[stream][0])
    # Functions of a program's main module go to Spark's workers by value.
    scope: dict[str, Any] = {"__name__": "__main__", "F": F, "fleet": Named(fleet, name), "spark": spark}
    scope |= {stream: feed.stream() for stream, feed in feeds.items()}
    exec(code, scope)
    expected = [ast.literal_eval(line) for line in re.findall(r"^# (\(.*\))$", code, re.MULTILINE)]
    assert expected, "an example says what comes out"
    updates = any(text in code for text in ('"update"', ".topN(", ".keepLast("))
    with Run(scope["result"], "update" if updates else "append", tmp_path / "ck") as run:
        run.wait()
        for stream, feed in feeds.items():
            feed.add(ROWS[stream][1])
        emitted = [tuple(row) for row in run.take()]
    assert sorted(emitted, key=repr) == sorted(expected, key=repr)
