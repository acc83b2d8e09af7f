"""Frames and sessions of Spark Connect, which the fleet refuses."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.model.errors import SetupError

_MODULE = "pyspark.sql.connect"
#: Variables of the environment by which PySpark's builder makes sessions of Spark Connect.
_REMOTE_VARIABLES = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED")
_REASON = (
    "the fleet does not run on Spark Connect: its operators are planned in the driver's own JVM, which a client of Connect does not "
    "have; make the session with statefleet.start_session, in a program that has made no session with "
    "SparkSession.builder.remote"
)


def check_classic(*arguments: object) -> None:
    """Refuse frames, groups and sessions of Spark Connect; any other argument passes.

    Raises
    ------
    SetupError
        The class of an argument is one of Spark Connect's.
    """
    for argument in arguments:
        # By the name of the module: to import it needs grpc, which only users of Connect have.
        if any(f"{base.__module__}.".startswith(f"{_MODULE}.") for base in type(argument).__mro__):
            raise SetupError(_REASON, given=f"{type(argument).__module__}.{type(argument).__qualname__}")


def check_no_remote(environment: Mapping[str, str]) -> None:
    """Refuse an environment in which PySpark's builder makes sessions of Spark Connect.

    Raises
    ------
    SetupError
        A variable of the environment asks for Spark Connect.
    """
    for name in _REMOTE_VARIABLES:
        if environment.get(name):
            raise SetupError(_REASON, variable=name)
