"""What may be deleted, and when it is worth looking: the pure rules of cleaning a state's folder.

A file is deleted once no retained version needs it, no reader has asked for it lately, and it is older than the grace period. It must
never be needed afterwards, whoever believes to be the coordinator, however long anybody sleeps between two steps. The steps of
:class:`coordinator.log.cleaner.Cleaner` are therefore, in this order:

1. The folder is listed. Only files that are older than the grace period *now* are candidates. Both times are the object store's own
   (:func:`coordinator.storage.probe.time_of_store`): no clock of a machine is asked how old a file is.
2. A record is appended to the manifest log, and what retained versions need is read off the ledger at that record. It says which of the
   candidates could still be counted; from there on they are refused (:mod:`coordinator.ledger.discards`).
3. Candidates that are not needed there are deleted.

A candidate that is not needed at the record is not needed by anything later, for only a record that counts a file makes it needed:

- A record that was decided before, and is still on its way (its writer sleeps, or its request hangs), finds its place taken by the
  record of step 2, or by what came before that. Its writer reads the log, and decides again. That is why a look that the log's next
  place is free is not enough.
- What is decided later is refused, by what the log says: by the record of step 2, or because a newer run, owner or version is there.

No clock decides whether a file counts. The grace period only spares attempts that take long: one that takes longer is refused, and its
task repeats it.

So a coordinator may sleep before step 2, and then it finds out what was decided meanwhile; or after it, and then it deletes what nobody
can have begun to need.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from coordinator.ledger.discards import DataFile
from coordinator.storage.protocol import ObjectInfo

__all__ = ["ListingSchedule", "Pins", "abandoned", "orphans", "prunable_records"]

#: Listings in a grace period in which something may be found, and grace periods between listings in which nothing is expected.
_LISTINGS_A_GRACE = 4
_GRACES_AT_REST = 24
_PART = re.compile(r"^[^/]+/parts/\d{20}-[^/]+\.json$")
_RECORD = re.compile(r"/(?P<folder>manifest|checkpoints)/(?P<seq>\d{20})\.json$")


def orphans(
    infos: Iterable[ObjectInfo], referenced: Collection[str], pinned: Collection[str], now_s: float, grace_s: float
) -> list[ObjectInfo]:
    """Data files of a state that may be deleted: of failed attempts, superseded commits and truncated versions."""
    return [
        info
        for info in infos
        if DataFile.of(info.path) is not None
        and info.path not in referenced
        and info.path not in pinned
        and now_s - info.modified_s > grace_s
    ]


def abandoned(unfinished: Iterable[ObjectInfo], now_s: float, grace_s: float) -> list[ObjectInfo]:
    """Files of writes whose writer is taken for dead.

    One that only slept finds its file gone when it goes on: it cannot give it its name, and its write fails, as any may.
    """
    return [info for info in unfinished if now_s - info.modified_s > grace_s]


def prunable_records(
    infos: Iterable[ObjectInfo], needed: int, parts: Collection[str], now_s: float, grace_s: float
) -> list[ObjectInfo]:
    """Files of the manifest log that loading does not need any more: those before the second newest checkpoint, and its records.

    The newest checkpoint may turn out unreadable, so the one before it and all records after that stay. A coordinator that has not
    looked at the log for half the grace period reads it anew before it appends (``LedgerWriter``), so a freed place is never taken.

    Parameters
    ----------
    needed
        Place in the log of the second newest checkpoint that is whole; 0 if there are not two.
    parts
        Parts of checkpoints that those from there on name. A checkpoint that is being written names some of these, and new ones.
    """

    def is_needless(info: ObjectInfo) -> bool:
        if (match := _RECORD.search(info.path)) is None:
            return _PART.search(info.path) is not None and info.path not in parts
        return int(match["seq"]) < needed + (match["folder"] == "manifest")

    return [info for info in infos if now_s - info.modified_s > grace_s and is_needless(info)]


@dataclass(slots=True)
class Pins:
    """Files that somebody was told to read, until some time after."""

    ttl_s: float
    _until: dict[str, float] = field(default_factory=dict)

    def add(self, files: Iterable[str], now_s: float) -> None:
        for file in files:
            self._until[file] = now_s + self.ttl_s

    def current(self, now_s: float) -> set[str]:
        """Pinned files; forgets those whose time is over."""
        self._until = {file: until for file, until in self._until.items() if until > now_s}
        return set(self._until)


@dataclass(slots=True)
class ListingSchedule:
    """When a state's folder is worth a listing, for which object stores charge.

    - Files are left over when versions are let go, and by attempts that fail, most of which fail because a run or a lease ended. They
      may be deleted a grace period later, so until then, and a grace period more for what a dying owner still wrote, listings
      go on: a few in a grace period, whatever happens in between. Garbage is held a quarter of the grace period longer for that.
    - A state at rest is listed when the coordinator has been there for a grace period, and then once in many: a lost answer
      of the object store can leave a file over without anybody knowing.
    - Before that nothing is listed: who was told to read what, before this coordinator started, is forgotten.

    Parameters
    ----------
    grace_s
        Seconds that an unneeded file is left alone.
    started_s
        When the coordinator started, in seconds of a clock that only elapses, as all times here.
    """

    grace_s: float
    started_s: float
    _epoch: int = -1
    _changed_s: float = 0.0
    _listed_s: float | None = None

    def observe(self, now_s: float, epoch: int, floors_moved: bool) -> None:
        """Take note of a round: the ledger's epoch, which each new run and lease raises, and whether versions were let go."""
        if floors_moved or epoch != self._epoch:
            self._epoch, self._changed_s = epoch, now_s

    def is_due(self, now_s: float) -> bool:
        """Whether to list now."""
        if not self.may_delete(now_s):
            return False
        if self._listed_s is None:
            return True
        period_s = self.grace_s * _GRACES_AT_REST if self.is_at_rest else self.grace_s / _LISTINGS_A_GRACE
        return now_s - self._listed_s >= period_s

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing that came about by the last change can still be waiting to be deleted."""
        return self._listed_s is not None and self._listed_s > self._changed_s + 2 * self.grace_s

    def may_delete(self, now_s: float) -> bool:
        """Whether readers that a former coordinator knew of are done."""
        return now_s - self.started_s > self.grace_s

    def listed(self, now_s: float) -> None:
        """Take note of a listing that was begun."""
        self._listed_s = now_s
