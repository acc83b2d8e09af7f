"""Every command against a fleet that runs, as people and scripts use it; its errors, too."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import statefleet as sf
from coordinator.model.names import dashboard_name
from coordinator.service.calls import RayActors
from statefleet.cli import main
from statefleet.commands.output import WIDTH
from statefleet.doctor.findings import Outcome
from statefleet.doctor.machine import spill_folder
from tests.clocks import until
from tests.conftest import NewUri
from tests.integration.streams import Feed, Run

pytestmark = pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")

EVENTS = pa.schema([("user", pa.string()), ("amount", pa.int64())])
USERS, BATCHES, ROWS = 20, 3, 100


class Statefleet:
    """The command, on one fleet."""

    def __init__(self, uri: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.uri, self._capsys = uri, capsys

    def run(self, command: str, *arguments: str, code: int = 0) -> tuple[str, str]:
        """Run a command, and return what it prints as (output, errors)."""
        self._capsys.readouterr()
        assert main([command, self.uri, *arguments]) == code, self._capsys.readouterr()
        printed = self._capsys.readouterr()
        return printed.out, printed.err

    def text(self, command: str, *arguments: str, code: int = 0) -> str:
        """Return the output that a person sees."""
        out, err = self.run(command, *arguments, code=code)
        assert all(len(line) <= WIDTH or " " not in line.strip() for line in out.splitlines()), out
        assert "\x1b" not in out + err
        return out

    def json(self, command: str, *arguments: str, code: int = 0) -> Any:
        """Return the output that a script reads."""
        return json.loads(self.run(command, *arguments, "--json", code=code)[0])

    def error(self, command: str, *arguments: str) -> str:
        """Return the only line of an error; nothing else is printed."""
        out, err = self.run(command, *arguments, code=1)
        assert out == ""
        (line,) = [text for text in err.splitlines() if text.startswith("error: ")]
        return line


@pytest.fixture
def statefleet(fleet: sf.Fleet, capsys: pytest.CaptureFixture[str]) -> Statefleet:
    return Statefleet(fleet.uri, capsys)


@pytest.fixture(scope="module")
def clicks(fleet: sf.Fleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Counts by user after some batches, with the query still there."""
    folder = tmp_path_factory.mktemp("clicks")
    feed = Feed(folder / "in", EVENTS)
    for batch in range(BATCHES):
        feed.add([(f"u{number % USERS}", batch + 1) for number in range(ROWS)])
    grouped = fleet.stateful(feed.stream(), name="cli-clicks", shards=3).groupBy("user")
    run = Run(grouped.agg(F.count("*").alias("n"), F.sum("amount").alias("total")), "update", folder / "checkpoint")
    run.wait()
    yield "cli-clicks"
    run.stop()


def test_what_the_fleet_holds_is_shown(statefleet: Statefleet, clicks: str) -> None:
    status = statefleet.json("status")
    (query,) = [entry for entry in status["queries"] if entry["name"] == clicks]
    assert (query["version"], query["num_shards"], query["state_rows"]) == (BATCHES, 3, USERS)
    text = statefleet.text("status")
    assert clicks in text
    assert "alive" in text
    assert status["uri"] in text
    (listed,) = statefleet.json("queries", "--name", clicks)
    assert (listed["batch_id"], listed["active"], "shards" in listed) == (BATCHES - 1, True, False)
    assert query["query_id"][:8] in statefleet.text("queries")
    shards = statefleet.json("shards", "--name", clicks)
    assert [shard["partition_id"] for shard in shards] == [0, 1, 2]
    lines = statefleet.text("shards", "--name", clicks).splitlines()
    assert sum(line.startswith(clicks) for line in lines) == 3, (
        "a line each, and maybe more where a node's name is long"
    )
    assert statefleet.json("shards", "--name", "nothing") == []
    metrics = statefleet.json("metrics")
    assert all(actor_metrics["commits"] > 0 for actor_metrics in metrics.values())
    assert "bytes_loaded" in statefleet.text("metrics")
    url = statefleet.text("dashboard").strip()
    assert statefleet.json("dashboard") == {"url": url}
    assert url.startswith("http://127.0.0.1:")
    # A coordinator that is slow to answer the first time is not shown yet.
    until(lambda: USERS in [query["state_rows"] for query in queries_shown(url) if query["name"] == clicks])
    (shown,) = [query for query in queries_shown(url) if query["name"] == clicks]
    assert all(shard["executor"] for shard in shown["shards"])
    assert "no such state" in statefleet.error("queries", "--name", "nothing")


def queries_shown(dashboard: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{dashboard}api/fleet", timeout=30) as answer:
        shown = json.load(answer)["fleet"]
    return shown["queries"] if shown else []


def test_state_is_read(statefleet: Statefleet, clicks: str, tmp_path: Path) -> None:
    """``tests/unit/test_command_line.py`` reads what is stored, with words, limits and errors."""
    row = {"user": "u7", "n": ROWS // USERS * BATCHES, "total": ROWS // USERS * sum(range(1, BATCHES + 1))}
    for consistency in ("finished", "committed", "latest"):
        assert statefleet.json("get", clicks, "user=u7", "--consistency", consistency) == [row]
    assert statefleet.json("get", clicks, "user=u7", "--version", "1", "--columns", "n") == [{"n": ROWS // USERS}]
    everything = statefleet.json("scan", clicks, "--limit", "1000")
    assert len(everything) == USERS
    latest = statefleet.json("scan", clicks, "--limit", "1000", "--consistency", "latest")
    assert sorted(map(repr, latest)) == sorted(map(repr, everything))
    assert statefleet.json("get", clicks, "user=nobody", code=1) == []
    chosen = statefleet.json("scan", clicks, "--where", "\"user\" IN ('u1', 'u7')", "--columns", "user")
    assert sorted(map(repr, chosen)) == ["{'user': 'u1'}", "{'user': 'u7'}"]
    query = f'select count(*) as n, sum(total)::bigint as total from "{clicks}"'
    assert statefleet.json("sql", query) == [{"n": USERS, "total": sum(entry["total"] for entry in everything)}]
    versions = statefleet.json("versions", clicks)
    assert [(version["version"], version["state_rows"]) for version in versions] == [(3, 20), (2, 20), (1, 20), (0, 0)]
    assert [version["rows_in"] > 0 for version in versions] == [True, True, True, False]
    changed = statefleet.json("changes", clicks, "1", "2", "--limit", "1000")
    assert {(change["_change_type"], change["_commit_version"]) for change in changed} == {("upsert", 2)}
    assert len({change["user"] for change in changed}) == USERS
    _, aside = statefleet.run("changes", clicks, "1", "2", "--limit", "1000")
    further = statefleet.json("changes", clicks, aside.split()[1].rstrip(":"), "--limit", "1000")
    assert {change["_commit_version"] for change in further} == {versions[0]["version"]}
    assert "made again" in statefleet.error("changes", clicks, f"2:{'0' * 8}")
    differing = statefleet.json("diff", clicks, "2", "3", "--limit", "1000")
    assert sum(change["n"] * (1 if change["_change_type"] == "insert" else -1) for change in differing) == ROWS
    file = tmp_path / "clicks.parquet"
    assert statefleet.json("export", clicks, str(file))["rows"] == USERS
    by_user = sorted(pq.read_table(file).to_pylist(), key=lambda entry: entry["user"])
    assert by_user == sorted(everything, key=lambda entry: entry["user"])
    assert "no such state" in statefleet.error("get", "nothing", "user=u7")
    assert "no such version" in statefleet.error("scan", clicks, "--version", "77")
    assert "a value for each key column" in statefleet.error("get", clicks, "name=u7")


def test_shards_are_moved(statefleet: Statefleet, clicks: str) -> None:
    """Try moves with a single node: those that are accepted, and those that are refused."""
    (node,) = [entry["NodeID"] for entry in ray.nodes() if entry["Alive"]]
    assert statefleet.json("move", clicks, "0", node[:12]) == []
    assert "the shard is there already" in statefleet.text("move", clicks, "0", node[:12])
    assert "shards are spread evenly" in statefleet.text("rebalance", "--name", clicks)
    assert statefleet.json("drain", node[:12], "--undo", "--dry-run") == []
    plan = statefleet.json("rescale", clicks, "--shards", "6", "--dry-run")
    assert (plan["num_shards"], plan["new_shards"], plan["sources"][3]) == (3, 6, [0])
    assert "3 to 6 shards: nothing was changed" in statefleet.text("rescale", clicks, "--shards", "6", "--dry-run")
    assert "no living Ray node" in statefleet.error("move", clicks, "0", "nowhere")
    assert "no such shard" in statefleet.error("move", clicks, "9", node[:12])
    assert "no such state" in statefleet.error("rebalance", "--name", "nothing")
    assert "no such state" in statefleet.error("rescale", "nothing", "--shards", "4")


def test_files_are_verified_beside_the_fleet_and_cleaned(statefleet: Statefleet, clicks: str) -> None:
    (checked,) = statefleet.json("verify", "--name", clicks)
    assert checked["damages"] == []
    assert checked["files"] > 3 * BATCHES
    assert "is there and whole" in statefleet.text("verify", "--name", clicks)
    assert statefleet.json("gc", "--name", clicks, "--dry-run").keys() == {clicks}
    assert "would be" in statefleet.text("gc", "--dry-run")
    assert "no such state" in statefleet.error("gc", "--name", "nothing")


def test_the_doctor_sees_a_machine_that_is_well(statefleet: Statefleet, clicks: str) -> None:
    address = ray.get_runtime_context().gcs_address
    # The disk of the machine that tests run on may be as full as the doctor says.
    is_full = spill_folder().outcome is Outcome.WRONG
    found = statefleet.json("doctor", "--address", address, code=int(is_full))
    findings = {finding["check"]: finding for finding in found}
    assert {check for check, finding in findings.items() if finding["outcome"] == "wrong"} <= {
        "spill folder",
        "disk of the store",
    }
    assert {
        "Python",
        "packages",
        "Java",
        "RayDP and Spark",
        "Ray cluster",
        "fleet",
        "object store",
        "clock",
    } <= findings.keys()
    assert "1 store actors" in findings["fleet"]["found"]
    assert "put-if-absent refuses a second writer" in findings["object store"]["found"]
    assert any(check.startswith("node ") for check in findings)


def test_the_doctor_says_that_no_cluster_answers(statefleet: Statefleet) -> None:
    findings = statefleet.json("doctor", "--address", "127.0.0.1:1", code=1)
    (cluster,) = [finding for finding in findings if finding["check"] == "Ray cluster"]
    assert cluster["outcome"] == "wrong"
    assert "ray start --head" in cluster["advice"]


def test_a_program_of_its_own_prints_json_and_nothing_else(fleet: sf.Fleet, clicks: str) -> None:
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "statefleet.cli", "scan", fleet.uri, clicks, "--address", address, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)


def is_closed(port: int) -> bool:
    """Return whether no process listens any more."""
    with socket.socket() as knocking:
        return knocking.connect_ex(("127.0.0.1", port)) != 0


def test_a_fleet_is_stopped_with_its_dashboard_and_read_afterwards(
    spark: SparkSession, new_uri: NewUri, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = sf.connect(new_uri())
    columns = {"keys": pa.schema([("user", pa.string())]), "values": pa.schema([("best", pa.int64())])}
    for best in (7, 9):
        with fleet.state_store("scores", **columns) as store:
            store.put(user="ann", best=best)
            store.commit()
    statefleet = Statefleet(fleet.uri, capsys)
    assert statefleet.json("get", "scores", "user=ann") == [{"user": "ann", "best": 9}]
    assert [version["version"] for version in statefleet.json("versions", "scores")] == [2, 1, 0]
    url = statefleet.text("dashboard").strip()
    with urllib.request.urlopen(url) as answer:
        assert b"Statefleet" in answer.read()
    assert len(statefleet.json("stop")["ended"]) == 1
    assert RayActors().find(dashboard_name(fleet.uri)) is None
    until(lambda: is_closed(int(url.rstrip("/").rpartition(":")[2])), 20)
    for command, *arguments in (("status",), ("stop",), ("get", "scores", "user=ann")):
        assert "no fleet of this URI runs" in statefleet.error(command, *arguments)
    assert statefleet.json("get", "scores", "user=ann", "--version", "1", "--offline") == [{"user": "ann", "best": 7}]
    assert statefleet.text("verify").count("scores") == 1
