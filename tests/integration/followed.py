"""The lineage of this process's queries, sent to a collector of a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from spark_jobs.driver.lineage import open_lineage
from statefleet import fleet
from tests.collector import Collector


@contextmanager
def following(collector: Collector) -> Iterator[None]:
    """Have the driver follow the queries that are built within."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENLINEAGE_URL", collector.url)
        lineage = open_lineage()
        assert lineage is not None
        patch.setattr(fleet._DRIVER, "_lineage", lineage)
        yield
        lineage.close()
    # OpenLineage's client adds variables of its own.
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE__")]:
        del os.environ[name]
