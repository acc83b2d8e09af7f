"""Spark's own check of streaming queries: the one that ``writeStream.start`` runs on a plan."""

from __future__ import annotations

from pyspark.errors import AnalysisException

from coordinator.errors import InvalidRequestError
from spark_jobs.plan.catalyst import CATALYST, java_class
from spark_jobs.plan.logical import Plan

__all__ = ["check_as_spark_would", "check_streaming"]


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


def check_as_spark_would(plan: Plan, output_mode: str, state: str) -> None:
    """Refuse a query that Spark refuses with its own operator in the place of the fleet's.

    Spark sees no operator of its own where the fleet's is, so it would start what it refuses else.

    Parameters
    ----------
    plan
        The query up to the operator, with Spark's own.
    state
        The state's name.

    Raises
    ------
    InvalidRequestError
        Has Spark's words.
    """
    try:
        check_streaming(plan, output_mode)
    except AnalysisException as error:
        raise InvalidRequestError(
            "Spark does not run this query with an operator of its own, so neither does the fleet; nothing was started: "
            + str(error).partition("\n")[0].rstrip(";"),
            state=state,
            outputMode=output_mode,
        ) from error
