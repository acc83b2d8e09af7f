"""Spark's own checks of a streaming query."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession


def check_as_spark_does(spark: SparkSession, query: DataFrame, mode: str) -> None:
    assert spark._jvm is not None
    checker = spark._jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    modes = spark._jvm.org.apache.spark.sql.streaming.OutputMode
    checker.checkForStreaming(query._jdf.queryExecution().analyzed(), getattr(modes, mode.capitalize())())
