"""Checkpoints of a state's ledger: their contents, and the files that have them. Pure.

A checkpoint is the ledger after a record of the log, so that opening a state reads little. Most of a ledger are commits and snapshots,
which are added and removed and never changed: a state of ten thousand shards retains a million of them, and a batch adds ten thousand.
So a large ledger is written in *parts*:

- A part is a file of a fixed number of commits and snapshots in the order of the log. It is never changed. The checkpoint itself names
  the parts before it, and has the rest: runs, leases, oldest retained versions (floors), and the commits and snapshots after its
  last part.
- The next checkpoint names the same parts, and those that were filled since.
- An entry of a part may be obsolete: a later record supersedes it, or its version is below a floor. Reading the parts in their
order and
  cutting at the floors leaves the valid ones (:meth:`coordinator.ledger.history_changes.ChangingHistory.load_history`).
- The oldest parts are left out once every shard's floor is above all that they have: entries that they superseded are in still older
  parts. Where that is not enough (a partition of a program that stands still), all is written again once more than half is obsolete.

A ledger that fits into one part has no parts: its checkpoint has all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile
from operator import attrgetter
from typing import Any

from msgspec import Struct

from coordinator.ledger.records import Committed, Record, SnapshotAdded
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.stored_json import from_json

#: Records of a part: about a megabyte and a half, which is read and parsed in some hundredths of a second.
PART_RECORDS = 2048


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """A file of commits and snapshots."""

    #: Path relative to the fleet's URI.
    file: str
    records: int
    newest_version: int


@dataclass(frozen=True, slots=True)
class Written:
    """The contents of a checkpoint, for the next one: its sequence number, its parts, and the commits and snapshots after them."""

    seq: int
    parts: tuple[Part, ...] = ()
    rest: tuple[Committed | SnapshotAdded, ...] = ()


@dataclass(slots=True)
class Since:
    """Records of the log after a sequence number, each with its own number."""

    seq: int
    records: list[tuple[int, Record]] = field(default_factory=list)

    def add(self, seq: int, records: Iterable[Record]) -> None:
        """Add records that were appended."""
        self.records += [(seq, record) for record in records]

    def retained_after(self, seq: int) -> Iterator[Committed | SnapshotAdded]:
        """Return the commits and snapshots after a later sequence number, which parts are made of."""
        return (
            record for number, record in self.records if number > seq and isinstance(record, Committed | SnapshotAdded)
        )

    def after(self, seq: int) -> Since:
        """Return the records after a later sequence number."""
        return Since(seq, [numbered for numbered in self.records if numbered[0] > seq])


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The contents of a checkpoint that is to be written; the ledger may change meanwhile."""

    #: Sequence number of the last record that is in it.
    seq: int
    #: The ledger without the commits and snapshots that parts have (:meth:`StateLedger.folded`).
    folded: Mapping[str, Any]
    parts: tuple[Part, ...]
    #: Records that are to be written as parts (:func:`in_parts`).
    further: tuple[Committed | SnapshotAdded, ...]
    #: The commits and snapshots after these, of which some may be obsolete.
    rest: tuple[Committed | SnapshotAdded, ...]
    record_id: str = ""


def plan_checkpoint(
    seq: int,
    ledger: StateLedger,
    written: Written | None,
    since: Since,
    part_records: int = PART_RECORDS,
) -> CheckpointPlan:
    """Return the plan of a checkpoint. It takes time by shards and new records, unless the whole ledger is written again.

    Parameters
    ----------
    written
        The contents of the checkpoint before; None if they are not known, or it was not stored.
    """
    size = ledger.size()
    if size <= part_records:
        return CheckpointPlan(seq, ledger.folded(ledger.retained()), (), (), ())
    if written is not None and since.seq <= written.seq:
        oldest = ledger.oldest_retained()
        parts = tuple(dropwhile(lambda part: part.newest_version < oldest, written.parts))
        records = (*written.rest, *since.retained_after(written.seq))
        if parts and sum(part.records for part in parts) + len(records) <= 2 * size + part_records:
            whole = len(records) - len(records) % part_records
            rest = records[whole:]
            return CheckpointPlan(seq, ledger.folded(filter(ledger.retains, rest)), parts, records[:whole], rest)
    return CheckpointPlan(seq, ledger.folded(()), (), tuple(ledger.retained()), ())


def in_parts(plan: CheckpointPlan, part_records: int = PART_RECORDS) -> Iterator[tuple[Committed | SnapshotAdded, ...]]:
    """Yield the records of each part that is to be written."""
    records = plan.further
    if not plan.parts:
        # By version, so that the oldest parts can be left out as floors rise. All entries are valid, so their order is free.
        records = tuple(sorted(records, key=attrgetter("version")))
    return (records[at : at + part_records] for at in range(0, len(records), part_records))


def newest_version(records: Iterable[Committed | SnapshotAdded]) -> int:
    """Return the newest version of some records."""
    return max(record.version for record in records)


def records_of_part(body: dict[str, Any], part: Part) -> list[Committed | SnapshotAdded]:
    """Return the records of a part's JSON data.

    Raises
    ------
    ValueError, KeyError, TypeError
        The data are not that part's.
    """
    records: list[Committed | SnapshotAdded] = from_json(body["records"], list[Committed | SnapshotAdded])
    if len(records) != part.records or newest_version(records) != part.newest_version:
        raise ValueError("a part of a checkpoint has other records than the checkpoint says")
    return records
