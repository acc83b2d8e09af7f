"""A power loss at every moment, and disks that fail to sync: acknowledged files are there afterwards, and every file is whole."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from msgspec import structs

from coordinator.ledger.records import Committed, Record
from coordinator.ledger.state_ledger import LeaseGrant, StateLedger
from coordinator.log.log_end import unseal
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.commits import CommitEntry
from coordinator.model.errors import CommitUnknownError, StateStoreError, StorageUnavailableError
from coordinator.model.identities import StateStoreId
from coordinator.model.leases import Lease
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.stored_json import from_json
from coordinator.storage.local import LocalObjectStore
from tests.unit.ledger_harness import actor, entry
from tests.unit.losing_disk import KEEPS, LosingDisk, PowerLoss

METADATA = StateMetadata("clicks", "query", 2, "update")
#: Upper bound of the changes that the disk sees in the whole scenario.
MOMENTS = 200


def store_on(disk: LosingDisk, kind: type[LocalObjectStore] = LocalObjectStore) -> LocalObjectStore:
    return kind(disk.mount / "var" / "fleet", disk)


def log_on(store: LocalObjectStore, writer: str) -> ManifestLog:
    numbers = count()
    # Checkpoints have parts from the third commit on.
    return ManifestLog(
        store, "clicks", writer, new_id=lambda: f"{writer}-{next(numbers)}", checkpoint_interval=2, part_records=2
    )


def record(seq: int) -> str:
    return f"clicks/manifest/{seq:020d}.json"


def write_batches(store: LocalObjectStore, writer: str, acknowledged: list[str], batches: int) -> None:
    """Commit batches as a coordinator and store actors do; add the paths of files that callers saw as written to `acknowledged`."""
    log = log_on(store, writer)
    ledger = log.load()
    acknowledged += [info.path for info in store.list("clicks/manifest")]
    if log.load_metadata() is None:
        log.create_metadata(METADATA)
    acknowledged.append("clicks/metadata.json")
    seq = len(store.list("clicks/manifest"))
    for number in range(seq + 1, seq + 1 + batches):
        delta = f"clicks/0/{number % 2}/{number}-{writer}.delta"
        store.put(delta, f"delta {number} of {writer}".encode() * 10)
        acknowledged.append(delta)
        committed = Committed(commit(number, delta))
        log.append([committed])
        ledger.fold(committed)
        if log.is_checkpoint_due:
            log.write_checkpoint(log.plan_checkpoint(ledger))
        acknowledged.append(record(number))


def commit(version: int, file: str) -> CommitEntry:
    grant = LeaseGrant(Lease(StateStoreId("clicks", 0, 0), "run", 1, actor("a")), version - 1)
    return structs.replace(entry(grant, version), file=file)


class CrashingMachine:
    """A disk, processes that use it one after the other, and the files that they saw as written."""

    def __init__(self, folder: Path, disk: LosingDisk, kind: type[LocalObjectStore] = LocalObjectStore) -> None:
        self._folder, self.disk, self._kind = folder, disk, kind
        self.acknowledged: list[str] = []
        self._processes = 0

    def run(self, batches: int = 3) -> bool:
        """Run a process until it ends or fails, and return whether it ended."""
        self._processes += 1
        try:
            write_batches(store_on(self.disk, self._kind), f"w{self._processes}", self.acknowledged, batches)
        except (PowerLoss, StateStoreError):
            return False
        return True

    def lose_power(self) -> None:
        """Check the files after a power loss, for each choice of unsynced names that the disk keeps."""
        visible = self.disk.mount / "var" / "fleet"
        for number, keeps in enumerate(KEEPS):
            chance = random.Random(self.disk.syncs + number)
            after = self.disk.after_power_loss(keeps, self._folder / f"after-{self._processes}-{keeps}", chance)
            store = LocalObjectStore(after / "var" / "fleet")
            for info in store.list(""):
                assert store.get(info.path) == (visible / info.path).read_bytes(), f"{info.path} is there and not whole"
            remaining = {info.path for info in store.list("")}
            lost = [path for path in self.acknowledged if path not in remaining]
            assert not lost, f"acknowledged, and lost: {lost}"
            ledger, folded = log_on(store, "reader").load(), StateLedger("clicks")
            for info in store.list("clicks/manifest"):
                for record in unseal(store.get(info.path))["records"]:
                    folded.fold(from_json(record, Record))
            assert ledger.entries(0) == folded.entries(0), "a checkpoint differs from the log"


@pytest.fixture
def new_machine(tmp_path: Path) -> Iterator[Callable[..., CrashingMachine]]:
    numbers = count()

    def make(*, kind: type[LocalObjectStore] = LocalObjectStore, **how: object) -> CrashingMachine:
        folder = tmp_path / str(next(numbers))
        (folder / "seen").mkdir(parents=True)
        return CrashingMachine(folder, LosingDisk(folder / "seen", **how), kind)  # type: ignore[arg-type]

    return make


def lose_power_at_every_moment(new_machine: Callable[..., CrashingMachine], **how: object) -> None:
    for moment in range(MOMENTS):
        machine = new_machine(calls_left=moment, **how)
        ended = machine.run()
        machine.lose_power()
        if ended:
            return
    raise AssertionError("the scenario has more moments than the test checks")


def test_acknowledged_files_outlive_a_power_loss_at_any_moment(new_machine: Callable[..., CrashingMachine]) -> None:
    lose_power_at_every_moment(new_machine)


def die_at_every_moment_and_lose_power_later(new_machine: Callable[..., CrashingMachine], **how: object) -> None:
    """Let a process die with its files in the page cache, let another process read and acknowledge them, then lose power."""
    for moment in range(MOMENTS):
        machine = new_machine(calls_left=moment, **how)
        ended = machine.run()
        machine.disk.restart()
        assert machine.run(batches=0)
        machine.lose_power()
        if ended:
            return
    raise AssertionError("the scenario has more moments than the test checks")


def test_files_of_a_killed_process_count_for_the_next_process_only_once_they_are_durable(
    new_machine: Callable[..., CrashingMachine],
) -> None:
    die_at_every_moment_and_lose_power_later(new_machine)


@pytest.mark.parametrize("failures", [1, 2, 3, 1000])
def test_files_in_doubt_after_a_failed_sync_are_synced_again_or_refused(
    new_machine: Callable[..., CrashingMachine], failures: int
) -> None:
    for first in range(MOMENTS):
        machine = new_machine(broken=range(first, first + failures))
        ended = machine.run()
        machine.lose_power()
        if machine.disk.syncs <= first:
            assert ended
            return
        # The disk is repaired, and another process continues with its files.
        machine.disk.broken = range(0)
        assert machine.run()
        machine.lose_power()
    raise AssertionError("the scenario has more syncs than the test checks")


def test_the_same_process_goes_on_after_failed_syncs(new_machine: Callable[..., CrashingMachine]) -> None:
    """Retry as tasks do: a folder whose sync failed after it was made is there at the second attempt."""
    for first in range(MOMENTS):
        machine = new_machine(broken=range(first, first + 1))
        store = store_on(machine.disk)
        for number in range(3):
            path = f"clicks/0/{number}/1-a.delta"
            with suppress(StorageUnavailableError):
                store.put(path, b"first attempt")
                machine.acknowledged.append(path)
                continue
            store.put(path, b"second attempt")
            machine.acknowledged.append(path)
        machine.lose_power()
        if machine.disk.syncs <= first:
            return
    raise AssertionError("the scenario has more syncs than the test checks")


class TrustingObjectStore(LocalObjectStore):
    """A store that assumes that files it reads are durable."""

    def ensure_durable(self, path: str) -> None:
        pass


@pytest.mark.parametrize("ignored", ["content", "names of files", "names of folders"])
def test_an_ignored_sync_is_detected(new_machine: Callable[..., CrashingMachine], ignored: str) -> None:
    with pytest.raises(AssertionError, match=r"not whole|and lost"):
        lose_power_at_every_moment(new_machine, ignored=ignored)


def test_a_reader_that_trusts_files_that_are_not_durable_is_detected(
    new_machine: Callable[..., CrashingMachine],
) -> None:
    with pytest.raises(AssertionError, match="and lost"):
        die_at_every_moment_and_lose_power_later(new_machine, kind=TrustingObjectStore)


def test_a_record_whose_folder_cannot_be_synced_is_no_success(new_machine: Callable[..., CrashingMachine]) -> None:
    machine = new_machine()
    log = log_on(store_on(machine.disk), "writer")
    log.load()
    log.append([])
    # One more sync makes the content durable. After it the disk fails.
    machine.disk.broken = range(machine.disk.syncs + 1, 10_000)
    with pytest.raises(CommitUnknownError, match=r"may not outlive a power loss.*file=`clicks/manifest"):
        log.append([])
    with pytest.raises(StorageUnavailableError, match="nothing that rests on them is answered"):
        log_on(store_on(machine.disk), "successor").load()
    machine.disk.broken = range(0)
    log_on(store_on(machine.disk), "successor").load()
    machine.acknowledged.append(record(2))
    machine.lose_power()


def test_a_folder_that_is_removed_and_made_again_is_synced_again(new_machine: Callable[..., CrashingMachine]) -> None:
    machine = new_machine()
    store = store_on(machine.disk)
    store.put("state/0/1-a.delta", b"1")
    folder = machine.disk.mount / "var" / "fleet" / "state" / "0"
    machine.disk.unlink(folder / "1-a.delta")
    machine.disk.rmdir(folder)
    store.put("state/0/2-a.delta", b"2")
    machine.acknowledged.append("state/0/2-a.delta")
    machine.lose_power()


class ClosedFolderDisk(LosingDisk):
    """A disk on which one folder above the store's may be entered, but not read."""

    closed: Path

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        if path == self.closed and not flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "simulated: not yours to read", str(path))
        return super().open(path, flags, mode)


def test_a_folder_above_that_may_not_be_read_is_not_in_the_way(tmp_path: Path) -> None:
    disk = ClosedFolderDisk(tmp_path)
    disk.mkdir(tmp_path / "home")
    disk.mkdir(tmp_path / "home" / "me")
    disk.closed = tmp_path / "home"
    store = LocalObjectStore(tmp_path / "home" / "me" / "fleet", disk)
    store.put("a/b", b"1")
    assert store.get("a/b") == b"1"
    # A folder of the store itself must be readable.
    disk.closed = tmp_path / "home" / "me" / "fleet"
    with pytest.raises(StorageUnavailableError, match="permissions"):
        store.put("c/d", b"1")
