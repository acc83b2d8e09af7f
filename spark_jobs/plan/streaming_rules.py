"""Spark's own check of streaming queries: the one that ``writeStream.start`` runs on a plan."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.errors import AnalysisException

from spark_jobs.plan.catalyst import CATALYST, java_class
from spark_jobs.plan.logical import Plan

__all__ = ["check_streaming", "refused_modes"]


def check_streaming(plan: Plan, output_mode: str) -> None:
    """Spark's check of a query that would be started in an output mode.

    Raises
    ------
    pyspark.errors.AnalysisException
        Spark does not run it.
    """
    modes = java_class("org.apache.spark.sql.streaming.OutputMode")
    checker = java_class(f"{CATALYST}.analysis.UnsupportedOperationChecker")
    checker.checkForStreaming(plan._java, getattr(modes, output_mode.capitalize())())


def refused_modes(plan: Plan, output_modes: Iterable[str]) -> dict[str, str]:
    """Output modes of some in which Spark does not run a query with its own operator in the place of the fleet's, with its words.

    Spark sees no operator of its own where the fleet's is, so it would start what it refuses else. None are refused where
    ``spark.sql.streaming.unsupportedOperationCheck`` is false.

    Parameters
    ----------
    plan
        The query up to the operator, with Spark's own.
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
