"""Unit tests run without Ray and Spark."""

from __future__ import annotations

from typing import Any

import pytest
import ray


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a unit test fail that starts Ray."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("unit tests run without Ray; test the rule without its actor")

    monkeypatch.setattr(ray, "init", refuse)
