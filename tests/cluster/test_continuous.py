"""Continuous queries whose tasks and shards are on several nodes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from statefleet.fleet import Fleet
from tests.integration.rate_epochs import await_epochs, committed, rate, read_by, started, state_rows
from tests.integration.streams import stopping


def aggregated(fleet: Fleet, frame: DataFrame, name: str) -> DataFrame:
    return fleet.stateful(frame, name=name, shards=4).groupBy("k").agg(F.count("*").alias("n"))


def by_a_function(fleet: Fleet, frame: DataFrame, name: str) -> DataFrame:
    def counted(keys: pa.Table, rows: pa.Table, state: Any) -> pa.Table:
        n = pc.add(state.get("n", 0), pa.array(state.offsets[1:] - state.offsets[:-1], pa.int64()))
        state.update({"n": n})
        return keys.append_column("n", n)

    grouped = fleet.stateful(frame, name=name, shards=4).groupBy("k")
    return grouped.applyInArrowWithState(counted, "k BIGINT, n BIGINT", "n BIGINT", "update", "NoTimeout")


def test_shards_of_several_nodes_count_each_row_once(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    # A core each, of three nodes with one.
    frames = {
        f"{name}-{of.__name__}": of(fleet, rate(spark, 1), f"{name}-{of.__name__}")
        for of in (aggregated, by_a_function)
    }
    queries = {key: started(frame, tmp_path / key, name=key, epoch="1 second") for key, frame in frames.items()}
    with stopping(list(queries.values())):
        for key, query in queries.items():
            await_epochs(query, tmp_path / key, 3)
        states = {state["name"]: state for state in fleet.status()["queries"]}
        assert all(len({shard["node_id"] for shard in states[key]["shards"]}) > 1 for key in queries)
        # The one that comes back has another address.
        lost = next(actor for actor in fleet.status()["store_actors"] if actor.get("alive", True))
        os.kill(lost["pid"], signal.SIGKILL)
        for key, query in queries.items():
            await_epochs(query, tmp_path / key, 3)
    for key in queries:
        rows = state_rows(fleet, key, tmp_path / key)
        assert {row["k"]: row["n"] for row in rows} == read_by(tmp_path / key, committed(tmp_path / key))
