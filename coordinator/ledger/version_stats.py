"""Statistics of each version of a state from its log, all shards together. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from coordinator.ledger.batch_stats import BatchStats
from coordinator.ledger.rescaling import first_layout
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.commits import CommitEntry
from coordinator.model.state_metadata import StateMetadata


class VersionStats(Struct, frozen=True):
    """Statistics of a version of a state.

    Attributes
    ----------
    committed_at_ms
        When its last shard was committed, in milliseconds since the epoch; None if the log does not say so any more.
    num_shards
        Shards that it was committed on.
    state_rows, state_bytes
        Rows and bytes of the shards then.
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


def version_stats(
    ledger: StateLedger, created: StateMetadata, oldest: int, newest: int, count: int
) -> tuple[VersionStats, ...]:
    """Return versions of a state, newest first.

    Parameters
    ----------
    oldest, newest
        The oldest and the newest version that can be read.
    """
    first = first_layout(created)
    versions = range(newest, max(oldest - 1, newest - count), -1)
    # A version is committed on the shards of the version before: shards that are made of it come later.
    return tuple(_stats_of(ledger, ledger.layouts.with_version(first, version - 1), version) for version in versions)


def _stats_of(ledger: StateLedger, layout: ShardLayout, version: int) -> VersionStats:
    resident = [list(_newest_commits(ledger, partition, version)) for partition in layout.partitions]
    # A shard of a Python program may have committed no version of that number.
    changed = [[entry for entry in entries if entry.version == version] for entries in resident]
    batch = BatchStats([entries for entries in changed if entries])
    whole = BatchStats([entries for entries in resident if entries])
    return VersionStats(
        version,
        batch.last_begun_ms,
        layout.num_shards,
        whole.state_rows,
        whole.state_bytes,
        batch.rows_in,
        batch.rows_late,
        batch.delta_bytes,
    )


def _newest_commits(ledger: StateLedger, partition: int, version: int) -> Iterator[CommitEntry]:
    """Return the commits of a partition's stores that made its newest version up to one."""
    newest, _ = ledger.committed(partition, version)
    for store_name in ledger.store_names([partition]):
        entry = ledger.entry_of(newest, partition, store_name)
        if entry is not None:
            yield entry
