"""Live migration: moves of shards that a driver carries out while its batches go on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from coordinator.placement.move_planner import PlannedMove
from coordinator.service.calls import RayActors
from coordinator.service.client import CoordinatorClient
from store_actors.actor.moving import carry_out

log = logging.getLogger(__name__)


class LiveMigration:
    """Carries out the moves of one fleet, in a thread that ends with them.

    Parameters
    ----------
    coordinator
        The fleet's coordinator.
    """

    def __init__(self, coordinator: CoordinatorClient) -> None:
        self._coordinator = coordinator
        self._guard = threading.Lock()
        #: Shards whose move is running: until it ends, the same move is planned repeatedly.
        self._moving: set[tuple[str, int]] = set()

    def begin(self, moves: Sequence[PlannedMove]) -> None:
        """Begin to move the shards that are not being moved."""
        with self._guard:
            new = [move for move in moves if _shard(move) not in self._moving]
            self._moving.update(map(_shard, new))
        if new:
            # A daemon: the driver can stop without waiting for moves, which only make batches faster.
            threading.Thread(target=self._carry_out, args=(new,), name="statefleet-moves", daemon=True).start()

    def _carry_out(self, moves: Sequence[PlannedMove]) -> None:
        try:
            for outcome in carry_out(RayActors(), self._coordinator, moves):
                with self._guard:
                    self._moving.discard(_shard(outcome.move))
        except Exception:  # no caller gets the error of a thread
            log.exception("shards could not be moved; they stay where they are, and their batches go on")
        finally:
            with self._guard:
                self._moving.difference_update(map(_shard, moves))


def _shard(move: PlannedMove) -> tuple[str, int]:
    return move.state_name, move.partition_id
