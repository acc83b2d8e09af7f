"""What counts of one state: commits and snapshots of each shard, and the schemas they are in. Pure.

:class:`coordinator.ledger.state_ledger.StateLedger` is this history with the runs and leases that make it.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from coordinator.ledger.batch_stats import BatchResult
from coordinator.ledger.records import Committed, Rescaled, SchemaChanged, SnapshotAdded, Truncated
from coordinator.ledger.shard_layouts import ShardLayout, ShardLayouts
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.errors import CorruptStateError, InvalidRequestError, StateMismatchError, VersionNotFoundError
from coordinator.model.identities import DEFAULT_STORE, ShardKey
from coordinator.model.load_plans import LoadPlan, LoadPlans, Origin, Parent
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.watermarks import Watermarks

__all__ = ["RetainedFiles", "StateHistory"]


@dataclass(frozen=True, slots=True)
class RetainedFiles:
    """Files that retained versions of a partition are made of, all its stores together.

    Attributes
    ----------
    deltas, snapshots
        How many of each.
    snapshot_version
        Version of the newest snapshot; None without any.
    """

    deltas: int
    snapshots: int
    file_bytes: int
    snapshot_version: int | None


class StateHistory:
    """Counted versions of one state.

    Parameters
    ----------
    root
        Folder of the state, ``<fleet uri>/<state name>``.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        #: Counted entries of each shard, versions ascending, from the oldest retained one.
        self._chains: dict[ShardKey, list[CommitEntry]] = {}
        #: Stores of each partition that have a version.
        self._stores: dict[int, list[str]] = {}
        #: Counted snapshots of each shard, versions ascending.
        self._snapshots: dict[ShardKey, list[SnapshotEntry]] = {}
        #: What is left of truncated history: oldest retained version, and late rows before it.
        self._floors: dict[ShardKey, int] = {}
        self._late_before: dict[ShardKey, int] = {}
        #: Of partitions of which no version is retained any more, the floor of all their stores.
        self._left: dict[int, int] = {}
        #: Schemas that runs asked for after that of ``metadata.json``, each with the epoch from which on commits are in it.
        self._schemas: list[tuple[int, StateSchema]] = []
        self.layouts = ShardLayouts()

    @property
    def state_name(self) -> str:
        return self.root.rsplit("/", 1)[-1]

    def newest(self, partition_id: int, store_name: str = DEFAULT_STORE) -> CommitEntry | None:
        """Newest counted entry of a shard."""
        chain = self._chains.get((partition_id, store_name))
        return chain[-1] if chain else None

    def entries(self, partition_id: int, store_name: str = DEFAULT_STORE) -> tuple[CommitEntry, ...]:
        """Retained entries of a shard, oldest first."""
        return tuple(self._chains.get((partition_id, store_name), ()))

    def newest_entries(self, partition_id: int, count: int) -> Sequence[CommitEntry]:
        """So many of the newest retained entries of a shard, oldest first."""
        return self._chains.get((partition_id, DEFAULT_STORE), [])[-count:]

    def entry_of(self, version: int, partition_id: int, store_name: str = DEFAULT_STORE) -> CommitEntry | None:
        """Retained entry that made a version of a shard; None if there is none."""
        found = _newest(self._chains.get((partition_id, store_name), ()), version)
        return found if found is not None and found.version == version else None

    def store_names(self, partitions: Iterable[int]) -> tuple[str, ...]:
        """Names of the stores of some partitions that have a version."""
        return tuple(sorted({name for one in partitions for name in self._stores.get(one, ())}))

    def held(self, partition_id: int) -> tuple[int, int]:
        """Rows and bytes of a partition's newest version, all its stores together."""
        newest = [chain[-1] for chain in self._partition_chains(partition_id) if chain]
        return sum(entry.state_rows for entry in newest), sum(entry.state_bytes for entry in newest)

    def _partition_chains(self, partition_id: int) -> list[list[CommitEntry]]:
        return [self._chains[partition_id, store_name] for store_name in self._stores.get(partition_id, ())]

    def _newest_of(self, partition_id: int, version: int) -> list[CommitEntry]:
        """Newest entry up to a version of each store of a partition that has one."""
        found = (_newest(chain, version) for chain in self._partition_chains(partition_id))
        return [entry for entry in found if entry is not None]

    def _made(self, partition_id: int, version: int) -> list[CommitEntry]:
        """Entries, one a store, that made a version of a partition."""
        return [entry for entry in self._newest_of(partition_id, version) if entry.version == version]

    def newest_version(self, partition_id: int) -> int:
        """Newest counted version of a partition; the one that it was made with if none was counted."""
        newest = (chain[-1].version for chain in self._partition_chains(partition_id) if chain)
        return max(newest, default=self._first_version(partition_id))

    def counted(self, partition_id: int, version: int) -> tuple[int, str]:
        """Newest version of a partition up to one, and the attempt that made it.

        If none was counted, it is the version that the partition was made with: the empty one without an attempt, or one of other
        shards, which is told by a digest of the attempts that made it there.
        """
        newest = max(self._newest_of(partition_id, version), key=lambda entry: entry.version, default=None)
        if newest is not None:
            return newest.version, newest.attempt_id
        own = self.layouts.of(partition_id)
        if own is None:
            return 0, ""
        parents = (self.counted(parent, own.version)[1] for parent in own.parents(partition_id))
        return own.version, hashlib.blake2b("\n".join(parents).encode(), digest_size=16).hexdigest()

    def oldest_readable(self, partition_id: int) -> int:
        """Oldest version that a partition can be loaded at, with all its stores."""
        floors = (self._floors.get((partition_id, name), 0) for name in self._stores.get(partition_id, ()))
        # A state that was imported has nothing before that.
        imported = (chain[0].version for chain in self._partition_chains(partition_id) if chain and chain[0].is_import)
        return max([self._first_version(partition_id), self._left.get(partition_id, 0), *floors, *imported])

    def retained_files(self, partition_id: int) -> RetainedFiles:
        """Files that retained versions of a partition are made of."""
        stores = [(partition_id, name) for name in self._stores.get(partition_id, ())]
        deltas = [entry for shard in stores for entry in self._chains[shard]]
        snapshots = [one for shard in stores for one in self._snapshots.get(shard, ())]
        pieces = [piece for one in snapshots for piece in one.pieces]
        size = sum(entry.file_bytes for entry in deltas) + sum(piece.file_bytes for piece in pieces)
        newest = max((one.version for one in snapshots), default=None)
        return RetainedFiles(len(deltas), len(pieces), size, newest)

    def _first_version(self, partition_id: int) -> int:
        """Version that a partition was made with."""
        own = self.layouts.of(partition_id)
        return 0 if own is None else own.version

    def rows_late(self, partition_id: int) -> int:
        """Late rows of a shard since the state began."""
        before = self._late_before.get((partition_id, DEFAULT_STORE), 0)
        return before + sum(entry.rows_late for entry in self.entries(partition_id))

    def total_rows_late(self) -> int:
        """Late rows of all shards since the state began, of those of former generations, too."""
        before = sum(late for (_, store_name), late in self._late_before.items() if store_name == DEFAULT_STORE)
        return before + sum(
            entry.rows_late for (_, name), chain in self._chains.items() if name == DEFAULT_STORE for entry in chain
        )

    def has_versions(self) -> bool:
        return any(self._chains.values())

    def load_plans(self, partition_id: int, version: int, store_names: Sequence[str] = (DEFAULT_STORE,)) -> LoadPlans:
        """How to load a version of some of a partition's stores.

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
        newest, attempt_id = self.counted(partition_id, version)
        if newest < version < sys.maxsize:
            raise VersionNotFoundError(
                "the state has no such version (any more): it was dropped, or put back, since the caller learned of the version; "
                "nothing was read and nothing was changed; ask anew for what is there now, or start the query again",
                state=self.state_name,
                partition=partition_id,
                version=version,
                newest=newest,
            )
        return LoadPlans(attempt_id, plans)

    def _origin(self, shard: ShardKey, layout: ShardLayout) -> Origin:
        """What a shard of a further generation is made of."""
        partition_id, store_name = shard
        parents = []
        for parent in layout.parents(partition_id):
            loading = self.load_plans(parent, layout.version, (store_name,))
            number = parent - layout.former_partition
            parents.append(Parent(parent, number, layout.former_shards, loading.attempt_id, loading.plans[store_name]))
        number = partition_id - layout.first_partition
        return Origin(layout.version, number, layout.num_shards, layout.keys, tuple(parents))

    def _load_plan(self, shard: ShardKey, version: int) -> LoadPlan:
        floor, own = self._floors.get(shard, 0), self.layouts.of(shard[0])
        oldest = max(floor, self._first_version(shard[0]))
        if version < oldest:
            raise InvalidRequestError(
                "this version is older than the oldest one that is retained; nothing was changed; ask for a newer one, and "
                "raise min_versions_to_retain to keep more",
                state=self.state_name,
                partition=shard[0],
                store=shard[1],
                version=version,
                oldest=oldest,
            )
        snapshots = [one for one in self._snapshots.get(shard, ()) if one.version <= version]
        deltas = tuple(entry for entry in self._chains.get(shard, ()) if entry.version <= version)
        self._check_chain(deltas)
        schemas = sorted({place for entry in deltas if (place := self._schema_at(entry.epoch)) >= 0})
        origin = None if own is None or floor else self._origin(shard, own)
        return LoadPlan(
            tuple(reversed(snapshots)), deltas, floor, tuple(self._schemas[place] for place in schemas), origin
        )

    def _check_chain(self, deltas: Sequence[CommitEntry]) -> None:
        """Refuse commits of a shard between which one is missing: what only that one changed would be lost.

        Raises
        ------
        CorruptStateError
            One was made on a version that the log does not have.
        """
        for below, entry in itertools.pairwise(deltas):
            partition_id, base = entry.partition_id, entry.base_version
            # A store that a run did not ask for stays at a version, while the partition's other stores go on, and what they committed
            # may have been let go since.
            let_go = max(self._floors.get((partition_id, name), 0) for name in self._stores[partition_id])
            if base > max(below.version, let_go) and not self._made(partition_id, base):
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

    def _schema_at(self, epoch: int) -> int:
        """Place of the schema that commits of an epoch are in; -1 for the one that the state was made with."""
        return bisect_right(self._schemas, epoch, key=itemgetter(0)) - 1

    def committed_schema(self, created: StateMetadata, version: int | None = None) -> StateSchema | None:
        """Return the schema of the newest commit, or of the newest one up to a version; None if there is none.

        A schema that a run asked for is the state's once something was committed in it, and as long as that counts: a run
        that came to nothing leaves none behind.
        """
        found = (_newest(chain, version) for chain in self._chains.values())
        epoch = max((entry.epoch for entry in found if entry is not None), default=None)
        if epoch is None:
            return None
        place = self._schema_at(epoch)
        return created.schema if place < 0 else self._schemas[place][1]

    def described(self, created: StateMetadata) -> StateMetadata:
        """The state's metadata (as `created`) with the schema of its newest commit, and its present number of shards."""
        shards = self.layouts.newest(ShardLayout(created.num_shards)).num_shards
        return replace(created, schema=self.committed_schema(created) or created.schema, num_shards=shards)

    def committed_version(self, layout: ShardLayout) -> int:
        """Newest version that every shard has, or is behind of; 0 where one has none."""
        return min(map(self.newest_version, layout.partitions))

    def referenced_files(self) -> set[str]:
        """Every delta and snapshot file that a retained version needs."""
        files = {entry.file for chain in self._chains.values() for entry in chain}
        return files | {file for snapshots in self._snapshots.values() for one in snapshots for file in one.files}

    def base_version(self, partition_id: int, batch_id: int) -> int:
        """Version that a batch reads: the newest counted one up to the batch's number, 0 without any.

        Raises
        ------
        StateMismatchError
            That version is no longer retained: the checkpoint is older than the state.
        """
        # The stores of a partition commit together; one that was added later has no early versions.
        found = self._newest_of(partition_id, batch_id)
        # Each store is let go of by itself, and a version is one of all of them.
        stores = self._stores.get(partition_id, ())
        if found and batch_id >= max(self._floors.get((partition_id, name), 0) for name in stores):
            return max(entry.version for entry in found)
        first = self._first_version(partition_id)
        floor = max((floor for (partition, _), floor in self._floors.items() if partition == partition_id), default=0)
        if floor or batch_id < first:
            raise StateMismatchError(
                "the checkpoint is older than the oldest retained version of the state; nothing was changed; restore the "
                "checkpoint that belongs to the state, or start a new state under another name",
                state=self.state_name,
                partition=partition_id,
                batch_id=batch_id,
                oldest=floor or first,
            )
        return first

    def made_by(self, version: int, partition_id: int) -> CommitEntry | None:
        """Entry that made a version of a partition, or of one of those that it is made of; None if none is retained."""
        found, own = self.entry_of(version, partition_id), self.layouts.of(partition_id)
        if found is None and own is not None and own.version == version:
            return self.made_by(version, own.parents(partition_id)[0])
        return found

    def _batch_time_ms(self, partition_id: int, version: int) -> int | None:
        """When Spark planned the batch that made a version; None if nobody said."""
        own = self.layouts.of(partition_id)
        if own is not None and own.version == version:
            return self._batch_time_ms(own.parents(partition_id)[0], version)
        made = self._made(partition_id, version)
        return next((entry.batch_time_ms for entry in made if entry.batch_time_ms is not None), None)

    def batch_result(self, run_id: str, batch_id: int, layout: ShardLayout) -> BatchResult:
        """What a batch of a run did to the state, and which shards of a generation have not counted it."""
        made: list[CommitEntry] = []
        missing: list[int] = []
        for shard, partition_id in enumerate(layout.partitions):
            found = [
                chain[-1]
                for chain in self._partition_chains(partition_id)
                if chain and chain[-1].version == batch_id + 1 and chain[-1].run_id == run_id
            ]
            made += found
            if not found:
                missing.append(shard)
        return BatchResult.of(tuple(missing), made)

    def batch_watermarks(self, run_id: str, batch_id: int) -> Watermarks:
        """Watermarks of this operator with a batch included, for those that it feeds; each shard has the same.

        Raises
        ------
        InvalidRequestError
            The run has not committed the batch here.
        """
        for chain in self._chains.values():
            entry = _newest(chain, batch_id + 1)
            if entry is not None and (entry.run_id, entry.version) == (run_id, batch_id + 1):
                return entry.watermarks
        raise InvalidRequestError(
            "an operator is fed by a state that has not committed this batch; nothing was changed; both must be in one query",
            state=self.state_name,
            run_id=run_id,
            batch_id=batch_id,
        )

    # -- folding --------------------------------------------------------------------------------------------------

    def take(self, record: Committed | SnapshotAdded | SchemaChanged | Truncated | Rescaled) -> None:
        """Take in a record of the log that changes what counts."""
        match record:
            case Committed():
                self._count(record.entry)
            case SnapshotAdded():
                self._snapshots.setdefault(record.snapshot.shard, []).append(record.snapshot)
            case SchemaChanged():
                self._schemas.append((record.epoch, record.schema))
            case Truncated():
                self._truncate((record.partition_id, record.store_name), record.floor)
                self._let_go_of_parents(record.partition_id)
            case Rescaled():
                self.layouts.add(record.layout)

    def _count(self, entry: CommitEntry) -> None:
        own = self._chain(entry.shard)
        while own and own[-1].version >= entry.version:
            own.pop()
        self._supersede_siblings(entry)
        self._drop_snapshots_ahead(entry.partition_id)
        own.append(entry)
        gone = self.layouts.count(entry.partition_id, lambda partition: bool(self._stores.get(partition)))
        if gone is not None:
            self._supersede_layouts(entry.partition_id, gone)

    def _chain(self, shard: ShardKey) -> list[CommitEntry]:
        """Entries of a shard, to be changed."""
        chain = self._chains.get(shard)
        if chain is None:
            chain = self._chains[shard] = []
            self._stores.setdefault(shard[0], []).append(shard[1])
        return chain

    def _supersede_siblings(self, entry: CommitEntry) -> None:
        """Let go of what a run before counted of the partition's other stores from the entry's version on.

        The run that replays a version may ask for fewer stores: one that it left out comes back as it was below that version.
        """
        for name in [one for one in self._stores[entry.partition_id] if one != entry.store_name]:
            shard = entry.partition_id, name
            chain = self._chains[shard]
            while chain and chain[-1].version >= entry.version and chain[-1].epoch < entry.epoch:
                chain.pop()
            if not chain:
                self._forget_store(shard)

    def _forget_store(self, shard: ShardKey) -> None:
        """Let go of a store that has no version left, as if it had never been."""
        del self._chains[shard]
        self._snapshots.pop(shard, None)
        self._stores[shard[0]].remove(shard[1])

    def _drop_snapshots_ahead(self, partition_id: int) -> None:
        """Let go of snapshots whose versions do not count any more."""
        for name in self._stores[partition_id]:
            snapshots, chain = self._snapshots.get((partition_id, name), []), self._chains[partition_id, name]
            newest = chain[-1].version if chain else 0
            # Not from the end only: after one that was superseded an older one may have been added.
            snapshots[:] = [one for one in snapshots if one.version <= newest]

    def _truncate(self, shard: ShardKey, floor: int) -> None:
        chain = self._chains[shard]
        self._late_before[shard] = self._late_before.get(shard, 0) + sum(
            entry.rows_late for entry in chain if entry.version < floor
        )
        # The floor's own commit stays: it says which lineage the floor's snapshot belongs to.
        self._chains[shard] = [entry for entry in chain if entry.version >= floor]
        self._snapshots[shard] = [one for one in self._snapshots[shard] if one.version >= floor]
        self._floors[shard] = floor

    # -- generations ----------------------------------------------------------------------------------------------

    def _supersede_layouts(self, partition_id: int, gone: Iterable[ShardLayout]) -> None:
        """A partition's generation is the newest that counts: let go of others, and of what its forebears counted after it was made."""
        for layout in gone:
            self.forget(layout.partitions)
        for layout in self.layouts.line(partition_id):
            for former in range(layout.former_partition, layout.former_partition + layout.former_shards):
                for name in list(self._stores.get(former, ())):
                    chain = self._chains[former, name]
                    while chain and chain[-1].version > layout.version:
                        chain.pop()
                    if not chain:
                        self._forget_store((former, name))
                if former in self._stores:
                    self._drop_snapshots_ahead(former)

    def is_taken_over(self, partition_id: int) -> bool:
        """Whether the shards that were made of a partition have all gone on, or it is none of the state's any more."""
        own = self.layouts.of(partition_id)
        if own is None and self.layouts.was_given(partition_id):
            return True
        return any(map(self.layouts.counts, self.layouts.made_of(partition_id)))

    def forget(self, partitions: Iterable[int]) -> None:
        """Let go of partitions as if they had never been."""
        for partition in partitions:
            self._left.pop(partition, None)
            for name in self._stores.pop(partition, ()):
                shard = partition, name
                for kept in (self._chains, self._snapshots, self._floors, self._late_before):
                    kept.pop(shard, None)

    def _let_go_of_parents(self, partition_id: int) -> None:
        """Let go of the shards that a partition is made of, as far as all that are made of these do without them."""
        own = self.layouts.of(partition_id)
        for parent in () if own is None else own.parents(partition_id):
            children = [child for one in self.layouts.made_of(parent) for child in one.children(parent)]
            for name in list(self._stores.get(parent, ())):
                if all(self._floors.get((child, name)) for child in children):
                    assert own is not None
                    self._let_go((parent, name), own.version + 1)
                    self._let_go_of_parents(parent)

    def _let_go(self, shard: ShardKey, floor: int) -> None:
        """Retain no version of a shard any more."""
        late = sum(entry.rows_late for entry in self._chains.pop(shard))
        self._late_before[shard] = self._late_before.get(shard, 0) + late
        self._snapshots.pop(shard, None)
        self._floors[shard] = floor
        self._stores[shard[0]].remove(shard[1])
        if not self._stores[shard[0]]:
            self._left[shard[0]] = max(floor, self._left.get(shard[0], 0))
            self.leave(shard[0])

    def leave(self, partition_id: int) -> None:
        """No version of a partition is retained any more."""

    # -- for checkpoints of the log -------------------------------------------------------------------------------

    def size(self) -> int:
        """Records that are retained."""
        return sum(map(len, self._chains.values())) + sum(map(len, self._snapshots.values()))

    def retained(self) -> Iterator[Committed | SnapshotAdded]:
        """Records that are retained, a shard after the other."""
        yield from (Committed(entry) for chain in self._chains.values() for entry in chain)
        yield from (SnapshotAdded(one) for items in self._snapshots.values() for one in items)

    def retains(self, record: Committed | SnapshotAdded) -> bool:
        """Whether a record of the log still says what counts."""
        if isinstance(record, SnapshotAdded):
            return record.snapshot in self._snapshots.get(record.snapshot.shard, ())
        entry = record.entry
        found = self.entry_of(entry.version, *entry.shard)
        return found is not None and found.attempt_id == entry.attempt_id

    def oldest_retained(self) -> int:
        """No shard has a version below this one."""
        return min((chain[0].version for chain in self._chains.values() if chain), default=0)

    def copy_history(self, other: StateHistory, records: Iterable[Committed | SnapshotAdded]) -> None:
        """Have another one's history, but of its commits and snapshots these only; that one may go on."""
        self._floors = dict(other._floors)
        self._late_before = dict(other._late_before)
        self._left = dict(other._left)
        self._schemas = list(other._schemas)
        self.layouts = other.layouts.copy()
        self._hold(records)

    def begin_with(self, other: StateHistory, version: int) -> None:
        """Have what another one's history is up to a version; that one may go on."""
        self.copy_history(other, (one for one in other.retained() if one.version <= version))
        for layout in self.layouts.cut(version):
            self.forget(layout.partitions)
        # Of stores that were added later.
        self._floors = {shard: floor for shard, floor in self._floors.items() if floor <= version}
        self._left = {partition: floor for partition, floor in self._left.items() if floor <= version}

    def _hold(self, records: Iterable[Committed | SnapshotAdded]) -> None:
        """Take in records that all are retained, those of a shard in their order."""
        for record in records:
            if isinstance(record, Committed):
                self._chain(record.entry.shard).append(record.entry)
            else:
                self._snapshots.setdefault(record.snapshot.shard, []).append(record.snapshot)

    def history_to_json(self) -> dict[str, Any]:
        """The history as data, for a checkpoint of the log."""
        return {
            "entries": [entry.to_json() for chain in self._chains.values() for entry in chain],
            "snapshots": [one.to_json() for items in self._snapshots.values() for one in items],
            "floors": [[*shard, floor] for shard, floor in self._floors.items()],
            "late_before": [[*shard, late] for shard, late in self._late_before.items()],
            "schemas": [[epoch, schema.to_json()] for epoch, schema in self._schemas],
            **self.layouts.to_json(),
        }

    def load_history(self, data: Mapping[str, Any], earlier: Iterable[Committed | SnapshotAdded] | None = None) -> None:
        """Have the history of a checkpoint.

        Parameters
        ----------
        earlier
            Records of the log before those that the data has, in their order: what some of them say counts no more. None if the data
            has all that is retained.
        """
        own: list[Committed | SnapshotAdded] = [Committed(CommitEntry.from_json(one)) for one in data["entries"]]
        own += [SnapshotAdded(SnapshotEntry.from_json(one)) for one in data["snapshots"]]
        if earlier is None:
            self._hold(own)
            self._settle_siblings()
        else:
            for record in itertools.chain(earlier, own):
                self.take(record)
        self._floors = {(partition, store): floor for partition, store, floor in data["floors"]}
        self._late_before = {(partition, store): late for partition, store, late in data["late_before"]}
        self._schemas = [(epoch, StateSchema.from_json(schema)) for epoch, schema in data.get("schemas", ())]
        self.layouts = ShardLayouts.from_json(data)
        if earlier is not None:
            self._forget_below_floors()
            self._forget_superseded_layouts()
        for (partition, _), floor in self._floors.items():
            if not self._stores.get(partition):
                self._left[partition] = max(floor, self._left.get(partition, 0))

    def _forget_superseded_layouts(self) -> None:
        """Let go of what is of no generation, or was counted of one after another was made of it, though it was read."""
        self.forget([one for one in self._stores if self.layouts.of(one) is None and self.layouts.was_given(one)])
        newest = next((one for one in reversed(self.layouts.made) if self.layouts.counts(one)), None)
        if newest is not None:
            self._supersede_layouts(newest.first_partition, ())

    def _forget_below_floors(self) -> None:
        """Let go of what is retained no more, though it was read."""
        for shard in [one for one in self._floors if one in self._chains]:
            floor = self._floors[shard]
            self._chains[shard] = [entry for entry in self._chains[shard] if entry.version >= floor]
            self._snapshots[shard] = [one for one in self._snapshots.get(shard, ()) if one.version >= floor]
            if not self._chains[shard]:
                # It was superseded as a whole: as if it had never been.
                del self._chains[shard]
                self._stores[shard[0]].remove(shard[1])
        self._snapshots = {shard: some for shard, some in self._snapshots.items() if shard in self._chains}

    def _settle_siblings(self) -> None:
        """What early versions left in their checkpoints: entries of stores that the run which superseded them did not ask for."""
        for partition_id in self._stores:
            chains = self._partition_chains(partition_id)
            if len({(chain[-1].version, chain[-1].epoch) for chain in chains}) > 1:
                for entry in sorted((one for chain in chains for one in chain), key=lambda one: one.epoch):
                    self._supersede_siblings(entry)
                self._drop_snapshots_ahead(partition_id)


def _newest(chain: Sequence[CommitEntry], version: int | None) -> CommitEntry | None:
    """Newest entry of a chain, or up to a version."""
    # What is asked for is one of the last, so the way from the end is short.
    for entry in reversed(chain):
        if version is None or entry.version <= version:
            return entry
    return None
