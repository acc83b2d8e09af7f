"""The JVM classes in a Spark session, which then plans the fleet's operators as stateful operators of its own.

They are Scala, in :mod:`spark_jobs.jvm`. A callback answers them where shards are, and what a batch did.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from py4j.java_gateway import java_import
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession

from coordinator.model.errors import SetupError
from spark_jobs.jvm.build import present_jar
from spark_jobs.plan.catalyst import JOB_FAILURES

_ENTRY = "org.apache.spark.sql.statefleet.Sessions$"
#: By application, as each has class loaders, and executors, of its own.
_LOADED: dict[str, Any] = {}


class _Driver:
    class Java:
        implements = ["java.util.function.Function"]  # noqa: RUF012 - Py4J reads it so

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer = answer

    def apply(self, message: str) -> str:
        return self._answer(message)


def install(spark: SparkSession, driver: Callable[[str], str], *, is_followed: bool) -> None:
    """Install the exchange in a session; a second call has no effect. A session of ``newSession`` needs a call of its own.

    `driver` answers a message about a batch, both in JSON. It is called in the driver, in a thread of the JVM's. If it `is_followed`,
    it is also told when queries start, what their batches did, and how they end. Raises SetupError if this version of Spark does not
    accept the exchange.
    """
    try:
        gateway = spark.sparkContext._gateway
        sessions = jvm_classes(spark)
        if not sessions.isInstalled(spark._jsparkSession):
            ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
            sessions.install(spark._jsparkSession, _Driver(driver))
        sessions.follow(is_followed)
    except Py4JError as error:
        raise SetupError(
            "this Spark cannot be made to see the fleet's operators, without which results would come in other batches than Spark's; "
            "nothing was started; use the version of pyspark that this package asks for, on a plain driver",
            spark=spark.version,
            cause=str(error).partition("\n")[0],
        ) from error


def check_reach(spark: SparkSession, uri: str, sockets: str) -> Sequence[Mapping[str, Any]]:
    """Have each core of a session's executors connect to a fleet's store actors once; return where Python workers find these.

    Raises
    ------
    SetupError
        One of them cannot.
    """
    try:
        store_actors: list[dict[str, Any]] = json.loads(
            jvm_classes(spark).checkReach(spark._jsparkSession, uri, sockets)
        )
    except JOB_FAILURES as error:
        raise SetupError(
            "Spark's executors cannot connect to the fleet's store actors; nothing was started; each of their machines needs a node of "
            "the Ray cluster, run by the same user, or a way to the ports of Ray's nodes",
            uri=uri,
            cause=error,
        ) from error
    return store_actors


def jvm_classes(spark: SparkSession) -> Any:
    """Return the object of the JVM that Python calls (``Sessions`` in ``Operators.scala``)."""
    application = spark.sparkContext.applicationId
    if application not in _LOADED:
        _LOADED[application] = _loaded(spark)
    return _LOADED[application]


def _loaded(spark: SparkSession) -> Any:
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    # PySpark has each call of a function look its class up, through all packages that it imports and all jars, unless it has a name.
    java_import(gateway.jvm, "org.apache.spark.sql.functions")
    loader = gateway.jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        entry = loader.loadClass(_ENTRY)
    except Py4JJavaError:
        # A session that start_session did not make.
        session = spark._jsparkSession
        session.sessionState().resourceLoader().addJar(str(present_jar()))
        entry = session.sharedState().jarClassLoader().loadClass(_ENTRY)
    return entry.getField("MODULE$").get(None)


def shard_routes(spark: SparkSession, shards: int) -> list[int]:
    """Return for each of a number of shards an integer that Spark's hash partitioning puts there."""
    return list(jvm_classes(spark).routes(shards))
