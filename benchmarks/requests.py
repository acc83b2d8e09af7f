"""The actor calls and object-store requests of a micro-batch, by kind; nothing is timed.

``python -m benchmarks.requests --json result.json``

The query is a ``transformWithState`` of five state variables (three values, a list, a map) on the S3 server that the tests use, and
gets a file at a time. Counted are a steady batch (the median after the warm-up); a new run of the query up to the end of its first
batch, over state in the store actors' memory; and the same after a restart of the store actors, so that state is read from the
object store. Maintenance is off: no snapshots, no rounds.

Object-store requests come from the server's access log, which has all of them. Actor calls come from Ray's task events in the GCS;
if Ray dropped events, or does not know the name of a call, the benchmark fails.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from pyspark.sql import DataFrame, SparkSession
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated.common_pb2 import ACTOR_TASK
from ray.core.generated.gcs_pb2 import TaskEvents
from ray.core.generated.gcs_service_pb2 import GetTaskEventsRequest
from ray.core.generated.gcs_service_pb2_grpc import TaskInfoGcsServiceStub
from ray.exceptions import RayActorError

import statefleet as sf
from benchmarks.harness import FLEET, Variant, add_options, report_json, session, write_rows
from tests.s3_server import BUCKET, S3Server

#: The fleet's classes of actors; all others are Ray's own and RayDP's.
_CLASSES = ("CoordinatorActor", "StoreActor")
#: Seconds without a change after which counts are complete: each process sends its task events once a second.
_QUIET_S = 3.0
_RESTART_DEADLINE_S = 60.0
_NAMELESS = "?"
#: Names in the report of what is counted.
_BATCH, _HOT, _COLD = "batch", "new run, memory hot", "new run, memory cold"

Counts = Counter[str]


# -- counting ---------------------------------------------------------------------------------------------------------


class IncompleteError(Exception):
    """Ray does not know of all calls."""


class ActorCalls:
    """Calls of the fleet's actors since Ray started, as ``Class.method``."""

    def __init__(self) -> None:
        self._tasks = TaskInfoGcsServiceStub(init_grpc_channel(ray.get_runtime_context().gcs_address))
        self._asked = GetTaskEventsRequest(filters=GetTaskEventsRequest.Filters(exclude_driver=True))

    def counts(self) -> Counts:
        """Return the number of calls, each attempt counted; calls whose name Ray does not know yet are under :data:`_NAMELESS`.

        Raises
        ------
        IncompleteError
            Ray has dropped events.
        """
        reply = self._tasks.GetTaskEvents(self._asked)
        if missing := reply.num_status_task_events_dropped + reply.num_truncated:
            raise IncompleteError(f"Ray has dropped {missing} task events: count fewer batches")
        named = Counter(event.task_info.name or _NAMELESS for event in reply.events_by_task if _is_call(event))
        return Counter({name: n for name, n in named.items() if name.split(".")[0] in (*_CLASSES, _NAMELESS)})


def _is_call(event: TaskEvents) -> bool:
    # The callee may report a call before the caller does, and then without its type.
    return not event.HasField("task_info") or event.task_info.type == ACTOR_TASK


#: Clients' methods, by operation in the S3 server's log.
_METHODS = {
    "s3_GetObject": "GET",
    "s3_PutObject": "PUT",
    "s3_HeadObject": "HEAD",
    "s3_ListObjectsV2": "LIST",
    "s3_DeleteObject": "DELETE",
    "s3_DeleteObjects": "DELETE",
}


def requests_of(log: str) -> Counts:
    """Return the requests in the S3 server's log by method and kind of object: ``GET delta``, ``PUT manifest``, .."""
    counts: Counts = Counter()
    for line in log.splitlines():
        if line.startswith("log starts"):
            continue
        # Owner, bucket, time in two, address, requester, request id, operation, key, URI, status, ..
        fields = line.split(" ")
        operation, key, status = fields[7], fields[8], fields[10]
        failure = "" if status.startswith("2") else f" ({status})"
        counts[f"{_METHODS.get(operation, operation)} {_kind(key)}{failure}"] += 1
    return counts


def _kind(key: str) -> str:
    """Return the kind of an object, by docs/format.md."""
    *folders, name = key.split("/")
    if name.endswith((".delta", ".snapshot")):
        return name.rsplit(".", 1)[-1]
    if name == "metadata.json":
        return "metadata"
    return next((folder for folder in folders if folder in ("manifest", "checkpoints")), "other")


@dataclass(frozen=True)
class Counted:
    """Actor calls and object-store requests (none, if the store is not the S3 server)."""

    calls: Counts
    requests: Counts

    def __sub__(self, before: Counted) -> Counted:
        return Counted(self.calls - before.calls, self.requests - before.requests)


class Meter:
    """Counts calls and requests.

    Parameters
    ----------
    log
        The server's log so far.
    """

    def __init__(self, log: Callable[[], str]) -> None:
        self._log = log
        self._calls = ActorCalls()

    def total(self) -> Counted:
        """Return all calls and requests so far, once no more are under way.

        Raises
        ------
        IncompleteError
            Ray does not know all calls.
        """
        previous = self._now()
        while True:
            time.sleep(_QUIET_S)
            now = self._now()
            if now == previous:
                break
            previous = now
        if nameless := now.calls[_NAMELESS]:
            raise IncompleteError(f"Ray has {nameless} task events without a name")
        return now

    def _now(self) -> Counted:
        return Counted(self._calls.counts(), requests_of(self._log()))


# -- the query --------------------------------------------------------------------------------------------------------


def _processor() -> sf.StatefulProcessor:
    # Defined here, so that Spark's workers get the class by value.
    class Visits(sf.StatefulProcessor):
        """State of each user: three values, a list and a map."""

        def init(self, handle: Any) -> None:
            self.visits = handle.getValueState("visits", "n bigint")
            self.total = handle.getValueState("total", "amount bigint")
            self.largest = handle.getValueState("largest", "amount bigint")
            self.recent = handle.getListState("recent", "amount bigint")
            self.pages = handle.getMapState("pages", "page bigint", "n bigint")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            amounts = [row.amount for row in rows]
            n = (self.visits.get() or (0,))[0] + len(amounts)
            total = (self.total.get() or (0,))[0] + sum(amounts)
            self.visits.update((n,))
            self.total.update((total,))
            self.largest.update((max(amounts + list(self.largest.get() or ())),))
            self.recent.put([*self.recent.get(), *((amount,) for amount in amounts)][-3:])
            for amount in amounts:
                page = (amount % 5,)
                self.pages.updateValue(page, ((self.pages.getValue(page) or (0,))[0] + 1,))
            yield (key[0], n, total)

    return Visits()


class _Query:
    """The query, with its input and restarts."""

    def __init__(self, spark: SparkSession, fleet: sf.Fleet, options: argparse.Namespace, root: Path) -> None:
        self._spark, self._fleet, self._options, self._root = spark, fleet, options, root
        self._files = root / "files"
        self._files.mkdir()
        self._number = 0
        self._variant: Variant | None = None

    def start(self) -> None:
        """Start a run of the query, from the checkpoint of the run before."""
        self._variant = Variant.start(FLEET, self._root, self._frame(), "update")

    def _frame(self) -> DataFrame:
        source = self._spark.readStream.schema("user BIGINT, amount BIGINT").option("maxFilesPerTrigger", 1)
        stream = source.parquet(str(Variant.input_folder(self._root, FLEET)))
        users = self._fleet.stateful(stream, name="visits", shards=self._options.shards).groupBy("user")
        result: DataFrame = users.transformWithState(
            _processor(), "user BIGINT, n BIGINT, total BIGINT", "Update", "None"
        )
        return result

    def batch(self) -> None:
        """Give the query a file and wait for the batch; each user has several rows, so that every shard has rows."""
        assert self._variant is not None
        amounts = np.random.default_rng(self._number).integers(0, 1000, self._options.rows)
        users = np.arange(self._options.rows) % self._options.users
        rows = pa.table({"user": users.astype(np.int64), "amount": amounts.astype(np.int64)})
        self._variant.run(write_rows(self._files / f"{self._number:04d}.parquet", rows))
        self._number += 1

    def stop(self) -> None:
        """End the run; the state stays in memory."""
        if self._variant is not None:
            self._variant.query.stop()


def _restart_store_actors(fleet: sf.Fleet) -> None:
    """End the processes of the store actors; Ray starts them again, with empty memories."""
    fleet_names = {actor["actor_name"] for actor in fleet.status()["store_actors"]}
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["name"] in fleet_names:
            handle = ray.get_actor(named["name"], namespace=named["namespace"])
            before = ray.get(handle.ping.remote())
            ray.kill(handle, no_restart=False)
            _await_restart(handle, before)


def _await_restart(handle: Any, before: str) -> None:
    deadline = time.monotonic() + _RESTART_DEADLINE_S
    while True:
        try:
            if ray.get(handle.ping.remote()) != before:
                return
        except RayActorError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _measure(
    spark: SparkSession, fleet: sf.Fleet, meter: Meter, options: argparse.Namespace, root: Path
) -> dict[str, list[Counted]]:
    """Return the counts of each batch, and of each new run up to the end of its first batch."""
    query = _Query(spark, fleet, options, root)

    def counted(work: Callable[[], None]) -> Counted:
        before = meter.total()
        work()
        return meter.total() - before

    def new_run() -> None:
        query.start()
        query.batch()

    results: dict[str, list[Counted]] = {_BATCH: [], _HOT: [], _COLD: []}
    try:
        query.start()
        for _ in range(options.warmup):
            query.batch()
        for _ in range(options.batches):
            results[_BATCH].append(counted(query.batch))
        for _ in range(options.restarts):
            query.stop()
            results[_HOT].append(counted(new_run))
        for _ in range(options.restarts):
            query.stop()
            _restart_store_actors(fleet)
            results[_COLD].append(counted(new_run))
    finally:
        query.stop()
    return results


# -- the report -------------------------------------------------------------------------------------------------------


def _medians(results: Mapping[str, Sequence[Counted]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return, for calls and requests and by what was counted, the median of each kind and of all together."""
    medians: dict[str, dict[str, dict[str, float]]] = {}
    for attribute in ("calls", "requests"):
        for label, counted in results.items():
            counts: list[Counts] = [getattr(sample, attribute) for sample in counted]
            kinds = sorted(set().union(*counts))
            row = {kind: float(statistics.median(count[kind] for count in counts)) for kind in kinds}
            # Kinds that occur once in many batches, such as a checkpoint of the log, are in the JSON only.
            row = {kind: median for kind, median in row.items() if median}
            row["all"] = float(statistics.median(count.total() for count in counts))
            if attribute == "requests":
                row["all GET"] = float(statistics.median(_gets(count) for count in counts))
            medians.setdefault(attribute, {})[label] = row
    return medians


def _gets(requests: Counts) -> int:
    return sum(count for kind, count in requests.items() if kind.startswith("GET "))


def _report(medians: Mapping[str, Mapping[str, Mapping[str, float]]], options: argparse.Namespace) -> None:
    labels = (_BATCH, _HOT, _COLD)
    print(
        f"\ntransformWithState, five state variables, {options.shards} shards, {options.users:,} users a batch: medians of "
        f"{options.batches} batches and of {options.restarts} new runs up to the end of their first batch\n"
    )
    titles = {"calls": "actor calls", "requests": "object-store requests"}
    for attribute, columns in medians.items():
        if attribute == "requests" and options.store != "s3":
            continue
        print(f"{titles[attribute]:<36}" + "".join(f"{label:>22}" for label in labels))
        kinds = sorted(
            {kind for row in columns.values() for kind in row}, key=lambda kind: (kind.startswith("all"), kind)
        )
        for kind in kinds:
            print(f"  {kind:<34}" + "".join(f"{columns[label].get(kind, 0):>22g}" for label in labels))
        print()


@contextmanager
def _store(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the URI of an empty fleet, and its server's log, which is empty for a folder. Enter it before Ray starts."""
    with tempfile.TemporaryDirectory(prefix="statefleet-requests-", dir=options.folder) as folder:
        if options.store == "file":
            yield f"file://{folder}", str
            return
        # The server's other log, which S3Server.log() shows, is out of order with concurrent requests.
        log = Path(folder, "access.log")
        os.environ["VGW_ACCESS_LOG"] = str(log)
        server = S3Server(Path(folder))
        # Other S3 settings in the environment belong to the developer.
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            del os.environ[name]
        os.environ.update(server.environment())
        try:
            yield f"s3://{BUCKET}/requests", log.read_text
        finally:
            server.stop()


@contextmanager
def _fleet(uri: str) -> Iterator[sf.Fleet]:
    # Rounds would run at any time; and without snapshots, loading does not depend on when they were written.
    fleet = sf.connect(uri, maintenance=sf.Maintenance(interval_s=24 * 3600.0))
    try:
        yield fleet
    finally:
        fleet.shutdown()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.requests", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--store", choices=("s3", "file"), default="s3", help="a folder's requests are not counted (%(default)s)"
    )
    parser.add_argument("--batches", type=int, default=9, help="measured batches (%(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="batches before them that do not count (%(default)s)")
    parser.add_argument("--restarts", type=int, default=3, help="new runs of each kind (%(default)s)")
    parser.add_argument("--rows", type=int, default=2000, help="rows a batch (%(default)s)")
    parser.add_argument("--users", type=int, default=500, help="users, who are in every batch (%(default)s)")
    add_options(parser, executor_memory="1g")
    options = parser.parse_args(argv)
    if min(options.batches, options.restarts, options.users) < 1 or options.rows < options.users:
        parser.error("batches, restarts and users are at least 1, and there is a row for each user")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Count calls and requests, and print their medians."""
    options = _parse(argv)
    with (
        _store(options) as (uri, log),
        session("statefleet-requests", options) as (spark, root),
        _fleet(uri) as fleet,
    ):
        results = _measure(spark, fleet, Meter(log), options, root)
    medians = _medians(results)
    _report(medians, options)
    sizes = {
        key: getattr(options, key) for key in ("store", "shards", "users", "rows", "batches", "warmup", "restarts")
    }
    counted = {
        label: [{"calls": sample.calls, "requests": sample.requests} for sample in samples]
        for label, samples in results.items()
    }
    report_json(options, **sizes, medians=medians, counted=counted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
