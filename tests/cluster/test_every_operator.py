"""Tasks that run Python with their state run where their shards are, on a cluster of three nodes; test_placement.py has the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

import statefleet as sf
from statefleet.fleet import Fleet
from tests.integration.counting_query import query_of
from tests.integration.streams import Feed, Run

ROWS = pa.schema([("k", pa.int64()), ("t", pa.timestamp("us", "UTC"))])
SHARDS = 3

Build = Callable[[Fleet, DataFrame, str], DataFrame]


def with_group_state(fleet: Fleet, rows: DataFrame, name: str) -> DataFrame:
    def count(key: Any, pdfs: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        total = (state.get[0] if state.exists else 0) + sum(len(pdf) for pdf in pdfs)
        state.update((total,))
        yield pd.DataFrame({"k": [key[0]], "n": [total]})

    grouped = fleet.stateful(rows, name=name, shards=SHARDS).groupBy("k")
    frame: DataFrame = grouped.applyInPandasWithState(
        count, "k long, n long", "n long", "update", GroupStateTimeout.NoTimeout
    )
    return frame


def newest(store: sf.StateStore, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        store.put(batch.select(["k", "t"]))
        yield batch.select(["k"])


def with_keyed_store(fleet: Fleet, rows: DataFrame, name: str) -> DataFrame:
    return sf.map_partitions_with_state_store(
        rows,
        newest,
        "k long",
        fleet=fleet,
        name=name,
        partition_by=["k"],
        keys=pa.schema([("k", pa.int64())]),
        values=pa.schema([("t", pa.timestamp("us", "UTC"))]),
        shards=SHARDS,
    )


@pytest.mark.replay
@pytest.mark.parametrize("build", [with_group_state, with_keyed_store])
def test_its_tasks_run_where_their_shards_are(
    build: Build, spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    with Run(
        build(fleet, feed.stream(), name), "update" if build is with_group_state else "append", tmp_path / "ck"
    ) as run:
        for batch in range(8):
            feed.add([(key, batch * 1_000_000) for key in range(30)])
            run.wait()
        query = query_of(fleet, name)
        assert query["locality"] >= 0.95, [shard["operations_elsewhere"] for shard in query["shards"]]
        assert len({shard["node_id"] for shard in query["shards"]}) == SHARDS
