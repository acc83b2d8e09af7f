"""Versions of a state: which one is read (the newest that all its shards, and all operators of its query, have), and statistics. Pure.

Shards commit a version one by one while a batch runs. All of them have it before the batch's sink and Spark's commit log are done.
If the batch fails there, it is replayed, perhaps by another program, and makes the version again, with other rows. So readers get
the newest version whose batch Spark has finished: it is never replaced. A read that asks for *committed* versions gets the newest
one that every shard has.

That Spark has finished batch `b` is known from the log: a run began with batch ``b + 1``, a shard committed version ``b + 2`` (Spark
plans a batch once the one before it is in its commit log), or the driver reported it. A run that begins with `b` again says that
it was not finished.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from msgspec import Struct, structs

from coordinator.ledger.batch_stats import BatchStats
from coordinator.ledger.rescaling import first_layout
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.commits import CommitEntry
from coordinator.model.errors import VersionNotFoundError
from coordinator.model.identities import ActorLocation
from coordinator.model.state_metadata import StateMetadata


class WantedView(Struct, frozen=True):
    """A request for a view of a state."""

    #: None for the newest one.
    version: int | None = None
    #: Whether a version that all shards have suffices, though Spark may not have finished its batch.
    is_committed: bool = False
    #: Selects the shards by which the version is read, as :attr:`ViewId.first_partition`: the version of a rescale can be read by the
    #: previous shards, too. None for the newest layout that has the version.
    first_partition: int | None = None


class ViewId(Struct, frozen=True):
    """All that a view depends on: while it is the same, so is the view."""

    version: int
    epoch: int
    first_partition: int
    state_id: str = ""


class ReadView(Struct, frozen=True):
    """A version of a state, and where it is read."""

    id: ViewId
    metadata: StateMetadata
    root: str
    #: Oldest version that every shard still has.
    oldest: int
    #: ``versions``, ``attempts``: The version of each shard, and the attempt that made it. Partitions of Python programs each
    #: have a version of their own; all others have the view's.
    versions: tuple[int, ...]
    attempts: tuple[str, ...]
    #: Digest of the attempts that made the version on all shards: a version that was made again has another one. The same for all
    #: shard layouts that have the version. Empty for programs' states, whose partitions have versions of their own.
    lineage: str
    stores: tuple[str, ...]
    #: Index into `locations` of the store actor that has each shard; -1 for none.
    holders: tuple[int, ...]
    locations: tuple[ActorLocation, ...]

    @property
    def version(self) -> int:
        """The version that is read."""
        return self.id.version

    @property
    def partitions(self) -> range:
        """Partition ids of the shards."""
        return range(self.id.first_partition, self.id.first_partition + len(self.versions))

    def has_rows(self, shard: int) -> bool:
        """Return whether rows were ever written to a shard, or to the shards that it is made of."""
        return self.versions[shard] > 0

    @property
    def written(self) -> list[int]:
        """Shards that rows were ever written to."""
        return list(filter(self.has_rows, range(len(self.versions))))

    def location(self, shard: int) -> ActorLocation | None:
        """Return the store actor that has a shard; None if none has."""
        holder = self.holders[shard]
        return None if holder < 0 else self.locations[holder]


def committed(ledger: StateLedger, created: StateMetadata) -> int:
    """Return the newest version that every shard of a state has by one run; Spark need not have finished its batch.

    A run that repeats a batch makes its version again, shard by shard, and may have another program. Until all shards have it, the
    version before is the newest.
    """
    layout = ledger.layouts.newest(first_layout(created))
    version = ledger.committed_version(layout)
    entries = (ledger.entry_of(version, partition) for partition in layout.partitions)
    runs = {entry.run_id for entry in entries if entry is not None}
    return version - 1 if len(runs) > 1 else version


def finished(ledger: StateLedger, created: StateMetadata) -> int:
    """Return the newest version of a state whose batch Spark has finished, as far as that is known."""
    version = committed(ledger, created)
    if ledger.is_of_python:
        # Python programs have no batches: their commits are finished.
        return version
    return min(version, ledger.finished)


def newest_readable(ledger: StateLedger, created: StateMetadata, *, is_committed: bool) -> int:
    """Return the newest committed version of a state, or the newest finished one."""
    return committed(ledger, created) if is_committed else finished(ledger, created)


def _lineage(ledger: StateLedger, committed_by: ShardLayout, version: int) -> str:
    """Return the digest of the attempts that made a version; see :attr:`ReadView.lineage`."""
    if ledger.is_of_python:
        return ""
    attempts = "\n".join(ledger.committed(partition, version)[1] for partition in committed_by.partitions)
    return hashlib.blake2b(attempts.encode(), digest_size=8).hexdigest()


def cut_of(newest: int, sibling_versions: Iterable[int]) -> int:
    """Return the newest version of an operator that all operators of its query have.

    Parameters
    ----------
    newest
        Newest version that every shard of the operator has.
    sibling_versions
        The newest versions of all other states of the same query. Operators of one query are never more than a batch apart; a
        state that is further behind belongs to an operator that the query does not have any more.
    """
    return min([newest, *(version for version in sibling_versions if version >= newest - 1)])


def read_view(
    ledger: StateLedger, created: StateMetadata, cut: int, request: WantedView, cached: ViewId | None = None
) -> ReadView | None:
    """Return the view of a version; None if the caller has that view.

    Parameters
    ----------
    cut
        Newest version of the query.

    Raises
    ------
    VersionNotFoundError
        There is no such version, or it is not retained any more, or the requested layout does not have it.
    """
    first = first_layout(created)
    newest = cut
    if ledger.is_of_python:
        newest = max(map(ledger.newest_version, first.partitions))
    version = newest if request.version is None else request.version
    # The shards that committed it. A newer layout may be made of them and have no version of its own yet.
    committed_by = ledger.layouts.with_version(first, version - 1)
    layout = _layout_of(ledger, first, committed_by, version, request.first_partition)
    oldest = max((ledger.oldest_readable(partition) for partition in layout.partitions), default=0)
    if newest < version <= committed(ledger, created) and not request.is_committed:
        raise _not_finished(created, version, newest)
    if not 0 <= version <= newest or (version < oldest and not ledger.is_of_python):
        raise _not_retained(created, version, oldest, newest)
    view_id = ViewId(version, ledger.epoch, layout.first_partition, created.state_id)
    if view_id == cached:
        return None
    commits = [ledger.committed(partition, version) for partition in layout.partitions]
    holders = [ledger.holder(partition) for partition in layout.partitions]
    incarnations = {location.instance_id: location for location in holders if location is not None}
    index_of = {instance: index for index, instance in enumerate(incarnations)}
    schema = ledger.committed_schema(created, version) or created.schema
    return ReadView(
        view_id,
        # The owner of a branch is in its log only.
        structs.replace(
            created,
            schema=schema,
            num_shards=layout.num_shards,
            query_id=ledger.query_id or created.query_id,
        ),
        ledger.root,
        oldest,
        tuple(shard_version for shard_version, _ in commits),
        tuple(attempt for _, attempt in commits),
        _lineage(ledger, committed_by, version),
        ledger.store_names(layout.partitions),
        tuple(-1 if location is None else index_of[location.instance_id] for location in holders),
        tuple(incarnations.values()),
    )


def _not_finished(created: StateMetadata, version: int, newest: int) -> VersionNotFoundError:
    return VersionNotFoundError(
        "all shards have this version, and Spark has not finished its batch, which may be repeated and make it again; nothing was "
        "changed; read it once it is finished, or as it is with consistency='committed'",
        state=created.state_name,
        version=version,
        newest=newest,
    )


def _not_retained(created: StateMetadata, version: int, oldest: int, newest: int) -> VersionNotFoundError:
    return VersionNotFoundError(
        "the state has no such version (any more); nothing was changed; read one from the oldest to the newest, and raise "
        "min_versions_to_retain or retain_s to keep more",
        state=created.state_name,
        version=version,
        oldest=oldest,
        newest=newest,
    )


def _layout_of(
    ledger: StateLedger, first: ShardLayout, former: ShardLayout, version: int, first_partition: int | None
) -> ShardLayout:
    newest = ledger.layouts.with_version(first, version)
    if first_partition in (None, newest.first_partition):
        return newest
    if former.first_partition != first_partition:
        raise VersionNotFoundError(
            "the shards by which the version was to be read are not there any more: what was committed on them was replaced by another "
            "run; nothing was changed; ask for the rows again",
            state=ledger.state_name,
            version=version,
            first_partition=first_partition,
        )
    return former


class VersionStats(Struct, frozen=True):
    """Statistics of a version of a state."""

    version: int
    #: When its last shard was committed, in milliseconds since the epoch; None if the log does not say so any more.
    committed_at_ms: int | None
    #: Shards that it was committed on.
    num_shards: int
    #: ``state_rows``, ``state_bytes``: Rows and bytes of the shards then.
    state_rows: int
    state_bytes: int
    #: ``rows_in``, ``rows_late``: Rows that reached the shards in its batch, and those of them that were late.
    rows_in: int
    rows_late: int
    #: Size of the files of what it changed.
    written_bytes: int
    #: The run of the query that made it; empty where several did, each for some partitions of a program's state.
    run_id: str


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
    run_ids = {entry.run_id for entries in changed for entry in entries}
    return VersionStats(
        version,
        batch.last_begun_ms,
        layout.num_shards,
        whole.total("state_rows"),
        whole.total("state_bytes"),
        batch.rows_in,
        batch.rows_late,
        batch.total("file_bytes"),
        run_ids.pop() if len(run_ids) == 1 else "",
    )


def _newest_commits(ledger: StateLedger, partition: int, version: int) -> Iterator[CommitEntry]:
    """Return the commits of a partition's stores that made its newest version up to one."""
    newest, _ = ledger.committed(partition, version)
    for store_name in ledger.store_names([partition]):
        entry = ledger.entry_of(newest, partition, store_name)
        if entry is not None:
            yield entry
