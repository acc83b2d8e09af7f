"""Committed versions of one state: which commits and snapshots make them, how they are loaded, and in which schemas they are. Pure.

The records that change a history are in :mod:`coordinator.ledger.history_changes`.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter

from msgspec import structs

from coordinator.ledger.batch_stats import BatchResult
from coordinator.ledger.shard_layouts import ShardLayout, ShardLayouts
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.errors import CorruptStateError, InvalidRequestError, StateMismatchError, VersionNotFoundError
from coordinator.model.identities import DEFAULT_STORE, ShardKey
from coordinator.model.load_plans import LoadPlan, LoadPlans, Origin, Parent
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata


class StateHistory:
    """Committed versions of one state.

    A shard here is one store of one partition. Its commits are a chain, from the oldest retained version to the newest.

    Parameters
    ----------
    root
        Folder of the state, ``<fleet uri>/<state name>``.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        #: Commits of each shard, versions ascending, from the oldest retained one.
        self._chains: dict[ShardKey, list[CommitEntry]] = {}
        #: Stores of each partition that have a version.
        self._stores: dict[int, list[str]] = {}
        #: Snapshots of each shard, versions ascending.
        self._snapshots: dict[ShardKey, list[SnapshotEntry]] = {}
        #: Of shards whose history was truncated: the oldest retained version, and the late rows before it.
        self._oldest_retained: dict[ShardKey, int] = {}
        self._late_before: dict[ShardKey, int] = {}
        #: Of partitions that retain no version any more: the oldest version that any of their stores could still have.
        self._truncated_at: dict[int, int] = {}
        #: Schemas that runs asked for after that of ``metadata.json``, each with the epoch from which on commits are in it.
        self._schemas: list[tuple[int, StateSchema]] = []
        self.layouts = ShardLayouts()

    @property
    def state_name(self) -> str:
        return self.root.rsplit("/", 1)[-1]

    # -- commits --------------------------------------------------------------------------------------------------

    def newest(self, partition_id: int, store_name: str = DEFAULT_STORE) -> CommitEntry | None:
        """Return the newest commit of a shard."""
        chain = self._chains.get((partition_id, store_name))
        return chain[-1] if chain else None

    def entries(self, partition_id: int, store_name: str = DEFAULT_STORE) -> tuple[CommitEntry, ...]:
        """Return the retained commits of a shard, oldest first."""
        return tuple(self._chains.get((partition_id, store_name), ()))

    def newest_entries(self, partition_id: int, count: int) -> Sequence[CommitEntry]:
        """Return the `count` newest retained commits of a partition's default store, oldest first."""
        return self._chains.get((partition_id, DEFAULT_STORE), [])[-count:]

    def entry_of(self, version: int, partition_id: int, store_name: str = DEFAULT_STORE) -> CommitEntry | None:
        """Return the retained commit that made a version of a shard; None if there is none."""
        entry = newest_entry(self._chains.get((partition_id, store_name), ()), version)
        return entry if entry is not None and entry.version == version else None

    def commit_of(self, version: int, partition_id: int) -> CommitEntry | None:
        """Return the commit that made a version of a partition, or of a partition that it is made of; None if none is retained."""
        entry, layout = self.entry_of(version, partition_id), self.layouts.of(partition_id)
        if entry is None and layout is not None and layout.version == version:
            return self.commit_of(version, layout.parents(partition_id)[0])
        return entry

    def commits_of_version(self, partition_id: int, version: int) -> list[CommitEntry]:
        """Return the commits, one a store, that made a version of a partition."""
        return [entry for entry in self._newest_of(partition_id, version) if entry.version == version]

    def store_names(self, partitions: Iterable[int]) -> tuple[str, ...]:
        """Return the names of the stores of some partitions that have a version."""
        return tuple(sorted({name for partition in partitions for name in self._stores.get(partition, ())}))

    def has_versions(self) -> bool:
        """Return whether anything was committed."""
        return any(self._chains.values())

    def rows_and_bytes(self, partition_id: int) -> tuple[int, int]:
        """Return rows and bytes of a partition's newest version, all its stores together."""
        newest = [chain[-1] for chain in self._partition_chains(partition_id) if chain]
        return sum(entry.state_rows for entry in newest), sum(entry.state_bytes for entry in newest)

    def total_rows_late(self) -> int:
        """Return the late rows of all shards since the state began, those of previous layouts included."""
        before = sum(late for (_, store_name), late in self._late_before.items() if store_name == DEFAULT_STORE)
        return before + sum(
            entry.rows_late for (_, name), chain in self._chains.items() if name == DEFAULT_STORE for entry in chain
        )

    def batch_result(self, run_id: str, batch_id: int, layout: ShardLayout) -> BatchResult:
        """Return what a batch of a run did to the state, and which shards of a layout have not committed it."""
        committed: dict[int, list[CommitEntry]] = {}
        missing: list[int] = []
        for shard, partition_id in enumerate(layout.partitions):
            of_shard = [
                chain[-1]
                for chain in self._partition_chains(partition_id)
                if chain and chain[-1].version == batch_id + 1 and chain[-1].run_id == run_id
            ]
            if of_shard:
                committed[shard] = of_shard
            else:
                missing.append(shard)
        return BatchResult.of(tuple(missing), committed)

    def _partition_chains(self, partition_id: int) -> list[list[CommitEntry]]:
        return [self._chains[partition_id, store_name] for store_name in self._stores.get(partition_id, ())]

    def _newest_of(self, partition_id: int, version: int) -> list[CommitEntry]:
        """Return, of each store of a partition, the newest commit up to a version, if there is one."""
        newest = (newest_entry(chain, version) for chain in self._partition_chains(partition_id))
        return [entry for entry in newest if entry is not None]

    def _batch_time_ms(self, partition_id: int, version: int) -> int | None:
        """Return when Spark planned the batch that made a version; None if no commit says so."""
        layout = self.layouts.of(partition_id)
        if layout is not None and layout.version == version:
            return self._batch_time_ms(layout.parents(partition_id)[0], version)
        entries = self.commits_of_version(partition_id, version)
        return next((entry.batch_time_ms for entry in entries if entry.batch_time_ms is not None), None)

    # -- versions -------------------------------------------------------------------------------------------------

    def newest_version(self, partition_id: int) -> int:
        """Return the newest committed version of a partition; the one that it was created with if there is none."""
        newest = (chain[-1].version for chain in self._partition_chains(partition_id) if chain)
        return max(newest, default=self._first_version(partition_id))

    def committed_version(self, layout: ShardLayout) -> int:
        """Return the newest version that every shard of a layout has, or is ahead of; 0 where a shard has none."""
        return min(map(self.newest_version, layout.partitions))

    def committed(self, partition_id: int, version: int) -> tuple[int, str]:
        """Return the newest version of a partition up to one, and the id of the attempt that committed it.

        Without a commit it is the version that the partition was created with: the empty one, whose attempt is an empty text, or one of
        the shards that it is made of, whose attempt is a digest of theirs.
        """
        newest = max(self._newest_of(partition_id, version), key=lambda entry: entry.version, default=None)
        if newest is not None:
            return newest.version, newest.attempt_id
        layout = self.layouts.of(partition_id)
        if layout is None:
            return 0, ""
        attempts = (self.committed(parent, layout.version)[1] for parent in layout.parents(partition_id))
        return layout.version, hashlib.blake2b("\n".join(attempts).encode(), digest_size=16).hexdigest()

    def base_version(self, partition_id: int, batch_id: int) -> int:
        """Return the version that a batch reads: the newest committed one up to the batch's number, 0 without any.

        Raises
        ------
        StateMismatchError
            That version is no longer retained: the checkpoint is older than the state.
        """
        # The stores of a partition commit together; a store that was added later has no early versions.
        entries = self._newest_of(partition_id, batch_id)
        # Each store is truncated by itself, and a version is one of all of them.
        stores = self._stores.get(partition_id, ())
        if entries and batch_id >= max(self._oldest_retained.get((partition_id, name), 0) for name in stores):
            return max(entry.version for entry in entries)
        first = self._first_version(partition_id)
        oldest = max(
            (version for (partition, _), version in self._oldest_retained.items() if partition == partition_id),
            default=0,
        )
        if oldest or batch_id < first:
            raise StateMismatchError(
                "the checkpoint is older than the oldest retained version of the state; nothing was changed; restore the "
                "checkpoint that belongs to the state, or start a new state under another name",
                state=self.state_name,
                partition=partition_id,
                batch_id=batch_id,
                oldest=oldest or first,
            )
        return first

    def oldest_readable(self, partition_id: int) -> int:
        """Return the oldest version that a partition can be loaded at, with all its stores."""
        oldest = (self._oldest_retained.get((partition_id, name), 0) for name in self._stores.get(partition_id, ()))
        # A state that was imported has nothing before that.
        imported = (chain[0].version for chain in self._partition_chains(partition_id) if chain and chain[0].is_import)
        return max([self._first_version(partition_id), self._truncated_at.get(partition_id, 0), *oldest, *imported])

    def oldest_retained(self) -> int:
        """Return a version below which no shard has a commit."""
        return min((chain[0].version for chain in self._chains.values() if chain), default=0)

    def is_taken_over(self, partition_id: int) -> bool:
        """Return whether all shards made of a partition have commits of their own, or the state has no such partition any more."""
        if self.layouts.of(partition_id) is None and self.layouts.was_given(partition_id):
            return True
        return any(map(self.layouts.counts, self.layouts.made_of(partition_id)))

    def _first_version(self, partition_id: int) -> int:
        layout = self.layouts.of(partition_id)
        return 0 if layout is None else layout.version

    # -- files ----------------------------------------------------------------------------------------------------

    def retained_files(self, partition_id: int) -> dict[str, int | None]:
        """Return what files retained versions of a partition are made of, all its stores together, as JSON data.

        ``snapshot_version`` is that of the newest snapshot; None without any.
        """
        shards = [(partition_id, name) for name in self._stores.get(partition_id, ())]
        deltas = [entry for shard in shards for entry in self._chains[shard]]
        snapshots = [snapshot for shard in shards for snapshot in self._snapshots.get(shard, ())]
        pieces = [piece for snapshot in snapshots for piece in snapshot.pieces]
        size = sum(entry.file_bytes for entry in deltas) + sum(piece.file_bytes for piece in pieces)
        newest = max((snapshot.version for snapshot in snapshots), default=None)
        return {
            "snapshot_version": newest,
            "delta_files": len(deltas),
            "snapshot_files": len(pieces),
            "file_bytes": size,
        }

    def referenced_files(self) -> set[str]:
        """Return every delta and snapshot file that a retained version needs."""
        files = {entry.file for chain in self._chains.values() for entry in chain}
        return files | {
            file for snapshots in self._snapshots.values() for snapshot in snapshots for file in snapshot.files
        }

    def load_plans(self, partition_id: int, version: int, store_names: Sequence[str] = (DEFAULT_STORE,)) -> LoadPlans:
        """Return how to load a version of some of a partition's stores.

        Parameters
        ----------
        version
            ``sys.maxsize`` is the newest.

        Raises
        ------
        InvalidRequestError
            The version is not retained any more.
        VersionNotFoundError
            The partition does not have the version: a caller from before the state was dropped, or put back, asks for it.
        """
        plans = {name: self._load_plan((partition_id, name), version) for name in store_names}
        newest, attempt_id = self.committed(partition_id, version)
        if newest < version < sys.maxsize:
            raise VersionNotFoundError(
                "the state has no such version (any more): it was dropped, or put back, since the caller learned of the version; "
                "nothing was read and nothing was changed; ask again for what is there now, or start the query again",
                state=self.state_name,
                partition=partition_id,
                version=version,
                newest=newest,
            )
        return LoadPlans(attempt_id, plans)

    def _load_plan(self, shard: ShardKey, version: int) -> LoadPlan:
        truncated_at, layout = self._oldest_retained.get(shard, 0), self.layouts.of(shard[0])
        oldest = max(truncated_at, self._first_version(shard[0]))
        if version < oldest:
            raise InvalidRequestError(
                "this version is older than the oldest one that is retained; nothing was changed; ask for a newer one, and "
                "raise min_versions_to_retain or retain_s to keep more",
                state=self.state_name,
                partition=shard[0],
                store=shard[1],
                version=version,
                oldest=oldest,
            )
        snapshots = [snapshot for snapshot in self._snapshots.get(shard, ()) if snapshot.version <= version]
        deltas = tuple(entry for entry in self._chains.get(shard, ()) if entry.version <= version)
        self._check_chain(deltas)
        indices = sorted({index for entry in deltas if (index := self._schema_index(entry.epoch)) >= 0})
        schemas = tuple(self._schemas[index] for index in indices)
        origin = None if layout is None or truncated_at else self._origin(shard, layout)
        return LoadPlan(tuple(reversed(snapshots)), deltas, truncated_at, schemas, origin)

    def _origin(self, shard: ShardKey, layout: ShardLayout) -> Origin:
        partition_id, store_name = shard
        parents = []
        for parent in layout.parents(partition_id):
            loading = self.load_plans(parent, layout.version, (store_name,))
            number = parent - layout.former_partition
            parents.append(Parent(parent, number, layout.former_shards, loading.attempt_id, loading.plans[store_name]))
        number = partition_id - layout.first_partition
        return Origin(layout.version, number, layout.num_shards, layout.keys, tuple(parents))

    def _check_chain(self, deltas: Sequence[CommitEntry]) -> None:
        """Refuse a chain that lacks a commit: what only that commit changed would be lost.

        Raises
        ------
        CorruptStateError
            A commit was made on a version that the log does not have.
        """
        for below, entry in itertools.pairwise(deltas):
            partition_id, base = entry.partition_id, entry.base_version
            # A store that a run did not ask for stays at a version, while the partition's other stores go on, and what they committed
            # may have been truncated since.
            truncated_at = max(
                self._oldest_retained.get((partition_id, name), 0) for name in self._stores[partition_id]
            )
            if base > max(below.version, truncated_at) and not self.commits_of_version(partition_id, base):
                raise CorruptStateError(
                    "the log of the state lacks a commit that a later one was made on, so a record or a part of a checkpoint is "
                    "missing; nothing was read and nothing was changed; restore the state's folder from a backup of the object store",
                    file=entry.file,
                    state=self.state_name,
                    partition=entry.partition_id,
                    store=entry.store_name,
                    version=entry.version,
                    missing=entry.base_version,
                )

    # -- schemas --------------------------------------------------------------------------------------------------

    def committed_schema(self, created: StateMetadata, version: int | None = None) -> StateSchema | None:
        """Return the schema of the newest commit, or of the newest one up to a version; None if there is none.

        A schema that a run asked for is the state's once something was committed in it, and as long as that commit counts: a run
        without commits leaves no schema behind.
        """
        newest = (newest_entry(chain, version) for chain in self._chains.values())
        epoch = max((entry.epoch for entry in newest if entry is not None), default=None)
        if epoch is None:
            return None
        index = self._schema_index(epoch)
        return created.schema if index < 0 else self._schemas[index][1]

    def described(self, created: StateMetadata) -> StateMetadata:
        """Return the state's metadata (as `created`) with the schema of its newest commit, and its present number of shards."""
        shards = self.layouts.newest(ShardLayout(created.num_shards)).num_shards
        return structs.replace(created, schema=self.committed_schema(created) or created.schema, num_shards=shards)

    def _schema_index(self, epoch: int) -> int:
        """Return the index of the schema that commits of an epoch are in; -1 for the one that the state was created with."""
        return bisect_right(self._schemas, epoch, key=itemgetter(0)) - 1


def newest_entry(chain: Sequence[CommitEntry], version: int | None) -> CommitEntry | None:
    """Return the newest commit of a chain, or the newest one up to a version."""
    # Callers ask for one of the last commits, so the way from the end is short.
    for entry in reversed(chain):
        if version is None or entry.version <= version:
            return entry
    return None
