"""Branches: a state that begins with a version of another one, and shares its files until it has its own. Pure.

No rows are copied. The branch's log begins with the parent's ledger up to the version: the files that make its shards, in whichever
folders. From there on the branch is a state like any other, with runs, commits and snapshots of its own, in a folder of its own. Its
versions continue the parent's numbers, as the batches of a query do that starts from a copy of its checkpoint.

Files of the parent have to stay after the parent itself needs them no more:

1. Every state whose files the branch is to use writes that into its own log (:class:`~coordinator.ledger.records.BranchMade`).
2. *After that* the parent's ledger is read, and written as the first record of the branch's log.
3. The branch gets its metadata file: now it exists.

Cleaning a folder first reads which files the branches that its log names need. Then it appends a record, after which no earlier
decision can be appended any more (:mod:`coordinator.ledger.cleaning_rules`). It deletes nothing if the log then names a branch
that it did not look at. So it knows the needs of every branch that was noted before that record. A branch that is noted later
reads its parent's ledger later still, and needs no file that the parent did not need by then: an old file of another state never
becomes needed again.

While a branch is noted and does not exist yet, it may be created at any moment, so nothing is deleted. Once a coordinator has seen it
missing for a grace period, it writes into the branch's own log that there is no such state
(:class:`~coordinator.ledger.records.Dropped`). A creator that was asleep then finds its sequence number taken, reads the log, and is
refused (:func:`decide_beginning`). No clock of one machine is compared with another's. A branch that exists is noted as such
(:class:`~coordinator.ledger.records.BranchBorn`): if its folder is missing later, it was deleted, and nothing is written into it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from coordinator.ledger.read_views import finished
from coordinator.ledger.records import Branched, Committed, Record
from coordinator.ledger.rescaling import first_layout
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.errors import InvalidRequestError, VersionNotFoundError
from coordinator.model.state_metadata import StateMetadata


@dataclass(frozen=True, slots=True)
class Branch:
    """A state that began with a version of another one.

    Attributes
    ----------
    query_id
        Id of the query that owns it; empty until a query has started from it.
    shared_files, shared_bytes
        Number and bytes of the files of other states that it needs.
    batch_time_ms
        When Spark planned the batch that made the version (milliseconds since the epoch); None if that is not known.
    watermark_ms
        Its watermark, in milliseconds since the epoch.
    """

    state_name: str
    parent: str
    version: int
    query_id: str
    num_shards: int
    shared_files: int
    shared_bytes: int
    batch_time_ms: int | None
    watermark_ms: int


def first_record(ledger: StateLedger, created: StateMetadata, name: str, version: int) -> Branched:
    """Return the first record of a branch's log.

    Raises
    ------
    VersionNotFoundError
        Not every shard has the version, or it is not retained any more.
    """
    branch = StateLedger(f"{ledger.root.removesuffix(ledger.state_name)}{name}")
    # Commits to the branch have epochs above it: epochs tell which schema a commit is in.
    branch.epoch = ledger.epoch
    branch.query_id = ledger.query_id if ledger.is_of_python else ""
    if ledger.is_of_python:
        # Each of its partitions has versions of its own.
        branch.begin_with(ledger, sys.maxsize)
    else:
        _check_retained(ledger, created, version)
        branch.begin_with(ledger, version)
        # Older versions are not promised to any reader.
        for record in branch.decide_truncation(1)[0]:
            branch.fold(record)
    return Branched(ledger.state_name, version, branch.to_json())


def _check_retained(ledger: StateLedger, created: StateMetadata, version: int) -> None:
    layout = ledger.layouts.with_version(first_layout(created), version)
    oldest = max(map(ledger.oldest_readable, layout.partitions))
    newest = finished(ledger, created)
    if not max(1, oldest) <= version <= newest:
        raise VersionNotFoundError(
            "a branch begins with a version that every shard has, and that is retained; nothing was changed; "
            "`statefleet versions` shows which are, and min_versions_to_retain keeps more of them",
            state=ledger.state_name,
            version=version,
            oldest=oldest,
            newest=newest,
        )


def owners(record: Branched) -> set[str]:
    """Return :func:`owners_of` the ledger that a branch begins with."""
    ledger = StateLedger("/branch")
    ledger.fold(record)
    return owners_of(ledger)


def owners_of(ledger: StateLedger) -> set[str]:
    """Return the states whose logs name a branch: those whose files it needs, and its parent."""
    named = {file.partition("/")[0] for file in ledger.referenced_files()}
    return named if ledger.origin is None else named | {ledger.origin[0]}


def decide_beginning(ledger: StateLedger, begun: Branched, drops: int) -> list[Record]:
    """Begin a branch's log.

    Parameters
    ----------
    ledger
        The branch's own, which is empty, or has begun in the same way before.
    drops
        How many states of the name had been dropped when the branch was first noted.

    Raises
    ------
    InvalidRequestError
        There is another state of that name.
    """
    if ledger.origin == (begun.parent, begun.version):
        return []
    if ledger.drops != drops:
        raise InvalidRequestError(
            "making the branch took so long that files which it needs may be gone; it was not made; make it again",
            state=ledger.state_name,
            branch_of=begun.parent,
            version=begun.version,
        )
    if ledger.origin is not None or ledger.has_versions() or ledger.run_id:
        raise taken(ledger, begun.parent, begun.version)
    return [begun]


def taken(ledger: StateLedger, parent: str, version: int | None) -> InvalidRequestError:
    """Return the error for a name that another state has."""
    origin = {} if ledger.origin is None else {"branch_of": ledger.origin[0], "branched_at": ledger.origin[1]}
    return InvalidRequestError(
        "there is a state of that name, and it is not this branch; nothing was changed; choose another name",
        state=ledger.state_name,
        parent=parent,
        version=version,
        **origin,
    )


def described(ledger: StateLedger, created: StateMetadata) -> Branch:
    """Return the description of a branch."""
    assert ledger.origin is not None
    parent, version = ledger.origin
    layout = ledger.layouts.newest(first_layout(created))
    folder = f"{ledger.state_name}/"
    shared = {file: size for file, size in _sizes(ledger) if not file.startswith(folder)}
    first = layout.partitions[0]
    commit = ledger.commit_of(version, first)
    return Branch(
        ledger.state_name,
        parent,
        version,
        ledger.query_id,
        layout.num_shards,
        len(shared),
        sum(shared.values()),
        None if commit is None else commit.batch_time_ms,
        0 if commit is None else commit.watermark_ms,
    )


def _sizes(ledger: StateLedger) -> Iterator[tuple[str, int]]:
    """Return the files that retained versions need, each with its bytes."""
    for record in ledger.retained():
        if isinstance(record, Committed):
            yield record.entry.file, record.entry.file_bytes
        else:
            yield from ((piece.file, piece.file_bytes) for piece in record.snapshot.pieces)
