"""A Ray of each module, and a fleet of each test on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from spark_jobs.session.spark_session import ensure_ray
from statefleet.fleet import Fleet, connect
from tests.conftest import NewUri


@pytest.fixture(scope="module")
def cluster(new_uri: NewUri) -> Iterator[str]:
    """A Ray cluster that outlives the drivers; its address."""
    ensure_ray(num_cpus=12)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def fleet(cluster: str, new_uri: NewUri) -> Iterator[Fleet]:
    connected = connect(new_uri())
    yield connected
    connected.shutdown()
