"""Hits and bytes per page and hour of web access logs (Apache combined format), with the state in the fleet."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_jobs.jobs.access_log import parse_log, read_log
from spark_jobs.jobs.input_job import InputJob, run_job


def build(requests: Any) -> DataFrame:
    """Return hits by page and hour.

    Without a watermark: log files are read in any order, and a watermark would drop late ones.
    """
    grouped = requests.groupBy(F.window("ts", "1 hour"), "path").agg(
        F.count("*").alias("hits"),
        F.count_if(F.col("status") >= 400).alias("errors"),
        F.sum("bytes").alias("bytes"),
    )
    result: DataFrame = grouped.select(F.col("window.start").alias("hour"), "path", "hits", "errors", "bytes")
    return result


JOB = InputJob("page-hits", __doc__ or "", read_log, build, ("hour", "path"), "hits", parse_log)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; return the exit code."""
    return run_job(JOB, argv)


if __name__ == "__main__":
    sys.exit(main())
