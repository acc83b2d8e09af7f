"""Requests and bytes per client of web access logs (Apache combined format), with the state in the fleet."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_jobs.jobs.access_log import parse_log, read_log
from spark_jobs.jobs.input_job import InputJob, run_job


def build(requests: Any) -> DataFrame:
    """Return traffic by client over all time."""
    result: DataFrame = requests.groupBy("client").agg(
        F.count("*").alias("requests"),
        F.sum("bytes").alias("bytes"),
        F.avg("bytes").alias("average"),
        F.min("ts").alias("first_seen"),
        F.max("ts").alias("last_seen"),
    )
    return result


JOB = InputJob("client-traffic", __doc__ or "", read_log, build, ("client",), "requests", parse_log)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; return the exit code."""
    return run_job(JOB, argv)


if __name__ == "__main__":
    sys.exit(main())
