"""Spark on Kubernetes next to a Ray cluster: API server, kubelet, containers and network are real ones (``./run kubernetes``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from tests.code_blocks import ROOT, blocks_of
from tests.kubernetes.cluster import ADDRESS, Cluster
from tests.kubernetes.images import EXECUTOR
from tests.kubernetes.spark_program import BATCHES

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(4000)]

#: What the page leaves to Spark's defaults: executors that fit a small machine, and the folder that all of them share.
_DEFAULTS = """
spark.executor.memory 512m
spark.kubernetes.executor.request.cores 0.3
spark.kubernetes.executor.volumes.hostPath.shared.options.path {folder}
spark.kubernetes.executor.volumes.hostPath.shared.mount.path {folder}
spark.kubernetes.executor.volumes.hostPath.shared.mount.readOnly true
spark.ui.enabled false
"""


def ran(cluster: Cluster, folder: Path, ray_address: str) -> subprocess.CompletedProcess[str]:
    """Run the program of the documentation's page and its queries, with a Ray that listens at an address."""
    folder.chmod(0o755)  # executors have a user of their own
    (page,) = blocks_of("tests/kubernetes/test_spark_on_kubernetes.py::test_executors_count_each_row_once_without_ray")
    (folder / "token").write_text(cluster.kubectl("create", "token", "spark"))
    (folder / "ca.crt").write_bytes(cluster.authority.read_bytes())
    code = page.code
    for shown, here in {
        "https://10.0.0.2:6443": cluster.url,
        "/etc/spark": str(folder),
        "registry.example.com/statefleet:0.1.0": EXECUTOR,
        "10.0.0.4": ADDRESS,
        "s3://bucket/prefix": f"file://{folder}/fleet",
    }.items():
        assert code.count(shown) >= 1, f"the page has no {shown}"
        code = code.replace(shown, here)
    (folder / "page.py").write_text(code)
    (folder / "spark-defaults.conf").write_text(_DEFAULTS.format(folder=folder))
    (folder / "words").mkdir()
    for number, words in enumerate(BATCHES):
        file = folder / "words" / f"{number}.parquet"
        pd.DataFrame({"word": words}).to_parquet(file)
        os.utime(file, (number, number))  # by which Spark orders them
    command = [
        sys.executable,
        "-m",
        "tests.kubernetes.spark_program",
        str(folder),
        ray_address,
        *cluster.kubectl_command,
    ]
    environment = {**os.environ, "SPARK_CONF_DIR": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=540, check=False, cwd=ROOT, env=environment)


def test_executors_count_each_row_once_without_ray(cluster: Cluster, tmp_path: Path) -> None:
    """In batches by an operator and by a function, each of which loses an executor, and in a continuous query."""
    done = ran(cluster, tmp_path, ADDRESS)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    totals, emitted = Counter[str](), {}
    for number, words in enumerate(BATCHES):
        totals.update(words)
        emitted[str(number)] = {word: totals[word] for word in words}
    assert printed["operator"] == printed["function"] == [emitted, dict(totals)]
    before, after = printed["executors"]
    assert before == ["1", "2"]
    assert len(after) == 2
    assert max(after) == "4", "two executors were ended, and Spark has started two others"


def test_a_session_that_reaches_no_store_actor_is_refused_when_its_query_is_built(
    cluster: Cluster, tmp_path: Path
) -> None:
    loopback = "127.0.0.9"
    done = ran(cluster, tmp_path, loopback)
    assert done.returncode == 1
    assert "SetupError: Spark's executors cannot connect to the fleet's store actors" in done.stderr, done.stderr
    assert loopback in done.stderr[done.stderr.index("SetupError") :]
