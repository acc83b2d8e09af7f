"""Checkpoints of a state's ledger: what is written of it, and in which files. Pure.

A checkpoint is the ledger after a record of the log, so that whoever opens the state reads little. Most of it are commits and
snapshots, which only come and go: a state of ten thousand shards retains a million of them, and a batch adds ten thousand. So a large
ledger is written in *parts*:

- A part is a file of so many commits and snapshots in the order of the log, and never changed. The checkpoint itself names the parts
  before it, and has the rest: runs, leases, floors, and the commits and snapshots after its last part.
- The next checkpoint names the same parts, and those that were filled since.
- What a part says may count no more: a later record supersedes it, or a floor is above it. Reading the parts in their order and cutting
  at the floors leaves what counts (:meth:`coordinator.ledger.history_changes.ChangingHistory.load_history`).
- Parts go from the front, once every shard's floor is above all that they have: what they had superseded lies before them. Where that
  is not enough (a shard of a program that stands still), all is written anew once more than half of it is of no use.

A ledger that fits into one part has no parts: its checkpoint has all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import dropwhile
from operator import attrgetter
from typing import Any

from coordinator.ledger.records import Committed, Record, SnapshotAdded, record_from_json, record_to_json
from coordinator.ledger.state_ledger import StateLedger

__all__ = [
    "PART_RECORDS",
    "CheckpointPlan",
    "Part",
    "Since",
    "Written",
    "in_parts",
    "newest_version",
    "part_body",
    "plan_checkpoint",
    "records_of_part",
]

#: Records of a part: about a megabyte and a half, which is read and parsed in some hundredths of a second.
PART_RECORDS = 2048


@dataclass(frozen=True, slots=True)
class Part:
    """A file of commits and snapshots.

    Attributes
    ----------
    file
        Path relative to the fleet's URI.
    records
        How many it has.
    newest_version
        Newest version that one of them is about.
    """

    file: str
    records: int
    newest_version: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Written:
    """What a checkpoint was made of, for the next one: its place in the log, its parts, and the commits and snapshots after them."""

    seq: int
    parts: tuple[Part, ...] = ()
    rest: tuple[Committed | SnapshotAdded, ...] = ()


@dataclass(slots=True)
class Since:
    """Records of the log after a place, each with its own place."""

    seq: int
    records: list[tuple[int, Record]] = field(default_factory=list)

    def add(self, seq: int, records: Iterable[Record]) -> None:
        """Take note of records that were appended."""
        self.records += [(seq, record) for record in records]

    def retained_after(self, seq: int) -> Iterator[Committed | SnapshotAdded]:
        """Those after a later place that parts are made of."""
        return (one for place, one in self.records if place > seq and isinstance(one, Committed | SnapshotAdded))

    def after(self, seq: int) -> Since:
        """Those after a later place."""
        return Since(seq, [one for one in self.records if one[0] > seq])


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """What is to be written of a ledger, for good: the ledger may go on.

    Attributes
    ----------
    seq
        Place in the log of the last record that is in it.
    ledger
        The ledger with those commits and snapshots only that no part has.
    parts
        Parts that are there.
    further
        Records that are to be written as parts (:func:`in_parts`).
    rest
        The commits and snapshots after these, of which some may count no more.
    record_id
        Of the last record that is in it.
    """

    seq: int
    ledger: StateLedger
    parts: tuple[Part, ...]
    further: tuple[Committed | SnapshotAdded, ...]
    rest: tuple[Committed | SnapshotAdded, ...]
    record_id: str = ""


def plan_checkpoint(
    seq: int,
    ledger: StateLedger,
    written: Written | None,
    since: Since,
    part_records: int = PART_RECORDS,
) -> CheckpointPlan:
    """What to write of a ledger. It takes as long as there are shards and new records, but for a ledger that is written anew.

    Parameters
    ----------
    written
        What the checkpoint before was made of; None if that is not known, or it was not stored.
    since
        The newest records of the log.
    """
    size = ledger.size()
    if size <= part_records:
        return CheckpointPlan(seq, ledger.copy(ledger.retained()), (), (), ())
    if written is not None and since.seq <= written.seq:
        oldest = ledger.oldest_retained()
        parts = tuple(dropwhile(lambda part: part.newest_version < oldest, written.parts))
        records = (*written.rest, *since.retained_after(written.seq))
        if parts and sum(part.records for part in parts) + len(records) <= 2 * size + part_records:
            whole = len(records) - len(records) % part_records
            rest = records[whole:]
            return CheckpointPlan(seq, ledger.copy(filter(ledger.retains, rest)), parts, records[:whole], rest)
    return CheckpointPlan(seq, ledger.copy(()), (), tuple(ledger.retained()), ())


def in_parts(plan: CheckpointPlan, part_records: int = PART_RECORDS) -> Iterator[tuple[Committed | SnapshotAdded, ...]]:
    """Records of the parts that are to be written, a part after the other."""
    records = plan.further
    if not plan.parts:
        # A shard after the other; by versions parts go from the front as floors rise. All of them count, so their order is free.
        records = tuple(sorted(records, key=attrgetter("version")))
    return (records[at : at + part_records] for at in range(0, len(records), part_records))


def part_body(records: Sequence[Committed | SnapshotAdded]) -> dict[str, Any]:
    """A part as JSON data; :class:`~coordinator.log.manifest_log.ManifestLog` adds what it says of its place."""
    return {"records": [record_to_json(record) for record in records]}


def newest_version(records: Iterable[Committed | SnapshotAdded]) -> int:
    """Newest version that one of some records is about."""
    return max(one.version for one in records)


def records_of_part(body: dict[str, Any], part: Part) -> list[Committed | SnapshotAdded]:
    """Records of a part's JSON data.

    Raises
    ------
    ValueError, KeyError, TypeError
        It is not that part.
    """
    records = []
    for one in body["records"]:
        record = record_from_json(one)
        if not isinstance(record, Committed | SnapshotAdded):
            raise ValueError("a part of a checkpoint has commits and snapshots only")
        records.append(record)
    if len(records) != part.records or newest_version(records) != part.newest_version:
        raise ValueError("a part of a checkpoint has other records than the checkpoint says")
    return records
