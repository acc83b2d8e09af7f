"""Packages that only some users need, each in an extra of ``pyproject.toml``: their imports, and what is said where one is missing."""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from types import MappingProxyType
from typing import Any

from coordinator.model.errors import SetupError

_SPARK = "spark35" if sys.version_info < (3, 12) else "spark4"
#: By import name: the package's name in sentences, and the extra that installs it.
EXTRAS = MappingProxyType(
    {
        "aiohttp": ("aiohttp", "dashboard"),
        "duckdb": ("DuckDB", "sql"),
        "openlineage": ("OpenLineage's client", "lineage"),
        "opentelemetry": ("OpenTelemetry's exporter", "traces"),
        "polars": ("Polars", "polars"),
        "pyspark": ("PySpark", _SPARK),
        "raydp": ("RayDP", "raydp"),
    }
)


def import_extra(module: str) -> Any:
    """Return a module that needs packages of extras.

    Raises
    ------
    SetupError
        A package of an extra is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        title, extra = EXTRAS[package]
        # Not the extra itself: the package of Statefleet's name on the public index, if there is one, is another project's.
        requirements = _requirements(extra)
        install = f"pip install {' '.join(requirements)}" if requirements else "install it"
        raise SetupError(
            f"{title} is not installed here; {install} (Statefleet's extra {extra})", cause=error
        ) from error


def _requirements(extra: str) -> list[str]:
    """Return the quoted requirements of an extra on this Python; none if Statefleet is not installed, but only a folder."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("statefleet") or []
    except metadata.PackageNotFoundError:
        return []
    # What needs no extra is for the empty one, too.
    markers = ((line.partition(";")[0].strip(), Requirement(line).marker) for line in lines)
    return [
        f"'{name}'"
        for name, marker in markers
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})
    ]
