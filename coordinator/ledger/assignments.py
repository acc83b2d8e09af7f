"""Which store actor each shard of a state is leased to, and how that came about. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from coordinator.ledger.records import MoveFailed, ShardsAssigned, copy_result_from_json
from coordinator.model.copy_result import ShardMove
from coordinator.model.identities import ActorLocation

__all__ = ["Assignment", "Assignments"]

#: Newest moves of a shard that are told of.
_MOVES_TOLD = 8


@dataclass(frozen=True, slots=True)
class Assignment:
    """A shard's present lease."""

    epoch: int
    location: ActorLocation


class Assignments:
    """Leases by partition, with the newest moves of each."""

    def __init__(self) -> None:
        self._present: dict[int, Assignment] = {}
        self._moves: dict[int, tuple[ShardMove, ...]] = {}

    def get(self, partition_id: int) -> Assignment | None:
        """A shard's present lease; None if it was never given to anybody."""
        return self._present.get(partition_id)

    def locations(self) -> dict[int, ActorLocation]:
        """Store actor of each partition's present lease."""
        return {partition: assignment.location for partition, assignment in self._present.items()}

    def moves(self, partition_id: int) -> tuple[ShardMove, ...]:
        """Newest moves of a shard, oldest first; those of earlier versions of this package, which gave no reasons, are not told."""
        return self._moves.get(partition_id, ())

    def renew(self, epoch: int) -> None:
        """Every lease goes on under another epoch."""
        self._present = {partition: replace(one, epoch=epoch) for partition, one in self._present.items()}

    def assign(self, record: ShardsAssigned, version: int) -> None:
        """A shard, at a version, goes to a store actor."""
        partition, before = record.partition_id, self._present.get(record.partition_id)
        self._present[partition] = Assignment(record.epoch, record.location)
        if record.reason:
            former = None if before is None else before.location
            move = ShardMove(record.epoch, version, former, record.location, record.reason, record.preparation)
            self._tell(partition, move)

    def stay(self, record: MoveFailed, version: int) -> None:
        """A shard, at a version, was to go to a store actor and did not."""
        present = self._present.get(record.partition_id)
        epoch, former = (0, None) if present is None else (present.epoch, present.location)
        self._tell(
            record.partition_id,
            ShardMove(epoch, version, former, record.location, record.reason, error=record.error),
        )

    def _tell(self, partition_id: int, move: ShardMove) -> None:
        self._moves[partition_id] = (*self.moves(partition_id), move)[-_MOVES_TOLD:]

    def forget(self, partitions: Iterable[int]) -> None:
        """There are no such partitions any more."""
        for partition in partitions:
            self._present.pop(partition, None)
            self._moves.pop(partition, None)

    def copy(self) -> Assignments:
        """The same, for good: this one may go on."""
        other = Assignments()
        other._present, other._moves = dict(self._present), dict(self._moves)
        return other

    def to_json(self) -> dict[str, Any]:
        """Fields of a checkpoint of the log: ``assignments``, and ``moves`` if there are any."""
        present = {str(key): asdict(value) for key, value in self._present.items()}
        moves = {str(key): [asdict(move) for move in some] for key, some in self._moves.items()}
        return {"assignments": present, **({"moves": moves} if moves else {})}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Assignments:
        """Those of a checkpoint; one of earlier versions tells of no moves."""
        found = cls()
        found._present = {
            int(key): Assignment(value["epoch"], ActorLocation(**value["location"]))
            for key, value in data["assignments"].items()
        }
        found._moves = {int(key): tuple(_moves(value)) for key, value in data.get("moves", {}).items()}
        return found


def _moves(data: Iterable[Mapping[str, Any]]) -> Iterable[ShardMove]:
    for one in data:
        former = one["former"]
        yield ShardMove(
            **{
                **one,
                "former": None if former is None else ActorLocation(**former),
                "location": ActorLocation(**one["location"]),
                "preparation": copy_result_from_json(one),
            }
        )
