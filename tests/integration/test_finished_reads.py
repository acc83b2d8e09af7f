"""Readers see what Spark has finished: no batch whose sink failed, and no batch twice because a corrected program repeated it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

import statefleet as sf
from statefleet.cli import main
from tests.clocks import until
from tests.integration.case_systems import configured
from tests.integration.follower import Follower
from tests.integration.streams import Feed, Run

pytestmark = pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")

VALUES = pa.schema([("k", pa.int64())])


def counts(fleet: sf.Fleet, stream: DataFrame, name: str, shards: int = 2) -> DataFrame:
    return fleet.stateful(stream, name=name, shards=shards).groupBy("k").agg(F.count("*").alias("n"))


def sources(fleet: sf.Fleet) -> tuple[Any, Any]:
    """Return a reader beside the query, and a reader of what is stored."""
    return sf.attach(fleet.uri), sf.attach(fleet.uri, offline=True)


def rows_of(rows: Any) -> dict[int, int]:
    return {row["k"]: row["n"] for row in rows.to_arrow().to_pylist()}


def fails(batch: int) -> Callable[[DataFrame, int], None]:
    """Return a sink that fails in `batch`, once it has taken all of its rows."""

    def write(rows: DataFrame, batch_id: int) -> None:
        rows.collect()
        if batch_id == batch:
            raise RuntimeError("this sink fails, on purpose")

    return write


def test_no_reader_sees_a_batch_whose_sink_failed_until_a_run_has_finished_it(
    fleet: sf.Fleet, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    feed, checkpoint = Feed(tmp_path / "in", VALUES), tmp_path / "ck"
    feed.add([(1,), (2,)])
    feed.add([(2,), (3,)])
    query: StreamingQuery = (
        counts(fleet, feed.stream(), name).writeStream.outputMode("update").foreachBatch(fails(1))
        .option("checkpointLocation", str(checkpoint)).start()
    )  # fmt: skip
    with pytest.raises(Exception, match="on purpose"):
        query.processAllAvailable()
    followers = [Follower(source.state(name)) for source in sources(fleet)]
    for source, follower in zip(sources(fleet), followers, strict=True):
        state, committed = source.state(name), source.state(name, consistency="committed")
        assert (state.version, rows_of(state.scan())) == (1, {1: 1, 2: 1})
        assert state.versions() == range(2)
        assert [row["n"] for row in state.multi_get([{"k": 2}]).to_pylist()] == [1]
        with pytest.raises(sf.VersionNotFoundError):
            state.at(2)
        assert rows_of(committed.scan()) == {1: 1, 2: 2, 3: 1}
        histories = [[entry.version for entry in read.history()] for read in (state, committed)]
        assert histories == [[1, 0], [2, 1, 0]]
        rows = f'select count(*) as n from "{name}"'
        assert [source.sql(rows, consistency=read)["n"].to_pylist() for read in ("finished", "committed")] == [[2], [3]]
        with pytest.raises(sf.InvalidRequestError, match="finished or committed"):
            source.sql(rows, consistency="latest")
        assert (follower.follow(), follower.rows) == ((1, [1]), {1: [1], 2: [1]})
    _commands_read(fleet.uri, name, capsys)
    hasty = [Follower(source.state(name, consistency="committed")) for source in sources(fleet)]
    pinned = [source.state(name, consistency="committed").at(2) for source in sources(fleet)]
    for follower in hasty:
        assert (follower.follow(), follower.rows) == ((2, [1, 2]), {1: [1], 2: [2], 3: [1]})
    with pytest.raises(sf.VersionNotFoundError):
        fleet.branch(name, f"{name}-of-2", version=2)
    assert fleet.branch(name, f"{name}-of-1").version == 1
    # The program is corrected, and the batch comes again.
    run = Run(counts(fleet, feed.stream().where("k <> 3"), name), "update", checkpoint)
    run.wait()
    for source, follower in zip(sources(fleet), followers, strict=True):
        assert rows_of(source.state(name).scan()) == {1: 1, 2: 2}
        assert (follower.follow(), follower.rows) == ((2, [2]), {1: [1], 2: [2]})
    for follower, at in zip(hasty, pinned, strict=True):
        with pytest.raises(sf.VersionReplacedError, match="made again"):
            follower.follow()
        with pytest.raises(sf.VersionReplacedError, match="made again"):
            at.get({"k": 2})
    feed.add([(1,)])
    run.wait()
    for follower in followers:
        assert (follower.follow(), follower.rows) == ((3, [3]), {1: [2], 2: [2]})
    run.stop()


def _commands_read(uri: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a fleet, and of a state of it whose version 2 is not finished."""
    query = f'select sum(n)::bigint as n from "{name}"'

    def read(*command: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert main([*command, "--json"]) == code
        return json.loads(capsys.readouterr().out or "null")

    for where in ([], ["--offline"]):
        finished, committed = where, [*where, "--consistency", "committed"]
        key = ["get", uri, name, "k=2", "--columns", "n"]
        assert [read(*key, *how) for how in (finished, committed)] == [[{"n": 1}], [{"n": 2}]]
        assert [len(read("scan", uri, name, *how)) for how in (finished, committed)] == [2, 3]
        assert [len(read("scan", uri, name, "--where", "n > 0", *how)) for how in (finished, committed)] == [2, 3]
        assert [read("sql", uri, query, *how) for how in (finished, committed)] == [[{"n": 2}], [{"n": 4}]]
        assert [read("versions", uri, name, *how)[0]["version"] for how in (finished, committed)] == [1, 2]
        assert [len(read("changes", uri, name, "1", *how)) for how in (finished, committed)] == [0, 2]
        assert [len(read("diff", uri, name, "1", *how)) for how in (finished, committed)] == [0, 3]
        assert read("scan", uri, name, "--version", "2", *finished, code=1) is None
        assert len(read("scan", uri, name, "--version", "2", *committed)) == 3


@pytest.mark.parametrize("how", ["once", "without batches of no data", "stopped"])
def test_what_spark_has_finished_is_seen_by_the_next_read(
    spark: SparkSession, fleet: sf.Fleet, tmp_path: Path, name: str, how: str
) -> None:
    feed = Feed(tmp_path / "in", VALUES)
    feed.add([(1,), (2,)])
    has_no_data_batches = how != "without batches of no data"
    with configured(spark, {"spark.sql.streaming.noDataMicroBatches.enabled": str(has_no_data_batches).lower()}):
        writer = counts(fleet, feed.stream(), name).writeStream.outputMode("update").format("noop")
        if how == "once":
            writer = writer.trigger(once=True)
        if how == "stopped":
            writer = writer.trigger(processingTime="1 hour")
        query = writer.option("checkpointLocation", str(tmp_path / "ck")).start()
        if how == "once":
            query.awaitTermination()
        elif how == "stopped":
            until(lambda: query.lastProgress is not None)
            # Nothing asks for another batch, for an hour.
            query.stop()
        else:
            query.processAllAvailable()
        for source in sources(fleet):
            state = source.state(name)
            if how == "stopped":
                until(lambda state=state: state.version == 1)
            assert rows_of(state.scan()) == {1: 1, 2: 1}
        query.stop()


@pytest.mark.replay
def test_rows_that_were_asked_for_before_a_rescale_are_all_there_after_it(
    spark: SparkSession, fleet: sf.Fleet, tmp_path: Path, name: str
) -> None:
    feed, checkpoint = Feed(tmp_path / "in", VALUES), tmp_path / "ck"
    expected = dict.fromkeys(range(26), 1)
    changed = sorted((key, 1, "upsert", 1) for key in expected)
    reads: list[tuple[Any, Any]] = []
    for shards in (2, 4, 3, 1):
        feed.add([(key,) for key in range(26)])
        run = Run(counts(fleet, feed.stream(), name, shards), "update", checkpoint)
        run.wait()
        run.stop()
        for source in sources(fleet) if not reads else ():
            state = source.state(name)
            reads.append((state.scan(), state.changes(0)))
    for rows, changes in reads:
        assert rows_of(rows) == expected
        in_tasks = [rows.to_spark(spark).toPandas(), rows.to_ray_dataset().to_pandas()]
        assert [dict(zip(frame["k"], frame["n"], strict=True)) for frame in in_tasks] == [expected, expected]
        changed_rows = changes.to_spark(spark).toPandas()
        names = ["k", "n", "_change_type", "_commit_version"]
        assert sorted(map(tuple, changed_rows[names].itertuples(index=False))) == changed


@pytest.mark.parametrize(
    "batches",
    [
        pytest.param(16, marks=pytest.mark.replay),
        pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(3000)]),
    ],
)
def test_programs_that_follow_a_state_hear_of_each_finished_version_once(
    fleet: sf.Fleet, tmp_path: Path, name: str, batches: int
) -> None:
    """Sinks fail, each time another program repeats the batch, and processes of the fleet are killed."""
    feed, every = Feed(tmp_path / "in", VALUES), max(8, batches // 40)
    for batch in range(batches):
        feed.add([(key,) for key in range(11) if (key * batch) % 3 != 1])
    results: dict[int, dict[int, list[int]]] = {}
    failed: set[int] = set()

    def versions_followed() -> list[int]:
        logs = [log.read_text().splitlines() for log in tmp_path.glob("*.jsonl")]
        # The last line may be half written.
        return [json.loads(lines[-2])["version"] for lines in logs if len(lines) > 1]

    def write(rows: DataFrame, batch_id: int) -> None:
        if batch_id % every == 1:
            deadline = time.monotonic() + 150
            while min([*versions_followed(), -1][:2]) < batch_id - 1:
                assert time.monotonic() < deadline, "nobody follows"
                time.sleep(0.05)
        results[batch_id] = {row["k"]: [row["n"], row["w"]] for row in rows.collect()}
        if batch_id % every == 3 and batch_id not in failed:
            failed.add(batch_id)
            raise RuntimeError("this sink fails, on purpose")
        if batch_id % every == every - 1 and batch_id not in failed:
            failed.add(batch_id)
            status = fleet.status()
            actors = [actor for actor in (*status["store_actors"], status["coordinator"]) if actor.get("alive", True)]
            os.kill(actors[batch_id // every % len(actors)]["pid"], signal.SIGKILL)

    def query(weight: int) -> StreamingQuery:
        """Start the program of a run; the weight in its rows says which run made them."""
        stream = fleet.stateful(
            feed.stream().withColumn("w", F.lit(weight)), name=name, outputMode="complete", shards=3
        )
        frame = stream.groupBy("k").agg(F.count("*").alias("n"), F.sum("w").alias("w"))
        writer = frame.writeStream.outputMode("complete").foreachBatch(write)
        return writer.option("checkpointLocation", str(tmp_path / "ck")).start()

    followers: list[subprocess.Popen[bytes]] = []
    for run in range(batches):
        running = query(run + 1)
        if not followers:
            until(lambda: 0 in results)
            for address in (ray.get_runtime_context().gcs_address, "offline"):
                command = [sys.executable, "-m", "tests.integration.follower", fleet.uri, name, address, str(tmp_path)]
                followers.append(subprocess.Popen(command, cwd=Path(__file__).parents[2]))
        try:
            running.processAllAvailable()
            break
        except StreamingQueryException as error:
            assert "on purpose" in str(error), error  # noqa: PT017 - the last run raises nothing
    running.stop()
    (tmp_path / "stop").touch()
    assert [follower.wait(120) for follower in followers] == [0, 0]
    assert len(failed) >= 4
    logs = sorted(tmp_path.glob("*.jsonl"))
    assert len(logs) == 2
    for log in logs:
        copies = [json.loads(line) for line in log.read_text().splitlines()]
        versions = [version for copy in copies for version in copy["versions"]]
        assert versions == sorted(set(versions)), "each version is told once, and none after a later one"
        assert [copy["version"] for copy in copies] == sorted(copy["version"] for copy in copies)
        for copy in copies:
            expected = results[copy["version"] - 1] if copy["version"] else {}
            assert {int(key): row for key, row in copy["rows"].items()} == expected, copy["version"]
        assert copies[-1]["version"] == len(results)
        assert len({copy["version"] for copy in copies}) > batches / every, "it followed"
