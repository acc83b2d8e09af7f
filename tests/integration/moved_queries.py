"""Queries that are moved from Spark to the fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from statefleet.fleet import Fleet
from tests.integration.case_systems import Inputs, System, configured, on_spark
from tests.integration.operator_cases import Case, Step


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def swap(operator: Path) -> None:
    """Swap the folders of the first two partitions of an operator's state."""
    (operator / "0").rename(operator / "2")
    (operator / "1").rename(operator / "0")
    (operator / "2").rename(operator / "1")


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

    def ours(frame: DataFrame, operator: str, mode: str = "append") -> Any:
        return fleet.stateful(frame, name=f"{name}-{operator}", outputMode=mode, shards=3)

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
