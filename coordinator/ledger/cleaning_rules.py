"""Rules of cleaning a state's folder: which files may be deleted, and when listing is worth its price. Pure.

A file is deleted once no retained version needs it, no reader has asked for it lately, and it is older than the grace period. It must
never be needed afterwards, whichever process takes itself for the coordinator, and however long one sleeps between two steps. Therefore
:class:`coordinator.log.cleaner.Cleaner` takes these steps, in this order:

1. The folder is listed. Only files that are older than the grace period *now* are candidates. Both times are the object store's own
   (:func:`coordinator.storage.probe.time_of_store`): no clock of a machine is asked how old a file is.
2. A record is appended to the manifest log, and the files that retained versions need are read from the ledger at that record. The
record
   says which candidates an attempt could still commit; from there on every ledger refuses them
   (:meth:`coordinator.ledger.ledger_state.LedgerState.refuse_discarded`).
3. Candidates that are not needed there are deleted.

A candidate that is not needed at the record is not needed later, because only a record that commits a file makes it needed:

- A record that was decided before, and is not written yet (its writer sleeps, or its request hangs), finds its sequence number taken by
  the record of step 2, or by an earlier one. Its writer reads the log, and decides again. So it would not be enough to see that
  the next sequence number is free.
- A later decision is refused by the log: by the record of step 2, or because there is a newer run, owner or version.

An attempt whose request hangs may ask for its commit at any time, long after cleaning took its files for those of a failed attempt. No
clock decides which of the two comes first: the log does. A refused file is remembered for as long as no other rule refuses it: a delta
until its shard is leased again, or has passed its version; a snapshot until its version is not retained any more.

No clock decides whether a commit is accepted. The grace period only spares attempts that take long: one that takes longer is
refused, and its task repeats it.

So a coordinator may sleep before step 2, and then learns what was decided meanwhile; or after it, and then deletes files that no
process can have begun to need.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from coordinator.storage.protocol import ObjectInfo

#: Listings in a grace period in which something may be found, and grace periods between listings in which nothing is expected.
_LISTINGS_A_GRACE = 4
_GRACES_AT_REST = 24
#: The path of a delta, or of a part of a snapshot.
DATA_FILE = re.compile(
    r"^[^/]+/\d+/(?P<partition>\d+)/(?:[^/]+/)?(?P<version>\d+)-[0-9a-f]+(?:-\d+)?\.(?P<kind>delta|snapshot)$"
)
_PART = re.compile(r"^[^/]+/parts/\d{20}-[^/]+\.json$")
_RECORD = re.compile(r"/(?P<folder>manifest|checkpoints)/(?P<seq>\d{20})\.json$")


def orphans(infos: Iterable[ObjectInfo], needed: Collection[str], now_s: float, grace_s: float) -> list[ObjectInfo]:
    """Return the data files of a state that may be deleted: of failed attempts, superseded commits and truncated versions."""
    return [
        info
        for info in infos
        if DATA_FILE.match(info.path) and info.path not in needed and now_s - info.modified_s > grace_s
    ]


def prunable_records(
    infos: Iterable[ObjectInfo], needed: int, parts: Collection[str], now_s: float, grace_s: float
) -> list[ObjectInfo]:
    """Return the files of the manifest log that loading does not need any more: those before the second newest checkpoint, and its
    records.

    The newest checkpoint may turn out unreadable, so the one before it and all records after that stay. A coordinator that has not
    looked at the log for half the grace period reads it again before it appends (``LedgerWriter``), so a freed number is never used.

    Parameters
    ----------
    needed
        Sequence number of the second newest checkpoint that is whole; 0 if there are not two.
    parts
        Parts of checkpoints that those from there on name. A checkpoint that is being written names some of these, and new ones.
    """

    def is_needless(info: ObjectInfo) -> bool:
        if (match := _RECORD.search(info.path)) is None:
            return _PART.search(info.path) is not None and info.path not in parts
        return int(match["seq"]) < needed + (match["folder"] == "manifest")

    return [info for info in infos if now_s - info.modified_s > grace_s and is_needless(info)]


@dataclass(slots=True)
class ListingSchedule:
    """When a state's folder is worth a listing, for which object stores charge.

    - Unneeded files come from truncation, and from failed attempts, most of which fail because a run or a lease ended. They may be
      deleted a grace period later. Until then, and for one more grace period because of a dying owner's writes, the folder is listed a
      few times in each grace period, also if nothing happens meanwhile. So an unneeded file stays a quarter of the grace period longer.
    - A state at rest is listed when the coordinator has run for a grace period, and then once in many: a lost answer of the object
      store can leave a file without any process knowing.
    - Before that nothing is listed: load plans that a previous coordinator gave to readers are not known.

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
        """Register a round: the ledger's epoch, which each new run and lease raises, and whether versions were truncated."""
        if floors_moved or epoch != self._epoch:
            self._epoch, self._changed_s = epoch, now_s

    def is_due(self, now_s: float) -> bool:
        """Return whether to list now."""
        if not self.may_delete(now_s):
            return False
        if self._listed_s is None:
            return True
        period_s = self.grace_s * _GRACES_AT_REST if self.is_at_rest else self.grace_s / _LISTINGS_A_GRACE
        return now_s - self._listed_s >= period_s

    @property
    def is_at_rest(self) -> bool:
        """Whether no file that the last change made unneeded can still be waiting to be deleted."""
        return self._listed_s is not None and self._listed_s > self._changed_s + 2 * self.grace_s

    def may_delete(self, now_s: float) -> bool:
        """Return whether readers with load plans of a previous coordinator are done."""
        return now_s - self.started_s > self.grace_s

    def listed(self, now_s: float) -> None:
        """Register a listing that was begun."""
        self._listed_s = now_s
