"""A state's folder that is restored from a backup, replaced or cut in half under a running fleet: no commit goes into the wrong state,
no wrong row is read, and the error says so.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coordinator.ledger.read_views import WantedView
from coordinator.model.errors import (
    CorruptStateError,
    FencedError,
    InvalidRequestError,
    StateMismatchError,
    StateReplacedError,
    StateStoreError,
)
from tests.memory_store import MemoryObjectStore
from tests.unit.damages import ERROR, copied, named_by_verify, rows_or_error, state_in
from tests.unit.running_fleet import RunningFleet, RunningQuery

STATE = "s"


def put(folder: MemoryObjectStore, fleet: RunningFleet, which: Callable[[str], bool] = lambda path: True) -> None:
    """Replace a fleet's files of the state by those of a folder that `which` chooses."""
    for info in fleet.objects.list(STATE):
        fleet.objects.delete(info.path)
    for info in folder.list(STATE):
        if which(info.path):
            fleet.objects.put(info.path, folder.get(info.path))
    fleet.clock.later_s += 2


def versions(objects: MemoryObjectStore) -> dict[int, str]:
    """Return the rows of all versions, as read from storage."""
    state = state_in(objects, STATE)
    return {
        version: rows_or_error(lambda version=version: state.at(version).scan().to_arrow().to_pylist())
        for version in state.versions()
    }


def fleet_with_backups(
    seed: str, batches: int, query: str = "query"
) -> tuple[RunningFleet, RunningQuery, dict[int, MemoryObjectStore]]:
    """Return a fleet with a query that ran batches, the query, and a backup from after each batch by version."""
    fleet = RunningFleet(MemoryObjectStore())
    running = RunningQuery(fleet, STATE, query, "run-1")
    backups = {}
    for batch in range(batches):
        running.next_batch(seed)
        if batch == 2:
            fleet.shards.partitions.maintain(1)
        fleet.settle()
        backups[batch + 1] = copied(fleet.objects)
    return fleet, running, backups


def is_as_it_was(fleet: RunningFleet, folder: MemoryObjectStore) -> bool:
    """Whether a state has just the files of a folder, apart from deltas that were never committed."""
    present = {info.path: fleet.objects.get(info.path) for info in fleet.objects.list(STATE)}
    restored = {info.path: folder.get(info.path) for info in folder.list(STATE)}
    further = present.keys() - restored.keys()
    return {path: present.get(path) for path in restored} == restored and all(
        path.endswith(".delta") for path in further
    )


def refusals(query: RunningQuery, seed: str = "a") -> list[type[StateStoreError]]:
    """Return the error types of a batch and its two repetitions."""
    kinds = []
    for _ in range(3):
        with pytest.raises(StateStoreError) as caught:
            query.next_batch(seed)
        kinds.append(type(caught.value))
    return kinds


def test_an_older_copy_is_an_error_and_not_written_to_until_the_query_starts_from_the_checkpoint_of_its_time() -> None:
    fleet, query, backups = fleet_with_backups("a", 5)
    expected = versions(backups[5])
    put(backups[3], fleet)
    with pytest.raises(StateReplacedError, match=r"put back from a backup.*nothing was counted.*state=`s`"):
        query.next_batch("a")
    with pytest.raises(FencedError, match=r"put back or replaced under this one.*restart the query"):
        query.next_batch("a")
    # Its next run has the newer checkpoint.
    with pytest.raises(StateMismatchError, match="put back from an older copy"):
        RunningQuery(fleet, STATE, "query", "run-2", 5).next_batch("a")
    assert is_as_it_was(fleet, backups[3])
    # With the copy's checkpoint it continues from the copy and not from memory, and comes to the same rows.
    restarted = RunningQuery(fleet, STATE, "query", "run-3", 3)
    for _ in range(2):
        restarted.next_batch("a")
    fleet.shards.partitions.maintain(1)
    assert versions(fleet.objects) == expected
    assert named_by_verify(fleet.objects, [STATE]) == set()


def test_a_newer_copy_of_the_same_state_is_read_before_any_commit() -> None:
    fleet, query, backups = fleet_with_backups("a", 5)
    put(backups[3], fleet)
    with pytest.raises(StateReplacedError):
        query.next_batch("a")
    # The coordinator and the shards know the state to version 3 now, and the copy of version 5 comes back.
    behind = RunningQuery(fleet, STATE, "query", "run-2", 3)
    assert behind.lease(0).base_version == 3
    put(backups[5], fleet)
    kinds = refusals(behind)
    assert set(kinds) <= {StateReplacedError, FencedError, StateMismatchError}, kinds
    assert is_as_it_was(fleet, backups[5])
    RunningQuery(fleet, STATE, "query", "run-3", 5).next_batch("a")
    assert versions(fleet.objects).items() >= versions(backups[5]).items()
    assert named_by_verify(fleet.objects, [STATE]) == set()


def test_a_copy_that_another_fleet_continued_is_read_before_any_commit() -> None:
    fleet, query, backups = fleet_with_backups("a", 3)
    copy = RunningFleet(copied(backups[3]))
    copy_query = RunningQuery(copy, STATE, "query", "run-elsewhere", 3)
    for _ in range(2):
        copy_query.next_batch("c")
    copy.settle()
    put(copy.objects, fleet)
    # The log continues after the record that this coordinator knows, so it reads on, and learns that another run took over.
    assert refusals(query) == [FencedError] * 3
    assert is_as_it_was(fleet, copy.objects)
    emitted = RunningQuery(fleet, STATE, "query", "run-2", 5).next_batch("c")
    assert sorted(emitted) == sorted(copy_query.next_batch("c"))
    assert versions(fleet.objects) == versions(copy.objects)


@pytest.mark.parametrize(("batches", "query_id"), [(1, "query"), (3, "another"), (6, "query")])
def test_another_state_of_the_name_is_neither_written_to_nor_read_for_the_first(batches: int, query_id: str) -> None:
    fleet, query, _ = fleet_with_backups("a", 3)
    other_fleet, other_query, backups = fleet_with_backups("b", batches, query_id)
    put(backups[batches], fleet)
    assert refusals(query) == [StateReplacedError, FencedError, FencedError]
    # Nor does memory write further files.
    fleet.shards.partitions.maintain(1)
    assert is_as_it_was(fleet, backups[batches])
    # Cleaning does not treat its files as unneeded.
    fleet.clock.later_s += 10_000
    fleet.do(fleet.coordinator.clean(STATE, False))
    assert versions(fleet.objects) == versions(backups[batches])
    # Its own query continues it, from its rows.
    emitted = RunningQuery(fleet, STATE, query_id, "run-2", batches).next_batch("b")
    assert sorted(emitted) == sorted(other_query.next_batch("b"))
    assert versions(fleet.objects) == versions(other_fleet.objects)
    assert named_by_verify(fleet.objects, [STATE]) == set()


def test_maintenance_leaves_nothing_in_a_folder_that_was_deleted() -> None:
    fleet, query, _ = fleet_with_backups("a", 5)
    put(MemoryObjectStore(), fleet)
    for _ in range(3):
        fleet.shards.partitions.maintain(1)
        assert fleet.objects.list(STATE) == []
    with pytest.raises(StateStoreError):
        query.next_batch("a")
    assert fleet.objects.list(STATE) == []


def test_maintenance_leaves_nothing_in_a_folder_that_is_replaced_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, _, backups = fleet_with_backups("a", 5)
    ask = fleet.reassigned
    monkeypatch.setattr(fleet, "reassigned", lambda *of: (ask(*of), put(backups[4], fleet))[0])
    fleet.shards.partitions.maintain(1)
    assert {info.path for info in fleet.objects.list(STATE)} == {info.path for info in backups[4].list(STATE)}


@pytest.mark.parametrize("is_resting", [False, True])
@pytest.mark.parametrize("damage", ["deleted", "damaged"])
def test_a_state_whose_folder_is_gone_or_damaged_keeps_no_other_of_its_query_from_being_read(
    damage: str, is_resting: bool
) -> None:
    fleet = RunningFleet(MemoryObjectStore())
    queries = [RunningQuery(fleet, name, "query", "run-1") for name in (STATE, "beside")]
    for query in queries * 3:
        query.next_batch("a")

    def version() -> int:
        view = fleet.do(fleet.coordinator.read_view(STATE, WantedView(None, False), None))
        return view.version

    assert version() == 3
    if is_resting:
        (details,) = (query for query in fleet.do(fleet.coordinator.status())["queries"] if query["name"] == "beside")
        fleet.clock.later_s += 1000
        assert fleet.coordinator._states.rest("beside", details)
    records = [info.path for info in fleet.objects.list("beside") if "/manifest/" in info.path]
    for path in records if damage == "deleted" else ():
        fleet.objects.delete(path)
    fleet.objects.put(f"beside/manifest/{len(records) + 1:020d}.json", b"{")
    fleet.clock.later_s += 5
    assert [version() for _ in range(2)] == [3, 3]


def test_shards_that_were_made_of_the_replaced_files_are_made_again() -> None:
    """After a copy was restored and rescaled again, its shards have the partition ids of other shards in memory."""
    fleet, _, backups = fleet_with_backups("a", 3)
    query = RunningQuery(fleet, STATE, "query", "run-2", 3)
    query.next_batch("a", 3)
    assert fleet.shards.partitions.cache.count() == 5
    put(backups[2], fleet)
    with pytest.raises(StateReplacedError):
        query.next_batch("a")
    fresh = RunningFleet(copied(backups[2]))
    emitted = []
    for running in (fleet, fresh):
        RunningQuery(running, STATE, "query", "run-3", 2).next_batch("c")
        emitted.append(sorted(RunningQuery(running, STATE, "query", "run-4", 3).next_batch("c", 3)))
    assert emitted[0] == emitted[1]
    assert versions(fleet.objects) == versions(fresh.objects)


def test_cleaning_alone_does_not_treat_files_of_a_restored_state_as_unneeded() -> None:
    fleet, _, _ = fleet_with_backups("a", 3)
    _, _, backups = fleet_with_backups("b", 3)
    put(backups[3], fleet)
    for info in fleet.objects.list(STATE):
        fleet.objects._modified_s[info.path] -= 100_000
    fleet.clock.later_s += 10_000
    with pytest.raises(StateReplacedError):
        fleet.do(fleet.coordinator.clean(STATE, False))
    fleet.do(fleet.coordinator.clean(STATE, False))
    assert versions(fleet.objects) == versions(backups[3])
    assert named_by_verify(fleet.objects, [STATE]) == set()


HALVES: dict[str, Callable[[str], bool]] = {
    "nothing": lambda path: False,
    "metadata": lambda path: path.endswith("metadata.json"),
    "all but metadata": lambda path: not path.endswith("metadata.json"),
    "log": lambda path: "/0/" not in path,
    "rows": lambda path: "/0/" in path,
    "checkpoints": lambda path: "/manifest/" not in path,
    "the first records": lambda path: "/manifest/" not in path or int(path[-25:-5]) < 5,
    "later records": lambda path: "/manifest/" not in path or int(path[-25:-5]) > 5,
    "one shard": lambda path: "/0/1/" not in path,
}


@pytest.mark.parametrize(("half", "version"), [(half, 5 - 2 * (index % 2)) for index, half in enumerate(HALVES)])
def test_half_of_a_folder_is_never_read_as_all_of_it(half: str, version: int) -> None:
    fleet, query, backups = fleet_with_backups("a", 5)
    longer, _, _ = fleet_with_backups("a", 7)
    expected = versions(longer.objects)
    put(backups[version], fleet, HALVES[half])
    for _ in range(2):
        # An error, or the right rows, since memory has them.
        rows_or_error(lambda: query.next_batch("a"))
    for objects in (fleet.objects, copied(fleet.objects)):
        try:
            rows_by_version = versions(objects)
        except (CorruptStateError, InvalidRequestError):
            continue
        assert all(rows.startswith(ERROR) or rows == expected[number] for number, rows in rows_by_version.items())
    # Once the rest is there, too, all versions are right.
    put(backups[version], fleet)
    later = RunningFleet(fleet.objects)
    RunningQuery(later, STATE, "query", "run-2", version).next_batch("a")
    assert versions(later.objects) == {number: rows for number, rows in expected.items() if number <= version + 1}
