"""Spark's own check of streaming queries, which ``writeStream.start`` runs on a plan."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.errors import AnalysisException

from spark_jobs.plan.catalyst import CATALYST, java_class
from spark_jobs.plan.logical import Plan


def check_streaming(plan: Plan, output_mode: str) -> None:
    """Run Spark's check of a query in an output mode.

    Raises
    ------
    pyspark.errors.AnalysisException
        Spark does not run the query.
    """
    modes = java_class("org.apache.spark.sql.streaming.OutputMode")
    checker = java_class(f"{CATALYST}.analysis.UnsupportedOperationChecker")
    checker.checkForStreaming(plan._java, getattr(modes, output_mode.capitalize())())


def refused_modes(plan: Plan, output_modes: Iterable[str]) -> dict[str, str]:
    """Return the output modes in which Spark refuses a query with its own operator in place of the fleet's, with its error texts.

    Spark does not recognise the fleet's operator, so it would start queries that it otherwise refuses. No mode is refused where
    ``spark.sql.streaming.unsupportedOperationCheck`` is false.

    Parameters
    ----------
    plan
        The query up to the operator, with Spark's own operator.
    """
    refused: dict[str, str] = {}
    if not plan.checks_streaming:
        return refused
    for mode in output_modes:
        try:
            check_streaming(plan, mode)
        except AnalysisException as error:
            refused[mode] = str(error).partition("\n")[0].rstrip(";")
    return refused
