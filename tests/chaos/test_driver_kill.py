"""The Spark driver is killed with SIGKILL, between two batches and in the middle of one; its restart must not show it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from statefleet.fleet import Fleet
from tests.chaos.driver_process import COUNTING, Driver, between, final_result, versions, wait_for
from tests.chaos.inputs import write_inputs

pytestmark = pytest.mark.timeout(1200)

BATCHES = 8


#: From the folder of a driver to whether its query has come to a point, by the versions of its shards.
Moment = Callable[[Path], Callable[[list[int]], bool]]


def between_batches(reached: int) -> Moment:
    return lambda folder: between(reached)


def in_the_middle(reached: int) -> Moment:
    def of_query(folder: Path) -> Callable[[list[int]], bool]:
        begun, finished = folder / "checkpoint" / "offsets", folder / "checkpoint" / "commits"
        return lambda versions: newest_batch(begun) >= max(reached, newest_batch(finished) + 1)

    return of_query


def newest_batch(log: Path) -> int:
    """Return the number of the newest batch in a log of Spark's; -1 if it has none."""
    return max((int(file.name) for file in log.glob("[0-9]*")), default=-1)


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param((in_the_middle(4),), id="in the middle of a batch"),
        # A start of Spark more.
        pytest.param(
            (between_batches(2), in_the_middle(4)),
            id="between batches, and in the middle of one",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_killed_driver_leaves_no_trace(
    cluster: str, fleet: Fleet, tmp_path: Path, moments: tuple[Moment, ...]
) -> None:
    counted = write_inputs(tmp_path, BATCHES, rows=4000, distinct=257)
    # It comes after the kills, so that a restart has a batch to run, however fast the drivers were.
    last = tmp_path / "in" / f"{BATCHES - 1:03d}.parquet"
    last.rename(tmp_path / last.name)
    for moment in moments:
        with Driver(tmp_path, fleet.uri, cluster, program=COUNTING) as driver:
            wait_for(driver, fleet, moment(tmp_path))
            driver.kill()
        assert min(versions(fleet)) < BATCHES
    (tmp_path / last.name).rename(last)
    with Driver(tmp_path, fleet.uri, cluster, program=COUNTING) as driver:
        assert driver.finish() == 0, (tmp_path / "driver.log").read_text()[-3000:]
    batches, result = final_result(tmp_path)
    assert result == dict(counted)
    assert versions(fleet) == [batches] * 4
    # The fleet stayed up, so no restart read any state from storage.
    assert [metrics["bytes_loaded"] for metrics in fleet.metrics().values()] == [0]
