"""The coordinator's rules and the manifest log: leases, accepted commits, and the effects of a crash or a zombie."""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from typing import Any

import pytest
from msgspec import structs

from coordinator.ledger.records import Record
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.ledger.state_ledger import LeaseGrant, StateLedger
from coordinator.log.ledger_writer import RECENT_S, LedgerWriter
from coordinator.log.log_end import seal, unseal
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.commits import CommitEntry
from coordinator.model.errors import (
    CommitUnknownError,
    CorruptStateError,
    FencedError,
    StateMismatchError,
    StorageUnavailableError,
)
from coordinator.model.identities import (
    PYTHON_QUERY_ID,
    ActorLocation,
    StateStoreId,
    StateStoreProviderId,
    TaskIdentity,
)
from coordinator.model.stored_json import from_json
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.lease_plans import stay_else_local
from coordinator.service.active_instances import ActiveInstances
from tests.clocks import LaterClock
from tests.memory_store import MemoryObjectStore
from tests.unit.ledger_harness import (
    ROOT,
    FakeFleetView,
    LedgerHarness,
    actor,
    data_of,
    entry,
    open_writer,
    task,
    through_json,
)
from tests.unit.observed_objects import ObservedObjectStore


def test_a_new_run_supersedes_and_the_old_run_is_fenced() -> None:
    harness = LedgerHarness()
    for batch in range(3):
        harness.commit(entry(harness.lease(task(batch=batch), actor("a")), batch + 1))
    old = harness.lease(task(batch=3), actor("a"))
    grant = harness.lease(task("run-2", 2), actor("a"))
    assert grant.base_version == 2
    harness.commit(entry(grant, 3))
    assert [(e.version, e.run_id) for e in harness.ledger.entries(0)] == [(1, "run-1"), (2, "run-1"), (3, "run-2")]
    with pytest.raises(FencedError, match="newer run"):
        harness.lease(task(batch=3), actor("a"))
    with pytest.raises(FencedError, match="newer owner"):
        harness.commit(entry(old, 4))


def test_an_epoch_counts_for_one_of_two_drivers() -> None:
    """Two drivers of a continuous query: the one that the log has first goes on, and the other one is refused."""
    harness, layout = LedgerHarness(), ShardLayout(1)

    def epoch(run: str, number: int) -> TaskIdentity:
        return structs.replace(task(run, number), is_epoch=True)

    harness.commit(entry(harness.lease(epoch("run-1", 0), actor("a")), 1))
    for record in harness.ledger.decide_epoch(epoch("run-1", 0), layout, "[3]"):
        harness.ledger.fold(through_json(record))
    assert harness.ledger.decide_epoch(epoch("run-1", 0), layout, "[3]") == []
    with pytest.raises(StateMismatchError, match="another driver ended it"):
        harness.lease(epoch("run-2", 0), actor("a"))
    paused = harness.lease(epoch("run-1", 1), actor("a"))
    harness.commit(entry(paused, 2, "of run-1"))
    harness.lease(epoch("run-2", 1), actor("a"))
    with pytest.raises(FencedError, match="a newer run"):
        harness.ledger.decide_epoch(epoch("run-1", 1), layout, "[5]")
    with pytest.raises(FencedError):
        harness.ledger.decide_epoch(epoch("run-2", 1), layout, "[4]")
    assert StateLedger.from_json(ROOT, data_of(harness.ledger)).epoch_end == (0, "[3]")


def test_a_python_program_may_open_first_the_partition_that_is_behind() -> None:
    harness = LedgerHarness()
    for version in (1, 2, 3):
        harness.commit(entry(harness.lease(task(batch=version - 1, query=PYTHON_QUERY_ID), actor("a")), version))
    grant = harness.lease(task("run-2", 0, shard=1, query=PYTHON_QUERY_ID), actor("a"))
    assert grant.base_version == 0
    assert harness.lease(task("run-2", 3, query=PYTHON_QUERY_ID), actor("a")).base_version == 3
    with pytest.raises(StateMismatchError, match="ahead of the checkpoint"):
        harness.lease(task("run-3", 1, query=PYTHON_QUERY_ID), actor("a"))


# -- Spark's StateStoreCoordinator, cases C1 and C2 -----------------------------------------------------------------


def provider(run: str, shard: int = 0) -> StateStoreProviderId:
    return StateStoreProviderId(StateStoreId(ROOT, 0, shard), run)


async def test_the_last_reporter_has_the_instance_and_learns_which_others_are_elsewhere_or_unknown() -> None:
    instances = ActiveInstances(ActorRegistry(), lambda _: open_writer(MemoryObjectStore()))
    assert instances.location(provider("run")) is None
    for name in "ab":
        await instances.report(provider("run"), actor(name), [])
        assert instances.location(provider("run")) == actor(name)
    await instances.report(provider("run", 1), actor("a"), [])
    await instances.report(provider("run", 2), actor("b"), [])
    await instances.report(provider("other"), actor("a"), [])
    other_instances = [provider("run", shard) for shard in (1, 2, 3)]
    assert await instances.report(provider("run"), actor("a"), other_instances) == other_instances[1:]
    assert instances.end("run") == 3
    assert instances.location(provider("run")) is None
    assert instances.location(provider("other")) == actor("a")


# -- the manifest log ----------------------------------------------------------------------------------------------


async def lease(ledger_writer: LedgerWriter, identity: TaskIdentity, local: ActorLocation) -> LeaseGrant:
    return await ledger_writer.decide(
        lambda ledger: ledger.decide_lease(identity, local, FakeFleetView(), stay_else_local)
    )


async def commit(ledger_writer: LedgerWriter, committed: CommitEntry) -> CommitEntry:
    (accepted,) = await ledger_writer.decide(lambda ledger: ledger.decide_commits([committed]))
    return accepted


async def test_a_store_that_stays_silent_counts_nothing() -> None:
    is_silent = False

    def drop(operation: str, path: str) -> None:
        if is_silent and operation == "put_if_absent":
            raise CommitUnknownError("nothing was stored", path=path)

    ledger_writer = await open_writer(ObservedObjectStore(drop))
    grant = await lease(ledger_writer, task(), actor("a"))
    is_silent = True
    with pytest.raises(StorageUnavailableError, match="nothing was counted"):
        await commit(ledger_writer, entry(grant, 1))
    is_silent = False
    assert await commit(ledger_writer, entry(grant, 1)) == entry(grant, 1)


async def test_an_unforeseen_error_fails_its_own_caller_only() -> None:
    store = MemoryObjectStore()

    def broken(_: StateLedger) -> tuple[list[Record], None]:
        raise ZeroDivisionError

    ledger_writer = await open_writer(store)
    grants = [await lease(ledger_writer, task(shard=shard), actor("a")) for shard in range(2)]
    ledger, lists = ledger_writer.ledger, len(store.list("clicks/manifest"))
    first, failed, second = await asyncio.gather(
        commit(ledger_writer, entry(grants[0], 1)),
        ledger_writer.decide(broken),
        commit(ledger_writer, entry(grants[1], 1)),
        return_exceptions=True,
    )
    assert (first, second) == (entry(grants[0], 1), entry(grants[1], 1))
    assert isinstance(failed, ZeroDivisionError)
    # One append, by the same ledger.
    assert ledger_writer.ledger is ledger
    assert len(store.list("clicks/manifest")) == lists + 1


@pytest.mark.parametrize("field", ["assignments", "entries", "snapshots", "floors", "late_before", "schemas"])
@pytest.mark.parametrize("damage", [7, "text", [7], None])
def test_a_checkpoint_that_is_no_ledger_is_named(field: str, damage: object) -> None:
    store = MemoryObjectStore()
    path = "clicks/checkpoints/00000000000000000003.json"
    store.put(path, seal({"seq": 3, "ledger": {**StateLedger(ROOT).to_json(), field: damage}}))
    with pytest.raises(CorruptStateError, match=path):
        ManifestLog(store, "clicks", "w").load()


async def test_an_answer_as_of_a_moment_ago_costs_no_request_right_after_the_log_was_written() -> None:
    store, clock = ObservedObjectStore(), LaterClock()
    ledger_writer = LedgerWriter(ManifestLog(store, "clicks", "w"), clock=clock)
    await ledger_writer.open()
    await lease(ledger_writer, task(), actor("a"))

    async def gets_of_a_read(max_age_s: float = 0.0) -> int:
        before = store.count("get")
        await ledger_writer.read(lambda _: None, max_age_s=max_age_s)
        return store.count("get") - before

    assert await gets_of_a_read(RECENT_S) == 0
    assert await gets_of_a_read() == 1, "it checks whether another coordinator has written"
    # A read that must be current makes all of them check the log.
    before = store.count("get")
    await asyncio.gather(ledger_writer.read(lambda _: None, max_age_s=RECENT_S), ledger_writer.read(lambda _: None))
    assert store.count("get") - before == 1
    clock.later_s += 2
    assert await gets_of_a_read(RECENT_S) == 2, "now and then it checks whether the log is still the same"
    assert await gets_of_a_read() == 1


async def test_no_answer_waits_for_a_checkpoint_and_it_has_the_state_at_the_time_it_was_due() -> None:
    gate = threading.Event()

    def hold_checkpoints(operation: str, path: str) -> None:
        assert operation != "put_if_absent" or "/checkpoints/" not in path or gate.wait(30)

    store = ObservedObjectStore(hold_checkpoints)
    ledger_writer = LedgerWriter(ManifestLog(store, "clicks", "w", checkpoint_interval=4))
    await ledger_writer.open()
    for batch in range(6):
        await asyncio.wait_for(
            commit(ledger_writer, entry(await lease(ledger_writer, task(batch=batch), actor("a")), batch + 1)), 20
        )
    checkpointing = ledger_writer._checkpointing
    assert checkpointing is not None
    assert store.list("clicks/checkpoints") == []
    # A coordinator that takes over now reads the whole log.
    assert len(ManifestLog(store, "clicks", "w").load().entries(0)) == 6
    gate.set()
    await checkpointing
    (info,) = store.list("clicks/checkpoints")
    folded = StateLedger(ROOT)
    for seq in range(1, 5):
        for record in unseal(store.get(f"clicks/manifest/{seq:020d}.json"))["records"]:
            folded.fold(from_json(record, Record))
    checkpoint = unseal(store.get(info.path))
    assert (checkpoint["seq"], checkpoint["folded"]) == (4, json.loads(json.dumps(folded.to_json())))
    assert checkpoint["record_id"] == unseal(store.get(f"clicks/manifest/{4:020d}.json"))["record_id"]
    # The next checkpoint that is due is written.
    await commit(ledger_writer, entry(await lease(ledger_writer, task(batch=6), actor("a")), 7))
    assert ledger_writer._checkpointing is not None
    await ledger_writer._checkpointing
    assert len(store.list("clicks/checkpoints")) == 2


@pytest.mark.parametrize(
    "body", [{"ledger": {}}, {"a": []}, {"b": {"y": [1, {"z": "ü"}], "x": None}, "a": [[], {}, [{"k": 1.5}]]}]
)
def test_sealed_json_is_plain_json_with_the_checksum_of_its_bytes_first(body: dict[str, Any]) -> None:
    data = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    sealed = seal(body)
    assert sealed == b'{"checksum": %d, ' % zlib.crc32(data) + data[1:]
    assert unseal(sealed) == body
    # A checksum of the JSON with sorted keys, as files had it before, is as good, wherever it is.
    checksum = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    for older in ({**body, "checksum": checksum}, {"checksum": checksum, **body}):
        assert unseal(json.dumps(older).encode()) == unseal(json.dumps(older, indent=1).encode()) == body


def test_a_changed_byte_is_detected_in_every_form_of_a_sealed_file() -> None:
    body = {"records": [{"kind": "a", "n": 12}], "also": "text"}
    older = json.dumps({**body, "checksum": zlib.crc32(json.dumps(body, sort_keys=True).encode())}).encode()
    for sealed in (seal(body), older):
        for index, byte in enumerate(sealed):
            with pytest.raises(ValueError, match=r"checksum|JSON|truncated|Invalid|UTF-8"):
                unseal(sealed[:index] + bytes([byte ^ 1]) + sealed[index + 1 :])
        for index in range(len(sealed)):
            with pytest.raises(ValueError, match=r"checksum|JSON|truncated|Invalid|UTF-8"):
                unseal(sealed[:index])
