"""The leases of a state's shards: the store actor of each, and the moves that led there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct, structs, to_builtins

from coordinator.ledger.records import MoveFailed, ShardsAssigned
from coordinator.model.copy_result import ShardMove
from coordinator.model.identities import ActorLocation
from coordinator.model.stored_json import from_json

#: Newest moves of a shard that are kept.
_MOVES = 8


class Assignment(Struct, frozen=True, forbid_unknown_fields=True):
    """A shard's present lease."""

    epoch: int
    location: ActorLocation


class Assignments:
    """Leases by partition, with the newest moves of each."""

    def __init__(self) -> None:
        self._present: dict[int, Assignment] = {}
        self._moves: dict[int, tuple[ShardMove, ...]] = {}

    def get(self, partition_id: int) -> Assignment | None:
        """Return a shard's present lease; None if it was never leased."""
        return self._present.get(partition_id)

    def locations(self) -> dict[int, ActorLocation]:
        """Return the store actor of each partition's present lease."""
        return {partition: assignment.location for partition, assignment in self._present.items()}

    def moves(self, partition_id: int) -> tuple[ShardMove, ...]:
        """Return the newest moves of a shard, oldest first."""
        return self._moves.get(partition_id, ())

    def renew(self, epoch: int) -> None:
        """Move every lease to another epoch."""
        self._present = {partition: structs.replace(lease, epoch=epoch) for partition, lease in self._present.items()}

    def assign(self, record: ShardsAssigned, version: int) -> None:
        """Lease a shard, which is at a version, to a store actor."""
        partition, before = record.partition_id, self._present.get(record.partition_id)
        self._present[partition] = Assignment(record.epoch, record.location)
        if record.reason:
            previous = None if before is None else before.location
            move = ShardMove(record.epoch, version, previous, record.location, record.reason, record.preparation)
            self._add_move(partition, move)

    def stay(self, record: MoveFailed, version: int) -> None:
        """Note that a shard, which is at a version, was to go to a store actor and did not."""
        present = self._present.get(record.partition_id)
        epoch, holder = (0, None) if present is None else (present.epoch, present.location)
        move = ShardMove(epoch, version, holder, record.location, record.reason, error=record.error)
        self._add_move(record.partition_id, move)

    def _add_move(self, partition_id: int, move: ShardMove) -> None:
        self._moves[partition_id] = (*self.moves(partition_id), move)[-_MOVES:]

    def forget(self, partitions: Iterable[int]) -> None:
        """Drop partitions that the state does not have any more."""
        for partition in partitions:
            self._present.pop(partition, None)
            self._moves.pop(partition, None)

    def copy(self) -> Assignments:
        """Return a deep copy."""
        duplicate = Assignments()
        duplicate._present, duplicate._moves = dict(self._present), dict(self._moves)
        return duplicate

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a checkpoint of the log: ``assignments``, and ``moves`` if there are any."""
        data = {"assignments": self._present, **({"moves": self._moves} if self._moves else {})}
        fields: dict[str, Any] = to_builtins(data, str_keys=True)
        return fields

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Assignments:
        """Return the assignments of a checkpoint."""
        assignments = cls()
        assignments._present = from_json(data["assignments"], dict[int, Assignment])
        assignments._moves = from_json(data.get("moves", {}), dict[int, tuple[ShardMove, ...]])
        return assignments
