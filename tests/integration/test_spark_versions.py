"""States and checkpoints that each version of Spark wrote (tests/data) are continued by the installed version."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.fleet import Fleet, connect
from tests.integration.version_states import BATCHES, FIRST_BATCHES, QUERIES, continued, folder_of


@pytest.fixture(scope="module", params=["3.5", "4.2"])
def written(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Fleet, Path]]:
    """Return a fleet on a copy of the states that a version wrote, and a copy of its checkpoints."""
    folder = tmp_path_factory.mktemp("written") / "copy"
    shutil.copytree(folder_of(request.param), folder)
    fleet = connect((folder / "fleet").as_uri())
    yield fleet, folder / "checkpoints"
    fleet.shutdown()


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_continues_from_what_another_version_wrote(
    spark: SparkSession, fleet: Fleet, written: tuple[Fleet, Path], tmp_path: Path, name: str, query: str
) -> None:
    whole = continued(spark, fleet, query, name, tmp_path / "whole", tmp_path / "checkpoint", BATCHES)
    earlier, checkpoints = written
    rest = continued(spark, earlier, query, query, tmp_path / "rest", checkpoints / query, BATCHES[FIRST_BATCHES:])
    assert rest == whole
    assert whole
