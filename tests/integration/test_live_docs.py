"""The examples of docs/live-state.md, run one after the other as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import statefleet as sf
from tests.code_blocks import blocks_of
from tests.conftest import NewUri
from tests.integration.streams import Feed, Run

#: What a line of the table of Spark's readers says is the same.
_CELL = re.compile(r"^\| .+? \| `(.+?)` \| ", re.MULTILINE)
#: Stores with the names and columns that the operators of that table have.
STORES = {
    "scores": {"totals": "user | total", "seen": "user |"},
    "orders": {"left": "id | amount", "right": "id | price"},
    "visits": {"default": "id timer |", "value.last": "id | page", "list.pages": "id place | page"},
}
TEXT = (Path(__file__).parents[2] / "docs" / "live-state.md").read_text()


@pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")
def test_the_examples_run(spark: Any, new_uri: NewUri, tmp_path: Path) -> None:
    fleet = sf.connect(new_uri())
    feed = Feed(tmp_path / "in", pa.schema([("user", pa.string()), ("amount", pa.int64())]))
    clicks = fleet.stateful(feed.stream(), name="clicks", shards=2).groupBy("user")
    run = Run(clicks.agg(F.count("*").alias("n"), F.sum("amount").alias("total")), "update", tmp_path / "checkpoint")
    for rows in ([("u1", 5), ("u1", 10), ("u2", 1)], [("u1", 15)]):
        feed.add(rows)
        run.wait()
    run.stop()
    names: dict[str, Any] = {"uri": fleet.uri, "spark": spark, "F": F, "events": feed.stream()}
    names |= {"checkpoint": str(tmp_path / "checkpoint"), "new_checkpoint": str(tmp_path / "new")}
    for block in blocks_of("tests/integration/test_live_docs.py::test_the_examples_run"):
        exec(compile(block.code, str(block), "exec"), names)
    # What the comments say.
    assert names["clicks"].keys == ("user",)
    assert names["clicks"].get({"user": "u1"}) == {"user": "u1", "n": 3, "total": 30}
    assert names["rows"].to_arrow().num_rows == 2
    feed.add([("u1", 7)])
    for query in spark.streams.active:
        query.processAllAvailable()
        query.stop()
    assert fleet.state("what_if").get({"user": "u1"}) == {"user": "u1", "n": 4, "most": 7}
    assert fleet.state("clicks").get({"user": "u1"}) == {"user": "u1", "n": 3, "total": 30}
    write_stores(fleet)
    check_readers(fleet.uri, offline=False)
    check_readers(fleet.uri, offline=True)
    counted = fleet.state("clicks").scan(partition_id=True).to_spark(spark).groupBy("partition_id").count().collect()
    assert sum(row["count"] for row in counted) == 2
    fleet.shutdown()


def write_stores(fleet: sf.Fleet) -> None:
    for name, stores in STORES.items():
        columns = {store: texts.partition("|") for store, texts in stores.items()}
        fields = {
            store: tuple(pa.schema([(column, pa.int64()) for column in part.split()]) for part in (keys, values))
            for store, (keys, _, values) in columns.items()
        }
        with fleet.state_store(name, stores=fields) as state:
            for store, (keys, values) in fields.items():
                state.store(store).put(**dict.fromkeys((*keys.names, *values.names), 1))
            state.commit()


def check_readers(uri: str, *, offline: bool) -> None:
    """Each line of the table of Spark's readers gives rows."""
    fleet = sf.attach(uri, offline=offline)
    names: dict[str, Any] = {"sf": sf, "uri": uri, "fleet": fleet, "clicks": fleet.state("clicks")}
    results: dict[str, Any] = {}
    for code in _CELL.findall(TEXT[TEXT.index("## Spark 4's readers") :]):
        rows = eval(code, names)
        results[code] = rows.to_arrow() if isinstance(rows, sf.Rows) else rows
    assert len(results) == 16
    numbered = results["clicks.scan(partition_id=True)"].to_pylist()
    alone, by_deltas = (
        [row for table in results.pop(f"clicks.at(2).scan().of_shard({which})") for row in table.to_pylist()]
        for which in ("1", "1, snapshot=0")
    )
    assert sorted(alone, key=str) == sorted(by_deltas, key=str)
    assert [{**row, "partition_id": 1} for row in alone] == [row for row in numbered if row["partition_id"] == 1]
    assert not [code for code, rows in results.items() if not len(rows)]
    batch_0 = results["clicks.at(1).scan()"].to_pylist()
    assert sorted((row["user"], row["n"]) for row in batch_0) == [("u1", 2), ("u2", 1)]
    feed = results["clicks.changes(since=1, until=2)"].to_pylist()
    assert [(row["user"], row["n"], row["_change_type"]) for row in feed] == [("u1", 3, "upsert")]
    metadata = results["fleet.state_metadata()"].to_pylist()
    assert {row["stateName"] for row in metadata} == {"clicks", "what_if", *STORES}
    (clicks,) = [row for row in metadata if row["stateName"] == "clicks"]
    assert (clicks["operatorName"], clicks["numPartitions"], clicks["maxBatchId"]) == ("stateStoreSave", 2, 1)
    assert results['fleet.state_metadata("clicks", version=1)'].to_pylist()[0]["maxBatchId"] == 0
