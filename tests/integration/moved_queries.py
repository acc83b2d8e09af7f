"""Queries that are moved from Spark to the fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from coordinator.model.errors import StateMismatchError, StateStoreError
from statefleet.fleet import Fleet
from tests.integration.case_systems import Inputs, System, configured, on_fleet, on_spark
from tests.integration.operator_cases import Case, Step
from tests.integration.streams import Feed, Run


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def swap(operator: Path) -> None:
    """Swap the folders of the first two partitions of an operator's state."""
    (operator / "0").rename(operator / "2")
    (operator / "1").rename(operator / "0")
    (operator / "2").rename(operator / "1")


class Import:
    """An input, the checkpoint of a query of Spark's on it, and its import.

    Attributes
    ----------
    old, new
        Folders of the checkpoint of Spark's query, and of the fleet's.
    """

    def __init__(self, fleet: Fleet, folder: Path, name: str, feed: Feed) -> None:
        self.fleet, self.name, self.feed = fleet, name, feed
        self.old, self.new = folder / "old", folder / "new"

    def run_on_spark(self, frame: DataFrame, mode: str = "update") -> None:
        """Run a query of Spark's own over all that there is."""
        Run(frame, mode, self.old, available_now=True).wait()

    def stateful(self) -> Any:
        return self.fleet.stateful(self.feed.stream(), name=self.name, shards=2)

    def rows(self, frame: DataFrame, source: Path | None = None, **options: Any) -> Mapping[str, int]:
        """Import the checkpoint; return how many rows each state has of it."""
        return self.fleet.import_checkpoint(str(source or self.old), frame, checkpoint=str(self.new), **options).rows

    def refused(
        self,
        frame: DataFrame,
        match: str,
        kind: type[StateStoreError] = StateMismatchError,
        source: Path | None = None,
        **options: Any,
    ) -> None:
        """Check that an import is refused, and leaves nothing."""
        with pytest.raises(kind, match=match):
            self.rows(frame, source, **options)
        assert not self.new.exists()
        assert self.fleet._coordinator.describe_state(self.name) is None


def moved(
    spark: SparkSession,
    fleet: Fleet,
    case: Case,
    name: str,
    folder: Path,
    *,
    at: int,
    conf: Mapping[str, str] = MappingProxyType({}),
    before: Callable[[DataFrame], None] = lambda frame: None,
) -> None:
    """Run a case's first steps on Spark, then the others on Spark and, from its state, on the fleet.

    Parameters
    ----------
    before
        What is done to the old checkpoint, or with the new query, before the import.
    """
    ours = on_fleet(fleet, name, shards=3)
    inputs, old, new = Inputs(spark, folder / "in", case.inputs), folder / "old", folder / "new"
    steps = [step for step in case.steps if isinstance(step, Step)]
    with configured(spark, conf):
        sparks = System(case, inputs, on_spark, old)
        running = [sparks]
        try:
            for step in steps[:at]:
                inputs.add(step.rows)
                sparks.take()
            sparks.stop()
            frame = case.query(ours, inputs.streams())
            before(frame)
            kept = files(old)
            fleet.import_checkpoint(str(old), frame, checkpoint=str(new))
            assert files(old) == kept
            sparks.start()
            running.append(System(case, inputs, ours, new))
            for number, step in enumerate(steps[at:], at):
                inputs.add(step.rows)
                expected, emitted = (system.take() for system in running)
                # By their text, in which a NaN is one.
                assert repr(emitted) == repr(expected), f"step {number}"
        finally:
            for system in running:
                system.stop()
