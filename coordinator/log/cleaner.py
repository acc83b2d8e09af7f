"""Maintenance of states by the coordinator: logs are truncated, and files that nothing needs are deleted. No Ray.

:mod:`coordinator.ledger.cleaning_rules` has the rules, and says why they are safe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from coordinator.ledger.cleaning_rules import ListingSchedule, orphans, prunable_records
from coordinator.ledger.records import BranchBorn, BranchEnded, BranchMade, Dropped, Record
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.model.errors import StateStoreError
from coordinator.model.identities import ShardKey
from coordinator.model.load_plans import LoadPlans
from coordinator.model.maintenance import Maintenance
from coordinator.runtime.runtime import Clock, now_ms
from coordinator.storage.probe import time_of_store
from coordinator.storage.protocol import ObjectInfo, ObjectStore

log = logging.getLogger(__name__)


class Cleaner:
    """Truncates and cleans states.

    Parameters
    ----------
    clock
        Measures elapsed time. Ages of files are measured by the object store's own times.
    writer_of
        Returns the writer of a state's ledger: of branches, whose files may belong to other states.
    notice_deleted
        Drops a state from memory if its folder was deleted.
    """

    def __init__(
        self,
        store: ObjectStore,
        maintenance: Maintenance,
        clock: Clock,
        writer_of: Callable[[str], Awaitable[LedgerWriter]],
        notice_deleted: Callable[[str], Awaitable[None]],
    ) -> None:
        self._notice_deleted = notice_deleted
        self._store = store
        self._writer_of = writer_of
        self._maintenance = maintenance
        self._clock = clock
        self._started_s = clock.elapsed_s()
        #: Files that readers were given in load plans, each with the time until which it stays.
        self._pinned_until_s: dict[str, float] = {}
        self._schedules: dict[str, ListingSchedule] = {}
        #: Branches that are in a log and do not exist yet, each with the time since which that was seen.
        self._unborn: dict[str, tuple[BranchMade, float]] = {}

    def pin(self, loading: LoadPlans) -> None:
        """Keep the files of load plans for the grace period: a reader has the plans."""
        files = (file for plan in loading.plans.values() for file in plan.files())
        self._pinned_until_s |= dict.fromkeys(files, self._clock.elapsed_s() + self._maintenance.grace_s)

    def _pinned(self) -> set[str]:
        """Return the pinned files; files whose time is over are forgotten."""
        now_s = self._clock.elapsed_s()
        self._pinned_until_s = {file: until_s for file, until_s in self._pinned_until_s.items() if until_s > now_s}
        return set(self._pinned_until_s)

    async def round(self, writer: LedgerWriter, state_name: str) -> Sequence[ObjectInfo]:
        """Run a regular round: truncate, and clean if there may be something to find; returns the deleted files."""
        schedule = self._schedule(state_name)
        floors, epoch = await self._truncate(writer, dry_run=False)
        schedule.observe(self._clock.elapsed_s(), epoch, bool(floors))
        if schedule.is_due(self._clock.elapsed_s()):
            return await self._delete(writer, state_name, schedule)
        return ()

    def is_at_rest(self, state_name: str) -> bool:
        """Return whether regular rounds have nothing more to do for a state until something happens to it."""
        return self._schedule(state_name).is_at_rest

    async def clean(self, writer: LedgerWriter, state_name: str, *, dry_run: bool) -> dict[str, Any]:
        """Run a round at once; see :meth:`~coordinator.service.coordinator.Coordinator.clean`."""
        schedule = self._schedule(state_name)
        floors, _ = await self._truncate(writer, dry_run=dry_run)
        now_s = 0.0
        if dry_run:
            now_s = await asyncio.to_thread(time_of_store, self._store)
            files = await self._candidates(writer, state_name, now_s, dry_run=True)
        elif schedule.may_delete(self._clock.elapsed_s()):
            files = await self._delete(writer, state_name, schedule)
            now_s = await asyncio.to_thread(time_of_store, self._store) if files else 0.0
        else:
            files = []
        return {
            "floors": [[*shard, floor] for shard, floor in floors.items()],
            "files": [{"path": info.path, "bytes": info.size, "age_s": int(now_s - info.modified_s)} for info in files],
        }

    def _schedule(self, state_name: str) -> ListingSchedule:
        return self._schedules.setdefault(state_name, ListingSchedule(self._maintenance.grace_s, self._started_s))

    async def _truncate(self, writer: LedgerWriter, *, dry_run: bool) -> tuple[dict[ShardKey, int], int]:
        """Truncate, and return the oldest retained versions that move, with the ledger's epoch."""
        keep, retain_s = self._maintenance.min_versions_to_retain, self._maintenance.retain_s
        since_ms = now_ms(self._clock) - 1000 * retain_s if retain_s else None

        def decide(ledger: StateLedger) -> tuple[list[Record], tuple[dict[ShardKey, int], int]]:
            records, floors = ledger.decide_truncation(keep, since_ms)
            return [] if dry_run else records, (floors, ledger.epoch)

        return await writer.decide(decide)

    async def _candidates(
        self, writer: LedgerWriter, state_name: str, now_s: float, *, dry_run: bool = False
    ) -> list[ObjectInfo]:
        """Return the files that may go, as far as can be said without writing to the log.

        `now_s` is the object store's time before the call.
        """
        infos = await asyncio.to_thread(self._store.list, state_name)
        unfinished = await asyncio.to_thread(self._store.list_unfinished, state_name)
        referenced, branches = await writer.read(_referenced)
        shared = await self._shared(writer, branches, may_write=not dry_run)
        needed = await writer.needed(infos)
        grace_s = self._maintenance.grace_s
        return [
            *([] if shared is None else orphans(infos, referenced | shared | self._pinned(), now_s, grace_s)),
            *prunable_records(infos, needed.seq, needed.parts, now_s, grace_s),
            # Their writers are taken for dead. One that was only asleep finds its file gone: its write fails, as any write may.
            *(info for info in unfinished if now_s - info.modified_s > grace_s),
        ]

    async def _delete(self, writer: LedgerWriter, state_name: str, schedule: ListingSchedule) -> list[ObjectInfo]:
        """Delete the files that nothing needs, and return them."""
        schedule.listed(self._clock.elapsed_s())
        now_s = await asyncio.to_thread(time_of_store, self._store)
        # Before listing: see :mod:`coordinator.ledger.branches`.
        _, looked_at = await writer.read(_referenced)
        candidates = await self._candidates(writer, state_name, now_s)
        if not candidates:
            return []

        def discard(ledger: StateLedger) -> tuple[list[Record], tuple[set[str], dict[str, BranchMade]]]:
            return ledger.decide_discard(info.path for info in candidates), _referenced(ledger)

        referenced, branches = await writer.fence(discard)
        if not branches.items() <= looked_at.items():
            # A branch was made meanwhile, and it is not known which files it needs.
            return []
        needed = referenced | self._pinned()
        files = [info for info in candidates if info.path not in needed]
        # Records go because of a checkpoint that was read; that it can be read does not prove that it outlives a power loss.
        await asyncio.to_thread(self._store.ensure_durable, f"{state_name}/checkpoints")
        await asyncio.to_thread(self._store.delete_all, [info.path for info in files])
        return files

    async def _shared(
        self, writer: LedgerWriter, branches: Mapping[str, BranchMade], *, may_write: bool
    ) -> set[str] | None:
        """Return the files that branches of a state need, of any state; None if that is not known yet, as one is being made.

        Branches that exist by now, and branches that are no more, are written to the state's log.
        """
        files: set[str] = set()
        for name, branch in branches.items():
            try:
                needed = await self._needed_by(writer, branch, may_write=may_write)
            except StateStoreError as error:
                log.warning(
                    "nothing is deleted, as it is not known which files a branch needs: %s",
                    error,
                    extra={"state": name},
                )
                return None
            if needed is None:
                return None
            files |= needed
        return files

    async def _needed_by(self, parent: LedgerWriter, branch: BranchMade, *, may_write: bool) -> set[str] | None:
        """Return the files that a branch needs, none if there is no such state any more; None if it may just be being made."""
        await self._notice_deleted(branch.name)
        writer = await self._writer_of(branch.name)
        was_born = await parent.read(lambda ledger: branch.name in ledger.born)
        is_there, needed = await writer.read(_needed_by_branch)
        if is_there:
            if may_write and not was_born:
                await parent.decide(partial(_noted, branch, BranchBorn(branch.name)))
            return needed
        if was_born:
            if may_write and await parent.decide(partial(_noted, branch, BranchEnded(branch.name))):
                log.warning(
                    "a branch of a state is not there any more, so what it needed of the state's files is let go",
                    extra={"state": branch.name},
                )
            return set()
        now_s = self._clock.elapsed_s()
        noted, since_s = self._unborn.setdefault(branch.name, (branch, now_s))
        if noted != branch:
            since_s = now_s
            self._unborn[branch.name] = branch, since_s
        if now_s - since_s <= self._maintenance.grace_s or not may_write:
            return None
        # A process that still makes it finds its sequence number in the log taken, and reads there that it is not to be made.
        needed = await writer.decide(_given_up)
        if not needed:
            await parent.decide(partial(_noted, branch, BranchEnded(branch.name)))
        return needed


def _noted(branch: BranchMade, record: Record, ledger: StateLedger) -> tuple[list[Record], bool]:
    """Decide the record of what became of a branch, unless another one of its name was made since."""
    is_that = ledger.branches.get(branch.name) == branch
    return [record] if is_that else [], is_that


def _given_up(ledger: StateLedger) -> tuple[list[Record], set[str]]:
    if ledger.has_versions() or ledger.run_id:
        return [], ledger.referenced_files()
    return [Dropped()], set()


def _referenced(ledger: StateLedger) -> tuple[set[str], dict[str, BranchMade]]:
    return ledger.referenced_files(), dict(ledger.branches)


def _needed_by_branch(ledger: StateLedger) -> tuple[bool, set[str]]:
    return ledger.has_versions(), ledger.referenced_files()
