"""A session on one machine: the addresses that it listens on, and the program's environment, which stays as it was."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from statefleet.fleet import Fleet
from tests.integration.streams import Feed, Run


def test_the_programs_environment_is_as_it_was(spark: SparkSession, environment_before: dict[str, str]) -> None:
    changed = {name for name, value in os.environ.items() if environment_before.get(name) != value}
    removed = environment_before.keys() - os.environ.keys()
    # Set by pytest, Ray, PySpark, when it is imported Polars, and for the tests on S3.
    prefixes = ("AWS_", "PYTEST_", "RAY_", "SPARK_", "PYTHONBREAKPOINT", "_RJEM_MALLOC_CONF")
    assert {name for name in changed | removed if not name.startswith(prefixes)} == set()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Ray takes the loopback address by itself")
def test_nothing_of_a_local_session_listens_on_the_network_but_rays_own_ports(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(tmp_path / "in", pa.schema([("k", pa.string())]))
    with Run(fleet.stateful(feed.stream(), name=name, shards=2).groupBy("k").count(), "update", tmp_path / "ck") as run:
        feed.add([("p",)])
        assert run.take() == [("p", 1)]
        addresses = {address for process in _session() for address in _listens_on(process)}
    # Ray's gRPC servers listen on all addresses, and ask for their token where one is set (docs/limits.md).
    outward = {address for address in addresses if not (address.is_loopback or address.is_unspecified)}
    assert any(address.is_loopback for address in addresses)
    assert outward == set()


#: Starts a local Ray, and prints the processes of this program before each attempt.
_ATTEMPTS = """
import json, psutil, ray
from spark_jobs.session import spark_session
start, processes = ray.init, []
def init(**options):
    processes.append([process.name() for process in psutil.Process().children(recursive=True)])
    return start(**options)
ray.init = init
spark_session.ensure_ray(num_cpus=1)
print(json.dumps({"processes": processes, "runs": ray.is_initialized()}))
spark_session.stop_session()
"""
#: Ends the first agent of a Ray where it begins.
_NO_FIRST_AGENT = """
import os, sys
if any(argument.endswith("agent.py") for argument in sys.orig_argv) and not os.path.exists(os.environ["FIRST_AGENT"]):
    open(os.environ["FIRST_AGENT"], "w").close()
    os._exit(1)
"""


@pytest.mark.replay
def test_a_ray_that_did_not_start_is_ended_and_started_once_more(tmp_path: Path) -> None:
    """Ray gives up when its agent is not there in time, and leaves its other processes running."""
    (tmp_path / "sitecustomize.py").write_text(_NO_FIRST_AGENT)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path, "FIRST_AGENT": str(tmp_path / "first")}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", _ATTEMPTS], env=environment, capture_output=True, text=True, timeout=600, check=True
    )
    assert "it is started again" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"processes": [[], []], "runs": True}


def _session() -> list[psutil.Process]:
    process = psutil.Process()
    return [process, *process.children(recursive=True)]


def _listens_on(process: psutil.Process) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    with suppress(psutil.NoSuchProcess):
        return {
            getattr(address, "ipv4_mapped", None) or address
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
            for address in (ipaddress.ip_address(connection.laddr.ip),)
        }
    return set()


#: A session that this project did not make, whose Ray has executors for it; prints the results of two queries.
_OWN = """
import json, sys
from pathlib import Path

import raydp
from pyspark.sql import functions as F

import statefleet as sf
from spark_jobs.session.settings import LOCAL_SETTINGS, SETTINGS
from spark_jobs.session.spark_session import ensure_ray, spark_environment

folder, results = Path(sys.argv[1]), []
with spark_environment():
    ensure_ray(num_cpus=4)
    configs = {name: setting.value for name, setting in {**SETTINGS, **LOCAL_SETTINGS}.items()}
    own = raydp.init_spark("own", 1, 2, "700m", configs=configs)
assert "statefleet" not in own.conf.get("spark.executor.extraClassPath", "")
fleet = sf.connect((folder / "fleet").as_uri())
for name, spark in (("first", own), ("second", own.newSession())):
    rows = spark.readStream.schema("k long, v long").json(str(folder / "in"))
    counts = fleet.stateful(rows, name=name, shards=3).groupBy("k").agg(F.count("*").alias("n"), F.max("v").alias("m"))
    query = counts.writeStream.outputMode("update").option("checkpointLocation", str(folder / name))
    query = query.foreachBatch(lambda batch, _: results.append(sorted(map(tuple, batch.collect()))))
    query.trigger(availableNow=True).start().awaitTermination()
print(json.dumps(results))
fleet.shutdown()
raydp.stop_spark()
"""


@pytest.mark.replay
def test_a_session_of_the_users_own_gets_the_classes_for_spark(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.json").write_text("\n".join(json.dumps({"k": n % 7, "v": n}) for n in range(1000)))
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", _OWN, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    expected = [[key, len(range(key, 1000, 7)), max(range(key, 1000, 7))] for key in range(7)]
    assert json.loads(ran.stdout.splitlines()[-1]) == [expected, expected]
