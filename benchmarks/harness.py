"""What the benchmarks share: a session, Spark's own state stores, queries that are fed a file at a time, ratios of medians.

All sides of a comparison live in one Spark session. Batch by batch, in rotating order, each is given the same file and must finish it
before the next one starts, so slow drifts of the machine hit all alike. Only ratios of medians are meant to be quoted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_jobs.plan.bounds import UnboundedStateWarning
from spark_jobs.session.spark_session import start_session, stop_session

__all__ = [
    "FLEET",
    "SMALL_SPLITS",
    "SPARK_STORES",
    "STATELESS",
    "DidNotFinish",
    "Target",
    "Variant",
    "add_files",
    "add_options",
    "cores",
    "fairness",
    "in_turn",
    "own_operators",
    "print_ratios",
    "ratios_of",
    "report_json",
    "scratch",
    "session",
    "some_of",
    "summary",
    "use_store",
    "write_rows",
]

Side = TypeVar("Side")

_PROVIDER = "org.apache.spark.sql.execution.streaming.state."
#: Names of the sides: the fleet, the same plan without state, and Spark's own stores with their configuration.
FLEET = "statefleet"
STATELESS = "stateless"
SPARK_STORES = {
    "hdfs": {"spark.sql.streaming.stateStore.providerClass": f"{_PROVIDER}HDFSBackedStateStoreProvider"},
    "rocksdb": {
        "spark.sql.streaming.stateStore.providerClass": f"{_PROVIDER}RocksDBStateStoreProvider",
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    },
}
#: Every row group of a file of :func:`write_rows` is read by a task of its own.
SMALL_SPLITS = {"spark.sql.files.maxPartitionBytes": "4m", "spark.sql.files.openCostInBytes": "0"}
#: How long the tasks of a stopped query may live on, in seconds: Spark gives Python two to end by itself.
_SETTLE_S = 5.0


class DidNotFinish(Exception):
    """A batch took longer than it may; its query was stopped."""


# -- a session --------------------------------------------------------------------------------------------------------


def cores() -> int:
    """Cores of this machine, all of which the one Spark executor has."""
    return os.cpu_count() or 1


def some_of(what: str, names: Collection[str]) -> Callable[[str], list[str]]:
    """An option's type: some of the names, with commas between them."""

    def chosen(text: str) -> list[str]:
        given = [name for name in text.split(",") if name]
        unknown = [name for name in given if name not in names]
        if unknown or not given:
            raise argparse.ArgumentTypeError(f"no such {what}: {', '.join(unknown)}; there are {', '.join(names)}")
        return given

    return chosen


def add_options(parser: argparse.ArgumentParser, *, executor_memory: str) -> None:
    """Options of every benchmark with Spark in it."""
    add_files(parser)
    parser.add_argument("--shards", type=int, default=4, help="shards, and shuffle partitions of Spark's stores")
    parser.add_argument("--executor-memory", default=executor_memory, help="of the Spark executor (%(default)s)")


def add_files(parser: argparse.ArgumentParser) -> None:
    """Options that say where files go: those of :func:`report_json` and :func:`scratch`."""
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--folder", type=Path, help="where to put input and state (default: a temporary folder)")


@contextmanager
def scratch(options: argparse.Namespace) -> Iterator[Path]:
    """A folder for files, which is gone afterwards."""
    root = Path(tempfile.mkdtemp(prefix="statefleet-bench-", dir=options.folder))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def session(
    app_name: str,
    options: argparse.Namespace,
    configs: Mapping[str, str] | None = None,
    *,
    task_slots: int | None = None,
) -> Iterator[tuple[SparkSession, Path]]:
    """A Spark session with one executor, and a folder for files; both are gone afterwards.

    Parameters
    ----------
    options
        Those of :func:`add_options`.
    configs
        Further Spark configuration.
    task_slots
        Of the executor; by default one for each core.
    """
    # Spark evicts state by the watermark of the batch before: in a steady stream that is one batch an input, as on the fleet.
    settings = {
        "spark.sql.shuffle.partitions": str(options.shards),
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        **(configs or {}),
    }
    slots = task_slots or cores()
    spark = start_session(app_name, executor_cores=slots, executor_memory=options.executor_memory, configs=settings)
    # State that nothing ends, on every side, is what some of the queries are to measure.
    warnings.filterwarnings("ignore", category=UnboundedStateWarning)
    with scratch(options) as root:
        try:
            yield spark, root
        finally:
            stop_session()


def fairness() -> str:
    """How the sides share the machine."""
    return (
        f"{cores()} cores shared by all: one Spark executor with {cores()} task slots for every variant; the fleet's actors reserve "
        "no core and are idle while Spark's own stores have their turn; one query runs at a time, and every variant reads the same "
        "files, shuffles into the same number of partitions and commits durably each batch (but the stateless one)."
    )


def use_store(spark: SparkSession, variant: str) -> None:
    """Have the next query use one of Spark's own stores, if the variant is one: a query keeps what is set when it starts."""
    for key, value in SPARK_STORES.get(variant, {}).items():
        spark.conf.set(key, value)


def own_operators(frame: DataFrame, operator: str, mode: str = "append") -> Any:
    """Spark's own stateful operators, whose output mode is the query's; see :class:`benchmarks.nexmark.query.Operators`."""
    return frame


def write_rows(file: Path, rows: pa.Table, parts: int = 4) -> Path:
    """Parquet file of so many row groups, which Spark reads side by side."""
    pq.write_table(rows, file, row_group_size=max(1, -(-rows.num_rows // parts)))
    return file


# -- queries ----------------------------------------------------------------------------------------------------------


@dataclass
class Variant:
    """One query of a comparison, over a folder of its own that it is fed into.

    Attributes
    ----------
    batch_s, fill_s
        Seconds of the batches that count, and of those before them that built up state.
    rows_out
        Rows that each of the batches that count gave to the sink.
    failure, limit_s
        Why it was given up (empty if it was not), and if a batch took too long, how long that was.
    progress
        Spark's progress of the newest batch.
    """

    name: str
    folder: Path
    query: StreamingQuery
    batch_s: list[float] = field(default_factory=list)
    fill_s: list[float] = field(default_factory=list)
    rows_out: list[int] = field(default_factory=list)
    failure: str = ""
    limit_s: float | None = None
    progress: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, root: Path, frame: DataFrame, mode: str) -> Variant:
        """Start a query whose results are made and thrown away; it reads ``root/name/input`` (:meth:`input_folder`)."""
        writer = frame.writeStream.outputMode(mode).format("noop")
        query = writer.option("checkpointLocation", str(root / name / "checkpoint")).start()
        return cls(name, cls.input_folder(root, name), query)

    @staticmethod
    def input_folder(root: Path, name: str) -> Path:
        """Folder that the variant's source is to read."""
        folder = root / name / "input"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def run(self, file: Path, limit_s: float | None = None) -> float:
        """Give the query one more file, which has rows, and wait for its batch; seconds as Spark measured them.

        Raises
        ------
        DidNotFinish
            It took longer than `limit_s`. The query is stopped.
        pyspark.errors.StreamingQueryException
            The query failed.
        """
        os.link(file, self.folder / file.name)
        before = self.progress.get("batchId", -1)
        with ThreadPoolExecutor(1) as waiting:
            # A look at the folder that began before the file was there may end the first wait.
            while self.progress.get("batchId", -1) == before:
                try:
                    waiting.submit(self.query.processAllAvailable).result(limit_s)
                except TimeoutError:
                    self.query.stop()
                    time.sleep(_SETTLE_S)
                    raise DidNotFinish(f"did not finish in {limit_s:.0f} s") from None
                batches = [one for one in self.query.recentProgress if one["numInputRows"] > 0]
                self.progress = dict(batches[-1]) if batches else {}
        return float(self.progress["durationMs"]["triggerExecution"]) / 1000

    def measure(self, file: Path, limit_s: float | None = None) -> None:
        """:meth:`run` of a batch that counts."""
        self.batch_s.append(self.run(file, limit_s))
        self.rows_out.append(int(self.progress["sink"]["numOutputRows"]))


def in_turn(variants: Sequence[Side], number: int) -> list[Side]:
    """The sides in the order of batch `number`."""
    turn = number % len(variants)
    return [*variants[turn:], *variants[:turn]]


# -- figures ----------------------------------------------------------------------------------------------------------


def summary(batch_s: Sequence[float]) -> dict[str, Any]:
    """Seconds of batches, and what is quoted of them."""
    return {
        "median_s": statistics.median(batch_s),
        "min_s": min(batch_s),
        "max_s": max(batch_s),
        "batch_s": list(batch_s),
    }


@dataclass(frozen=True)
class Target:
    """A ratio of medians, and what the project promises of it.

    Attributes
    ----------
    bound
        None: nothing is promised.
    is_least
        Whether the ratio is to be at least `bound`, or at most.
    """

    over: str
    under: str
    bound: float | None = None
    is_least: bool = True


def ratios_of(
    results: Mapping[str, Mapping[str, Any]], targets: Sequence[Target], **facts: Any
) -> list[dict[str, Any]]:
    """The ratios whose both sides were measured; where the upper one was stopped at ``limit_s``, a lower bound of it."""
    ratios = []
    for target in targets:
        over, under = results.get(target.over, {}), results.get(target.under, {})
        above = over.get("median_s", over.get("limit_s"))
        if above is None or "median_s" not in under:
            continue
        value, is_bound = above / under["median_s"], "median_s" not in over
        row = {**facts, "ratio": f"{target.over} / {target.under}", "value": value, "is_lower_bound": is_bound}
        if target.bound is not None:
            met = value >= target.bound if target.is_least else value <= target.bound
            # A lower bound below the target tells nothing.
            row["met"] = True if met and target.is_least else None if is_bound else met
            row["target"] = f"{'at least' if target.is_least else 'at most'} {target.bound}"
        ratios.append(row)
    return ratios


def print_ratios(ratios: Sequence[Mapping[str, Any]], label: str) -> None:
    """A line each; `label` is the key of what a ratio is about."""
    if not ratios:
        return
    print("\nratios of medians")
    marks = {True: "met", False: "MISSED", None: "unknown"}
    for row in ratios:
        told = f"  target {row['target']}  {marks[row['met']]}" if "target" in row else ""
        value = f"{'>' if row['is_lower_bound'] else ' '}{row['value']:7.2f}"
        print(f"  {row[label]!s:<10} {row['ratio']:<28} {value}{told}")


def report_json(options: argparse.Namespace, **document: Any) -> None:
    """Write all figures, if asked for."""
    if options.json is not None:
        machine = {"cores": cores(), "machine": platform.machine()}
        options.json.write_text(json.dumps({**machine, **document}, indent=2))
