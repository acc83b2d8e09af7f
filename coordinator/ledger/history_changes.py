"""Changes of a state's history by records of the log, and the history's form in checkpoints of the log. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from coordinator.ledger.history import StateHistory
from coordinator.ledger.records import Committed, Rescaled, SchemaChanged, SnapshotAdded, Truncated
from coordinator.ledger.shard_layouts import ShardLayout, ShardLayouts
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.identities import ShardKey
from coordinator.model.schema import StateSchema
from coordinator.model.stored_json import from_json


def records_of(data: Mapping[str, Any]) -> tuple[Committed | SnapshotAdded, ...]:
    """Return the commits and snapshots that a checkpoint has itself, and not in parts."""
    entries = map(Committed, from_json(data["entries"], list[CommitEntry]))
    return (*entries, *map(SnapshotAdded, from_json(data["snapshots"], list[SnapshotEntry])))


class ChangingHistory(StateHistory):
    """A history that takes in records of the log."""

    def take(self, record: Committed | SnapshotAdded | SchemaChanged | Truncated | Rescaled) -> None:
        """Take in a record that changes which versions there are."""
        match record:
            case Committed():
                self._commit(record.entry)
            case SnapshotAdded():
                self._snapshots.setdefault(record.snapshot.shard, []).append(record.snapshot)
            case SchemaChanged():
                self._schemas.append((record.epoch, record.schema))
            case Truncated():
                self._truncate((record.partition_id, record.store_name), record.floor)
                self._drop_parents(record.partition_id)
            case Rescaled():
                self.layouts.add(record.layout)

    def forget(self, partitions: Iterable[int]) -> None:
        """Drop partitions as if they had never been."""
        for partition in partitions:
            self._truncated_at.pop(partition, None)
            for name in self._stores.pop(partition, ()):
                shard = partition, name
                for of_shards in (self._chains, self._snapshots, self._oldest_retained, self._late_before):
                    of_shards.pop(shard, None)

    def leave(self, partition_id: int) -> None:
        """Called when no version of a partition is retained any more."""

    # -- commits --------------------------------------------------------------------------------------------------

    def _commit(self, entry: CommitEntry) -> None:
        chain = self._chain(entry.shard)
        while chain and chain[-1].version >= entry.version:
            chain.pop()
        self._supersede_siblings(entry)
        self._drop_snapshots_ahead(entry.partition_id)
        chain.append(entry.share_values())
        superseded = self.layouts.count(entry.partition_id, lambda partition: bool(self._stores.get(partition)))
        if superseded is not None:
            self._supersede_layouts(entry.partition_id, superseded)

    def _chain(self, shard: ShardKey) -> list[CommitEntry]:
        """Return the commits of a shard, to be changed."""
        chain = self._chains.get(shard)
        if chain is None:
            chain = self._chains[shard] = []
            self._stores.setdefault(shard[0], []).append(shard[1])
        return chain

    def _supersede_siblings(self, entry: CommitEntry) -> None:
        """Drop what an earlier run committed of the partition's other stores from the entry's version on.

        The run that replays a version may ask for fewer stores: a store that it does not ask for is again as it was below that version.
        """
        for name in [name for name in self._stores[entry.partition_id] if name != entry.store_name]:
            shard = entry.partition_id, name
            chain = self._chains[shard]
            while chain and chain[-1].version >= entry.version and chain[-1].epoch < entry.epoch:
                chain.pop()
            if not chain:
                self._forget_store(shard)

    def _forget_store(self, shard: ShardKey) -> None:
        """Drop a store that has no version any more, as if it had never been."""
        del self._chains[shard]
        self._snapshots.pop(shard, None)
        self._stores[shard[0]].remove(shard[1])

    def _drop_snapshots_ahead(self, partition_id: int) -> None:
        for name in self._stores[partition_id]:
            snapshots, chain = self._snapshots.get((partition_id, name), []), self._chains[partition_id, name]
            newest = chain[-1].version if chain else 0
            # Not from the end only: after a snapshot that was superseded an older one may have been added.
            snapshots[:] = [snapshot for snapshot in snapshots if snapshot.version <= newest]

    # -- truncation -----------------------------------------------------------------------------------------------

    def _truncate(self, shard: ShardKey, oldest: int) -> None:
        chain = self._chains[shard]
        self._late_before[shard] = self._late_before.get(shard, 0) + sum(
            entry.rows_late for entry in chain if entry.version < oldest
        )
        # The oldest version's own commit stays: it says which lineage the snapshot of that version belongs to.
        self._chains[shard] = [entry for entry in chain if entry.version >= oldest]
        self._snapshots[shard] = [snapshot for snapshot in self._snapshots[shard] if snapshot.version >= oldest]
        self._oldest_retained[shard] = oldest

    def _drop_parents(self, partition_id: int) -> None:
        """Drop the shards that a partition is made of, as far as no partition that is made of them needs them any more."""
        layout = self.layouts.of(partition_id)
        for parent in () if layout is None else layout.parents(partition_id):
            children = [child for later in self.layouts.made_of(parent) for child in later.children(parent)]
            for name in list(self._stores.get(parent, ())):
                if all(self._oldest_retained.get((child, name)) for child in children):
                    assert layout is not None
                    self._drop_shard((parent, name), layout.version + 1)
                    self._drop_parents(parent)

    def _drop_shard(self, shard: ShardKey, oldest: int) -> None:
        late = sum(entry.rows_late for entry in self._chains.pop(shard))
        self._late_before[shard] = self._late_before.get(shard, 0) + late
        self._snapshots.pop(shard, None)
        self._oldest_retained[shard] = oldest
        self._stores[shard[0]].remove(shard[1])
        if not self._stores[shard[0]]:
            self._truncated_at[shard[0]] = max(oldest, self._truncated_at.get(shard[0], 0))
            self.leave(shard[0])

    # -- layouts --------------------------------------------------------------------------------------------------

    def _supersede_layouts(self, partition_id: int, superseded: Iterable[ShardLayout]) -> None:
        """Make a partition's layout the newest: drop others, and what was committed on its predecessors after it was created."""
        for layout in superseded:
            self.forget(layout.partitions)
        for layout in self.layouts.line(partition_id):
            for previous in range(layout.former_partition, layout.former_partition + layout.former_shards):
                for name in list(self._stores.get(previous, ())):
                    chain = self._chains[previous, name]
                    while chain and chain[-1].version > layout.version:
                        chain.pop()
                    if not chain:
                        self._forget_store((previous, name))
                if previous in self._stores:
                    self._drop_snapshots_ahead(previous)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Return the number of records that are retained."""
        return sum(map(len, self._chains.values())) + sum(map(len, self._snapshots.values()))

    def retained(self) -> Iterator[Committed | SnapshotAdded]:
        """Return the records that are retained, one shard after another."""
        yield from (Committed(entry) for chain in self._chains.values() for entry in chain)
        yield from (SnapshotAdded(snapshot) for snapshots in self._snapshots.values() for snapshot in snapshots)

    def retains(self, record: Committed | SnapshotAdded) -> bool:
        """Return whether a record of the log still counts."""
        if isinstance(record, SnapshotAdded):
            return record.snapshot in self._snapshots.get(record.snapshot.shard, ())
        entry = self.entry_of(record.entry.version, *record.entry.shard)
        return entry is not None and entry.attempt_id == record.entry.attempt_id

    def begin_with(self, source: ChangingHistory, version: int) -> None:
        """Take over the history of another state up to a version; nothing is shared."""
        records = (record for record in source.retained() if record.version <= version)
        self.load_history(source.folded_history(records))
        for layout in self.layouts.cut(version):
            self.forget(layout.partitions)
        # Stores that were added after the version have no part in it.
        self._oldest_retained = {shard: oldest for shard, oldest in self._oldest_retained.items() if oldest <= version}
        self._truncated_at = {
            partition: oldest for partition, oldest in self._truncated_at.items() if oldest <= version
        }

    def _add_retained(self, records: Iterable[Committed | SnapshotAdded]) -> None:
        """Add records that all are retained, those of a shard in their order."""
        for record in records:
            if isinstance(record, Committed):
                self._chain(record.entry.shard).append(record.entry.share_values())
            else:
                self._snapshots.setdefault(record.snapshot.shard, []).append(record.snapshot)

    def folded_history(self, records: Iterable[Committed | SnapshotAdded]) -> dict[str, Any]:
        """Return the history for a checkpoint of the log, with these of its commits and snapshots only."""
        entries, snapshots = [], []
        for record in records:
            if isinstance(record, Committed):
                entries.append(record.entry.recorded())
            else:
                snapshots.append(record.snapshot)
        return {
            "entries": entries,
            "snapshots": snapshots,
            "floors": [[*shard, oldest] for shard, oldest in self._oldest_retained.items()],
            "late_before": [[*shard, late] for shard, late in self._late_before.items()],
            "schemas": list(self._schemas),
            **self.layouts.to_json(),
        }

    def load_history(self, data: Mapping[str, Any], earlier: Iterable[Committed | SnapshotAdded] | None = None) -> None:
        """Take over the history of a checkpoint.

        Parameters
        ----------
        earlier
            Records of the log before those in the data, in their order; some of them may not count any more. None if the data have all
            that is retained.
        """
        records = records_of(data)
        if earlier is None:
            self._add_retained(records)
        else:
            for record in itertools.chain(earlier, records):
                self.take(record)
        self._oldest_retained = {(partition, store): oldest for partition, store, oldest in data["floors"]}
        self._late_before = {(partition, store): late for partition, store, late in data["late_before"]}
        self._schemas = from_json(data["schemas"], list[tuple[int, StateSchema]])
        self.layouts = ShardLayouts.from_json(data)
        if earlier is not None:
            self._forget_truncated()
            self._forget_superseded_layouts()
        for (partition, _), oldest in self._oldest_retained.items():
            if not self._stores.get(partition):
                self._truncated_at[partition] = max(oldest, self._truncated_at.get(partition, 0))

    def _forget_superseded_layouts(self) -> None:
        """Drop what was read and is of no layout, or was committed on a layout after another one was created of it."""
        without_layout = [
            partition
            for partition in self._stores
            if self.layouts.of(partition) is None and self.layouts.was_given(partition)
        ]
        self.forget(without_layout)
        newest = next((layout for layout in reversed(self.layouts.made) if self.layouts.counts(layout)), None)
        if newest is not None:
            self._supersede_layouts(newest.first_partition, ())

    def _forget_truncated(self) -> None:
        for shard in [shard for shard in self._oldest_retained if shard in self._chains]:
            oldest = self._oldest_retained[shard]
            self._chains[shard] = [entry for entry in self._chains[shard] if entry.version >= oldest]
            snapshots = self._snapshots.get(shard, ())
            self._snapshots[shard] = [snapshot for snapshot in snapshots if snapshot.version >= oldest]
            if not self._chains[shard]:
                # It was superseded as a whole: as if it had never been.
                del self._chains[shard]
                self._stores[shard[0]].remove(shard[1])
        self._snapshots = {shard: items for shard, items in self._snapshots.items() if shard in self._chains}
