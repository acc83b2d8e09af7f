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

from spark_jobs.fleet import Fleet
from tests.integration.streams import Feed, Run

TEXT = (Path(__file__).parents[2] / "docs" / "operators.md").read_text()
EXAMPLES = {
    re.search(r'name="([^"]+)"', code)[1]: code  # type: ignore[index]
    for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
}
CLICKS = pa.schema(
    [("user", pa.string()), ("page", pa.string()), ("ts", pa.timestamp("us", tz="UTC")), ("ms", pa.int64())]
)


def noon(seconds: int) -> dt.datetime:
    return dt.datetime(2025, 6, 1, 12, tzinfo=dt.UTC) + dt.timedelta(seconds=seconds)


ROWS = [("ann", "/", noon(0), 30), ("ann", "/a", noon(5), 70), ("bob", "/", noon(20), 10), ("ann", "/", noon(0), 30)]
LAST = [("eve", "/", noon(3600), 1)]


class Named:
    """A fleet in which every state's name is this test's own."""

    def __init__(self, fleet: Fleet, prefix: str) -> None:
        self._fleet, self._prefix = fleet, prefix

    def stateful(self, df: DataFrame, *, name: str, **options: Any) -> Any:
        return self._fleet.stateful(df, name=f"{self._prefix}-{name}", shards=2, **options)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, example: str) -> None:
    code = EXAMPLES[example]
    feeds = {"clicks": Feed(spark, tmp_path / "clicks", CLICKS)}
    feeds["clicks"].add(ROWS)
    scope: dict[str, Any] = {"F": F, "fleet": Named(fleet, name), "spark": spark}
    scope |= {stream: feed.stream() for stream, feed in feeds.items()}
    exec(code, scope)
    expected = [ast.literal_eval(line) for line in re.findall(r"^# (\(.*\))$", code, re.MULTILINE)]
    assert expected, "an example says what comes out"
    run = Run(scope["result"], "update" if "update" in code else "append", tmp_path / "ck")
    try:
        run.wait()
        feeds["clicks"].add(LAST)
        emitted = [tuple(row) for row in run.take()]
    finally:
        run.stop()
    assert sorted(emitted, key=repr) == sorted(expected, key=repr)
