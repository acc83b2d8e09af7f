"""The latency of stateful queries with Kafka in front and behind: of continuous queries, of micro-batches, and of Spark's own store.

``pip install confluent-kafka``, then ``python -m benchmarks.realtime``; ``--sides``, ``--workloads``, ``--rates`` and ``--keys`` choose

A process sends events at a fixed rate and does not wait for anything: each has the time at which it was due in its value. A query reads
them, and sends its results to another topic, whose broker writes down when each was appended. So the latency of a result is that time
less the time at which the newest event in it was due: the producer, the broker (twice), the query and the state are all in it, and no
consumer has to run meanwhile. Times of Kafka's are whole milliseconds, rounded down.

Each run is a new query on new topics, with an empty state that the warm-up fills. After it every event has to be counted: the results
are compared with Spark's own batch query over the same events, and a difference is an error. The sides take turns, run by run, in one
session; reported are medians of the runs. All of it shares one machine: the figures are not those of a broker and a producer elsewhere.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.harness import SPARK_STORES, cores, in_turn, report_json, scratch, some_of
from spark_jobs.page_hits import PACKAGE
from spark_jobs.session.settings import SETTINGS
from spark_jobs.session.spark_session import start_session, stop_session
from statefleet.fleet import Fleet, connect

_ROOT = Path(__file__).parents[1]
#: Partitions of the topics. Each partition of the source keeps a core of a continuous query's for as long as it runs.
PARTITIONS = 2
_EXECUTOR_CORES = PARTITIONS + 1
_EVENTS, _RESULTS = "k LONG, due LONG", "k LONG, n LONG, due LONG"
#: Milliseconds for which the producer gathers events; the sink does not.
_LINGER_MS = 1
#: Seconds in which all events have to be counted after the last one was sent.
_DEADLINE_S = 120
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
#: Part of a process's command line, and what the process is called in the figures.
_ROLES = {
    "kafka.Kafka": "broker", "DefaultWorker": "executor", "spark.deploy": "driver", "StoreActor": "store actor",
    "spawn_main": "producer",
}  # fmt: skip


class LostEventsError(Exception):
    """Results are not those of the events that were sent, or did not come in time."""


# -- queries ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A stateful query over events ``k, due``, with results ``k, n, due``.

    Attributes
    ----------
    query
        Given a frame, whose operators may be those of a fleet.
    repeated
        Of an event how likely it is that it has the key of an earlier one, one of the last `keys`. None: keys are drawn out of `keys`.
    adds_up
        Whether each result counts, so that the sum of a key's is right at the end; otherwise its largest ``n`` is.
    """

    query: Callable[[Any], DataFrame]
    repeated: float | None = None
    adds_up: bool = False


WORKLOADS = {
    "count": Workload(
        lambda events: events.groupBy("k").agg(F.count("*").alias("n"), F.max("due").alias("due")),
    ),
    "deduplicate": Workload(
        lambda events: events.dropDuplicates(["k"]).select("k", F.lit(1).alias("n"), "due"),
        repeated=0.1,
        adds_up=True,
    ),
}


@dataclass(frozen=True)
class Side:
    """How a query runs: on the fleet or not, by which trigger, and with which settings."""

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
    """What is measured some times: a workload on a side, at a rate in events a second."""

    workload: str
    side: str
    rate: int
    keys: int


# -- the producer -----------------------------------------------------------------------------------------------------


def _produce(pipe: Connection, servers: str, topic: str, case: Case, seconds: float, seed: int) -> None:
    """Send events as they become due, in a process of its own; tell when the first one was due, and then how late they were sent."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": servers, "linger.ms": _LINGER_MS, "queue.buffering.max.messages": 10**6})
    producer.list_topics(topic)
    keys = _keys(case, seed)
    gc.disable()
    begin_us = time.time_ns() // 1000 + 100_000
    pipe.send(begin_us)
    late_us: list[int] = []
    number, count = 0, int(case.rate * seconds)
    while number < count:
        due_us = begin_us + number * 1_000_000 // case.rate
        ahead_us = due_us - time.time_ns() // 1000
        if ahead_us > 0:
            producer.poll(0)
            time.sleep(max(ahead_us, 1000) / 1e6)
            continue
        late_us.append(-ahead_us)
        key = next(keys)
        producer.produce(topic, b'{"k":%d,"due":%d}' % (key, due_us), partition=key % PARTITIONS)
        number += 1
    if left := producer.flush(_DEADLINE_S):
        raise LostEventsError(f"{left} events were not sent")
    pipe.send({"late_ms": {name: float(np.quantile(late_us, at)) / 1000 for name, at in PERCENTILES.items()}})


def _keys(case: Case, seed: int) -> Iterator[int]:
    random, repeated, first = np.random.default_rng(seed), WORKLOADS[case.workload].repeated, 0
    while True:
        drawn = random.integers(0, case.keys, 10_000)
        if repeated is not None:
            numbers = np.arange(first, first + len(drawn))
            is_new = (random.random(len(drawn)) >= repeated) | (numbers <= drawn)
            drawn = np.where(is_new, numbers, numbers - 1 - drawn)
            first += len(drawn)
        yield from drawn.tolist()


# -- Kafka ------------------------------------------------------------------------------------------------------------


@contextmanager
def _broker(address: str | None, folder: Path) -> Iterator[str]:
    """A broker's address: of the one that was asked for, or of that of the tests, which ends afterwards."""
    if address is not None:
        yield address
        return
    # Of the tests, so that a broker that runs anyway can be used without them.
    from tests.kafka_broker import KafkaBroker

    broker = KafkaBroker(folder / "kafka")
    try:
        yield broker.address
    finally:
        broker.stop()


def _create_topics(servers: str, source: str, sink: str) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    topics = [
        NewTopic(source, num_partitions=PARTITIONS, replication_factor=1),
        NewTopic(sink, PARTITIONS, 1, config={"message.timestamp.type": "LogAppendTime"}),
    ]
    # It has to outlive its answers.
    client = AdminClient({"bootstrap.servers": servers})
    for created in client.create_topics(topics).values():
        created.result()


def _records(spark: SparkSession, servers: str, topic: str, columns: str, *, is_stream: bool = False) -> DataFrame:
    """Return a topic's records, with the time of each as ``at``."""
    reader = (spark.readStream if is_stream else spark.read).format("kafka").option("kafka.bootstrap.servers", servers)
    records = reader.option("subscribe", topic).option("startingOffsets", "earliest").load()
    value = F.from_json(F.col("value").cast("string"), columns).alias("value")
    return records.select(F.col("timestamp").alias("at"), value).select("at", "value.*")


# -- runs -------------------------------------------------------------------------------------------------------------


class _Bench:
    """The session, the fleet and the broker of all runs."""

    def __init__(
        self, spark: SparkSession, fleet: Fleet, servers: str, folder: Path, options: argparse.Namespace
    ) -> None:
        self._spark, self._fleet, self._servers, self._folder = spark, fleet, servers, folder
        self._warm_up_s, self._seconds = options.warm_up, options.seconds

    def run(self, case: Case, number: int) -> dict[str, Any]:
        """Measure a case once.

        Raises
        ------
        LostEventsError
            Not every event was counted once.
        pyspark.errors.StreamingQueryException
            The query failed.
        """
        name = f"{case.workload}-{case.side}-{case.rate}-{case.keys}-{number}"
        source, sink = f"{name}-in", f"{name}-out"
        _create_topics(self._servers, source, sink)
        query = self._start(case, name, source, sink)
        try:
            begin_us, produced = self._send(case, source, seed=number, query=query)
            self._await_all(query, name, source)
        finally:
            query.stop()
        return {**produced, **self._figures(case, source, sink, begin_us)}

    def _start(self, case: Case, name: str, source: str, sink: str) -> StreamingQuery:
        side, workload = SIDES[case.side], WORKLOADS[case.workload]
        for key, value in side.settings.items():
            self._spark.conf.set(key, value)
        events: Any = _records(self._spark, self._servers, source, _EVENTS, is_stream=True).drop("at")
        if side.is_fleet:
            events = self._fleet.stateful(events, name=name, shards=PARTITIONS)
        values = workload.query(events).select(F.to_json(F.struct("k", "n", "due")).alias("value"))
        writer = values.writeStream.format("kafka").option("kafka.bootstrap.servers", self._servers)
        writer = writer.option("topic", sink).option("kafka.linger.ms", "0").outputMode("update")
        writer = writer.option("checkpointLocation", str(self._folder / name)).queryName(name)
        return writer.trigger(**side.trigger).start()  # type: ignore[arg-type]

    def _send(self, case: Case, source: str, seed: int, query: StreamingQuery) -> tuple[int, dict[str, Any]]:
        """Have events sent; return when the first was due, how late they were sent, and which processes used the measured seconds."""
        processes = multiprocessing.get_context("spawn")
        ours, theirs = processes.Pipe()
        seconds = self._warm_up_s + self._seconds
        producer = processes.Process(target=_produce, args=(theirs, self._servers, source, case, seconds, seed))
        producer.start()
        theirs.close()
        try:
            begin_us = ours.recv()
            self._wait(query, begin_us / 1e6 + self._warm_up_s)
            before = _used_s()
            self._wait(query, begin_us / 1e6 + seconds)
            used = _used_s() - before
            produced = ours.recv()
        finally:
            producer.terminate()
            producer.join()
        return begin_us, {**produced, "cores": {role: used_s / self._seconds for role, used_s in used.items()}}

    def _wait(self, query: StreamingQuery, until_s: float) -> None:
        """Wait until a time; the query's error is raised if it ends before."""
        while (left_s := until_s - time.time()) > 0:
            if query.awaitTermination(max(1, round(left_s))):
                raise LostEventsError("the query ended before the events")

    def _await_all(self, query: StreamingQuery, name: str, source: str) -> None:
        """Wait until Spark's commit log has all events."""
        ends = self._ends(source)
        deadline = time.monotonic() + _DEADLINE_S
        while (counted := _committed(self._folder / name, source)) != ends:
            if time.monotonic() > deadline or query.awaitTermination(1):
                raise LostEventsError(f"events up to {ends} were sent, and up to {counted} counted")

    def _ends(self, topic: str) -> dict[str, int]:
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer({"bootstrap.servers": self._servers, "group.id": "ends"})
        try:
            partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
            return {str(one.partition): consumer.get_watermark_offsets(one)[1] for one in partitions}
        finally:
            consumer.close()

    def _figures(self, case: Case, source: str, sink: str, begin_us: int) -> dict[str, Any]:
        """Return the latencies of results whose events were due after the warm-up, in milliseconds, once all results are right."""
        workload = WORKLOADS[case.workload]
        events = _records(self._spark, self._servers, source, _EVENTS)
        results = _records(self._spark, self._servers, sink, _RESULTS)
        newest = results.groupBy("k").agg((F.sum if workload.adds_up else F.max)("n").alias("newest"))
        both = newest.join(workload.query(events), "k", "full")
        wrong, keys = both.agg(F.count_if(~F.col("n").eqNullSafe(F.col("newest"))), F.count("*")).collect()[0]
        sent = int(case.rate * (self._warm_up_s + self._seconds))
        if wrong or events.count() != sent:
            raise LostEventsError(f"{wrong} of {keys} keys have another result than the {sent} events that were sent")
        measured = results.where(F.col("due") >= begin_us + int(self._warm_up_s * 1e6))
        took_ms = measured.select(((F.unix_micros("at") - F.col("due")) / 1000).alias("ms"))
        points = F.percentile("ms", list(PERCENTILES.values()))
        at_points, count = took_ms.agg(points, F.count("*")).collect()[0]
        latency_ms = dict(zip(PERCENTILES, at_points, strict=True))
        return {"latency_ms": latency_ms, "results": count, "events": sent, "keys": keys}


def _committed(checkpoint: Path, topic: str) -> dict[str, int]:
    """Return the end of the last epoch or batch in Spark's commit log, by partition; empty without any."""
    epochs = [int(file.name) for file in (checkpoint / "commits").glob("[0-9]*")]
    if not epochs:
        return {}
    ends: dict[str, dict[str, int]] = json.loads(
        (checkpoint / "offsets" / str(max(epochs))).read_text().splitlines()[-1]
    )
    return ends[topic]


def _used_s() -> Counter[str]:
    """Return the processor seconds that the benchmark's processes have used, by what they are, and those of all others."""
    used: Counter[str] = Counter()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            command, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        role = next((role for part, role in _ROLES.items() if part in command), "Ray and Python")
        used[role] += times.user + times.system
    machine = psutil.cpu_times()
    used["others"] = sum(machine) - machine.idle - machine.iowait - used.total()
    return used


# -- the command ------------------------------------------------------------------------------------------------------


def _summary(case: Case, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    medians = {name: statistics.median(run["latency_ms"][name] for run in runs) for name in PERCENTILES}
    return {**vars(case), "median_ms": medians, "runs": runs}


def _line(*cells: object) -> str:
    first, *others = (f"{cell:,.0f}" if isinstance(cell, float) else str(cell) for cell in cells)
    return f"{first:<46}" + "".join(f"{cell:>9}" for cell in others)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.realtime", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sides", type=some_of("side", SIDES), default=list(SIDES), help=f"some of {','.join(SIDES)}")
    parser.add_argument(
        "--workloads", type=some_of("workload", WORKLOADS), default=list(WORKLOADS), help=f"some of {','.join(WORKLOADS)}"
    )
    parser.add_argument("--rates", type=int, nargs="+", default=[1000, 30_000], help="events a second (%(default)s)")
    parser.add_argument("--keys", type=int, nargs="+", default=[100_000, 1_000_000], help="keys (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="of each (%(default)s)")
    parser.add_argument("--warm-up", type=float, default=60, help="seconds before the measured ones (%(default)s)")
    parser.add_argument("--seconds", type=float, default=120, help="that are measured, of each run (%(default)s)")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a broker (default: that of this checkout's tests is started)")
    parser.add_argument("--executor-memory", default="2g", help="of the Spark executor (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where to put events and state (default: a temporary folder)")
    parser.add_argument("--json", type=Path, default=_ROOT / "build" / "bench" / "realtime.json", help="file for all figures")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases; return the exit code."""
    options = _parse(argv)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    settings = {
        "spark.sql.shuffle.partitions": str(PARTITIONS),
        "spark.jars.packages": PACKAGE,
        "spark.ray.log4j.config.file.name": SETTINGS["spark.log4j.config.file.name"].value,
    }
    rows: list[dict[str, Any]] = []
    with scratch(options) as folder, _broker(options.kafka, folder) as servers:
        spark = start_session(
            "statefleet-realtime",
            executor_cores=_EXECUTOR_CORES,
            executor_memory=options.executor_memory,
            configs=settings,
        )
        try:
            fleet = connect(f"file://{folder}/fleet")
            bench = _Bench(spark, fleet, servers, folder, options)
            print(_line("milliseconds", *PERCENTILES, "cores"), flush=True)
            for workload, rate, keys in product(options.workloads, options.rates, options.keys):
                cases = [Case(workload, side, rate, keys) for side in options.sides]
                runs: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
                for number in range(options.runs):
                    for case in in_turn(cases, number):
                        runs[case].append(bench.run(case, number))
                for case in cases:
                    rows.append(_summary(case, runs[case]))
                    name = f"{workload} {case.side}, {rate:,}/s, {keys:,} keys"
                    print(_line(name, *rows[-1]["median_ms"].values()), flush=True)
                report_json(options, seconds=options.seconds, warm_up_s=options.warm_up, rows=rows)
            fleet.shutdown()
        finally:
            stop_session()
    print(f"\n{cores()} cores for all of it; all figures: {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
