"""Processors of ``transformWithState`` that are moved from Spark 4's own operator to the fleet continue as on Spark itself."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

from coordinator.model.errors import CorruptStateError, InvalidRequestError, StateStoreError
from spark_jobs.plan.spark_version import SPARK
from statefleet.fleet import Fleet
from tests.integration.case_systems import CHANGELOGS, FORMAT_2, ROCKSDB, configured
from tests.integration.moved_queries import Import, moved, swap
from tests.integration.processor_cases import CASES, OUTPUT, ROWS, StatefulProcessor
from tests.integration.streams import Feed, Run, short_list

on_spark_4 = pytest.mark.skipif(not SPARK.PROCESSOR_CLASSES, reason="Spark 3.5 has no such operator")
#: Spark has this encoding for processors only.
AVRO = {**ROCKSDB, "spark.sql.streaming.stateStore.encodingFormat": "avro"}
CASES_AND_CONFS = {
    "T1 counts": CHANGELOGS,
    "T1 counts in pandas": FORMAT_2,
    "lists and maps": ROCKSDB,
    "event-time timers": AVRO,
    "chained": ROCKSDB,
    "map under struct keys": CHANGELOGS,
}


@on_spark_4
@pytest.mark.parametrize("case_name", short_list(CASES_AND_CONFS, ["lists and maps"]))
def test_a_moved_processor_goes_on_as_spark_does(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, case_name: str
) -> None:
    moved(spark, fleet, CASES[case_name], name, tmp_path, at=2, conf=CASES_AND_CONFS[case_name])


def _living(value_type: str = "v int", ttl_ms: int | None = 3_600_000, extra: bool = False) -> StatefulProcessor:
    """Return a processor with a variable of each kind with a time to live, and a timer in an hour."""

    class Living(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            self.last = handle.getValueState("last", value_type, ttl_ms)
            self.all = handle.getListState("all", "v int", ttl_ms)
            self.by = handle.getMapState("by", "odd boolean", "v int, vs array<int>", ttl_ms)
            if extra:
                handle.getValueState("extra", "v int")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            for row in rows:
                self.last.update((row.v,))
                self.all.appendValue((row.v,))
                self.by.updateValue((row.v % 2 == 1,), (row.v, [row.v]))
            self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 3_600_000)
            yield Row(id=key[0], out=f"{self.last.get()} {list(self.all.get())} {sorted(self.by.iterator())}")

    return Living()


def _committed(checkpoint: Path) -> bool:
    return any(path.name.isdecimal() for path in (checkpoint / "commits").glob("*"))


@pytest.fixture
def feed(spark: SparkSession, tmp_path: Path) -> Feed:
    feed = Feed(tmp_path / "in", ROWS)
    feed.add([("a", 1), ("a", 2), ("b", 3)])
    return feed


@pytest.fixture
def importing(fleet: Fleet, feed: Feed, tmp_path: Path, name: str) -> Import:
    return Import(fleet, tmp_path, name, feed)


@pytest.fixture
def old(spark: SparkSession, feed: Feed, importing: Import) -> Path:
    """The checkpoint of a processor in Spark, with two partitions."""
    with configured(spark, ROCKSDB | {"spark.sql.shuffle.partitions": "2"}):
        frame = feed.stream().groupBy("id").transformWithState(_living(), OUTPUT, "update", "ProcessingTime")
        with Run(frame, "update", importing.old) as run:
            # By processing time a query goes on with batches of no rows, so it is never through.
            while not _committed(importing.old):
                assert run.query.isActive, run.query.exception()
                time.sleep(0.2)
    return importing.old


def _asked(fleet: Fleet, feed: Feed, name: str, processor: StatefulProcessor, key: str = "id", mode: str = "") -> Any:
    grouped = fleet.stateful(feed.stream(), name=name, shards=3).groupBy(key)
    return grouped.transformWithState(processor, OUTPUT, "update", mode or "ProcessingTime")


@pytest.mark.replay
@on_spark_4
def test_timers_and_times_to_live_are_those_of_spark(
    spark: SparkSession, fleet: Fleet, feed: Feed, old: Path, tmp_path: Path, name: str
) -> None:
    def sparks(**options: str) -> list[Mapping[str, Any]]:
        rows = spark.read.format("statestore").options(path=str(old), **options).load()
        return [row.asDict(recursive=True) for row in rows.orderBy("key").collect()]

    last, timers = sparks(stateVarName="last"), sparks(readRegisteredTimers="true")
    frame = _asked(fleet, feed, name, _living())
    imported = fleet.import_checkpoint(str(old), frame, checkpoint=str(tmp_path / "new"))
    # Timers; values; lists and maps with a head for each key.
    assert imported.rows == {name: 2 + 2 + (3 + 2) + (3 + 2)}
    assert fleet.import_checkpoint(str(old), frame, checkpoint=str(tmp_path / "new")) == imported

    def ours(store: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = fleet.state(name, store).scan().to_arrow().to_pylist()
        return sorted(rows, key=repr)

    expiry_ms = last[0]["value"]["ttlExpirationMs"]
    assert [(row["id"], row["v"], row["expiry"].timestamp() * 1000) for row in ours("value.last")] == [
        (row["key"]["id"], row["value"]["value"]["v"], expiry_ms) for row in last
    ]
    assert [(row["id"], row["timer"].timestamp() * 1000) for row in ours("default")] == [
        (row["key"]["id"], row["expiration_timestamp_ms"]) for row in timers
    ]
    feed.add([("a", 4)])
    run = Run(frame, "update", tmp_path / "new")
    emitted = [tuple(row) for row in run.take()]
    run.stop()
    assert emitted == [
        (
            "a",
            "Row(v=4) [Row(v=1), Row(v=2), Row(v=4)] [(Row(odd=False), Row(v=4, vs=[4])), (Row(odd=True), Row(v=1, vs=[1]))]",
        )
    ]


@on_spark_4
def test_what_does_not_fit_a_processors_checkpoint_is_refused_before_anything_is_written(
    fleet: Fleet, feed: Feed, importing: Import, old: Path, tmp_path: Path, name: str
) -> None:
    refused = importing.refused
    refused(_asked(fleet, feed, name, _living(extra=True)), "other state variables.*existing=.*asked=.*value extra")
    refused(_asked(fleet, feed, name, _living(ttl_ms=None)), "other state variables.*with a time to live")
    refused(_asked(fleet, feed, name, _living("v bigint")), "columns of state variable last.*existing=`v int`")
    refused(_asked(fleet, feed, name, _living(), key="v"), "grouping columns.*existing=")
    refused(_asked(fleet, feed, name, _living(ttl_ms=None), mode="None"), "time mode processingtime.*time mode none")
    refused(fleet.stateful(feed.stream(), name=name).groupBy("id").count(), "another one than the query's")
    shutil.copytree(old, tmp_path / "copy")
    shutil.rmtree(old / "state/0/1")
    refused(_asked(fleet, feed, name, _living()), r"missing=`\[1\]`", CorruptStateError)
    shutil.copytree(tmp_path / "copy/state/0/1", old / "state/0/1")
    # Which variables there are, and their types.
    shutil.rmtree(old / "state/0/_stateSchema")
    refused(_asked(fleet, feed, name, _living()), "cannot read what the checkpoint says", CorruptStateError)


@on_spark_4
def test_swapped_partitions_of_a_processor_are_found(
    fleet: Fleet, feed: Feed, importing: Import, old: Path, name: str
) -> None:
    swap(old / "state/0")
    importing.refused(_asked(fleet, feed, name, _living()), r"not finished.*swapped or copied", StateStoreError)


@pytest.mark.skipif(bool(SPARK.PROCESSOR_CLASSES), reason="Spark 4 reads it")
def test_spark_35_does_not_read_the_state_of_a_processor(
    fleet: Fleet, feed: Feed, importing: Import, name: str
) -> None:
    # Spark 3.5 cannot write such a checkpoint; the state of any operator is one that it does not read for a processor.
    importing.run_on_spark(feed.stream().groupBy("id").agg(F.max("v")))
    importing.refused(_asked(fleet, feed, name, _living()), "import it with Spark 4", InvalidRequestError)
