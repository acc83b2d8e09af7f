"""A Spark driver to be killed: counts values over a folder of Parquet files, one file a batch, until none is left.

``python -m tests.chaos.driver FOLDER URI``; joins the Ray cluster of ``RAY_ADDRESS``. After each batch it writes all counts to
``FOLDER/result-<batch>.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import DataFrame

from spark_jobs.session.spark_session import start_session, stop_session
from statefleet.fleet import connect


def main(folder: Path, uri: str) -> None:
    # A name of its own: a driver that was stopped or killed may still hold the former one.
    spark = start_session(f"chaos-driver-{os.getpid()}", executor_cores=2)
    stream = spark.readStream.schema("v BIGINT").option("maxFilesPerTrigger", 1).parquet(str(folder / "in"))
    counts = connect(uri).stateful(stream, name="chaos", outputMode="complete", shards=4).groupBy("v").count()

    def write(emitted: DataFrame, batch_id: int) -> None:
        rows = {str(row["v"]): row["count"] for row in emitted.collect()}
        temporary = folder / f".result-{batch_id}"
        temporary.write_text(json.dumps(rows))
        temporary.rename(folder / f"result-{batch_id}.json")

    query = counts.writeStream.outputMode("complete").foreachBatch(write).trigger(availableNow=True)
    query.option("checkpointLocation", str(folder / "checkpoint")).start().awaitTermination()
    stop_session()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
