"""What the log tells of each version of a state, all its shards together. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from coordinator.ledger.rescaling import first_generation
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.commits import CommitEntry
from coordinator.model.identities import FastPickle
from coordinator.model.state_metadata import StateMetadata

__all__ = ["VersionStats", "version_figures"]


@dataclass(frozen=True, slots=True)
class VersionStats(FastPickle):
    """One version of a state.

    Attributes
    ----------
    committed_at_ms
        When its last shard was committed, in milliseconds since the epoch; None if the log does not tell it any more.
    num_shards
        Shards that it was committed on.
    state_rows, state_bytes
        What the shards held then.
    rows_in, rows_late
        Rows that reached the shards in its batch, and those of them that were late.
    written_bytes
        Size of the files of what it changed.
    """

    version: int
    committed_at_ms: int | None
    num_shards: int
    state_rows: int
    state_bytes: int
    rows_in: int
    rows_late: int
    written_bytes: int


def version_figures(
    ledger: StateLedger, created: StateMetadata, oldest: int, newest: int, count: int
) -> tuple[VersionStats, ...]:
    """Versions of a state, newest first.

    Parameters
    ----------
    oldest, newest
        Those that can be read.
    count
        Most to give.
    """
    first = first_generation(created)
    versions = range(newest, max(oldest - 1, newest - count), -1)
    # Committed on the shards of the version before: those that are made of a version are not there yet.
    return tuple(_figures(ledger, ledger.generations.with_version(first, version - 1), version) for version in versions)


def _figures(ledger: StateLedger, generation: ShardLayout, version: int) -> VersionStats:
    held = [list(_held(ledger, partition, version)) for partition in generation.partitions]
    # A shard of a Python program may have made no version of that number.
    made = [[entry for entry in entries if entry.version == version] for entries in held]
    whole = [entry for entries in held for entry in entries]
    changed = [entry for entries in made for entry in entries]
    return VersionStats(
        version,
        max((entry.committed_at_ms for entry in changed), default=None),
        generation.num_shards,
        sum(entry.state_rows for entry in whole),
        sum(entry.state_bytes for entry in whole),
        # Each store of a shard tells of all rows that reached it.
        sum(max((entry.rows_in for entry in entries), default=0) for entries in made),
        sum(max((entry.rows_late for entry in entries), default=0) for entries in made),
        sum(entry.file_bytes for entry in changed),
    )


def _held(ledger: StateLedger, partition: int, version: int) -> Iterator[CommitEntry]:
    """What a partition's stores were at a version, as their newest commits up to it tell."""
    newest, _ = ledger.counted(partition, version)
    for store_name in ledger.store_names([partition]):
        entry = ledger.entry_of(newest, partition, store_name)
        if entry is not None:
            yield entry
