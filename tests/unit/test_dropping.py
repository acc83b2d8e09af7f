"""States that end while the fleet runs: their names, memory and files, and processes that slept meanwhile. No Ray."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import pytest
from msgspec import structs

from coordinator.ledger.records import Dropped
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.log_end import seal
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.errors import (
    CorruptStateError,
    FencedError,
    InvalidRequestError,
    StateMismatchError,
    StateReplacedError,
)
from coordinator.model.maintenance import Maintenance
from coordinator.model.stored_json import FORMAT
from coordinator.service.coordinator import Coordinator
from statefleet.reads.verify import check_files, files_of, state_names
from tests.memory_store import MemoryObjectStore
from tests.unit.service_harness import CREATED, QueriedCoordinator


def remaining(objects: MemoryObjectStore, state: str = "s") -> set[str]:
    return {info.path.split("/")[1] for info in objects.list(state)} - {"manifest", "checkpoints"}


def delete_folders(objects: MemoryObjectStore, *states: str) -> None:
    """Delete folders as a user does by hand."""
    objects.delete_all([info.path for state in states for info in objects.list(state)])


async def owner(coordinator: QueriedCoordinator) -> str:
    """Return the query that the state belongs to."""
    created = await coordinator.describe_state("s")
    assert created is not None
    return created.query_id


async def after_batches(count: int) -> tuple[QueriedCoordinator, MemoryObjectStore]:
    """Return a coordinator that has committed batches of a run, and its object store."""
    coordinator = QueriedCoordinator(objects := MemoryObjectStore())
    for batch in range(count):
        await coordinator.commit("run-1", batch)
    return coordinator, objects


def begin_drop(objects: MemoryObjectStore) -> None:
    """Drop the state as a process does that is killed once the log has it: its files and metadata are there."""
    log = ManifestLog(objects, "s", "killed")
    metadata = log.load_metadata()
    assert metadata is not None
    log.load()
    log.append([Dropped(metadata.to_json())])


async def test_a_dropped_state_is_gone_and_another_one_of_its_name_begins_with_nothing_of_it() -> None:
    coordinator = QueriedCoordinator(objects := MemoryObjectStore())
    for batch in range(3):
        old = await coordinator.commit("run-1", batch)
    await coordinator.commit("run-1", 0, "other")
    with pytest.raises(InvalidRequestError, match="a query that uses the state runs"):
        await coordinator.drop("s", False, False)
    await coordinator.deactivate_instances("run-1")
    dropped = await coordinator.drop("s", True, False)
    assert (dropped.versions, dropped.files, dropped.file_bytes, dropped.others) == (3, 3, 15, ("other",))
    assert await coordinator.version() == 3, "nothing was changed"
    assert await coordinator.drop("s", False, False) == dropped
    assert remaining(objects) == set()
    assert await coordinator.describe_state("s") is None
    assert await coordinator.reassigned("s", "a", [0]) == [0], "memory lets go of it"
    assert state_names(objects) == ["other"]
    with pytest.raises(InvalidRequestError, match="no such state"):
        await coordinator.drop("s", False, False)
    # All calls of the previous query are refused.
    assert isinstance(await coordinator.outcome(structs.replace(old, version=4)), FencedError)
    with pytest.raises(FencedError):
        await coordinator.lease("run-1", 3)
    # The name is free for another query at once, also for a coordinator that reads the log again.
    await coordinator.commit("run-2", 0, query="another")
    assert await coordinator.version() == 1
    restarted = QueriedCoordinator(objects)
    assert await restarted.version() == 1
    assert await owner(restarted) == "another"
    assert state_names(objects) == ["other", "s"]
    await restarted.commit("run-3", 1, query="another")
    # The state is dropped a second time.
    await restarted.drop("s", False, True)
    # The other coordinator has to learn of it first.
    with pytest.raises(FencedError, match="was dropped by another coordinator"):
        await coordinator.lease("run-4", 0, query="third")
    await coordinator.commit("run-4", 0, query="third")
    assert await QueriedCoordinator(objects).version() == 1


async def test_a_drop_that_was_cut_off_is_never_read_as_a_state_and_is_done_again() -> None:
    _, objects = await after_batches(1)
    begin_drop(objects)
    with pytest.raises(InvalidRequestError, match="no such state"):
        await QueriedCoordinator(objects).version()
    assert state_names(objects) == []
    last = QueriedCoordinator(objects)
    assert (await last.drop("s", False, False)).files == 1
    assert remaining(objects) == set()
    # Another query may begin, too.
    await last.commit("run-2", 0)
    begin_drop(objects)
    await QueriedCoordinator(objects).commit("run-3", 0, query="another")
    assert await QueriedCoordinator(objects).version() == 1


async def test_a_coordinator_that_slept_while_a_state_was_dropped_and_created_again_continues_from_the_new_one() -> (
    None
):
    slept = QueriedCoordinator(objects := MemoryObjectStore())
    await slept.commit("run-1", 0)
    old = await slept.commit("run-1", 1)
    coordinator = QueriedCoordinator(objects)
    await coordinator.drop("s", False, True)
    await coordinator.commit("run-2", 0, query="another")
    late = structs.replace(old, version=3, base_version=2, attempt_id="late")
    assert isinstance(await slept.outcome(late), FencedError)
    assert await slept.version() == 1
    assert await owner(slept) == "another"
    assert "0" in remaining(objects)


async def test_a_state_with_branches_is_not_dropped_and_a_dropped_branch_frees_what_was_kept_for_it() -> None:
    coordinator, objects = await after_batches(3)
    await coordinator.branch("s", "what_if", 2)
    with pytest.raises(InvalidRequestError, match="branches=`what_if`"):
        await coordinator.drop("s", False, True)
    assert ManifestLog(objects, "s", "").load().born == {"what_if"}
    dropped = await coordinator.drop("what_if", False, False)
    assert dropped.files == 0
    assert ManifestLog(objects, "s", "").load().branches == {}
    assert await coordinator.version() == 3
    # Another branch of that name may be created.
    assert (await coordinator.branch("s", "what_if", 1)).version == 1
    await coordinator.drop("what_if", False, False)
    await coordinator.drop("s", False, True)
    assert remaining(objects) == remaining(objects, "what_if") == set()


#: What is asked first for a query of another checkpoint: by the driver that builds it, or starts it.
FIRST_CALLS: dict[str, Callable[[Coordinator], Awaitable[object]]] = {
    "check_state": lambda coordinator: coordinator.check_state(structs.replace(CREATED, query_id="another")),
    "describe_state": lambda coordinator: coordinator.describe_state("s"),
    "check_start": lambda coordinator: coordinator.check_start("s", "", "append"),
}


@pytest.mark.parametrize("call", FIRST_CALLS)
async def test_a_folder_that_was_deleted_by_hand_is_noticed_by_the_next_query_and_nothing_is_written_into_it(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator, objects = await after_batches(2)
    await coordinator.branch("s", "what_if", 1)
    await coordinator.deactivate_instances("run-1")
    with pytest.raises(StateMismatchError, match=r"belongs to another query.*`statefleet drop` frees the name"):
        await coordinator.check_start("s", "", "update")
    delete_folders(objects, "s", "what_if")
    assert await FIRST_CALLS[call](coordinator) is None
    assert "the folder of a state was deleted" in caplog.text
    assert await coordinator.reassigned("s", "a", [0]) == [0]
    assert objects.list("s") == objects.list("what_if") == []
    await coordinator.commit("run-2", 0, query="another")
    assert await coordinator.version() == 1


async def test_a_folder_that_was_deleted_under_a_running_query_is_reported_at_once_and_nothing_is_written_into_it() -> (
    None
):
    coordinator, objects = await after_batches(2)
    delete_folders(objects, "s")
    with pytest.raises(StateReplacedError, match=r"replaced or deleted.*statefleet verify.*state=`s`"):
        await coordinator.commit("run-1", 2)
    # A repeated batch may not begin a new state.
    with pytest.raises(FencedError, match=r"put back or replaced under this one.*restart the query"):
        await coordinator.commit("run-1", 2)
    with pytest.raises(StateMismatchError, match="restore the state's folder"):
        await coordinator.commit("run-2", 2)
    assert [info.path for info in objects.list("s") if not info.path.endswith(".delta")] == []
    delete_folders(objects, "s")
    await coordinator.commit("run-2", 0, query="another")
    assert await coordinator.version() == await QueriedCoordinator(objects).version() == 1


@pytest.mark.parametrize("batches", [2, 40], ids=["records", "a checkpoint"])
async def test_a_folder_with_only_later_files_is_reported_and_can_be_dropped(batches: int) -> None:
    """An interrupted copy leaves such folders."""
    coordinator, objects = await after_batches(2)
    first = [info.path for info in objects.list("s")]
    for batch in range(2, 2 + batches):
        await coordinator.commit("run-1", batch)
    objects.delete_all(first)
    assert "manifest" in {info.path.split("/")[1] for info in objects.list("s")}
    # Readers and new queries get an error: nothing of the folder is read, and nothing is written into it.
    before = [info.path for info in objects.list("s")]
    restarted = QueriedCoordinator(objects)
    for _ in range(2):
        with pytest.raises(CorruptStateError, match=r"metadata\.json.*is missing.*statefleet drop.*state=`s`"):
            await restarted.check_state(structs.replace(CREATED, query_id="another"))
        with pytest.raises(CorruptStateError, match="statefleet drop"):
            await restarted.commit("run-2", 0, query="another")
    # The coordinator of the query notices it when it cleans, at the latest.
    await coordinator._states.notice_deleted("s")
    with pytest.raises(CorruptStateError, match="statefleet drop"):
        await coordinator.commit("run-1", 3 + batches)
    assert [info.path for info in objects.list("s")] == before
    dry = await restarted.drop("s", True, False)
    assert dry.files == len([path for path in before if path.split("/")[1].isdecimal()])
    assert [info.path for info in objects.list("s")] == before
    assert await restarted.drop("s", False, False) == dry
    assert remaining(objects) == set()
    with pytest.raises(InvalidRequestError, match="no such state"):
        await restarted.drop("s", False, False)
    # The name is free, and the previous writer is refused.
    await restarted.commit("run-2", 0, query="another")
    assert await QueriedCoordinator(objects).version() == 1
    with pytest.raises(StateMismatchError, match="belongs to another query"):
        await coordinator.commit("run-1", 3 + batches)
    await restarted.commit("run-2", 1, query="another")
    assert await QueriedCoordinator(objects).version() == 2


async def test_the_remains_of_a_folder_are_reported_and_its_name_can_be_freed() -> None:
    record = {
        "format": FORMAT,
        "state": "s",
        "seq": 6,
        "writer_id": "w",
        "record_id": "r",
        "records": [{"kind": "run_started", "run_id": "r"}],
    }
    coordinator = QueriedCoordinator(objects := MemoryObjectStore())
    await coordinator.commit("run-1", 0, "beside", "beside")
    objects.put("s/0/0/2-5a.snapshot", b"rows")
    objects.put(f"s/manifest/{6:020d}.json", seal(record))
    (damage, metadata) = check_files(objects, files_of(objects, "s"), lambda size: None).damages
    assert (damage.file, damage.kind) == (f"s/manifest/{1:020d}.json", "log record")
    assert (metadata.problem, "statefleet drop" in metadata.advice) == ("it is missing", True)
    assert await coordinator.load_all_states() == ["beside"]
    status = await coordinator.status()
    assert [query["name"] for query in status["queries"]] == ["beside"]
    (unreadable,) = status["unreadable"]
    assert unreadable["name"] == "s"
    assert re.search(r"metadata\.json is missing, while its log is there.*statefleet drop", unreadable["error"])
    # The other state can still be read.
    assert await coordinator.version("beside") == 1
    with pytest.raises(CorruptStateError, match="statefleet drop"):
        await coordinator.check_start("s", "", "update")
    with pytest.raises(CorruptStateError, match="statefleet drop"):
        await coordinator.commit("run-2", 0, query="another")
    assert len(objects.list("s")) == 2, "nothing is written there"
    assert (await coordinator.drop("s", False, False)).files == 1
    await coordinator.load_all_states()
    assert (await coordinator.status())["unreadable"] == []
    assert state_names(objects) == ["beside"]
    await coordinator.commit("run-3", 0, query="another")
    assert await coordinator.version() == await QueriedCoordinator(objects).version() == 1


async def test_a_state_that_lost_only_its_metadata_is_not_taken_for_no_state() -> None:
    _, objects = await after_batches(1)
    metadata = objects.get("s/metadata.json")
    objects.delete("s/metadata.json")
    with pytest.raises(CorruptStateError, match=r"metadata\.json.*is missing.*backup"):
        await QueriedCoordinator(objects).check_state(structs.replace(CREATED, query_id="another"))
    damaged = metadata.replace(b"query", b"quary")
    objects.put("s/metadata.json", damaged)
    with pytest.raises(CorruptStateError, match=r"unreadable.*metadata\.json"):
        await QueriedCoordinator(objects).drop("s", False, False)
    objects.put("s/metadata.json", metadata)
    assert await QueriedCoordinator(objects).version() == 1


async def test_a_branch_that_was_deleted_by_hand_leaves_nothing_behind_and_frees_files() -> None:
    coordinator, objects = await after_batches(2)
    await coordinator.branch("s", "what_if", 1)
    delete_folders(objects, "what_if")
    await coordinator._cleaner._candidates(await coordinator.opened(), "s", 0.0)
    assert objects.list("what_if") == []
    assert ManifestLog(objects, "s", "").load().branches == {}
    # Files that are left there are no state.
    ManifestLog(objects, "what_if", "old").append([])
    assert state_names(objects) == ["s"]


def test_a_drop_is_in_checkpoints() -> None:
    ledger = StateLedger("memory:///s")
    ledger.fold(Dropped(CREATED.to_json()))
    reloaded = StateLedger.from_json("memory:///s", ledger.to_json())
    assert (reloaded.drops, reloaded.is_dropped, reloaded.dropped_metadata) == (1, True, CREATED.to_json())


async def test_shards_of_an_ended_query_leave_memory_after_a_configured_time_and_are_loaded_again() -> None:
    objects = MemoryObjectStore()
    coordinator = QueriedCoordinator(objects, Maintenance(unload_after_s=600))
    await coordinator.commit("run-1", 0)
    coordinator.clock.later_s = 10_000
    assert await coordinator.reassigned("s", "a", [0]) == [], "a query that runs keeps its shards, however quiet it is"
    await coordinator.deactivate_instances("run-1")
    assert await coordinator.reassigned("s", "a", [0]) == []
    coordinator.clock.later_s += 599
    assert await coordinator.reassigned("s", "a", [0]) == []
    coordinator.clock.later_s += 1
    assert await coordinator.reassigned("s", "a", [0]) == [0]
    # The query continues from the stored state, and keeps its shards as long as it runs.
    assert (await coordinator.lease("run-2", 1)).base_version == 1
    assert await coordinator.reassigned("s", "a", [0]) == []
