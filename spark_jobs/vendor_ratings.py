"""Running average rating per vendor over a folder of CSV reviews (reviewerId,vendorId,rating,date), state in the fleet."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_jobs.jobs.input_job import InputJob, reason, run_job

_COLUMNS = "reviewerId STRING, vendorId STRING, rating STRING, date STRING, raw STRING"
_NUMBER = r"^\s*[+-]?\d+(\.\d*)?\s*$"


def parse(rows: DataFrame) -> DataFrame:
    """Return typed columns of CSV rows that were read as text; and raw, reason."""
    texts = [F.coalesce(F.col(name), F.lit("")) for name in ("reviewerId", "vendorId", "rating", "date")]
    typed = rows.select(
        F.concat_ws(",", *texts).alias("text"),
        "raw",
        F.col("reviewerId").isNull().alias("anonymous"),
        # Spark's own casts accept more: '2.7' is 2 as bigint, '5d' is 5 as double.
        F.when(F.col("vendorId").rlike(r"^\s*\d+\s*$"), F.expr("try_cast(vendorId AS BIGINT)")).alias("vendor"),
        F.when(F.col("rating").rlike(_NUMBER), F.expr("try_cast(rating AS DOUBLE)")).alias("rating"),
        F.expr("try_to_timestamp(date, 'yyyy-MM-dd HH:mm')").alias("ts"),
    )
    return typed.select(
        F.coalesce("raw", "text").alias("raw"),
        "vendor",
        "rating",
        "ts",
        reason(
            (F.col("raw").isNotNull(), "not a row of four fields"),
            (F.col("anonymous"), "reviewer is missing"),
            (F.col("vendor").isNull(), "vendor is not a number"),
            (F.col("rating").isNull(), "rating is not a number"),
            (~F.col("rating").between(0, 5), "rating is not between 0 and 5"),
            (F.col("ts").isNull(), "date cannot be read"),
        ).alias("reason"),
    )


def read(spark: SparkSession, path: str, files_per_trigger: int) -> DataFrame:
    """Return a streaming DataFrame of a file or folder of CSV reviews, parsed."""
    reader = spark.readStream.schema(_COLUMNS).option("maxFilesPerTrigger", files_per_trigger)
    return parse(reader.option("header", True).option("columnNameOfCorruptRecord", "raw").csv(path))


def build(reviews: Any) -> DataFrame:
    """Return ratings by vendor over all time."""
    result: DataFrame = reviews.groupBy("vendor").agg(
        F.count("*").alias("reviews"),
        F.avg("rating").alias("average"),
        F.stddev("rating").alias("deviation"),
        F.max("ts").alias("newest"),
    )
    return result


JOB = InputJob("vendor-ratings", __doc__ or "", read, build, ("vendor",), "reviews")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; return the exit code."""
    return run_job(JOB, argv)


if __name__ == "__main__":
    sys.exit(main())
