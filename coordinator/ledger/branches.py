"""Branches: a state that begins with a version of another one, and shares its files until it has its own. Pure.

Nothing of the state's rows is copied. The branch's log begins with the parent's ledger as far as it leads to the version: which files
its shards are made of, wherever these lie. From there on it is a state like any other, with runs, commits and snapshots of its own, in
a folder of its own. Its versions go on counting from the parent's, as the batches of a query do that goes on from a copy of its
checkpoint.

Files of the parent must outlive the parent's own need of them:

1. Every state whose files the branch is to use takes note of it in its log (:class:`~coordinator.ledger.records.BranchMade`).
2. *After that* the parent's ledger is read, and written as the first record of the branch's log.
3. The branch gets its metadata: now it is there.

Whoever cleans a folder looks *first* at what the branches that its log names need, *then* appends the record behind which nothing
can come that was decided before (:mod:`coordinator.ledger.cleaning_rules`), and deletes nothing if that log names a branch which
was not looked at. So of a branch that is noted before that record it knows what it needs. One that is noted later reads its
parent's ledger later still, and needs nothing that the parent did not need when it was looked at: an old file of another state is
never needed anew.

A branch that is noted and not there yet may come any moment, so nothing is deleted. Once a coordinator has seen it missing for a
grace period, it writes into the branch's own log that there is no such state (:class:`~coordinator.ledger.records.Dropped`): what
the maker, who slept, still has on its way is refused its place, and decided again, by a log that says so
(:func:`decide_beginning`). No clock of one machine is compared with another's. A branch that was there is noted as such
(:class:`~coordinator.ledger.records.BranchBorn`): if its folder is missing, it was deleted, and nothing is written into it.
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

__all__ = ["Branch", "decide_beginning", "described", "first_record", "owners", "owners_of", "taken"]


@dataclass(frozen=True, slots=True)
class Branch:
    """A state that began with a version of another one.

    Attributes
    ----------
    query_id
        Of the query that owns it; empty until one has gone on from it.
    shared_files, shared_bytes
        Files of other states that it needs.
    batch_time_ms
        When Spark planned the batch that made the version (milliseconds since the epoch); None if that is not known.
    watermark_ms
        Where event time stood after it.
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
    """What the log of a branch begins with.

    Parameters
    ----------
    ledger, created
        The parent's.
    name
        The branch's.

    Raises
    ------
    VersionNotFoundError
        Not every shard has the version, or it is not retained any more.
    """
    branch = StateLedger(f"{ledger.root.removesuffix(ledger.state_name)}{name}")
    # Above it are the epochs of what is committed to the branch: they tell which schema that is in.
    branch.epoch = ledger.epoch
    branch.query_id = ledger.query_id if ledger.is_of_python else ""
    if ledger.is_of_python:
        # Each of its partitions goes on by itself.
        branch.begin_with(ledger, sys.maxsize)
    else:
        _check_retained(ledger, created, version)
        branch.begin_with(ledger, version)
        # Of older versions nobody was promised anything.
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
    """States whose files a branch needs."""
    return {file.partition("/")[0] for file in _ledger_of(record).referenced_files()} | {record.parent}


def owners_of(ledger: StateLedger) -> set[str]:
    """States that took note of a branch, or of one that it is a branch of: those whose files it needs, and its parent."""
    named = {file.partition("/")[0] for file in ledger.referenced_files()}
    return named if ledger.origin is None else named | {ledger.origin[0]}


def _ledger_of(record: Branched) -> StateLedger:
    ledger = StateLedger("/branch")
    ledger.fold(record)
    return ledger


def decide_beginning(ledger: StateLedger, begun: Branched, drops: int) -> list[Record]:
    """Begin a branch's log.

    Parameters
    ----------
    ledger
        The branch's own, which has nothing yet, or has begun just so before.
    drops
        How many states of the name were no more when the first state took note of this one.

    Raises
    ------
    InvalidRequestError
        There is something else under that name.
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
    """The error for a name that another state has."""
    told = {} if ledger.origin is None else {"branch_of": ledger.origin[0], "branched_at": ledger.origin[1]}
    return InvalidRequestError(
        "there is a state of that name, and it is not this branch; nothing was changed; choose another name",
        state=ledger.state_name,
        parent=parent,
        version=version,
        **told,
    )


def described(ledger: StateLedger, created: StateMetadata) -> Branch:
    """What a branch is like."""
    assert ledger.origin is not None
    parent, version = ledger.origin
    layout = ledger.layouts.newest(first_layout(created))
    own = f"{ledger.state_name}/"
    shared = {file: size for file, size in _sizes(ledger) if not file.startswith(own)}
    first = layout.partitions[0]
    made = ledger.commit_of(version, first)
    return Branch(
        ledger.state_name,
        parent,
        version,
        ledger.query_id,
        layout.num_shards,
        len(shared),
        sum(shared.values()),
        None if made is None else made.batch_time_ms,
        0 if made is None else made.watermark_ms,
    )


def _sizes(ledger: StateLedger) -> Iterator[tuple[str, int]]:
    """Files that retained versions need, each with its bytes."""
    for record in ledger.retained():
        if isinstance(record, Committed):
            yield record.entry.file, record.entry.file_bytes
        else:
            yield from ((piece.file, piece.file_bytes) for piece in record.snapshot.pieces)
