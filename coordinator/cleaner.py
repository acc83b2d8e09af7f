"""Maintenance of states by the coordinator: old versions are let go, and files that nothing needs are deleted. No Ray.

Why it is safe is told in :mod:`coordinator.cleaning_rules`, whose rules decide.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from coordinator.cleaning_rules import ListingSchedule, Pins, abandoned, orphans, prunable_records
from coordinator.core import StateLedger
from coordinator.errors import StateStoreError
from coordinator.ledger_keeper import LedgerKeeper
from coordinator.maintenance import Maintenance
from coordinator.model import LoadPlans, ShardKey
from coordinator.records import BranchMade, Record
from coordinator.storage.protocol import ObjectInfo, ObjectStore
from coordinator.surroundings import Clock

__all__ = ["Cleaner"]

log = logging.getLogger(__name__)


class Cleaner:
    """Truncates and cleans states.

    Parameters
    ----------
    store
        The fleet's object store.
    maintenance
        What is kept, and for how long.
    clock
        Ages of files are measured against the time of day, all else by what has elapsed.
    keeper
        Gives the keeper of a state's ledger, of branches whose files are not their own.
    """

    def __init__(
        self,
        store: ObjectStore,
        maintenance: Maintenance,
        clock: Clock,
        keeper: Callable[[str], Awaitable[LedgerKeeper]],
    ) -> None:
        self._store = store
        self._keeper = keeper
        self._maintenance = maintenance
        self._clock = clock
        self._started_s = clock.elapsed_s()
        self._pins = Pins(maintenance.grace_s)
        self._schedules: dict[str, ListingSchedule] = {}
        #: Branches that were never made, whose makers were kept from it.
        self._given_up: dict[str, BranchMade] = {}

    def pin(self, loading: LoadPlans) -> None:
        """Leave the files of plans alone for the grace period: somebody was told to read them."""
        files = [file for plan in loading.plans.values() for file in plan.files()]
        self._pins.add(files, self._clock.elapsed_s())

    async def round(self, keeper: LedgerKeeper, state_name: str) -> Sequence[ObjectInfo]:
        """One of the regular rounds: truncate, and clean if there may be something to find; returns the files that are gone."""
        schedule = self._schedule(state_name)
        floors, epoch = await self._truncate(keeper, dry_run=False)
        schedule.observe(self._clock.elapsed_s(), epoch, bool(floors))
        if schedule.is_due(self._clock.elapsed_s()):
            return await self._delete(keeper, state_name, schedule)
        return ()

    async def clean(self, keeper: LedgerKeeper, state_name: str, *, dry_run: bool) -> dict[str, Any]:
        """What a round does, at once; see ``Coordinator.clean``."""
        schedule = self._schedule(state_name)
        floors, _ = await self._truncate(keeper, dry_run=dry_run)
        now_s = self._clock.now_s()
        if dry_run:
            files = await self._candidates(keeper, state_name, now_s, dry_run=True)
        elif schedule.may_delete(self._clock.elapsed_s()):
            files = await self._delete(keeper, state_name, schedule)
        else:
            files = []
        return {
            "floors": [[*shard, floor] for shard, floor in floors.items()],
            "files": [{"path": info.path, "bytes": info.size, "age_s": int(now_s - info.modified_s)} for info in files],
        }

    def _schedule(self, state_name: str) -> ListingSchedule:
        return self._schedules.setdefault(state_name, ListingSchedule(self._maintenance.grace_s, self._started_s))

    async def _truncate(self, keeper: LedgerKeeper, *, dry_run: bool) -> tuple[dict[ShardKey, int], int]:
        """Floors that move, and the ledger's epoch."""
        keep = self._maintenance.min_versions_to_retain

        def decide(ledger: StateLedger) -> tuple[list[Record], tuple[dict[ShardKey, int], int]]:
            records, floors = ledger.decide_truncation(keep)
            return [] if dry_run else records, (floors, ledger.epoch)

        return await keeper.submit(decide)

    async def _candidates(
        self, keeper: LedgerKeeper, state_name: str, now_s: float, *, dry_run: bool = False
    ) -> list[ObjectInfo]:
        """What may go as far as can be said without writing to the log; `now_s` is the time of day before the call."""
        infos = await asyncio.to_thread(self._store.list, state_name)
        unfinished = await asyncio.to_thread(self._store.list_unfinished, state_name)
        referenced, branches = await keeper.submit(_referenced)
        shared = await self._shared(branches, now_s, fence=not dry_run)
        pinned = self._pins.current(self._clock.elapsed_s())
        needed = await keeper.needed(infos)
        grace_s = self._maintenance.grace_s
        return [
            *([] if shared is None else orphans(infos, referenced | shared, pinned, now_s, grace_s)),
            *prunable_records(infos, needed.seq, needed.parts, now_s, grace_s),
            *abandoned(unfinished, now_s, grace_s),
        ]

    async def _delete(self, keeper: LedgerKeeper, state_name: str, schedule: ListingSchedule) -> list[ObjectInfo]:
        """Delete what nothing needs; returns it."""
        schedule.listed(self._clock.elapsed_s())
        now_s = self._clock.now_s()
        # Before all else: see :mod:`coordinator.branches`.
        _, looked_at = await keeper.submit(_referenced)
        found = await self._candidates(keeper, state_name, now_s)
        if not found:
            return []
        referenced, branches = await keeper.submit(_referenced, fence=True)
        if branches != looked_at:
            # A branch was made meanwhile, whose needs were not looked at.
            return []
        needed = referenced | self._pins.current(self._clock.elapsed_s())
        files = [info for info in found if info.path not in needed]
        # Records go because of a checkpoint that was seen; that it can be read does not say that it outlives a power loss.
        await asyncio.to_thread(self._store.ensure_durable, f"{state_name}/checkpoints")
        await asyncio.to_thread(self._store.delete_all, [info.path for info in files])
        return files

    async def _shared(self, branches: Mapping[str, BranchMade], now_s: float, *, fence: bool) -> set[str] | None:
        """Files that branches of a state need, of whatever state; None if that is not known yet, as one is being made."""
        files: set[str] = set()
        for name, made in branches.items():
            try:
                needed = await self._needed_by(made, now_s, fence=fence)
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

    async def _needed_by(self, made: BranchMade, now_s: float, *, fence: bool) -> set[str] | None:
        keeper = await self._keeper(made.name)
        is_born, needed = await keeper.submit(_needed_by_branch)
        if not is_born and now_s * 1000 - made.made_at_ms <= self._maintenance.grace_s * 1000:
            return None
        if not is_born and fence and self._given_up.get(made.name) != made:
            # Whoever still makes it finds its place in the log taken, and that it took too long.
            is_born, needed = await keeper.submit(_needed_by_branch, fence=True)
            self._given_up[made.name] = made
        return needed


def _referenced(ledger: StateLedger) -> tuple[list[Record], tuple[set[str], dict[str, BranchMade]]]:
    return [], (ledger.referenced_files(), dict(ledger.branches))


def _needed_by_branch(ledger: StateLedger) -> tuple[list[Record], tuple[bool, set[str]]]:
    return [], (ledger.has_versions(), ledger.referenced_files())
