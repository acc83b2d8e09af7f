"""Live migration of shards between store actors: the target takes a copy, then the coordinator gives it the lease."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import structs
from ray.exceptions import RayError

from coordinator.model.errors import StateStoreError
from coordinator.model.leases import CopyResult
from coordinator.placement.move_planner import PlannedMove
from coordinator.runtime.runtime import MachineThreads
from coordinator.service.calls import Actors, RayActors, unwrapped
from coordinator.service.client import CoordinatorClient

log = logging.getLogger(__name__)

#: Moves that are under way at once: each needs room for a copy of a shard.
_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """The outcome of a move.

    Attributes
    ----------
    copy_result
        What the target copied; None if it copied nothing.
    error
        Why the shard stays where it is; empty if it goes, with the next batch.
    """

    move: PlannedMove
    copy_result: CopyResult | None
    error: str = ""


def carry_out(actors: Actors, coordinator: CoordinatorClient, moves: Sequence[PlannedMove]) -> Iterator[MoveOutcome]:
    """Move shards, some at a time, and yield each outcome; batches go on meanwhile.

    A move that fails leaves its shard where it is, and the other moves go on. The state's log has the reason.
    """
    for begin in range(0, len(moves), _AT_ONCE):
        group = moves[begin : begin + _AT_ONCE]
        for move, started in [(move, _begun(actors, coordinator, move)) for move in group]:
            outcome = _ended(actors, coordinator, move, started)
            if outcome.error:
                _log_failure(coordinator, outcome)
            yield outcome


@dataclass(frozen=True, slots=True)
class _Started:
    """The target of a move and its pending answer, or the reason why nothing was begun."""

    handle: Any = None
    answer: Any = None
    error: str = ""


def _begun(actors: Actors, coordinator: CoordinatorClient, move: PlannedMove) -> _Started:
    try:
        handle = actors.find(move.target.actor_name)
        if handle is None:
            return _Started(error="the store actor that was to have the shard is gone")
        # Its own partition, also where the state was rescaled since the move was planned.
        store_id = structs.replace(
            coordinator.locate(move.state_name, move.shard).store_id, partition_id=move.partition_id
        )
        return _Started(handle, handle.take_copy.remote(store_id, move.source.actor_name))
    except (StateStoreError, RayError) as failure:
        return _Started(error=f"{type(failure).__name__}: {failure}")


def _ended(actors: Actors, coordinator: CoordinatorClient, move: PlannedMove, started: _Started) -> MoveOutcome:
    if started.error:
        return MoveOutcome(move, None, started.error)
    copy_result: CopyResult | None = None
    try:
        copy_result = unwrapped(actors, started.handle, started.answer)
        if coordinator.move_prepared(move, copy_result):
            return MoveOutcome(move, copy_result)
        error = "the shard is given to another store actor by now, or the one that was to have it was lost or its node drained"
    except (StateStoreError, RayError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return MoveOutcome(move, copy_result, error)


def _log_failure(coordinator: CoordinatorClient, outcome: MoveOutcome) -> None:
    """Log a move that failed, here and in the state's log."""
    move = outcome.move
    log.warning(
        "shard %d of %s stays where it is, and its batches go on: %s",
        move.shard,
        move.state_name,
        outcome.error,
        extra={"state": move.state_name, "shard": move.shard, "actor": move.source.actor_name},
    )
    try:
        coordinator.move_failed(move, outcome.error)
    except (StateStoreError, RayError) as failure:  # the caller gets the outcome all the same
        log.warning("the log of %s does not say so: %s: %s", move.state_name, type(failure).__name__, failure)


class LiveMigration:
    """Carries out the moves of one fleet, in a thread that ends with them."""

    def __init__(self, coordinator: CoordinatorClient) -> None:
        self._coordinator = coordinator
        self._threads = MachineThreads()
        self._guard = self._threads.lock()
        #: Shards whose move is running: until it ends, the same move is planned repeatedly.
        self._moving: set[tuple[str, int]] = set()

    def begin(self, moves: Sequence[PlannedMove]) -> None:
        """Begin to move the shards that are not being moved."""
        with self._guard:
            new = [move for move in moves if _shard(move) not in self._moving]
            self._moving.update(map(_shard, new))
        if new:
            # It ends with the process: the driver can stop without waiting for moves, which only make batches faster.
            self._threads.start(partial(self._carry_out, new), "statefleet-moves")

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
