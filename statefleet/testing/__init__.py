"""Tests of a user's own queries: on a fleet that fails, beside Spark's own stores.

>>> from statefleet.testing import QueryTester, local_session  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statefleet.testing.query import QueryTester as QueryTester
    from statefleet.testing.results import ResultsDifferError as ResultsDifferError
    from statefleet.testing.session import LocalSession as LocalSession
    from statefleet.testing.session import local_session as local_session

#: Public names by module, which is imported at the first access to one of them: pytest loads the plugin of this package in every run.
_NAMES = {
    "statefleet.testing.query": "QueryTester",
    "statefleet.testing.results": "ResultsDifferError",
    "statefleet.testing.session": "LocalSession local_session",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
