"""Has Spark plan the fleet's exchanges as stateful operators of its own.

They are compiled when a session is made ready, by the compiler that comes with Spark. The source is ``StatefulExchange.java`` beside
this module; it runs on the driver only. A callback tells it where shards are, and what a batch did.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import DataFrame, SparkSession

from coordinator.model.errors import SetupError
from spark_jobs.plan.catalyst import CATALYST, WATERMARK_KEY, java_class
from spark_jobs.plan.logical import Plan

__all__ = ["install", "marked_as_aggregation", "with_event_time", "with_sparks_own"]

_SOURCE = Path(__file__).with_name("StatefulExchange.java")
_ENTRY = "statefleet.spark.Sessions"


class _Driver:
    """``java.util.function.Function`` of Python's."""

    class Java:
        implements = ["java.util.function.Function"]  # noqa: RUF012 - Py4J reads it so

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer = answer

    def apply(self, told: str) -> str:
        """What Java calls."""
        return self._answer(told)


def install(spark: SparkSession, driver: Callable[[str], str]) -> None:
    """Make a session ready; twice does no harm. A session of ``newSession`` is another one.

    Parameters
    ----------
    driver
        From what Java tells of a batch (JSON) to an answer (JSON); called in the driver, in a thread of the JVM's.

    Raises
    ------
    SetupError
        This Spark cannot be taught it.
    """
    try:
        gateway = spark.sparkContext._gateway
        sessions = _compiled(gateway)
        if not sessions.isInstalled(spark._jsparkSession):
            ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
            sessions.install(spark._jsparkSession, _Driver(driver))
    except Py4JError as error:
        raise SetupError(
            "this Spark cannot be made to see the fleet's operators, without which results would come in other batches than Spark's; "
            "nothing was started; use the version of pyspark that this package asks for, on a plain driver",
            spark=spark.version,
            cause=str(error).partition("\n")[0],
        ) from error


@cache
def _compiled(gateway: Any) -> Any:
    """The entry to the compiled classes, once a JVM."""
    jvm = gateway.jvm
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
    compiler.cook(_SOURCE.read_text())
    entry = compiler.getClassLoader().loadClass(_ENTRY)
    nothing = gateway.new_array(jvm.java.lang.Class, 0), gateway.new_array(jvm.java.lang.Object, 0)
    return entry.getDeclaredConstructor(nothing[0]).newInstance(nothing[1])


def with_event_time(chunks: DataFrame) -> DataFrame:
    """Chunks with a column that Spark's checks take for the event time of groups, as append mode asks for."""
    return chunks.withMetadata("rows_read", {WATERMARK_KEY: 0})


def marked_as_aggregation(exchange: DataFrame) -> DataFrame:
    """An exchange that Spark's checks take for the aggregation that its operator is.

    The mark is taken out again before the query is planned, in a session where :func:`install` was called.
    """
    plan = exchange._jdf.queryExecution().analyzed()
    columns = plan.output()
    aggregate = java_class(f"{CATALYST}.plans.logical.Aggregate")
    return Plan(aggregate(columns, columns, plan), exchange.sparkSession).frame()


def with_sparks_own(results: DataFrame, analysed: Plan) -> DataFrame:
    """Results of an operator that say what Spark's own was analysed to, for filters that Spark would move through that."""
    tag = java_class(f"{CATALYST}.trees.TreeNodeTag")("statefleet.analysed")
    results._jdf.queryExecution().analyzed().setTagValue(tag, analysed._java)
    return results
