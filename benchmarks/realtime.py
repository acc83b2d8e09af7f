"""The latency of stateful queries with Kafka in front and behind: of continuous queries, of micro-batches, and of Spark's own store.

``python -m benchmarks.realtime``; ``--sides``, ``--workloads``, ``--rates`` and ``--keys`` choose. Spark's real-time mode and Flink are
sides, too, where there are environments that have them: ``--peer spark-realtime=PYTHON`` (``pip install pyspark==4.3.0``) and
``--peer flink=PYTHON`` (``pip install apache-flink``, and ``flink-sql-connector-kafka`` in the folder ``pyflink/lib`` of it).

A process sends events at a fixed rate and waits for nothing: each has the time at which it was due in its value. A query reads them,
and sends its results to another topic, where the broker writes down when each was appended. So the latency of a result is that time
less the time at which the newest event in it was due: the producer, the broker (twice), the query and the state are all in it, and no
consumer has to run meanwhile. How much of it is between the two topics is told as well. The broker's times are whole milliseconds.

Each run is a new query on new topics, with an empty state that the warm-up fills, once the query has begun. In the end every event has
to be counted: the results are compared with Spark's own batch query over the same events, and a difference is an error. The sides take
turns, run by run, in one session; reported are medians of the runs. All of it shares one machine: a broker and a producer elsewhere
would leave more of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyspark
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.harness import add_files, cores, in_turn, report_json, session, some_of
from benchmarks.kafka import PERCENTILES, EventProducer, Events, Kafka, broker
from benchmarks.peers.process import PEERS, PeerQuery
from benchmarks.peers.queries import EVENT, QUERIES, RESULT, records, results_writer
from benchmarks.shared import PARTITIONS, SPARK_STORES
from spark_jobs.page_hits import PACKAGE
from spark_jobs.session.settings import SETTINGS
from statefleet.fleet import connect

#: Each partition of the source keeps a core of a continuous query's for as long as it runs.
_EXECUTOR_CORES = PARTITIONS + 1
_SETTINGS = {
    "spark.jars.packages": PACKAGE,
    "spark.ray.log4j.config.file.name": SETTINGS["spark.log4j.config.file.name"].value,
}
#: Seconds in which all events have to be counted after the last one was sent.
_DEADLINE_S = 120
#: Events before all others.
_FIRST = 100
#: What is in the command line of a process, and what the process is called in the figures.
_ROLES = {
    "kafka.Kafka": "broker", "DefaultWorker": "executor", "org.apache.spark": "driver", "StoreActor": "store actor",
    "spawn_main": "producer", "org.apache.flink": "flink",
}  # fmt: skip


class WrongResultsError(Exception):
    """Results are not those of the events that were sent, or did not come in time."""


# -- what is measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A stateful query over events ``k, due``, whose results are ``k, n, due``."""

    #: Is given a frame, whose operators may be those of a fleet.
    query: Callable[[Any], DataFrame]
    #: Of its events; see :class:`~benchmarks.kafka.Events`.
    repeated: float | None = None
    #: Whether the sum of ``n`` of all results of a key has to be right in the end, and not its largest.
    adds_up: bool = False
    #: What gives the same results of a table, where the query is only there for streams.
    same: Callable[[DataFrame], DataFrame] | None = None


_STATE = "n LONG, due LONG"


def _counted_by_function(events: Any) -> DataFrame:
    """Count by a function of the user's: the fleet's own for many keys, or Spark's for each key."""
    grouped = events.groupBy("k")
    if hasattr(grouped, "applyInArrowWithState"):
        return grouped.applyInArrowWithState(_count_all, RESULT, _STATE, "update", "NoTimeout")
    return grouped.applyInPandasWithState(_count_one, RESULT, _STATE, "update", "NoTimeout")


def _count_all(keys: pa.Table, rows: pa.Table, state: Any) -> pa.Table:
    due = np.maximum.reduceat(rows.column("due").to_numpy(), state.offsets[:-1])
    counted = {"n": pc.add(state.get("n", 0), pa.array(np.diff(state.offsets))), "due": pa.array(due)}
    state.update(counted)
    return pa.table({"k": keys.column("k"), **counted})


def _count_one(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
    n, due = state.get if state.exists else (0, 0)
    for frame in frames:
        n, due = n + len(frame), max(due, int(frame["due"].max()))
    state.update((n, due))
    yield pd.DataFrame({"k": [key[0]], "n": [n], "due": [due]})


WORKLOADS = {
    "count": Workload(QUERIES["count"]),
    "window": Workload(QUERIES["window"]),
    "function": Workload(_counted_by_function, same=QUERIES["count"]),
    # Of keys that are drawn out of some, hardly one would be new after a while.
    "deduplicate": Workload(QUERIES["deduplicate"], repeated=0.1, adds_up=True),
}


@dataclass(frozen=True)
class Side:
    """How a query of this session runs: on a fleet or not, by which trigger, and with which settings."""

    is_fleet: bool
    trigger: Mapping[str, str]
    settings: Mapping[str, str]


_AT_ONCE = {"processingTime": "0 seconds"}
SIDES = {
    "continuous": Side(True, {"continuous": "1 second"}, {}),
    "batches": Side(True, _AT_ONCE, {}),
    "rocksdb": Side(False, _AT_ONCE, SPARK_STORES["rocksdb"]),
}


@dataclass(frozen=True)
class Case:
    """What is measured some times: a workload on a side, with a number of keys, at a rate in events a second."""

    workload: str
    side: str
    rate: int
    keys: int


# -- a run ------------------------------------------------------------------------------------------------------------


class _SparkQuery:
    """A query of this session, on a fleet of its own or none."""

    def __init__(self, spark: SparkSession, case: Case, kafka: Kafka, source: str, sink: str, folder: Path) -> None:
        side = SIDES[case.side]
        self._checkpoint, self._kafka, self._source = folder / "checkpoint", kafka, source
        for key, value in side.settings.items():
            spark.conf.set(key, value)
        events: Any = records(spark, kafka.address, source, EVENT, is_stream=True).drop("at")
        with ExitStack() as ends:
            if side.is_fleet:
                fleet = connect(f"file://{folder}/fleet")
                ends.callback(fleet.shutdown)
                events = fleet.stateful(events, name=case.workload, shards=PARTITIONS)
            results = WORKLOADS[case.workload].query(events)
            writer = results_writer(results, kafka.address, sink, str(self._checkpoint))
            self._query = writer.trigger(**side.trigger).start()
            ends.callback(self._query.stop)
            #: Stops the query, and then its fleet.
            self.stop = ends.pop_all().close

    def ended(self, within_s: float) -> bool:
        """Return whether it ends within some seconds; raise what it failed with."""
        return bool(self._query.awaitTermination(max(1, round(within_s))))

    def counted_all(self) -> bool:
        """Return whether Spark's commit log has all events."""
        logged = [int(file.name) for file in (self._checkpoint / "commits").glob("[0-9]*")]
        if not logged:
            return False
        lines = (self._checkpoint / "offsets" / str(max(logged))).read_text().splitlines()
        return bool(json.loads(lines[-1])[self._source] == self._kafka.ends(self._source))


_Query = _SparkQuery | PeerQuery


class _Run:
    """A case, measured once: a query, whose state, topics and checkpoint are its own."""

    def __init__(
        self, spark: SparkSession, kafka: Kafka, root: Path, case: Case, number: int, options: argparse.Namespace
    ) -> None:
        self._spark, self._kafka, self._case, self._seed = spark, kafka, case, number
        self._workload, self._peer = WORKLOADS[case.workload], options.peers.get(case.side)
        name = f"{case.workload}-{case.side}-{case.rate}-{case.keys}-{number}"
        self._source, self._sink, self._folder = f"{name}-in", f"{name}-out", root / name
        self._warm_up_s, self._measured_s = options.warm_up, options.seconds

    def measure(self) -> dict[str, Any]:
        """Return the figures.

        Raises
        ------
        WrongResultsError
            Not every event was counted once.
        pyspark.errors.StreamingQueryException
            The query failed.
        """
        with self._kafka.topics(self._source, self._sink):
            query = self._start()
            try:
                self._begin(query)
                begin_us, used = self._send(query)
                self._await_all(query)
            finally:
                query.stop()
            return {**used, **self._figures(begin_us + int(self._warm_up_s * 1e6))}

    def _start(self) -> _Query:
        ways = self._kafka, self._source, self._sink, self._folder
        if self._peer is None:
            return _SparkQuery(self._spark, self._case, *ways)
        return PeerQuery(self._peer, self._case.side, self._case.workload, *ways)

    def _send(self, query: _Query) -> tuple[int, dict[str, Any]]:
        """Have the events sent; return when the first was due, how late they were sent, and who used the measured seconds."""
        seconds = self._warm_up_s + self._measured_s
        producer = EventProducer(self._kafka, self._source, self._events(round(self._case.rate * seconds)))
        try:
            begin_us = producer.begin_us
            self._wait(query, begin_us / 1e6 + self._warm_up_s)
            before, since = _used_s(), time.monotonic()
            self._wait(query, begin_us / 1e6 + seconds)
            used, passed_s = _used_s() - before, time.monotonic() - since
            late_ms = producer.wait()
        finally:
            producer.end()
        return begin_us, {"late_ms": late_ms, "cores": {role: used_s / passed_s for role, used_s in used.items()}}

    def _events(self, count: int) -> Events:
        return Events(self._case.rate, count, self._case.keys, self._workload.repeated, self._seed)

    def _begin(self, query: _Query) -> None:
        """Have the query count some events, so that none wait for its start."""
        producer = EventProducer(self._kafka, self._source, self._events(_FIRST))
        try:
            producer.wait()
        finally:
            producer.end()
        self._await_all(query)

    def _wait(self, query: _Query, until_s: float) -> None:
        left_s = until_s - time.time()
        if left_s > 0 and query.ended(left_s):
            raise WrongResultsError("the query ended before the events")

    def _await_all(self, query: _Query) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not query.counted_all():
            if time.monotonic() > deadline or query.ended(1):
                raise WrongResultsError(f"of events up to {self._kafka.ends(self._source)}, not all were counted")

    def _figures(self, since_us: int) -> dict[str, Any]:
        """Return the latencies of results whose newest events were due since a time."""
        events = records(self._spark, self._kafka.address, self._source, EVENT)
        results = records(self._spark, self._kafka.address, self._sink, RESULT)
        last = (F.sum if self._workload.adds_up else F.max)("n").alias("last")
        rightly = self._workload.same or self._workload.query
        both = results.groupBy("k").agg(last).join(rightly(events), "k", "full")
        wrong, keys = both.agg(F.count_if(~F.col("n").eqNullSafe(F.col("last"))), F.count("*")).collect()[0]
        came, sent = events.count(), _FIRST + round(self._case.rate * (self._warm_up_s + self._measured_s))
        if wrong or came != sent:
            raise WrongResultsError(f"{wrong} of {keys} keys have a wrong result; {sent} events were sent, {came} came")
        # No two events are due at the same microsecond.
        arrived = events.select("due", F.col("at").alias("arrived"))
        measured = results.where(F.col("due") >= since_us).join(arrived, "due")
        at_us = F.unix_micros("at")
        latency, between = _percentiles(at_us - F.col("due")), _percentiles(at_us - F.unix_micros("arrived"))
        latencies, betweens, count = measured.agg(latency, between, F.count("*")).collect()[0]
        named = {"latency_ms": latencies, "between_ms": betweens}
        figures = {name: dict(zip(PERCENTILES, values, strict=True)) for name, values in named.items()}
        return {**figures, "results": count, "events": sent, "keys": keys}


def _percentiles(of_us: Column) -> Column:
    return F.percentile(of_us / 1000, list(PERCENTILES.values()))


def _used_s() -> Counter[str]:
    """Return the processor seconds that this benchmark's processes have used, by what they are, and that all others have."""
    used: Counter[str] = Counter()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            command, times = " ".join(process.cmdline()), process.cpu_times()
            used[next((role for part, role in _ROLES.items() if part in command), "rest")] += times.user + times.system
    machine = psutil.cpu_times()
    used["others"] = sum(machine) - machine.idle - machine.iowait - used.total()
    return used


# -- the command ------------------------------------------------------------------------------------------------------


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name:<46}" + "".join(f"{cell:>9}" for cell in cells)


def _row(case: Case, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a case's figures, and print the medians."""
    # What others did not use at all is no figure.
    others = statistics.median(run["cores"].get("others", 0.0) for run in runs)
    row: dict[str, Any] = {**vars(case), "runs": runs}
    titles = {
        "latency_ms": f"{case.workload} {case.side}, {case.rate:,}/s, {case.keys:,} keys",
        "between_ms": "  of it between the topics",
    }
    for figure, title in titles.items():
        row[figure] = {name: statistics.median(run[figure][name] for run in runs) for name in PERCENTILES}
        print(_line(title, [*(f"{value:,.0f}" for value in row[figure].values()), f"{others:.1f}"]), flush=True)
    return row


def _peer(text: str) -> tuple[str, Path]:
    """Return the side and the interpreter of an option."""
    side, _, interpreter = text.partition("=")
    if side not in PEERS or not Path(interpreter).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(PEERS)}, an =, and the path of a Python")
    return side, Path(interpreter).absolute()


def _cases(options: argparse.Namespace, workload: str, rate: int, keys: int) -> list[Case]:
    """Return the cases of a comparison: of all sides that can run its query."""
    sides = [*options.sides, *options.peers]
    if workload == "function":
        # PySpark 3.5's own worker fails with today's pyarrow where a key has several rows in a batch. The peers have none in Python.
        of_fleets = [side for side in options.sides if SIDES[side].is_fleet]
        sides = options.sides if pyspark.__version__ >= "4" else of_fleets
    return [Case(workload, side, rate, keys) for side in sides]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.realtime", description=(__doc__ or "").split("\n")[0])
    for noun, names in (("side", SIDES), ("workload", WORKLOADS)):
        choices = ",".join(names)
        parser.add_argument(f"--{noun}s", type=some_of(noun, names), default=list(names), help=f"some of {choices}")
    parser.add_argument(
        "--peer", dest="peers", type=_peer, action="append", default=[], metavar="SIDE=PYTHON",
        help=f"another side ({', '.join(PEERS)}), and a Python that has it",
    )  # fmt: skip
    parser.add_argument("--rates", type=int, nargs="+", default=[1000, 30_000], help="events a second (%(default)s)")
    parser.add_argument("--keys", type=int, nargs="+", default=[100_000, 1_000_000], help="keys (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each (%(default)s)")
    parser.add_argument("--warm-up", type=float, default=60, help="seconds before those measured (%(default)s)")
    parser.add_argument("--seconds", type=float, default=120, help="measured seconds of a run (%(default)s)")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a broker (default: one of this checkout's tests)")
    parser.add_argument("--executor-memory", default="2g", help="of the Spark executor (%(default)s)")
    add_files(parser)
    parser.set_defaults(shards=PARTITIONS, json=Path(__file__).parents[1] / "build" / "bench" / "realtime.json")
    options = parser.parse_args(argv)
    options.peers = dict(options.peers)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases; return the exit code."""
    options = _parse(argv)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with (
        session("statefleet-realtime", options, _EXECUTOR_CORES, _SETTINGS) as (spark, root),
        broker(options.kafka, root) as kafka,
    ):
        print(_line("medians, in milliseconds", [*PERCENTILES, "others"]), flush=True)
        for workload, rate, keys in product(options.workloads, options.rates, options.keys):
            cases = _cases(options, workload, rate, keys)
            runs: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
            for number in range(options.runs):
                for case in in_turn(cases, number):
                    runs[case].append(_Run(spark, kafka, root, case, number, options).measure())
            rows += [_row(case, runs[case]) for case in cases]
            # After each comparison: a command that is killed has given those before.
            report_json(options, warm_up_s=options.warm_up, measured_s=options.seconds, rows=rows)
    print(
        f"\n{cores()} cores for all of it, of which processes of `others` used that many; all figures: {options.json}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
