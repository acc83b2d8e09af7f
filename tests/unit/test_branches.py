"""Branches of a state: which files are shared, which names may be used, and that cleaning keeps the files that a branch needs."""

from __future__ import annotations

import asyncio
import json

import pytest
from msgspec import structs

from coordinator.ledger.branches import Branch
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.errors import InvalidRequestError, StateMismatchError, VersionNotFoundError
from statefleet.reads.verify import files_of
from tests.memory_store import MemoryObjectStore
from tests.unit.ledger_harness import snapshot_of
from tests.unit.service_harness import CREATED, GRACE_S, QueriedCoordinator, two_coordinators


async def commit(coordinator: QueriedCoordinator, batches: range, run: str = "run-1", state: str = "s") -> list[str]:
    """Commit batches of a query and return their files."""
    files = [(await coordinator.commit(run, batch, state)).file for batch in batches]
    # The batches before the last are finished already, since another one followed.
    await coordinator.batch_finished([state], run, batches[-1], 0.0)
    return files


async def create_branch(
    coordinator: QueriedCoordinator, version: int, name: str = "what_if", parent: str = "s"
) -> Branch:
    created = await (await coordinator.opened(parent)).create_metadata(CREATED)
    return await coordinator._versions._branching.make(created, version, name)


async def add_snapshot(coordinator: QueriedCoordinator, state: str, version: int) -> str:
    writer = await coordinator.opened(state)
    assert writer.ledger is not None
    commit_entry = writer.ledger.entry_of(version, 0)
    assert commit_entry is not None
    file = f"{state}/0/0/{version}-5a.snapshot"
    coordinator.objects.put(file, b"snapshot")
    snapshot = snapshot_of(commit_entry, file)
    assert await writer.decide(lambda ledger: ledger.decide_snapshot(snapshot))
    return file


async def keep_newest_only(coordinator: QueriedCoordinator, state: str) -> None:
    """Truncate a state so that only its newest version is retained."""
    writer = await coordinator.opened(state)
    await writer.decide(lambda ledger: (ledger.decide_truncation(1)[0], None))


def needed(objects: MemoryObjectStore, state: str) -> set[str]:
    return ManifestLog(objects, state, "reader").load().referenced_files()


def stored(objects: MemoryObjectStore, state: str) -> set[str]:
    return {info.path for info in objects.list(f"{state}/0")}


async def test_a_branch_is_the_parents_version_and_no_file_of_rows_is_written() -> None:
    old, new, objects, _ = await two_coordinators()
    files = await commit(new, range(4))
    before = {info.path: info.size for info in objects.list("")}
    branch = await create_branch(new, 3)
    assert (branch.state_name, branch.parent, branch.version, branch.query_id) == ("what_if", "s", 3, "")
    # A byte each, as the log has it.
    assert (branch.num_shards, branch.shared_files, branch.shared_bytes) == (1, 3, 3)
    written = {info.path for info in objects.list("") if before.get(info.path) != info.size}
    assert {path.split("/")[1] for path in written} == {"manifest", "metadata.json"}
    assert needed(objects, "what_if") == set(files[:3])
    # A repeated request returns the branch; another branch under that name is refused.
    assert await old.branch("s", "what_if", 3) == await old.branch("s", "what_if", None) == branch
    for parent, version in (("s", 2), ("t", 3)):
        with pytest.raises(InvalidRequestError, match="there is a state of that name"):
            await old.branch(parent, "what_if", version)
    with pytest.raises(InvalidRequestError, match="there is a state of that name"):
        await create_branch(new, 2)
    with pytest.raises(StateMismatchError, match="the state is a branch, and this checkpoint does not begin with"):
        await commit(new, range(1), "run-2", "what_if")
    # State and branch continue independently, the branch with its own query.
    branch_files = await commit(new, range(3, 5), "run-2", "what_if")
    assert needed(objects, "what_if") == {*files[:3], *branch_files}
    assert needed(objects, "s") == set(files)
    assert ManifestLog(objects, "what_if", "").load().run_id == "run-2"


async def test_versions_that_are_not_there_cannot_be_branched() -> None:
    _, new, objects, _ = await two_coordinators()
    await commit(new, range(4))
    await add_snapshot(new, "s", 3)
    await keep_newest_only(new, "s")
    for version in (0, 2, 5):
        with pytest.raises(VersionNotFoundError, match="oldest=`3` newest=`4`"):
            await create_branch(new, version)
    assert objects.folders() == ["s"]


async def test_a_name_that_a_query_took_meanwhile_is_refused_for_a_branch() -> None:
    old, new, _, __ = await two_coordinators()
    await commit(new, range(2))
    await new.opened("what_if")
    # The metadata of a query that has no lease yet.
    await (await old.opened("what_if")).create_metadata(structs.replace(CREATED, state_name="what_if", num_shards=3))
    with pytest.raises(InvalidRequestError, match="there is a state of that name"):
        await create_branch(new, 1)


async def test_a_branch_whose_log_cannot_be_read_keeps_files_and_names_itself(caplog: pytest.LogCaptureFixture) -> None:
    old, new, objects, _ = await two_coordinators()
    files = await commit(new, range(3))
    await create_branch(new, 2)
    await add_snapshot(new, "s", 3)
    await keep_newest_only(new, "s")
    for info in objects.list("what_if/manifest"):
        objects.put(info.path, b"damaged")
    await asyncio.sleep(1.1 * GRACE_S)
    assert await old.cleaned() == []
    assert "it is not known which files a branch needs" in caplog.text
    assert "what_if/manifest/" in caplog.text
    assert set(files) <= stored(objects, "s")


async def test_files_stay_as_long_as_a_branch_or_a_branch_of_it_needs_them() -> None:
    _, new, objects, _ = await two_coordinators()
    files = await commit(new, range(3))
    await create_branch(new, 2)
    branch_files = await commit(new, range(2, 4), "run-2", "what_if")
    await create_branch(new, 3, "deeper", "what_if")
    snapshot = await add_snapshot(new, "s", 3)
    await keep_newest_only(new, "s")
    await asyncio.sleep(1.1 * GRACE_S)
    assert await new.cleaned() == []
    assert stored(objects, "s") == {*files, snapshot}
    # The first branch now has its own snapshot and does not need the parent's files; the second branch still does.
    await add_snapshot(new, "what_if", 4)
    await keep_newest_only(new, "what_if")
    assert needed(objects, "what_if") & set(files) == set()
    assert await new.cleaned() == []
    assert await new.cleaned("what_if") == []
    await commit(new, range(3, 4), "run-3", "deeper")
    await add_snapshot(new, "deeper", 4)
    await keep_newest_only(new, "deeper")
    await asyncio.sleep(1.1 * GRACE_S)
    # The commit of the oldest retained version is kept as long as the version is.
    assert await new.cleaned() == files[:2]
    assert await new.cleaned("what_if") == branch_files[:1]
    assert {file.path for file in files_of(objects, "deeper").files if file.path.startswith("s/")} == set()


@pytest.mark.parametrize("hangs", ["look", "delete_all"])
async def test_a_branch_that_is_created_while_a_coordinator_cleans_lacks_no_file(
    hangs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, objects, gated = await two_coordinators(hangs)

    async def opened(state_name: str) -> LedgerWriter:
        await asyncio.to_thread(gated.pass_gate, "look")
        return await old.opened(state_name)

    # The cleaner hangs between reading the state's branches and reading which files they need.
    monkeypatch.setattr(old._cleaner, "_writer_of", opened)
    files = await commit(new, range(3))
    await create_branch(new, 2)
    await add_snapshot(new, "s", 3)
    await keep_newest_only(new, "s")
    await commit(new, range(2, 3), "run-2", "what_if")
    objects.put("s/0/0/9-0f.delta", b"of a failed attempt")
    await asyncio.sleep(1.1 * GRACE_S)
    gated.gate.clear()
    cleaning = asyncio.create_task(old.cleaned())
    await gated.wait_until_it_hangs()
    # The branch gets a branch, and then does not need the parent's files any more.
    branch = await create_branch(new, 2, "deeper", "what_if")
    assert branch.shared_files == 2
    await add_snapshot(new, "what_if", 3)
    await keep_newest_only(new, "what_if")
    gated.gate.set()
    await cleaning
    assert needed(objects, "deeper") == set(files[:2]) <= stored(objects, "s")


async def test_while_a_branch_may_come_nothing_is_deleted_and_a_creator_that_slept_too_long_is_refused() -> None:
    old, new, objects, gated = await two_coordinators("put_if_absent")
    files = await commit(new, range(3))
    await (await old.opened("s")).create_metadata(CREATED)
    await old.opened("what_if")
    await asyncio.sleep(1.1 * GRACE_S)
    gated.gate.clear()
    creating = asyncio.create_task(create_branch(old, 2))
    await gated.wait_until_it_hangs()
    gated.gate.set()
    await asyncio.sleep(0)
    gated.gate.clear()
    gated.reached.clear()
    await gated.wait_until_it_hangs()
    snapshot = await add_snapshot(new, "s", 3)
    await keep_newest_only(new, "s")
    assert ManifestLog(objects, "s", "").load().branches.keys() == {"what_if"}
    assert await new.cleaned() == []
    await asyncio.sleep(1.1 * GRACE_S)
    assert await new.cleaned() == files[:2]
    gated.gate.set()
    with pytest.raises(InvalidRequestError, match="took so long that files"):
        await creating
    assert stored(objects, "s") == {files[2], snapshot}
    assert not ManifestLog(objects, "what_if", "").load().has_versions()
    # Within the time it is created.
    assert (await create_branch(new, 3)).shared_files == 2


async def test_checkpoints_of_the_log_have_the_branches() -> None:
    _, new, objects, _ = await two_coordinators()
    await commit(new, range(2))
    await create_branch(new, 1)
    for name in ("s", "what_if"):
        log = ManifestLog(objects, name, "other", checkpoint_interval=1)
        ledger = log.load()
        log.append([])
        log.write_checkpoint(log.plan_checkpoint(ledger))
        reloaded = ManifestLog(objects, name, "reader").load()
        assert json.dumps(reloaded.to_json()) == json.dumps(ledger.to_json())
        assert (reloaded.origin, reloaded.branches) == (ledger.origin, ledger.branches)
        branches = {child: kept.version for child, kept in reloaded.branches.items()}
        assert (reloaded.origin, branches) == ((None, {"what_if": 1}) if name == "s" else (("s", 1), {}))
