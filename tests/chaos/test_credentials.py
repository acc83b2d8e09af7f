"""Credentials given to ``connect``: nowhere but in the memory of the fleet's processes, and there again after a restart."""

from __future__ import annotations

import gc
import os
import pickle
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray.cloudpickle import dumps

from coordinator.model.errors import (
    CredentialsNeededError,
    InvalidRequestError,
    StateStoreError,
    StorageUnavailableError,
)
from coordinator.model.identities import TaskIdentity
from coordinator.service.calls import NAMESPACE, RayActors
from coordinator.service.deploy import coordinator_name
from coordinator.storage.options import split_options
from statefleet.fleet import Fleet, connect
from store_actors.actor.fleet_clients import fleet_client_of
from store_actors.client.state_store import store_specs
from tests.unit.s3_with_faults import FaultyS3, faulty_s3

pytestmark = pytest.mark.timeout(600)

COLUMNS: dict[str, Any] = {"keys": pa.schema([("k", pa.int64())]), "values": pa.schema([("v", pa.int64())])}


@pytest.fixture
def server(cluster: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    for name in [variable for variable in os.environ if variable.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with faulty_s3() as running:
        yield running


def canary() -> str:
    """Return a secret that is only where it was sent: this process, too, has it only while it is used."""
    return f"canary{secrets.token_hex(12)}"


def options_of(server: FaultyS3, secret: str) -> dict[str, str]:
    return server.options(secret_access_key=secret, timeout="5s")


@pytest.fixture
def fleet(server: FaultyS3) -> Iterator[Fleet]:
    connected = connect(f"s3://bucket/{secrets.token_hex(4)}", storage_options=options_of(server, canary()))
    yield connected
    connected.shutdown()


def put(fleet: Fleet, value: int) -> None:
    with fleet.state_store("scores", **COLUMNS) as store:
        store.put(k=1, v=value)
        store.commit()


def got(fleet: Fleet) -> Any:
    with fleet.read_state_store("scores", **COLUMNS) as store:
        return store.get(1)["v"]


def kill(name: str) -> None:
    """End the process of an actor; Ray starts it again."""
    ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=False)


def store_name(fleet: Fleet) -> str:
    (actor,) = [actor for actor in fleet.status()["store_actors"] if actor["alive"]]
    return str(actor["actor_name"])


def memory_has(pid: int, secret: bytes) -> bool:
    """Return whether the bytes are in the memory of a process."""
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in maps:
            span, rights = line.split()[:2]
            start, end = (int(address, 16) for address in span.split("-"))
            if "rw" not in rights or "[v" in line:
                continue
            memory.seek(start)
            try:
                if secret in memory.read(end - start):
                    return True
            except OSError:
                continue  # given back since, or not to be read
    return False


def node() -> Any:
    """Return the Ray node that this process started."""
    return ray._private.worker._global_node  # type: ignore[attr-defined]


def places_of(fleet: Fleet, secret: str) -> list[str]:
    """Return where a text can be read: in what Ray's own processes hold (its state API shows no more), in logs, kept or printed."""
    processes = {kind: process.process.pid for kind, all_of_it in node().all_processes.items() for process in all_of_it}
    logs = [file for file in Path(node().get_session_dir_path()).rglob("*") if file.is_file()]
    kept = dumps(fleet._address)
    printed = repr((fleet, fleet._address, fleet.status())) + str(fleet._coordinator)
    return [
        *(kind for kind, pid in processes.items() if memory_has(pid, secret.encode())),
        *(file.name for file in logs if secret.encode() in file.read_bytes()),
        *(["functions that Spark keeps"] if secret.encode() in kept else []),
        *(["what is printed"] if secret in printed else []),
    ]


def test_credentials_are_nowhere_but_in_the_memory_of_the_fleets_processes(server: FaultyS3) -> None:
    secret = canary()
    fleet = connect(f"s3://bucket/{secrets.token_hex(4)}", storage_options=options_of(server, secret))
    try:
        put(fleet, 7)
        name = store_name(fleet)
        for actor in (name, coordinator_name(fleet.uri)):
            kill(actor)
            assert got(fleet) == 7
        put(fleet, 8)
        assert places_of(fleet, secret) == []
        # The search finds what is there: the store actor works with it, and what travels is in the GCS.
        assert memory_has(
            next(actor["pid"] for actor in fleet.status()["store_actors"] if actor["alive"]), secret.encode()
        )
        assert {"gcs_server", "functions that Spark keeps"} <= set(places_of(fleet, f"127.0.0.1:{server.server_port}"))
    finally:
        fleet.shutdown()


@pytest.mark.soak
def test_a_worker_has_no_credentials_and_needs_none(fleet: Fleet) -> None:
    put(fleet, 1)
    address = pickle.loads(pickle.dumps(fleet._address))
    assert address.storage_options.withheld == ("access_key_id", "secret_access_key")
    kill(store_name(fleet))
    client = fleet_client_of(address)
    with client.open_read("scores", 0, store_specs(COLUMNS["keys"], COLUMNS["values"], None), None) as store:
        assert store.get(1) == {"v": 1}


@pytest.mark.soak
def test_a_driver_forwards_its_credentials_again_when_no_other_process_has_them(fleet: Fleet) -> None:
    put(fleet, 3)
    kill_all_at_once(fleet)
    stranger = fleet_client_of(fleet._address)
    with pytest.raises(CredentialsNeededError, match=r"connect with the same storage_options again.*secret_access_key"):
        stranger.load_plans(TaskIdentity("scores", "python", "run", 0, 0, 0, "test"), ["default"])
    # This process has them, and its next question hands them over.
    assert fleet._coordinator.describe_state("scores") is not None
    assert got(fleet) == 3


def kill_all_at_once(fleet: Fleet) -> None:
    """End the fleet's processes, so that none can be asked when the others start again."""
    status = fleet.status()
    for sent in (signal.SIGSTOP, signal.SIGKILL):
        for process in (status["coordinator"], *status["store_actors"]):
            os.kill(process["pid"], sent)


@pytest.mark.soak
def test_a_fleet_without_its_coordinator_is_started_by_drivers_only(server: FaultyS3) -> None:
    fleet = connect(f"s3://bucket/{secrets.token_hex(4)}", storage_options=options_of(server, canary()))
    address = fleet._address
    fleet.shutdown()
    wait_until_gone(coordinator_name(fleet.uri))
    with pytest.raises(CredentialsNeededError, match="only a driver can start it"):
        fleet_client_of(address)


def wait_until_gone(name: str) -> None:
    while RayActors().find(name) is not None:
        gc.collect()


@pytest.mark.soak
def test_other_credentials_replace_those_in_use_if_the_store_takes_them(fleet: Fleet, server: FaultyS3) -> None:
    put(fleet, 5)
    wrong = {**options_of(server, canary()), "access_key_id": "SOMEBODYELSE"}
    with pytest.raises(StorageUnavailableError, match="credentials") as refused:
        connect(fleet.uri, storage_options=wrong)
    assert "SOMEBODYELSE" not in str(refused.value)
    put(fleet, 6)
    renewed = canary()
    connect(fleet.uri, storage_options=options_of(server, renewed))
    pids = [actor["pid"] for actor in fleet.status()["store_actors"] if actor["alive"]]
    assert all(memory_has(pid, renewed.encode()) for pid in [*pids, fleet.status()["coordinator"]["pid"]])
    assert got(fleet) == 6


@pytest.mark.soak
def test_a_fleet_that_uses_its_environment_takes_no_others(cluster: str, tmp_path: Path, server: FaultyS3) -> None:
    plain = connect(f"file://{tmp_path}")
    try:
        with pytest.raises(InvalidRequestError, match="started without credentials"):
            plain._coordinator._forward_credentials(split_options("s3://bucket", server.options())[1])
    finally:
        plain.shutdown()


def test_errors_of_ours_tell_no_credentials(fleet: Fleet, server: FaultyS3) -> None:
    secret = canary()
    with pytest.raises(StateStoreError) as refused:
        connect("s3://bucket/x", storage_options={**options_of(server, secret), "access_key_id": "SOMEBODYELSE"})
    assert secret not in "".join(map(str, (refused.value, refused.value.__cause__, refused.value.context)))
