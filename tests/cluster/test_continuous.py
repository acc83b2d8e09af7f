"""Continuous queries whose tasks and shards are on several nodes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from statefleet.fleet import Fleet
from tests.cluster.counting_query import address_of
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


@pytest.mark.parametrize("counts_of", [aggregated, by_a_function])
def test_shards_of_several_nodes_count_each_row_once(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, counts_of: Any
) -> None:
    with stopping(started(counts_of(fleet, rate(spark), name), tmp_path, epoch="1 second")) as query:
        await_epochs(query, tmp_path, 3)
        (state,) = [entry for entry in fleet.status()["queries"] if entry["name"] == name]
        assert len({address_of(shard["node_id"]) for shard in state["shards"]}) > 1
        # The one that comes back has another address.
        lost = next(actor for actor in fleet.status()["store_actors"] if actor.get("alive", True))
        os.kill(lost["pid"], signal.SIGKILL)
        await_epochs(query, tmp_path, 3)
    rows = state_rows(fleet, name, tmp_path)
    assert {row["k"]: row["n"] for row in rows} == read_by(tmp_path, committed(tmp_path))
