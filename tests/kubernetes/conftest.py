"""Kubernetes on this machine, with an account that may start pods."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes.cluster import Cluster, why_not


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(f"Kubernetes cannot run here: {reason}")
    made = Cluster(tmp_path_factory.mktemp("kubernetes"))
    with made.running():
        made.kubectl("create", "serviceaccount", "spark")
        made.kubectl("create", "rolebinding", "spark", "--clusterrole=edit", "--serviceaccount=default:spark")
        yield made
