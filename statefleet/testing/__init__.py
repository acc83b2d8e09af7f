"""Tests of a user's own queries: on a fleet that fails, beside Spark's own stores.

>>> from statefleet.testing import QueryTester, local_session  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statefleet.testing.query import QueryTester
    from statefleet.testing.results import ResultsDifferError
    from statefleet.testing.session import LocalSession, local_session

__all__ = ["LocalSession", "QueryTester", "ResultsDifferError", "local_session"]

#: Module of each public name. It is imported at the first access to the name: pytest loads the plugin of this package in every run.
_MODULES = {
    "LocalSession": "statefleet.testing.session",
    "QueryTester": "statefleet.testing.query",
    "ResultsDifferError": "statefleet.testing.results",
    "local_session": "statefleet.testing.session",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
