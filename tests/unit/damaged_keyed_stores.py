"""Two partitions with two named stores each, whose commits are in parts of checkpoints, and whose files can be damaged."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pyarrow as pa

from coordinator.model.identities import PYTHON_QUERY_ID, ActorLocation, StateStoreId, TaskIdentity
from coordinator.model.leases import Lease
from coordinator.model.state_metadata import StateMetadata
from store_actors.messages.requests import OpenRequest, StoreSpec
from tests.memory_store import MemoryObjectStore
from tests.unit.aggregation_fleet import LocalCoordinator
from tests.unit.damages import StoredSurvey, copied, rows_or_error, state_in, taken_from
from tests.unit.keyed_fleet import COUNTS, NAMES, KeyedFleet

PARTITIONS = 2
VERSIONS = 5
STORES = (COUNTS, NAMES)
CREATED = StateMetadata("s", PYTHON_QUERY_ID, PARTITIONS, "keyed")


class WritingProgram(KeyedFleet):
    """A program that writes partitions of a state that may be there."""

    query = PYTHON_QUERY_ID

    def __init__(self, objects: MemoryObjectStore, run: str) -> None:
        super().__init__()
        self.run, self.objects = run, objects
        self.coordinator = LocalCoordinator(objects, CREATED, checkpoint_interval=6, part_records=3)
        self.stores = self.new_stores()

    def change(self, version: int, letter: str) -> list[str]:
        """Write the next version of the partition; return the rows that its stores had before."""
        session = self.open(version, self.run, 0, *STORES)
        before = [repr(row) for spec in STORES for row in self.rows(session, spec)]
        counts = {"k": [letter, "xy"[version % 2]], "n": pa.array([version + 1, self.partition], pa.int64())}
        self.call(session, "put", pa.record_batch(counts))
        names = {"id": pa.array([version, self.partition], pa.int64()), "name": [letter * version, letter]}
        self.call(session, "put", pa.record_batch(names), store="names")
        if version == 2:
            self.call(session, "remove", pa.record_batch({"id": pa.array([0], pa.int64())}), store="names")
        self.stores.commit(session)
        return before

    def at(self, version: int) -> Iterator[str]:
        """Yield the rows of all stores of the partition at a version."""
        task = TaskIdentity("s", "", "", version, self.partition, 0, "executor")
        lease = Lease(
            StateStoreId("memory:///s", 0, self.partition), "", -1, ActorLocation("a", "a", "node", "host", 1)
        )
        session, _ = self.stores.open_read(OpenRequest(task, lease, version, STORES))
        for spec in STORES:
            yield from (f"{spec.name} {row}" for row in self.rows(session, spec))

    def rows(self, session: str, spec: StoreSpec) -> Iterator[dict[str, Any]]:
        scan = self.call(session, "iterator", store=spec.name)
        while (batch := self.stores.next_batch(session, scan)) is not None:
            yield from batch.to_pylist()


def files(letter: str) -> MemoryObjectStore:
    """Return the files of a program's state."""
    program = WritingProgram(MemoryObjectStore(), "run-1")
    for version in range(VERSIONS):
        for program.partition in range(PARTITIONS):
            program.change(version, letter)
        if version in (1, 3):
            program.stores.partitions.maintain(1)
    return program.objects


def read(objects: MemoryObjectStore) -> dict[str, str]:
    """Return what is read of each version: with handles, as a table without a fleet, and by the program that continues."""
    answers, opened = {}, list[WritingProgram]()
    objects_of_program = copied(objects)

    def program(partition: int) -> WritingProgram:
        if not opened:
            opened.append(WritingProgram(objects_of_program, "run-2"))
        opened[0].partition = partition
        return opened[0]

    for spec in STORES:
        state = state_in(objects, "s", spec.name)
        answers[f"table {spec.name}"] = rows_or_error(lambda state=state: state.scan().to_arrow().to_pylist())
    for partition in range(PARTITIONS):
        for version in range(VERSIONS + 1):
            answers[f"{partition} at {version}"] = rows_or_error(lambda: program(partition).at(version))  # noqa: B023
    for partition in range(PARTITIONS):
        answers[f"{partition} goes on"] = rows_or_error(lambda: program(partition).change(VERSIONS, "n"))  # noqa: B023
    return answers


@cache
def survey() -> StoredSurvey:
    return StoredSurvey(files("a"), ("s",), read, {"another fleet's": taken_from(files("b"))})
