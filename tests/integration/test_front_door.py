"""The errors of connecting, and where Spark writes to."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import ray
from pyspark import SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

import statefleet as sf


def test_a_store_that_cannot_be_written_is_refused_at_once(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(sf.StorageUnavailableError, match="permissions"):
        sf.connect(f"file://{tmp_path}/file/fleet")
    with pytest.raises(sf.InvalidRequestError, match="schemes"):
        sf.connect("hdfs://namenode/x")


def unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_an_address_without_a_usable_ray_is_refused_at_once() -> None:
    code = f"""
from spark_jobs.session.spark_session import ensure_ray
for address in ("ray://127.0.0.1:10001", "{unused_address()}"):
    try:
        ensure_ray(ray_address=address)
    except Exception as error:
        print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert all(text in said for text in ("Ray Client addresses", "no Ray cluster answers at this address"))


def test_a_cluster_that_wants_a_token_is_reported_at_once_and_in_one_line(fleet: sf.Fleet) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "statefleet.cli", "status", fleet.uri]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert re.match(r"error: .* wants a token: set RAY_AUTH_MODE=token", line)


def test_spark_writes_to_the_programs_standard_error_but_for_what_ray_notes_there(
    spark: SparkSession,
) -> None:
    """Its JVM has a pipe, of which this process passes on what comes."""
    jvm = next(process for process in psutil.Process().children() if process.name() == "java")
    assert os.readlink(f"/proc/{jvm.pid}/fd/2").startswith("pipe:")
    assert any(thread.name == "statefleet-stderr" for thread in threading.enumerate())
    assert sys.modules[SparkContext.__module__].launch_gateway is launch_gateway  # type: ignore[attr-defined]


def test_a_command_after_the_cluster_has_ended_is_refused_at_once(tmp_path: Path) -> None:
    """Ray leaves the address of its newest cluster behind, here in a folder of its own."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(unused_address())
    code = f"""
import ray._private.services as services
from ray._private.utils import read_ray_address
# As on a machine without any other cluster.
services.find_gcs_addresses = lambda: set()
assert read_ray_address() == "{(tmp_path / "ray" / "ray_current_cluster").read_text()}"
from statefleet.cli import main
from tests.clocks import until
raise SystemExit(main(["status", "file://{tmp_path}/fleet"]))
"""
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert ended.returncode == 1, ended.stderr
    assert "no Ray cluster answers" in ended.stderr
