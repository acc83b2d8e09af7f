"""A store actor proves that it sees the coordinator's storage: the same URI may name two storages."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from coordinator.model.errors import InvalidRequestError, SetupError, StorageUnavailableError
from coordinator.model.identities import ActorLocation, StateStoreId, TaskIdentity
from coordinator.model.leases import Lease
from coordinator.model.maintenance import Maintenance
from coordinator.runtime.runtime import Clock, Runtime
from coordinator.service.calls import RayActors
from coordinator.service.client import CoordinatorClient
from coordinator.service.coordinator import Coordinator
from coordinator.storage.local import LocalObjectStore
from coordinator.storage.probe import ProbeResult, StorageProof, prove_shared
from coordinator.storage.protocol import ObjectStore
from store_actors.actor.store_actor import StoreProcess
from store_actors.messages.requests import OpenRequest
from tests.memory_store import MemoryObjectStore
from tests.unit.observed_objects import ObservedObjectStore

URI = "file:///var/lib/statefleet"


def on_node(folder: Path) -> LocalObjectStore:
    """Return the store that the fleet's URI names on a node whose disk is a folder."""
    store = LocalObjectStore(folder / "var" / "lib" / "statefleet")
    store.uri = URI
    return store


def coordinator_over(store: ObjectStore) -> Callable[[str], ProbeResult]:
    coordinator = Coordinator(URI, store, Maintenance(), "node-1")
    return lambda folder: asyncio.run(coordinator.look_into(folder))


def test_a_folder_of_each_nodes_own_disk_is_refused_with_both_nodes_and_what_to_do(tmp_path: Path) -> None:
    look = coordinator_over(on_node(tmp_path / "1"))
    with pytest.raises(
        SetupError, match=r"s3://.*mounted.*every node.*store_actor=`node-2` coordinator=`.*node-1`"
    ) as caught:
        prove_shared(on_node(tmp_path / "2"), look, "node-2")
    assert URI in str(caught.value)
    assert "nothing was written to any state" in str(caught.value)


def test_one_folder_that_both_see_is_accepted_and_left_as_it_was(tmp_path: Path) -> None:
    prove_shared(on_node(tmp_path), coordinator_over(on_node(tmp_path)), "node-2")
    assert on_node(tmp_path).list("") == []


class OneWay(MemoryObjectStore):
    """A copy that writes of others reach late or never."""

    def __init__(self, to: MemoryObjectStore) -> None:
        super().__init__()
        self._to = to

    def put(self, path: str, data: bytes) -> None:
        super().put(path, data)
        self._to.put(path, data)


def test_a_copy_that_shows_only_its_own_writes_is_refused() -> None:
    shared = MemoryObjectStore()
    with pytest.raises(SetupError, match="see different storage"):
        prove_shared(OneWay(shared), coordinator_over(shared), "node-2")


class Replayed(MemoryObjectStore):
    """A store that answers with data of an earlier time."""

    def get(self, path: str) -> bytes:
        super().get(path)
        return b"of an earlier proof"


def test_an_answer_of_an_earlier_time_is_no_proof() -> None:
    with pytest.raises(SetupError, match="see different storage"):
        prove_shared(store := Replayed(), coordinator_over(store), "node-2")


def test_a_store_that_fails_is_reported_as_such_and_not_as_different_storage() -> None:
    def fail(operation: str, path: str) -> None:
        if operation == "get":
            raise StorageUnavailableError("simulated: the store failed")

    with pytest.raises(StorageUnavailableError, match="the store failed"):
        prove_shared(store := ObservedObjectStore(fail), coordinator_over(store), "node-2")


@pytest.mark.parametrize("folder", ["", "clicks", "_probe/..", "_probe/../clicks", f"_probe/{'0' * 32}/x"])
def test_the_coordinator_looks_into_folders_of_proofs_only(folder: str) -> None:
    store = MemoryObjectStore()
    store.put(f"{folder}/from-store-actor", b"1")
    with pytest.raises(InvalidRequestError, match="nothing was written"):
        coordinator_over(store)(folder)
    assert not any(info.path.endswith("from-coordinator") for info in store.list(""))


def test_old_files_of_killed_proofs_are_removed_when_a_coordinator_starts(tmp_path: Path) -> None:
    store, clock = on_node(tmp_path), Clock()
    old, young = [f"_probe/{digit * 32}/from-store-actor" for digit in "01"]
    for path in (old, young, "clicks/metadata.json"):
        store.put(path, b"1")
    folder = tmp_path / "var" / "lib" / "statefleet"
    (folder / "_probe" / ".tmp-killed").write_bytes(b"1")
    for path in (old, "_probe/.tmp-killed", "clicks/metadata.json"):
        os.utime(folder / path, (clock.now_s() - 61, clock.now_s() - 61))

    async def start() -> None:
        coordinator = Coordinator(URI, store, Maintenance(grace_s=60), "node-1")
        await coordinator.open()

    asyncio.run(start())
    assert [info.path for info in store.list("")] == [young, "clicks/metadata.json"]
    assert list(store.list_unfinished("")) == []


class SameProcess:
    """The part of the coordinator's client that a store actor needs, for a coordinator in the same process."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: asyncio.run(getattr(self._coordinator, method)(*args))


def store_process(objects: ObjectStore, coordinator: Coordinator) -> StoreProcess:
    location = ActorLocation("store-2", "life-1", "node-2", "host-2", 2)
    client = cast(CoordinatorClient, SameProcess(coordinator))
    proof, maintenance = (
        StorageProof(objects, client.look_into, location, threading.Lock()),
        Maintenance(interval_s=10**6),
    )
    return StoreProcess(location, objects, client, maintenance, Runtime(), RayActors(), check_fitness=proof.check)


def requests() -> list[tuple[str, tuple[Any, ...]]]:
    task = TaskIdentity("clicks", "query", "run", 0, 0, 0, "executor")
    location = ActorLocation("store-2", "life-1", "node-2", "host-2", 2)
    opening = OpenRequest(task, Lease(StateStoreId(f"{URI}/clicks", 0, 0), "run", 1, location), 0, ())
    return [("location", ()), ("apply", (None, None)), ("open_update", (opening,)), ("open_read", (opening,))]


@pytest.mark.parametrize(("method", "args"), requests(), ids=lambda arg: arg if isinstance(arg, str) else "")
def test_a_store_actor_on_storage_of_its_own_takes_no_work(tmp_path: Path, method: str, args: tuple[Any, ...]) -> None:
    coordinator = Coordinator(URI, on_node(tmp_path / "1"), Maintenance(), "node-1")
    store = store_process(on_node(tmp_path / "2"), coordinator)
    for _ in range(2):
        with pytest.raises(SetupError, match="see different storage"):
            getattr(store, method)(*args)
    assert on_node(tmp_path / "2").list("") == []


def test_a_store_actor_that_sees_the_coordinators_storage_proves_it_once(tmp_path: Path) -> None:
    looks: list[str] = []

    class Counting(Coordinator):
        async def look_into(self, folder: str) -> ProbeResult:
            looks.append(folder)
            return await super().look_into(folder)

    store = store_process(on_node(tmp_path), Counting(URI, on_node(tmp_path), Maintenance(), "node-1"))
    assert [store.location().node_id for _ in range(2)] == ["node-2"] * 2
    assert len(looks) == 1
