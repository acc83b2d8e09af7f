"""Functions and processors with state under trigger(continuous=..): called as rows come, and each epoch counts once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from statefleet.fleet import Fleet
from tests.clocks import until
from tests.integration.streams import stopping
from tests.integration.test_continuous import (
    await_epochs,
    committed,
    rate,
    read_by,
    run_for,
    started,
    state_rows,
    view,
)


def counted(keys: pa.Table, rows: pa.Table, state: Any) -> pa.Table:
    """Add the rows of each key to its count; emit the counts."""
    sizes = pa.array(state.offsets[1:] - state.offsets[:-1], pa.int64())
    n = pc.add(state.get("n", 0), sizes)
    state.update({"n": n})
    return keys.append_column("n", n)


def counts_of(frame: DataFrame, fleet: Fleet, name: str) -> DataFrame:
    return (
        fleet.stateful(frame, name=name)
        .groupBy("k")
        .applyInArrowWithState(counted, "k BIGINT, n BIGINT", "n BIGINT", "update", "NoTimeout")
    )


def test_an_arrow_function_counts_each_row_once_in_each_run(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    counts, folder = counts_of(rate(spark), fleet, name), tmp_path / "checkpoint"
    for _ in range(2):
        run_for(started(counts, folder), folder, 4)
        rows = state_rows(fleet, name, folder)
        assert {row["k"]: row["n"] for row in rows} == read_by(folder, committed(folder))
