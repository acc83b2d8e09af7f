"""Shared by the benchmarks: a session, Spark's own state stores, queries that get a file at a time, ratios of medians.

All sides of a comparison run in one Spark session. Batch by batch, in rotating order, each gets the same file and has to finish it
before the next side starts, so slow drifts of the machine affect all sides alike. Only ratios of medians are meant to be quoted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.shared import SPARK_STORES
from spark_jobs.plan.operator_rules import UnboundedStateWarning
from spark_jobs.session.spark_session import start_session, stop_session

if TYPE_CHECKING:
    from statefleet.fleet import Fleet

Side = TypeVar("Side")

#: Names of the sides: the fleet; the fleet where small batches are shuffled as others are; the same query with a shuffle, without state
#: and without Python.
FLEET = "statefleet"
SHUFFLED = "statefleet-shuffled"
PLAIN = "plain"
#: Spark evicts state by the watermark of the batch before: in a steady stream that is one batch an input, as on the fleet.
_ONE_BATCH = {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}
#: Settings with which Spark reads each row group of a file of :func:`write_rows` in a task of its own.
_SMALL_SPLITS = {"spark.sql.files.maxPartitionBytes": "4m", "spark.sql.files.openCostInBytes": "0"}
#: How often Spark lists the folder of a query that waits, and its default. Queries that wait for their turn must not keep cores busy.
_POLLING = "spark.sql.streaming.pollingDelay"
SELDOM = "100ms"
AT_ONCE = "10ms"


# -- a session --------------------------------------------------------------------------------------------------------


def cores() -> int:
    """Return the number of cores of this machine, all of which the only Spark executor has."""
    return os.cpu_count() or 1


def some_of(noun: str, names: Collection[str]) -> Callable[[str], list[str]]:
    """Return an option's type: some of the names, separated by commas."""

    def chosen(text: str) -> list[str]:
        chosen_names = [name for name in text.split(",") if name]
        unknown = [name for name in chosen_names if name not in names]
        if unknown or not chosen_names:
            raise argparse.ArgumentTypeError(f"no such {noun}: {', '.join(unknown)}; there are {', '.join(names)}")
        return chosen_names

    return chosen


def add_files(parser: argparse.ArgumentParser) -> None:
    """Add the options for the folders of files, of :func:`report_json` and :func:`scratch`."""
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--folder", type=Path, help="where to put input and state (default: a temporary folder)")


@contextmanager
def scratch(options: argparse.Namespace) -> Iterator[Path]:
    """Create a folder for files, and delete it afterwards."""
    with TemporaryDirectory(prefix="statefleet-bench-", dir=options.folder, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def session(
    app_name: str,
    options: argparse.Namespace,
    executor_cores: int | None = None,
    configs: Mapping[str, str] | None = None,
) -> Iterator[tuple[SparkSession, Path]]:
    """Start a Spark session with one executor, and create a folder for files; both are removed afterwards."""
    settings = {"spark.sql.shuffle.partitions": str(options.shards), **_ONE_BATCH, **_SMALL_SPLITS, **(configs or {})}
    spark = start_session(
        app_name,
        executor_cores=executor_cores or cores(),
        executor_memory=options.executor_memory,
        configs=settings,
    )
    # Some of the queries measure unbounded state, on every side.
    warnings.filterwarnings("ignore", category=UnboundedStateWarning)
    with scratch(options) as root:
        try:
            yield spark, root
        finally:
            stop_session()


def fairness() -> str:
    """Describe how the sides share the machine."""
    return (
        f"{cores()} cores shared by all: one Spark executor with {cores()} task slots for every variant; the fleet's actors reserve "
        "no core and are idle while Spark's own stores have their turn; one query runs at a time, and every variant reads the same "
        "files, shuffles into the same number of partitions and commits durably each batch (but the plain one, which has no state)."
    )


def use_side(spark: SparkSession, side: str, shards: int, polling: str = SELDOM) -> None:
    """Have the next query be one of a side: a query keeps the settings of its start."""
    settings = {"spark.sql.shuffle.partitions": str(shards), _POLLING: polling, **SPARK_STORES.get(side, {})}
    for key, value in settings.items():
        spark.conf.set(key, value)


class Operators:
    """The stateful operators of a side: those of a fleet, or Spark's own, whose output mode is the query's.

    Attributes
    ----------
    states
        Names of the states on the fleet so far, those nearest to the sources first.
    """

    def __init__(self, fleet: Fleet, side: str, shards: int, name: str = "") -> None:
        self._fleet, self._side, self._shards, self._name = fleet, side, shards, name or side

    def __call__(self, frame: DataFrame, operator: str, mode: str = "append") -> Any:
        """Return `frame` with stateful ``groupBy``, ``join``, ..; `operator` is its name within the query, `mode` its output mode."""
        if not self._side.startswith(FLEET):
            return frame
        return self._fleet.stateful(frame, name=f"{self._name}-{operator}", outputMode=mode, shards=self._shards)


def write_rows(file: Path, rows: pa.Table, row_groups: int = 4) -> Path:
    """Write a Parquet file with a number of row groups, which Spark reads in parallel."""
    pq.write_table(rows, file, row_group_size=max(1, -(-rows.num_rows // row_groups)))
    return file


# -- queries ----------------------------------------------------------------------------------------------------------


@dataclass
class Variant:
    """A query of a comparison, which reads a folder of its own."""

    name: str
    folder: Path
    query: StreamingQuery
    #: ``batch_s``, ``fill_s``: Seconds of the measured batches, and of the batches before that built up state.
    batch_s: list[float] = field(default_factory=list)
    fill_s: list[float] = field(default_factory=list)
    rows_out: list[int] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, root: Path, frame: DataFrame, mode: str) -> Variant:
        """Start a query whose results are computed and discarded; it reads ``root/name/input`` (:meth:`input_folder`)."""
        writer = frame.writeStream.outputMode(mode).format("noop")
        query = writer.option("checkpointLocation", str(root / name / "checkpoint")).start()
        return cls(name, cls.input_folder(root, name), query)

    @staticmethod
    def input_folder(root: Path, name: str) -> Path:
        folder = root / name / "input"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def run(self, file: Path) -> float:
        """Give the query another file, which has rows, and wait for its batch; return the seconds that Spark measured.

        Raises
        ------
        pyspark.errors.StreamingQueryException
            The query failed.
        """
        os.link(file, self.folder / file.name)
        before = self.progress.get("batchId", -1)
        # A listing of the folder that began before the file existed may end the first wait.
        while self.progress.get("batchId", -1) == before:
            self.query.processAllAvailable()
            batches = [progress for progress in self.query.recentProgress if progress["numInputRows"] > 0]
            self.progress = dict(batches[-1]) if batches else {}
        return float(self.progress["durationMs"]["triggerExecution"]) / 1000


def in_turn(variants: Sequence[Side], number: int) -> list[Side]:
    """Return the sides in the order for a batch."""
    turn = number % len(variants)
    return [*variants[turn:], *variants[:turn]]


# -- figures ----------------------------------------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def summary(batch_s: Sequence[float]) -> dict[str, Any]:
    """Return the seconds of batches, with their median, quartiles, minimum and maximum."""
    return {
        "median_s": statistics.median(batch_s),
        "quartiles_s": quartiles(batch_s),
        "min_s": min(batch_s),
        "max_s": max(batch_s),
        "batch_s": list(batch_s),
    }


@dataclass(frozen=True)
class Target:
    """A ratio of medians, and the project's promise for it."""

    over: str
    under: str
    #: The promised bound; None if there is none.
    bound: float | None = None
    #: Whether `bound` is the least promised ratio, or the largest.
    is_least: bool = True


def ratios_of(results: Mapping[str, Mapping[str, Any]], targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Return the ratios of medians of which both sides were measured, with the quartiles of the ratios batch by batch."""
    ratios = []
    for target in targets:
        over, under = results.get(target.over), results.get(target.under)
        if over is None or under is None:
            continue
        value = over["median_s"] / under["median_s"]
        row = {"ratio": f"{target.over} / {target.under}", "value": value}
        if pairs := list(zip(over.get("batch_s", ()), under.get("batch_s", ()), strict=False)):
            row["quartiles"] = quartiles([one / other for one, other in pairs])
        if target.bound is not None:
            row["met"] = value >= target.bound if target.is_least else value <= target.bound
            row["target"] = f"{'at least' if target.is_least else 'at most'} {target.bound}"
        ratios.append(row)
    return ratios


def report_json(options: argparse.Namespace, **document: Any) -> None:
    """Write all figures to a file, if the options have one."""
    if options.json is not None:
        machine = {"cores": cores(), "machine": platform.machine()}
        options.json.write_text(json.dumps({**machine, **document}, indent=2))
