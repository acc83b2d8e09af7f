"""Unit tests run without Ray and Spark."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from tests.unit.jvm import Jvm
from tests.unit.running_fleet import RUNNING


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a unit test fail that starts Ray."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("unit tests run without Ray; test the rule without its actor")

    monkeypatch.setattr(ray, "init", refuse)


@pytest.fixture(autouse=True)
def no_running_fleet() -> Iterator[None]:
    """Stop a test's fleets with it: what goes on in their threads would be in other tests."""
    yield
    for fleet in tuple(RUNNING):
        fleet.stop()


@pytest.fixture(scope="session")
def jvm() -> Iterator[Jvm]:
    """A JVM with Statefleet's classes, and without a Spark session."""
    started = Jvm()
    yield started
    started.close()
