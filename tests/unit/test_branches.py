"""Branches of a state: what is shared, who may have the name, and that no cleaning takes away what a branch needs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from coordinator.ledger.branches import Branch
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.commits import SnapshotEntry
from coordinator.model.errors import InvalidRequestError, StateMismatchError, VersionNotFoundError
from coordinator.model.schema import Field, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.storage.memory import MemoryObjectStore
from statefleet.reads.verify import files_of
from tests.unit.coordinator_harness import (
    GRACE_S,
    CoordinatorHarness,
    GatedObjectStore,
    two_coordinators,
    wait_for_event,
)

SCHEMA = StateSchema((Field("k", "int32"),), (), (), None, None, "update")
CREATED = StateMetadata("s", "query", 1, "update", SCHEMA)
Scenario = Callable[[CoordinatorHarness, CoordinatorHarness, MemoryObjectStore, GatedObjectStore], Awaitable[None]]


async def commit(office: CoordinatorHarness, batches: range, run: str = "run-1", state: str = "s") -> list[str]:
    """Commit some batches of a query; returns their files."""
    files = []
    for batch in batches:
        begun = await office.begin(run, batch, state)
        office.objects.put(begun.file, b"delta")
        await office.count(begun, state)
        files.append(begun.file)
    # The others are, as another one followed.
    last = batches[-1]
    await (await office.opened(state)).note(lambda ledger: ledger.decide_finished(run, last), 0.0)
    return files


async def make(office: CoordinatorHarness, version: int, name: str = "what_if", parent: str = "s") -> Branch:
    created = await (await office.opened(parent)).create_metadata(CREATED)
    return await office.branching.make(created, version, name)


async def add_snapshot(office: CoordinatorHarness, state: str, version: int) -> str:
    keeper = await office.opened(state)
    assert keeper.ledger is not None
    shown = keeper.ledger.entry_of(version, 0)
    assert shown is not None
    file = f"{state}/0/0/{version}-5a.snapshot"
    office.objects.put(file, b"snapshot")
    made = SnapshotEntry(0, version, shown.attempt_id, file, 8, 2, 3, 0, shown.committed_at_ms)
    assert await keeper.decide(lambda ledger: ledger.decide_snapshot(made))
    return file


async def let_go(office: CoordinatorHarness, state: str) -> None:
    """Retain the newest version only."""
    keeper = await office.opened(state)
    await keeper.decide(lambda ledger: (ledger.decide_truncation(1)[0], None))


def needed(objects: MemoryObjectStore, state: str) -> set[str]:
    return ManifestLog(objects, state, "reader").load().referenced_files()


def stored(objects: MemoryObjectStore, state: str) -> set[str]:
    return {info.path for info in objects.list(f"{state}/0")}


def run(scenario: Scenario, hangs: str = "") -> None:
    two_coordinators(scenario, hangs)


def test_a_branch_is_the_parents_version_and_no_file_of_rows_is_written() -> None:
    async def scenario(
        old: CoordinatorHarness, new: CoordinatorHarness, objects: MemoryObjectStore, _: GatedObjectStore
    ) -> None:
        files = await commit(new, range(4))
        before = {info.path: info.size for info in objects.list("")}
        made = await make(new, 3)
        assert (made.state_name, made.parent, made.version, made.query_id) == ("what_if", "s", 3, "")
        assert (made.num_shards, made.shared_files, made.shared_bytes) == (1, 3, 3)  # a byte each, as the log has it
        written = {info.path for info in objects.list("") if before.get(info.path) != info.size}
        assert {path.split("/")[1] for path in written} == {"manifest", "metadata.json"}
        assert needed(objects, "what_if") == set(files[:3])
        # Whoever asks for it again is given it; another one under that name is not made.
        assert (
            await old.branching.existing("s", 3, "what_if")
            == await old.branching.existing("s", None, "what_if")
            == made
        )
        for parent, version in (("s", 2), ("t", 3)):
            with pytest.raises(InvalidRequestError, match="there is a state of that name"):
                await old.branching.existing(parent, version, "what_if")
        with pytest.raises(InvalidRequestError, match="there is a state of that name"):
            await make(new, 2)
        with pytest.raises(StateMismatchError, match="the state is a branch, and this checkpoint does not begin with"):
            await commit(new, range(1), "run-2", "what_if")
        # Each goes on by itself, the branch with a query of its own.
        own = await commit(new, range(3, 5), "run-2", "what_if")
        assert needed(objects, "what_if") == {*files[:3], *own}
        assert needed(objects, "s") == set(files)
        assert ManifestLog(objects, "what_if", "").load().run_id == "run-2"

    run(scenario)


def test_versions_that_are_not_there_cannot_be_branched() -> None:
    async def scenario(
        _: CoordinatorHarness, new: CoordinatorHarness, objects: MemoryObjectStore, __: GatedObjectStore
    ) -> None:
        await commit(new, range(4))
        await add_snapshot(new, "s", 3)
        await let_go(new, "s")
        for version in (0, 2, 5):
            with pytest.raises(VersionNotFoundError, match="oldest=`3` newest=`4`"):
                await make(new, version)
        assert objects.folders() == ["s"]

    run(scenario)


def test_a_name_that_a_query_has_taken_meanwhile_is_not_branched_into() -> None:
    async def scenario(
        old: CoordinatorHarness, new: CoordinatorHarness, objects: MemoryObjectStore, _: GatedObjectStore
    ) -> None:
        await commit(new, range(2))
        await new.opened("what_if")
        # Of a query that has not been given a lease yet.
        await (await old.opened("what_if")).create_metadata(replace(CREATED, state_name="what_if", num_shards=3))
        with pytest.raises(InvalidRequestError, match="there is a state of that name"):
            await make(new, 1)

    run(scenario)


def test_a_branch_whose_log_cannot_be_read_keeps_files_and_names_itself(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(
        old: CoordinatorHarness, new: CoordinatorHarness, objects: MemoryObjectStore, _: GatedObjectStore
    ) -> None:
        files = await commit(new, range(3))
        await make(new, 2)
        await add_snapshot(new, "s", 3)
        await let_go(new, "s")
        for info in objects.list("what_if/manifest"):
            objects.put(info.path, b"damaged")
        await asyncio.sleep(1.1 * GRACE_S)
        assert await old.clean() == []
        assert "it is not known which files a branch needs" in caplog.text
        assert "what_if/manifest/" in caplog.text
        assert set(files) <= stored(objects, "s")

    run(scenario)


def test_files_stay_as_long_as_a_branch_or_a_branch_of_it_needs_them() -> None:
    async def scenario(
        _: CoordinatorHarness, new: CoordinatorHarness, objects: MemoryObjectStore, __: GatedObjectStore
    ) -> None:
        files = await commit(new, range(3))
        await make(new, 2)
        own = await commit(new, range(2, 4), "run-2", "what_if")
        await make(new, 3, "deeper", "what_if")
        kept = await add_snapshot(new, "s", 3)
        await let_go(new, "s")
        await asyncio.sleep(1.1 * GRACE_S)
        assert await new.clean() == []
        assert stored(objects, "s") == {*files, kept}
        # The first branch has a snapshot of its own, and does without: the second one does not.
        await add_snapshot(new, "what_if", 4)
        await let_go(new, "what_if")
        assert needed(objects, "what_if") & set(files) == set()
        assert await new.clean() == []
        assert await new.clean("what_if") == []
        await commit(new, range(3, 4), "run-3", "deeper")
        await add_snapshot(new, "deeper", 4)
        await let_go(new, "deeper")
        await asyncio.sleep(1.1 * GRACE_S)
        # The floor's own commit is told of as long as its version is.
        assert await new.clean() == files[:2]
        assert await new.clean("what_if") == own[:1]
        assert {one.path for one in files_of(objects, "deeper").files if one.path.startswith("s/")} == set()

    run(scenario)


@pytest.mark.parametrize("hangs", ["look", "delete"])
def test_a_branch_that_is_made_while_somebody_cleans_lacks_no_file(hangs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(
        old: CoordinatorHarness, new: CoordinatorHarness, objects: MemoryObjectStore, gated: GatedObjectStore
    ) -> None:
        async def opened(state_name: str) -> LedgerWriter:
            await asyncio.to_thread(gated._pass, "look")
            return await old.opened(state_name)

        # Between what the state's log says of branches, and what these need.
        monkeypatch.setattr(old.cleaner, "_writer_of", opened)
        files = await commit(new, range(3))
        await make(new, 2)
        await add_snapshot(new, "s", 3)
        await let_go(new, "s")
        await commit(new, range(2, 3), "run-2", "what_if")
        objects.put("s/0/0/9-0f.delta", b"of a failed attempt")
        await asyncio.sleep(1.1 * GRACE_S)
        gated.gate.clear()
        cleaning = asyncio.create_task(old.clean())
        await wait_for_event(gated.reached)
        # The branch has a branch, and does without the parent's files from then on.
        made = await make(new, 2, "deeper", "what_if")
        assert made.shared_files == 2
        await add_snapshot(new, "what_if", 3)
        await let_go(new, "what_if")
        gated.gate.set()
        await cleaning
        assert needed(objects, "deeper") == set(files[:2]) <= stored(objects, "s")

    run(scenario, hangs)


def test_while_a_branch_may_come_nothing_goes_and_a_maker_who_slept_too_long_is_refused() -> None:
    async def scenario(
        old: CoordinatorHarness, new: CoordinatorHarness, objects: MemoryObjectStore, gated: GatedObjectStore
    ) -> None:
        files = await commit(new, range(3))
        await (await old.opened("s")).create_metadata(CREATED)
        await old.opened("what_if")
        await asyncio.sleep(1.1 * GRACE_S)
        gated.gate.clear()
        making = asyncio.create_task(make(old, 2))
        await wait_for_event(gated.reached)
        gated.gate.set()
        await asyncio.sleep(0)
        gated.gate.clear()
        gated.reached.clear()
        await wait_for_event(gated.reached)
        snapshot = await add_snapshot(new, "s", 3)
        await let_go(new, "s")
        assert ManifestLog(objects, "s", "").load().branches.keys() == {"what_if"}
        assert await new.clean() == []
        await asyncio.sleep(1.1 * GRACE_S)
        assert await new.clean() == files[:2]
        gated.gate.set()
        with pytest.raises(InvalidRequestError, match="took so long that files"):
            await making
        assert stored(objects, "s") == {files[2], snapshot}
        assert not ManifestLog(objects, "what_if", "").load().has_versions()
        # In time, it is made after all.
        assert (await make(new, 3)).shared_files == 2

    run(scenario, "put_if_absent")


def test_a_branch_is_told_by_checkpoints_of_the_log() -> None:
    async def scenario(
        _: CoordinatorHarness, new: CoordinatorHarness, objects: MemoryObjectStore, __: GatedObjectStore
    ) -> None:
        await commit(new, range(2))
        await make(new, 1)
        for name in ("s", "what_if"):
            log = ManifestLog(objects, name, "other", checkpoint_interval=1)
            ledger = log.load()
            log.append([])
            log.write_checkpoint(log.plan_checkpoint(ledger))
            again = ManifestLog(objects, name, "reader").load()
            assert json.dumps(again.to_json()) == json.dumps(ledger.to_json())
            assert (again.origin, again.branches) == (ledger.origin, ledger.branches)
        assert again.origin == ("s", 1)
        keeper = LedgerWriter(ManifestLog(objects, "s", "reader"))
        await keeper.open()
        assert keeper.ledger is not None
        assert keeper.ledger.branches["what_if"].version == 1

    run(scenario)
