"""Errors of calls that PySpark has, too: each is Statefleet's and PySpark's, so a program that catches PySpark's catches it.

The table of what raises which is in docs/operators.md. PySpark raises an ``AssertionError`` for some wrong arguments; those are
errors of a type or a value here.
"""

from __future__ import annotations

from pickle import PicklingError

from pyspark.errors import (
    AnalysisException,
    IllegalArgumentException,
    PySparkAttributeError,
    PySparkException,
    PySparkRuntimeError,
    PySparkTypeError,
)

from coordinator.model.errors import InvalidRequestError


class _PySparksError(InvalidRequestError, PySparkException):
    def __init__(self, message: str, **context: object) -> None:
        PySparkException.__init__(self, message)
        super().__init__(message, **context)


class RefusedQueryError(_PySparksError, AnalysisException):
    """A query cannot run: Spark refuses it, too, by its analysis or when it starts, or the fleet lacks a part of it."""


class InvalidArgumentError(_PySparksError, IllegalArgumentException):
    """An argument is none of the values that it may have, such as an output mode."""


class InvalidTypeError(_PySparksError, PySparkTypeError):
    """An argument is of a wrong type."""


class UnpicklableError(InvalidRequestError, PicklingError):
    """A function or processor cannot be pickled."""


class StateCallError(_PySparksError, PySparkRuntimeError):
    """A call of a processor or a function on its state, timers or handle cannot be done. The call changed nothing."""


class MissingAttributeError(PySparkAttributeError, AnalysisException):
    """A frame lacks a method: Spark has none, or refuses it for a stream when the query starts, or the fleet lacks it."""
