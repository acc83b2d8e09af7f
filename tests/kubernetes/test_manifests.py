"""The manifests of ``deploy/kubernetes``, and those of the page, as an API server sees them that knows KubeRay's resources."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kuberay import download, manifests
from tests.kubernetes.cluster import Cluster

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(4000)]


def test_the_api_server_accepts_all_manifests(cluster: Cluster, tmp_path: Path) -> None:
    definitions = download(tmp_path) / "config" / "crd" / "bases"
    # By `apply` they would not fit an annotation.
    cluster.kubectl("create", f"--filename={definitions}")
    cluster.kubectl("wait", "--for=condition=established", f"--filename={definitions}", "--timeout=60s")
    for text in manifests():
        # An unknown field is an error, too.
        printed = cluster.kubectl("apply", "--dry-run=server", "--filename=-", given=text).splitlines()
        assert printed
        assert all(line.endswith("created (server dry run)") for line in printed), printed
