"""The examples of docs/live-state.md, run one after the other as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import statefleet as sf
from tests.conftest import NewUri
from tests.integration.streams import Feed, Run

TEXT = (Path(__file__).parents[2] / "docs" / "live-state.md").read_text()


@pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")
def test_the_examples_run(spark: Any, new_uri: NewUri, tmp_path: Path) -> None:
    fleet = sf.connect(new_uri())
    feed = Feed(spark, tmp_path / "in", pa.schema([("user", pa.string()), ("amount", pa.int64())]))
    clicks = fleet.stateful(feed.stream(), name="clicks", shards=2).groupBy("user")
    run = Run(clicks.agg(F.count("*").alias("n"), F.sum("amount").alias("total")), "update", tmp_path / "checkpoint")
    for rows in ([("u1", 5), ("u1", 10), ("u2", 1)], [("u1", 15)]):
        feed.add(rows)
        run.wait()
    run.stop()
    told: dict[str, Any] = {"uri": fleet.uri, "spark": spark}
    for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(code, "docs/live-state.md", "exec"), told)
    # What the comments say.
    assert told["clicks"].keys == ("user",)
    assert told["clicks"].get({"user": "u1"}) == {"user": "u1", "n": 3, "total": 30}
    assert told["rows"].to_arrow().num_rows == 2
    fleet.shutdown()
