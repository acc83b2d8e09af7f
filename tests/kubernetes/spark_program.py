"""A program with Spark on Kubernetes beside a Ray of its own: it counts words by an operator and by a function, and continuously.

It prints, as JSON, what the states have after each run, and which executors Spark has had.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import ray
from pyspark.sql import DataFrame

from statefleet.fleet import Fleet
from tests.clocks import until
from tests.integration.rate_epochs import count_epochs

#: Words of each batch; the last one has its executor ended before its rows are read.
BATCHES = [["a", "b", "a"], ["a", "c"], ["c", "d"], ["a", "b", "b"]]


def counted(key: tuple[str], rows: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Count a key's rows, where Ray is not installed."""
    import importlib.util

    assert importlib.util.find_spec("ray") is None, "executors need nothing of Ray"
    before = state.get[0] if state.exists else 0
    state.update((before + sum(len(part) for part in rows),))
    yield pd.DataFrame({"word": [key[0]], "n": state.get})


def by_function(fleet: Fleet, words: DataFrame, name: str) -> DataFrame:
    of_function = fleet.stateful(words, name=name).groupBy("word")
    return of_function.applyInPandasWithState(counted, "word string, n bigint", "n bigint", "update", "NoTimeout")


def by_operator(fleet: Fleet, words: DataFrame, name: str) -> DataFrame:
    return fleet.stateful(words, name=name).groupBy("word").count()


def end_an_executor(kubectl: list[str]) -> None:
    """End the pod of an executor at once, as if its node was lost."""
    selected = ["get", "pods", "--selector=spark-role=executor", "--output=name"]
    pods = subprocess.run([*kubectl, *selected], check=True, capture_output=True, text=True).stdout.split()
    subprocess.run([*kubectl, "delete", pods[0], "--grace-period=0", "--force"], check=True, stdout=subprocess.DEVNULL)


def run(results: DataFrame, checkpoint: Path, kubectl: list[str]) -> dict[int, dict[str, int]]:
    """Run a query over all files, one a batch; return what each batch emitted. Before the last one an executor is ended."""
    emitted: dict[int, dict[str, int]] = {}

    def keep(rows: DataFrame, batch: int) -> None:
        if batch == len(BATCHES) - 1:
            end_an_executor(kubectl)
        assert batch not in emitted
        emitted[batch] = {row[0]: row[1] for row in rows.collect()}

    writer = results.writeStream.outputMode("update").option("checkpointLocation", str(checkpoint))
    writer.foreachBatch(keep).trigger(availableNow=True).start().awaitTermination()
    return emitted


def executors(kubectl: list[str]) -> list[str]:
    """Return the numbers of the executors that run, as Spark gives them."""
    selected = ["get", "pods", "--selector=spark-role=executor", "--output=json"]
    pods = json.loads(subprocess.run([*kubectl, *selected], check=True, capture_output=True, text=True).stdout)["items"]
    running = [
        pod for pod in pods if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]
    return sorted(pod["metadata"]["labels"]["spark-exec-id"] for pod in running)


def main(folder: Path, ray_address: str, *kubectl: str) -> None:
    """Run the documentation's page ``folder/page.py``, then the queries, in a folder that pods have, too."""
    os.environ |= {"PYSPARK_PYTHON": "python", "PYSPARK_DRIVER_PYTHON": sys.executable}
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address=ray_address)
    scope: dict[str, Any] = {}
    exec((folder / "page.py").read_text(), scope)
    spark, fleet = scope["spark"], scope["fleet"]
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    try:
        before = executors([*kubectl])
        words = spark.readStream.schema("word string").option("maxFilesPerTrigger", 1).parquet(str(folder / "words"))
        found: dict[str, Any] = {}
        for name, build in {"operator": by_operator, "function": by_function}.items():
            emitted = run(build(fleet, words, name), folder / name, [*kubectl])
            rows = fleet.state(name).scan().to_arrow().to_pylist()
            found[name] = [emitted, {row["word"]: next(iter(list(row.values())[1:])) for row in rows}]
            until(lambda: len(executors([*kubectl])) == len(before), every_s=1)
        count_epochs(fleet, spark, "epochs", folder / "epochs")
        print(json.dumps({**found, "executors": [before, executors([*kubectl])]}))
    finally:
        spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
