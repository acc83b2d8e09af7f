"""Which version of a state is read: the newest that is one cut across all its shards, and across the operators of its query. Pure.

A version counts shard by shard while a batch runs. Whoever reads is given the newest one that every shard has, and that the other
operators of the query have, too: what one finished batch left, nothing of the one that is being made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from coordinator.core import StateLedger
from coordinator.errors import VersionNotFoundError
from coordinator.model import ActorLocation, StateMetadata, Travelling
from coordinator.rescaling import first_generation

__all__ = ["ReadView", "ViewId", "cut_of", "finished", "read_view"]


@dataclass(frozen=True, slots=True)
class ViewId(Travelling):
    """What a view depends on: while it is the same, so is the view."""

    version: int
    epoch: int
    first_partition: int


@dataclass(frozen=True, slots=True)
class ReadView(Travelling):
    """A version of a state, and where it is read.

    Attributes
    ----------
    metadata
        Of the state as it is at the version: its schema, its number of shards.
    root
        Folder of the state.
    oldest
        Oldest version that every shard can still be read at.
    versions, attempts
        Of each shard its version, and the attempt that made it. Partitions of Python programs each have a version of their own; all
        others have that of the view.
    stores
        Names of the stores that the partitions have.
    holders
        Place in `locations` of the store actor that has each shard; -1 for none.
    """

    id: ViewId
    metadata: StateMetadata
    root: str
    oldest: int
    versions: tuple[int, ...]
    attempts: tuple[str, ...]
    stores: tuple[str, ...]
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
        """Whether anything was ever written to a shard, or to those that it is made of."""
        return self.versions[shard] > 0

    @property
    def written(self) -> list[int]:
        """Shards that something was ever written to."""
        return list(filter(self.has_rows, range(len(self.versions))))

    def location(self, shard: int) -> ActorLocation | None:
        """Store actor that has a shard."""
        holder = self.holders[shard]
        return None if holder < 0 else self.locations[holder]


def finished(ledger: StateLedger, created: StateMetadata) -> int:
    """Newest version that every shard of a state has, made by one batch.

    A batch that is repeated makes the same version again. One that was planned anew makes another one, shard by shard: until all have
    it, the version before is the newest.
    """
    generation = ledger.generations.newest(first_generation(created))
    version = ledger.finished_version(generation)
    made = (ledger.entry_of(version, one) for one in generation.partitions)
    planned = {one.batch_time_ms for one in made if one is not None and one.batch_time_ms is not None}
    return version - 1 if len(planned) > 1 else version


def cut_of(own: int, others: Iterable[int]) -> int:
    """Newest version of an operator that all operators of its query have.

    Parameters
    ----------
    own
        Newest version that every shard of the operator has.
    others
        Those of all states that were made by the same query. Operators of one query are never more than a batch apart; a state that is
        further behind belongs to an operator that the query does not have any more.
    """
    return min([own, *(version for version in others if version >= own - 1)])


def read_view(
    ledger: StateLedger, created: StateMetadata, cut: int, version: int | None, known: ViewId | None = None
) -> ReadView | None:
    """How a version of a state is read; None if the caller has that view.

    Parameters
    ----------
    cut
        Newest version of the query.
    version
        Which to read; the newest by default.
    known
        Of a view that the caller has.

    Raises
    ------
    VersionNotFoundError
        There is no such version, or it is not retained any more.
    """
    first = first_generation(created)
    newest = cut
    if ledger.is_of_python:
        newest = max(map(ledger.newest_version, first.partitions))
    wanted = newest if version is None else version
    generation = ledger.generations.with_version(first, wanted)
    oldest = max((ledger.oldest_readable(one) for one in generation.partitions), default=0)
    if not 0 <= wanted <= newest or (wanted < oldest and not ledger.is_of_python):
        raise VersionNotFoundError(
            "the state has no such version (any more); nothing was changed; read one from the oldest to the newest, and raise "
            "min_versions_to_retain to keep more",
            state=created.state_name,
            version=wanted,
            oldest=oldest,
            newest=newest,
        )
    view_id = ViewId(wanted, ledger.epoch, generation.first_partition)
    if view_id == known:
        return None
    made = [ledger.counted(one, wanted) for one in generation.partitions]
    located = [ledger.holder(one) for one in generation.partitions]
    lives = {one.instance_id: one for one in located if one is not None}
    places = {instance: place for place, instance in enumerate(lives)}
    schema = ledger.committed_schema(created, wanted) or created.schema
    return ReadView(
        view_id,
        # Who owns a branch is in its log only.
        replace(
            created,
            schema=dict(schema),
            num_shards=generation.num_shards,
            query_id=ledger.query_id or created.query_id,
        ),
        ledger.root,
        oldest,
        tuple(own for own, _ in made),
        tuple(attempt for _, attempt in made),
        ledger.store_names(generation.partitions),
        tuple(-1 if one is None else places[one.instance_id] for one in located),
        tuple(lives.values()),
    )
