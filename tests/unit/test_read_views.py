"""Readers get finished versions: the records that finish a version, and how a report of the driver comes into the log."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from msgspec import structs

from coordinator.ledger.read_views import ReadView, WantedView, committed, finished, read_view
from coordinator.ledger.records import BatchFinished, Branched, Committed, Record, Rescaled, RunStarted, recorded
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.log_end import unseal
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.commits import CommitEntry
from coordinator.model.errors import StateMismatchError, StorageUnavailableError, VersionNotFoundError
from coordinator.model.identities import PYTHON_QUERY_ID, TaskIdentity
from coordinator.model.schema import Field, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.stored_json import from_json
from tests.memory_store import MemoryObjectStore
from tests.unit.observed_objects import ObservedObjectStore

SCHEMA = StateSchema((Field("k", "int32"),), (), (), None, None, "update")
CREATED = StateMetadata("s", "query", 2, "update", SCHEMA)


def started(run: str, batch: int, epoch: int, query: str = "query") -> RunStarted:
    return RunStarted(run, query, batch, epoch)


def commits(run: str, version: int, epoch: int, partitions: tuple[int, ...] = (0, 1), **options: Any) -> list[Record]:
    entries = [
        CommitEntry(p, version, version - 1, epoch, run, f"{run}-{p}-{version}", f"{run}-{p}-{version}.delta", *[1] * 11)
        for p in partitions
    ]  # fmt: skip
    return [Committed(structs.replace(entry, **options)) for entry in entries]


def ledger_of(*records: Record, root: str = "file:///fleet/s") -> StateLedger:
    ledger = StateLedger(root)
    for record in records:
        ledger.fold(from_json(json.loads(msgspec.json.encode(recorded(record))), Record))
    reloaded = StateLedger.from_json(root, json.loads(json.dumps(ledger.to_json())))
    assert reloaded.finished == ledger.finished
    return reloaded


def view(ledger: StateLedger, version: int | None = None, **options: Any) -> ReadView:
    newest = finished(ledger, CREATED)
    read = read_view(ledger, CREATED, newest, WantedView(version, **options))
    assert read is not None
    return read


def test_a_version_is_finished_once_a_record_says_so() -> None:
    begun = [started("r1", 0, 1), *commits("r1", 1, 1)]
    assert [count(ledger_of(*begun), CREATED) for count in (finished, committed)] == [0, 1]
    # The driver reports it, ...
    assert finished(ledger_of(*begun, BatchFinished("r1", 0)), CREATED) == 1
    # ... a shard commits the next one, ...
    assert finished(ledger_of(*begun, *commits("r1", 2, 1, (0,))), CREATED) == 1
    # ... or a run begins with the next batch.
    assert finished(ledger_of(*begun, started("r2", 1, 2)), CREATED) == 1
    with pytest.raises(VersionNotFoundError):
        view(ledger_of(*begun), 1)


def test_a_run_that_begins_with_a_batch_again_makes_it_unfinished() -> None:
    begun = [started("r1", 0, 1), *commits("r1", 1, 1), *commits("r1", 2, 1), BatchFinished("r1", 1)]
    assert finished(ledger_of(*begun), CREATED) == 2
    again = [*begun, started("r2", 1, 2)]
    assert finished(ledger_of(*again), CREATED) == 1
    # While it makes the version again, shard by shard, no reader gets rows of two programs.
    half = [*again, *commits("r2", 2, 2, (0,))]
    assert [count(ledger_of(*half), CREATED) for count in (finished, committed)] == [1, 1]
    # A late report of the previous run is ignored.
    assert finished(ledger_of(*half, BatchFinished("r1", 1)), CREATED) == 1
    whole = [*half, *commits("r2", 2, 2, (1,))]
    assert [count(ledger_of(*whole), CREATED) for count in (finished, committed)] == [1, 2]
    assert finished(ledger_of(*whole, BatchFinished("r2", 1)), CREATED) == 2


def test_imported_and_branched_versions_and_those_of_programs_are_finished_when_committed() -> None:
    assert finished(ledger_of(started("r1", 4, 1), *commits("r1", 5, 1, is_import=True)), CREATED) == 5
    of_program = [started("r1", 0, 1, PYTHON_QUERY_ID), *commits("r1", 1, 1)]
    assert finished(ledger_of(*of_program), CREATED) == 1
    assert view(ledger_of(*of_program)).lineage == "", "each of its partitions has versions of its own"
    parent = ledger_of(started("r1", 0, 1), *commits("r1", 1, 1), BatchFinished("r1", 0))
    branch = StateLedger("file:///fleet/b")
    branch.begin_with(parent, 1)
    assert finished(ledger_of(Branched("s", 1, branch.to_json()), root="file:///fleet/b"), CREATED) == 1


def test_only_a_version_that_was_made_again_has_another_lineage() -> None:
    begun = [started("r1", 0, 1), *commits("r1", 1, 1), *commits("r1", 2, 1), BatchFinished("r1", 1)]
    lineage = view(ledger_of(*begun), 2).lineage
    assert lineage == view(ledger_of(*begun, started("r2", 2, 2), *commits("r2", 3, 2)), 2).lineage
    replayed = [*begun, started("r2", 1, 2), *commits("r2", 2, 2), BatchFinished("r2", 1)]
    assert lineage != view(ledger_of(*replayed), 2).lineage
    # Read by the shards that committed it, or by those that are made of it.
    rescaled = [*begun, Rescaled(4, 2, 2, "r3", 0, 2, ("k",)), started("r3", 2, 2)]
    ledger = ledger_of(*rescaled, *commits("r3", 3, 2, (2, 3, 4, 5)), BatchFinished("r3", 2))
    newer, previous = view(ledger, 2), view(ledger, 2, first_partition=0)
    assert (len(newer.versions), len(previous.versions), view(ledger, 1, first_partition=0).partitions) == (
        4,
        2,
        range(2),
    )
    assert newer.lineage == previous.lineage == lineage
    assert previous.attempts == ("r1-0-2", "r1-1-2")
    with pytest.raises(VersionNotFoundError, match="not there any more"):
        view(ledger, 2, first_partition=7)
    with pytest.raises(VersionNotFoundError, match="not there any more"):
        view(ledger, 3, first_partition=0)


def test_a_run_of_the_past_is_detected_by_shards_of_an_abandoned_rescale() -> None:
    wish = ShardLayout(4, 2, 1, "r1", 0, 2, ("k",))
    begun = [
        started("r1", 0, 1),
        *commits("r1", 1, 1),
        Rescaled(*structs.astuple(wish)),
        *commits("r1", 2, 1, (3,)),
        started("r2", 1, 2),
    ]
    task = TaskIdentity("s", "query", "r3", 0, 0, 0, "executor")
    with pytest.raises(StateMismatchError, match="ahead of the checkpoint"):
        ledger_of(*begun).check_not_of_the_past(task)


# -- how a report comes into the log ----------------------------------------------------------------------------------


def logged(objects: MemoryObjectStore) -> list[list[str]]:
    """Return the kinds of records in each file of the log."""
    files = sorted(info.path for info in objects.list("s/manifest"))
    return [[record["kind"] for record in unseal(objects.get(file))["records"]] for file in files]


async def opened() -> tuple[LedgerWriter, ObservedObjectStore]:
    """Return a log with a version that is not finished."""
    objects = ObservedObjectStore()
    ledger_writer = LedgerWriter(ManifestLog(objects, "s", "one"))
    await ledger_writer.open()
    await ledger_writer.decide(lambda _: ([started("r1", 0, 1), *commits("r1", 1, 1)], None))
    return ledger_writer, objects


def report(ledger_writer: LedgerWriter, within_s: float, batch: int = 0) -> asyncio.Task[None]:
    return asyncio.create_task(ledger_writer.note(lambda ledger: ledger.decide_finished("r1", batch), within_s))


async def newest(ledger_writer: LedgerWriter) -> int:
    return await ledger_writer.read(lambda ledger: finished(ledger, CREATED))


async def test_a_report_is_known_at_once_and_written_with_the_next_records() -> None:
    ledger_writer, objects = await opened()
    reported = report(ledger_writer, 30.0)
    await asyncio.sleep(0)
    assert await newest(ledger_writer) == 1
    assert len(logged(objects)) == 1
    assert not reported.done()
    await ledger_writer.decide(lambda _: (commits("r1", 2, 1), None))
    await reported
    assert logged(objects)[1:] == [["batch_finished", "committed", "committed"]]
    # The log says it by now.
    await report(ledger_writer, 0.0)
    assert len(logged(objects)) == 2


async def test_a_report_is_written_by_itself_where_nothing_follows() -> None:
    ledger_writer, objects = await opened()
    await asyncio.gather(report(ledger_writer, 0.05), report(ledger_writer, 0.05))
    assert logged(objects)[1:] == [["batch_finished"]]
    await ledger_writer.decide(lambda _: (commits("r1", 2, 1), None))
    late = report(ledger_writer, 30.0, 1)
    await report(ledger_writer, 0.0, 1)
    await late
    assert logged(objects)[3:] == [["batch_finished"]]


async def test_a_report_outlives_another_coordinators_records() -> None:
    ledger_writer, objects = await opened()
    reported = report(ledger_writer, 30.0)
    await asyncio.sleep(0)
    assert await newest(ledger_writer) == 1
    other_writer = LedgerWriter(ManifestLog(objects, "s", "other"))
    await other_writer.open()
    await other_writer.fence(lambda _: ([], None))
    await ledger_writer.decide(lambda _: (commits("r1", 2, 1), None))
    await reported
    assert logged(objects)[1:] == [[], ["batch_finished", "committed", "committed"]]
    # A report of a run that was replaced is not written.
    late = report(ledger_writer, 30.0, 1)
    await other_writer.decide(lambda _: ([started("r2", 1, 2)], None))
    await ledger_writer.fence(lambda _: ([], None))
    await late
    assert "batch_finished" not in logged(objects)[-1]
    assert await newest(ledger_writer) == 1


async def test_a_report_that_cannot_be_written_still_counts() -> None:
    ledger_writer, objects = await opened()

    def fail(operation: str, path: str) -> None:
        if operation == "put_if_absent":
            raise StorageUnavailableError("simulated: the store does not answer")

    objects.before = fail
    with pytest.raises(StorageUnavailableError):
        await report(ledger_writer, 0.0)
    assert await newest(ledger_writer) == 1
    objects.before = lambda operation, path: None
    await ledger_writer.decide(lambda _: (commits("r1", 2, 1), None))
    assert logged(objects)[1:] == [["batch_finished", "committed", "committed"]]
