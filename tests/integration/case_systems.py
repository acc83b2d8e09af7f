"""Cases of operators on the fleet or on Spark: inputs, queries and totals."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType, TimestampType

from coordinator.model.errors import InvalidRequestError
from spark_jobs.plan.spark_version import SPARK
from statefleet.fleet import Fleet
from tests.integration.frame_cases import FRAME_CASES
from tests.integration.group_state_cases import GROUP_STATE_CASES
from tests.integration.join_cases import JOIN_CASES
from tests.integration.operator_cases import CASES, RESTART, Case, Operators, Step
from tests.integration.streams import Feed, Run

#: Settings of Spark's own stores.
ROCKSDB = {
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
}
CHANGELOGS = {**ROCKSDB, "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true"}
FORMAT_2 = {**CHANGELOGS, "spark.sql.streaming.stateStore.checkpointFormatVersion": "2"}

ALL_CASES = {**CASES, **JOIN_CASES, **GROUP_STATE_CASES, **FRAME_CASES}


class Inputs:
    """The inputs of a case as streams of one source, so that a step's rows of all inputs arrive together."""

    def __init__(self, spark: SparkSession, folder: Path, columns: Mapping[str, str]) -> None:
        self._types = {key: spark.createDataFrame([], ddl).schema for key, ddl in columns.items()}
        fields = [StructField(key, kind) for key, kind in self._types.items()]
        self._feed = Feed(folder, SPARK.arrow_schema(StructType(fields)))

    def add(self, rows: Mapping[str, Any]) -> None:
        # A row of the source is a row of one input; the others are null.
        self._feed.add(
            [
                tuple(self._row(key, row) if key == name else None for key in self._types)
                for name in rows
                for row in rows[name]
            ]
        )

    def _row(self, key: str, row: tuple[Any, ...]) -> dict[str, Any]:
        return {
            item.name: dt.datetime.fromtimestamp(value, dt.UTC)
            if isinstance(item.dataType, TimestampType) and value is not None
            else value
            for item, value in zip(self._types[key].fields, row, strict=True)
        }

    def streams(self) -> dict[str, DataFrame]:
        return self._split(self._feed.stream())

    def batch(self) -> dict[str, DataFrame]:
        """Return all rows so far as batch DataFrames."""
        return self._split(self._feed.batch())

    def _split(self, source: DataFrame) -> dict[str, DataFrame]:
        return {key: source.where(F.col(key).isNotNull()).select(f"{key}.*") for key in self._types}


class System:
    """A case's query on the fleet or on Spark, restarted at will."""

    def __init__(self, case: Case, inputs: Inputs, operators: Operators, checkpoint: Path) -> None:
        self._case, self._inputs, self._operators, self._checkpoint = case, inputs, operators, checkpoint
        self.run = self._start()

    def _start(self) -> Run:
        frame = self._case.query(self._operators, self._inputs.streams())
        self.schema = frame.schema
        return Run(frame, self._case.mode, self._checkpoint)

    def stop(self) -> None:
        self.run.stop()

    def start(self) -> None:
        self.run = self._start()

    def restart(self) -> None:
        self.stop()
        self.start()

    def take(self) -> dict[int, list[tuple[Any, ...]]]:
        """Return the rows that each batch emitted since the last call."""
        return self.run.take_batches()


def on_fleet(fleet: Fleet, name: str, shards: int = 2) -> Operators:
    """Return the fleet's operators; what the names of their states begin with is given."""

    def stateful(frame: DataFrame, operator: str, mode: str = "append") -> Any:
        return fleet.stateful(frame, name=f"{name}-{operator}", outputMode=mode, shards=shards)

    return stateful


def on_spark(frame: DataFrame, name: str, mode: str = "append") -> DataFrame:
    """Spark's own operators."""
    return frame


def rescale(fleet: Fleet, state: str, shards: int) -> None:
    """Rescale a state, if it has keys."""
    try:
        fleet.rescale(state, shards)
    except InvalidRequestError as refused:
        # As of a limit, which has no keys.
        if "one shard by nature" not in str(refused):
            raise


@contextmanager
def configured(spark: SparkSession, conf: Mapping[str, str]) -> Iterator[None]:
    """Set some settings of a session, and put them back."""
    before = {key: spark.conf.get(key, None) for key in conf}
    for key, value in conf.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, former in before.items():
            # Of a setting that the session was made with, too, Spark would forget the value.
            if former is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, former)


def check(where: str, step: Step, inputs: Inputs, systems: Mapping[str, System]) -> None:
    inputs.add(step.rows)
    results = {who: system.take() for who, system in systems.items()}
    expected = None if step.out is None else sorted(step.out, key=repr)
    for who, batches in results.items():
        rows = sorted(itertools.chain(*batches.values()), key=repr)
        assert expected is None or rows == expected, f"{where}, on {who}: {batches}"
    # In the same batches, those without data among them.
    assert len({repr(batches) for batches in results.values()}) == 1, f"{where}: {results}"


def compare_case(
    spark: SparkSession,
    fleet: Fleet,
    folder: Path,
    name: str,
    case_name: str,
    case: Case,
    *,
    with_spark: bool,
    conf: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run a case on the fleet, and beside it on Spark if Spark can run it."""
    inputs = Inputs(spark, folder / "in", case.inputs)
    with configured(spark, conf):
        systems = {"the fleet": System(case, inputs, on_fleet(fleet, name), folder / "ck-fleet")}
        if with_spark:
            systems["Spark"] = System(case, inputs, on_spark, folder / "ck-spark")
        check_case(case_name, case, inputs, systems)


def check_case(case_name: str, case: Case, inputs: Inputs, systems: Mapping[str, System]) -> None:
    """Do the steps of a case on all systems, compare them after each step, and stop them."""
    first, *others = systems.values()
    try:
        assert all(system.schema == first.schema for system in others), case_name
        for index, step in enumerate(case.steps):
            if isinstance(step, str):
                assert step == RESTART
                for system in systems.values():
                    system.restart()
                continue
            check(f"{case_name}, step {index}", step, inputs, systems)
    finally:
        for system in systems.values():
            system.run.stop()
