"""States that another version of Spark made, for tests that go on from them: ``python -m tests.integration.version_states OUT.zip``.

The file has the fleet's folder, the checkpoints of cases of operators, each run for the first half of its steps, and the checkpoints of
Spark's own operators, run for as long. It is made again, with both versions of Spark, when a case changes.
"""

from __future__ import annotations

import re
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_jobs.session.spark_session import start_session, stop_session
from statefleet.fleet import Fleet, connect
from tests.integration.case_systems import ALL_CASES, Inputs, System, on_fleet, on_spark
from tests.integration.conftest import SETTINGS
from tests.integration.operator_cases import RESTART, Case, Operators, Step

_EVERY_KEY = "i int, l bigint, s string, b binary, x double, d decimal(20,2), o boolean, day date, t timestamp"


def _sums(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """Group by many types, with sums and averages, which ANSI mode computes otherwise, and sketches."""
    grouped = ops(i["a"], "agg", "update").groupBy(*(name.split()[0] for name in _EVERY_KEY.split(", ")))
    results: DataFrame = grouped.agg(
        F.sum("l").alias("long"),
        F.sum("i").alias("int"),
        F.avg("l").alias("mean"),
        F.sum("d").alias("decimal"),
        F.approx_count_distinct("s").alias("different"),
        F.max_by("s", "x").alias("best"),
        F.collect_list("i").alias("all"),
        F.expr("percentile(x, 0.5)").alias("median"),
    )
    return results.select("i", "s", "long", "int", "mean", "decimal", "different", "best", "all", "median")


def _row(number: int | None, time: int | None) -> tuple[Any, ...]:
    if number is None:
        return (None,) * 9
    return (
        number, 2**40 + number, f"s{number}", bytes([number]), number / 3, None, number % 2 == 0, None, time,
    )  # fmt: skip


_SUMS = Case(
    {"a": _EVERY_KEY},
    _sums,
    [
        Step({"a": [_row(1, 10), _row(2, 10), _row(None, None), _row(3, 12)]}, None),
        Step({"a": [_row(1, 10), _row(4, 10)]}, None),
        RESTART,
        Step({"a": [_row(1, 10), _row(4, 10), _row(None, None), _row(3, 13)]}, None),
        Step({"a": [_row(3, 12), _row(2, 10)]}, None),
    ],
    mode="update",
)

#: Cases by the name of their states: one of each operator.
VERSION_CASES: dict[str, Case] = {
    "sums": _SUMS,
    "windows": ALL_CASES["E1 windows, append"],
    "sessions": ALL_CASES["SW sessions, append"],
    "distinct": ALL_CASES["distinct"],
    "within": ALL_CASES["W1 within the watermark"],
    "limit": ALL_CASES["CF2 limit"],
    "top": ALL_CASES["topN"],
    "last": ALL_CASES["keepLast"],
    "function": ALL_CASES["F1 running count"],
    "join": ALL_CASES["J1 inner"],
    "outer": ALL_CASES["JO1 left outer of windows"],
    "rollup": ALL_CASES["rollup, update"],
}


class VersionCase:
    """A case whose first half of steps one version of Spark takes, and whose second half another takes.

    Parameters
    ----------
    spark, fleet
        Session and fleet, whose folder has the first half's states if it is over.
    name
        One of :data:`VERSION_CASES`.
    folder
        Folder of the inputs.
    states
        What the names of the states begin with, if not with the case's name.
    """

    def __init__(self, spark: SparkSession, fleet: Fleet, name: str, folder: Path, *, states: str = "") -> None:
        self.case, self.operators = VERSION_CASES[name], on_fleet(fleet, states or name)
        self.inputs = Inputs(spark, folder, self.case.inputs)
        steps = [step for step in self.case.steps if step != RESTART]
        half = max(1, len(steps) // 2)
        self.halves = steps[:half], steps[half:]


def unpack(file: Path, folder: Path) -> Path:
    """Unpack states into a folder, and return it: the fleet is in ``fleet``, checkpoints in ``checkpoints``, Spark's own in ``spark``.

    The queries' inputs are in the folder's ``in``. Spark looks there for those of the last batch, by their names only.
    """
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)
    for log in folder.glob("*/*/sources/*/*"):
        log.write_text(re.sub(r'"file://[^"]*/in/(\w+)/', rf'"file://{folder}/in/\1/earlier-', log.read_text()))
    return folder


def _make(spark: SparkSession, folder: Path) -> None:
    fleet = connect(f"file://{folder / 'fleet'}")
    try:
        for name in VERSION_CASES:
            case = VersionCase(spark, fleet, name, folder / "in" / name)
            sides = {"checkpoints": case.operators, **({"spark": on_spark} if case.case.spark else {})}
            with ExitStack() as ended:
                systems = [System(case.case, case.inputs, side, folder / part / name) for part, side in sides.items()]
                for system in systems:
                    ended.callback(system.stop)
                for step in case.halves[0]:
                    case.inputs.add(step.rows)
                    for system in systems:
                        system.take()
    finally:
        fleet.shutdown()


def main(out: str) -> None:
    """Write the states of the running version of Spark into a zip file."""
    spark = start_session("version-states", executor_cores=2, configs=SETTINGS)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            _make(spark, folder)
            with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
                for part in ("fleet", "checkpoints", "spark"):
                    for file in sorted((folder / part).rglob("*")):
                        if file.is_file() and not file.name.endswith(".crc"):
                            archive.write(file, file.relative_to(folder))
    finally:
        stop_session()


if __name__ == "__main__":
    main(*sys.argv[1:])
