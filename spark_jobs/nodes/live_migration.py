"""Moves of shards that a driver has carried out while its batches go on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from coordinator.placement.move_planner import PlannedMove
from coordinator.service.calls import RayActors
from coordinator.service.client import CoordinatorClient
from store_actors.moving import carry_out

__all__ = ["ShadowMoves"]

log = logging.getLogger(__name__)


class ShadowMoves:
    """Carries out the moves of one fleet, in a thread that ends with them.

    Parameters
    ----------
    coordinator
        The fleet's coordinator.
    """

    def __init__(self, coordinator: CoordinatorClient) -> None:
        self._coordinator = coordinator
        self._guard = threading.Lock()
        #: Shards whose move is under way: until it is at its end the same one is planned again and again.
        self._moving: set[tuple[str, int]] = set()

    def begin(self, moves: Sequence[PlannedMove]) -> None:
        """Begin to move shards, but for those that are being moved."""
        with self._guard:
            new = [move for move in moves if _shard(move) not in self._moving]
            self._moving.update(map(_shard, new))
        if new:
            # A daemon: who stops the driver need not wait for what is only a matter of speed.
            threading.Thread(target=self._carry_out, args=(new,), name="statefleet-moves", daemon=True).start()

    def _carry_out(self, moves: Sequence[PlannedMove]) -> None:
        try:
            for outcome in carry_out(RayActors(), self._coordinator, moves):
                with self._guard:
                    self._moving.discard(_shard(outcome.move))
        except Exception:  # a thread's error has nobody else to be told to
            log.exception("shards could not be moved; they stay where they are, and their batches go on")
        finally:
            with self._guard:
                self._moving.difference_update(map(_shard, moves))


def _shard(move: PlannedMove) -> tuple[str, int]:
    return move.state_name, move.partition_id
