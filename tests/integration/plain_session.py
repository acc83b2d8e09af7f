"""A program with a Spark session of its own beside a Ray cluster: it counts words by an operator and by a function.

It prints, as JSON, what the states have after each run, and where the function saw Ray.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pyspark
import ray
from pyspark.sql import DataFrame, SparkSession

from coordinator.service.calls import NAMESPACE
from spark_jobs.nodes import executor_nodes
from spark_jobs.session.java import choose_java_home
from spark_jobs.session.spark_session import ensure_ray
from statefleet.fleet import Fleet
from tests.clocks import until
from tests.integration.rate_epochs import count_epochs
from tests.processes import end_process, end_with_parent, free_ports


def counted(key: tuple[str], rows: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Count a key's rows, where no Ray is."""
    assert not ray.is_initialized(), "a worker needs a socket, and nothing of Ray"
    before = state.get[0] if state.exists else 0
    state.update((before + sum(len(part) for part in rows),))
    yield pd.DataFrame({"word": [key[0]], "n": state.get})


def queries(fleet: Fleet, words: DataFrame, name: str) -> dict[str, DataFrame]:
    of_function = fleet.stateful(words, name=f"{name}-function").groupBy("word")
    kinds = "word string, n bigint", "n bigint"
    return {
        f"{name}-operator": fleet.stateful(words, name=f"{name}-operator").groupBy("word").count(),
        f"{name}-function": of_function.applyInPandasWithState(counted, *kinds, "update", "NoTimeout"),
    }


def run(
    fleet: Fleet, spark: SparkSession, name: str, folder: Path, *, runs: int, kills: bool
) -> list[dict[str, dict[str, int]]]:
    """Run both queries several times, each over a further file; return the counts after each run."""
    counts = []
    words = spark.readStream.schema("word string").option("maxFilesPerTrigger", 1).parquet(f"{folder}/words")
    for number in range(runs):
        (folder / f"{number}.parquet").rename(folder / "words" / f"{number}.parquet")
        for state, results in queries(fleet, words, name).items():
            writer = results.writeStream.outputMode("update").option("checkpointLocation", f"{folder}/{state}")
            if kills:
                writer = writer.foreachBatch(lambda rows, batch: (rows.collect(), kill(fleet))[0] and None)
            else:
                writer = writer.foreachBatch(lambda rows, batch: rows.collect() and None)
            writer.trigger(availableNow=True).start().awaitTermination()
        rows = {state: fleet.state(state).scan().to_arrow().to_pylist() for state in queries(fleet, words, name)}
        counts.append({state: {row["word"]: list(row.values())[1] for row in of} for state, of in rows.items()})
    return counts


def kill(fleet: Fleet) -> None:
    for actor in fleet.status()["store_actors"]:
        if actor["alive"]:
            ray.kill(ray.get_actor(actor["actor_name"], namespace=NAMESPACE), no_restart=False)


def import_counts(fleet: Fleet, spark: SparkSession, name: str, folder: Path) -> None:
    """Begin a state with a table of counts."""
    words = spark.readStream.schema("word string").parquet(f"{folder}/words")
    counts, table = fleet.stateful(words, name=name).groupBy("word").count(), [("a", 5), ("b", 7)]
    rows = spark.createDataFrame(table, "word string, count bigint")
    assert fleet.import_table(counts, rows, checkpoint=f"{folder}/{name}").rows == {name: 2}
    assert sorted(fleet.state(name).scan().to_arrow().to_pydict()["count"]) == [5, 7]


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@contextmanager
def standalone(folder: Path) -> Iterator[str]:
    """Run a master and a worker of Spark's own on this machine, whose Python has this package; yield the master's address."""
    spark, (port,) = Path(pyspark.__file__).parent, free_ports(1)
    url, ran = f"spark://127.0.0.1:{port}", list[subprocess.Popen[bytes]]()
    of_master = ["org.apache.spark.deploy.master.Master", "--port", str(port)]
    of_worker = ["org.apache.spark.deploy.worker.Worker", "--cores", "2", "--memory", "1g", "--work-dir", folder, url]
    of_package = {"SPARK_HOME": str(spark), "PYTHONPATH": str(Path(__file__).parents[2])}
    environment = {**os.environ, **of_package, "JAVA_HOME": str(choose_java_home(os.environ))}
    try:
        for command in (of_master, of_worker):
            arguments = [spark / "bin" / "spark-class", *command, "--host", "127.0.0.1", "--webui-port", "0"]
            ran.append(subprocess.Popen(arguments, env=environment, preexec_fn=end_with_parent))
            until(lambda: answers(port))
        yield url
    finally:
        for process in reversed(ran):
            end_process(process, 20)


def main(uri: str, address: str, way: str, folder: Path) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    ensure_ray(ray_address=address)
    if way not in ("near", "standalone"):
        # As on a machine without a node of the cluster.
        executor_nodes.addresses_of_machine = frozenset  # type: ignore[assignment]
        Fleet.sockets = "/tmp/statefleet-of-nobody/"  # type: ignore[assignment, method-assign]
    if way == "refused":
        # As where Ray has TLS.
        of_none = lambda nodes, holders: {holder.instance_id: None for holder in holders}  # noqa: E731
        executor_nodes.ExecutorNodes.direct_addresses = of_none  # type: ignore[method-assign,assignment]
    with standalone(folder / "work") if way == "standalone" else nullcontext("local[*]") as master:
        # The session of the documentation's page.
        scope: dict[str, Any] = {}
        page = (folder / "page.py").read_text().replace("file:///var/lib/statefleet", uri)
        exec(page.replace("local[*]", master), scope)
        spark, fleet = scope["spark"], scope["fleet"]
        spark.conf.set("spark.sql.shuffle.partitions", "2")
        try:
            spark.createDataFrame([("a",), ("b",), ("a",)], "word string").toPandas().to_parquet(folder / "0.parquet")
            spark.createDataFrame([("a",), ("c",)], "word string").toPandas().to_parquet(folder / "1.parquet")
            (folder / "words").mkdir()
            name = f"plain-{way}-{os.getpid()}"
            if way in ("far", "standalone"):
                import_counts(fleet, spark, f"{name}-table", folder)
            if way == "standalone":
                count_epochs(fleet, spark, f"{name}-epochs", folder / "epochs")
            print(json.dumps(run(fleet, spark, name, folder, runs=1 if way == "near" else 2, kills=way == "killed")))
        finally:
            spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
