"""Load plans: the files that make a version of a partition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from msgspec import Struct, structs

from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import StateStoreProviderId
from coordinator.model.schema import StateSchema


class LoadPlan(Struct, frozen=True):
    """The files of one version of a shard: the newest snapshot that can be read, then every later delta in order."""

    #: Snapshots of the version and before, newest first: if one is damaged, the next is used.
    snapshots: tuple[SnapshotEntry, ...]
    #: Retained commits up to the version, oldest first.
    deltas: tuple[CommitEntry, ...]
    #: Oldest retained version; 0 if the deltas go back to the empty version.
    oldest_retained: int
    #: Schemas after the first one that the deltas are in, oldest first, each with the epoch from which on commits are in it.
    schemas: tuple[tuple[int, StateSchema], ...] = ()
    #: What the deltas build on, of a shard of a state that was rescaled; None if that is the empty version, or not needed any more.
    origin: Origin | None = None

    def parts(self) -> Iterator[LoadPlan]:
        """Yield the plan itself, and the plans of the shards that it is made of, recursively."""
        yield self
        for parent in () if self.origin is None else self.origin.parents:
            yield from parent.plan.parts()

    def file_bytes(self) -> int:
        """Return the bytes of the files that loading reads, if none is damaged or in memory."""
        size = 0
        for plan in self.parts():
            begun = plan.snapshots[0].version if plan.snapshots else 0
            size += sum(piece.file_bytes for snapshot in plan.snapshots[:1] for piece in snapshot.pieces)
            size += sum(delta.file_bytes for delta in plan.deltas if delta.version > begun)
        return size

    def beginning_with(self, snapshot: int) -> LoadPlan:
        """Return a plan for the same version that begins with the snapshot of a given version, and with no snapshot if that is 0.

        Raises
        ------
        InvalidRequestError
            There is no such snapshot.
        """
        if snapshot == 0 and self.oldest_retained == 0:
            return structs.replace(self, snapshots=())
        chosen = tuple(entry for entry in self.snapshots if entry.version == snapshot)
        if not chosen:
            versions = sorted(
                {entry.version for entry in self.snapshots} | ({0} if self.oldest_retained == 0 else set())
            )
            raise InvalidRequestError(
                "the version cannot be read from this snapshot on; 0 reads the deltas alone, where all are retained",
                snapshot=snapshot,
                snapshots=", ".join(map(str, versions)),
            )
        # The delta of the snapshot's own version says which schema it is in.
        deltas = tuple(delta for delta in self.deltas if delta.version >= snapshot)
        return structs.replace(self, snapshots=chosen, deltas=deltas, oldest_retained=snapshot, origin=None)

    def may_have_rows(self) -> bool:
        """Return whether the version is not known to be empty."""
        if self.deltas:
            return self.deltas[-1].state_rows > 0
        return self.origin is not None and any(parent.plan.may_have_rows() for parent in self.origin.parents)

    def files(self) -> Iterator[str]:
        """Yield the paths of all files that loading may read."""
        for plan in self.parts():
            yield from (file for snapshot in plan.snapshots for file in snapshot.files)
            yield from (delta.file for delta in plan.deltas)


@dataclass(frozen=True, slots=True)
class Parent:
    """A shard of the previous layout, of which another one is made."""

    partition_id: int
    #: ``shard``, ``num_shards``: Its number, of how many: all its rows have keys with ``pmod(hash, num_shards) == shard``.
    shard: int
    num_shards: int
    #: The attempt that made the version that is taken over; empty for the empty version, and for a shard that was itself made of
    #: others.
    attempt_id: str
    plan: LoadPlan


@dataclass(frozen=True, slots=True)
class Origin:
    """The shards that a shard of a rescaled state is made of."""

    #: The version that was taken over.
    version: int
    #: ``shard``, ``num_shards``: Its number, of how many: its rows are those with ``pmod(hash, num_shards) == shard``.
    shard: int
    num_shards: int
    #: Columns that are hashed.
    keys: tuple[str, ...]
    parents: tuple[Parent, ...]


class LoadPlans(Struct, frozen=True):
    """The files of one version of some stores of a partition."""

    #: The attempt that made the version (all stores of a partition commit together); empty for the empty version.
    attempt_id: str
    plans: Mapping[str, LoadPlan]

    def state_bytes(self) -> int:
        """Return an estimate of the memory that the version's rows take, in bytes, from its commits."""
        newest = (part.deltas[-1].state_bytes for plan in self.plans.values() for part in plan.parts() if part.deltas)
        return sum(newest)

    def file_bytes(self) -> int:
        """Return :meth:`LoadPlan.file_bytes` of all the stores."""
        return sum(plan.file_bytes() for plan in self.plans.values())

    def newest_version(self) -> int:
        """Return the newest version that the plans' deltas make, or build on; 0 without any."""
        made = [plan.deltas[-1].version for plan in self.plans.values() if plan.deltas]
        taken_over = [plan.origin.version for plan in self.plans.values() if plan.origin is not None]
        return max([*made, *taken_over], default=0)

    def made(self) -> dict[int, str]:
        """Return by version the attempts that made the versions from which deltas of one schema lead to the planned version."""
        attempts: dict[int, str] = {}
        for plan in self.plans.values():
            newest_schema = max((epoch for epoch, _ in plan.schemas), default=-1)
            attempts |= {entry.version: entry.attempt_id for entry in plan.deltas if entry.epoch >= newest_schema}
        return attempts


@dataclass(frozen=True, slots=True)
class InstancePlans:
    """The answer to a store actor that reports a shard which it is about to open."""

    #: The other shards that it should unload.
    stale: tuple[StateStoreProviderId, ...]
    loading: LoadPlans
