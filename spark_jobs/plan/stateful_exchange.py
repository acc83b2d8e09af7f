"""Install the fleet's exchange in a Spark session, which then plans it as a stateful operator.

The exchange is Java, in the files of ``spark_jobs/plan/java/``. They are compiled when a session is made ready, by the compiler that
comes with Spark, and run on the driver only. A callback answers them where shards are, and what a batch did.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from coordinator.model.errors import SetupError
from spark_jobs.plan.catalyst import CATALYST, WATERMARK_KEY, java_class
from spark_jobs.plan.logical import Plan, quoted
from spark_jobs.plan.spark_version import SPARK, executor_code, with_moved_classes

__all__ = [
    "compiled_entry",
    "install",
    "joined_source",
    "marked_as_aggregation",
    "shard_routes",
    "with_event_time",
    "with_sparks_own",
]

_SOURCES = Path(__file__).with_name("java")
_PACKAGE = "statefleet.spark"
_ENTRY = f"{_PACKAGE}.Sessions"


class _Driver:
    """A Python function as a ``java.util.function.Function``."""

    class Java:
        implements = ["java.util.function.Function"]  # noqa: RUF012 - Py4J reads it so

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer = answer

    def apply(self, message: str) -> str:
        """Answer a call from Java."""
        return self._answer(message)


def install(spark: SparkSession, driver: Callable[[str], str]) -> None:
    """Install the exchange in a session; a second call has no effect. A session of ``newSession`` needs a call of its own.

    Parameters
    ----------
    driver
        Function from a message about a batch (JSON) to its answer (JSON). It is called in the driver, in a thread of the JVM's.

    Raises
    ------
    SetupError
        This version of Spark does not accept the exchange.
    """
    try:
        gateway = spark.sparkContext._gateway
        sessions = compiled_entry(spark)
        if not sessions.isInstalled(spark._jsparkSession):
            ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
            sessions.install(spark._jsparkSession, _Driver(driver), executor_code("HandOver.java"))
    except Py4JError as error:
        raise SetupError(
            "this Spark cannot be made to see the fleet's operators, without which results would come in other batches than Spark's; "
            "nothing was started; use the version of pyspark that this package asks for, on a plain driver",
            spark=spark.version,
            cause=str(error).partition("\n")[0],
        ) from error


def compiled_entry(spark: SparkSession) -> Any:
    """Return the entry of the compiled classes (``Sessions.java``), of which a JVM has one."""
    return _compiled(spark.sparkContext._gateway)


@cache
def _compiled(gateway: Any) -> Any:
    """Compile the classes, once for each JVM, and return an instance of their entry."""
    jvm = gateway.jvm
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
    compiler.cook(joined_source())
    entry = compiler.getClassLoader().loadClass(_ENTRY)
    no_types, no_arguments = gateway.new_array(jvm.java.lang.Class, 0), gateway.new_array(jvm.java.lang.Object, 0)
    return entry.getDeclaredConstructor(no_types).newInstance(no_arguments)


def joined_source() -> str:
    """Return the Java files as the single compilation unit that Spark's compiler takes: a package, all imports, all classes."""
    package = f"package {_PACKAGE};"
    imports: set[str] = set()
    classes: list[str] = []
    for file in sorted([*_SOURCES.glob("*.java"), *(_SOURCES / SPARK.JAVA_FOLDER).glob("*.java")]):
        for line in with_moved_classes(file.read_text()).splitlines():
            if line.startswith("import "):
                imports.add(line)
            elif line != package:
                classes.append(line)
    return "\n".join([package, *sorted(imports), *classes])


def shard_routes(spark: SparkSession, shards: int) -> list[int]:
    """Return for each of a number of shards an integer that Spark's hash partitioning puts there."""
    return list(compiled_entry(spark).routes(shards))


def with_event_time(rows: DataFrame, column: str) -> DataFrame:
    """Return the rows with a column that Spark's checks take for the event time of groups, as append mode asks for."""
    marked = F.col(quoted(column)).alias(column, metadata={WATERMARK_KEY: 0})
    return rows.select(*(marked if name == column else F.col(quoted(name)) for name in rows.columns))


def marked_as_aggregation(exchange: DataFrame) -> DataFrame:
    """Return the exchange below an aggregation of nothing, so that Spark's checks treat its operator as an aggregation.

    The mark is removed before the query is planned, in a session where :func:`install` was called.
    """
    plan = exchange._jdf.queryExecution().analyzed()
    columns = plan.output()
    aggregate = SPARK.aggregate_of_nothing(exchange.sparkSession._jvm, columns, plan)
    return Plan(aggregate, exchange.sparkSession).frame()


def with_sparks_own(results: DataFrame, analysed: Plan) -> DataFrame:
    """Tag an operator's results with Spark's own operator as it was analysed, and return them.

    Filters that Spark would move through its own operator are moved by the tag (``FilterPushdown.java``).
    """
    tag = java_class(f"{CATALYST}.trees.TreeNodeTag")("statefleet.analysed")
    results._jdf.queryExecution().analyzed().setTagValue(tag, analysed._java)
    return results
