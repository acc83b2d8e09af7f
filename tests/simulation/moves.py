"""Moves of shards while batches run: by a driver's thread, or an operator's command."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayError

from coordinator.model.errors import StateStoreError
from coordinator.service.client import CoordinatorClient
from store_actors.actor.deploy import carry_out
from tests.simulation.scheduler import Party, Violation


class Mover(Party):
    """Moves a shard to a node, and ends.

    Parameters
    ----------
    world
        Makes clients of the coordinator.
    """

    def __init__(self, world: Any, name: str, state: str, shard: int, node: str) -> None:
        super().__init__(name, node)
        self._world = world
        self._wish = (state, shard, node)
        self.is_over = False
        world.scheduler.spawn(self, self._run)

    def _run(self) -> None:
        scheduler = self._world.scheduler
        try:
            coordinator: CoordinatorClient = self._world.new_coordinator_client()
            for outcome in carry_out(self._world.actors, coordinator, coordinator.plan_move(*self._wish)):
                scheduler.fault(self.name, "moved" if not outcome.error else "not_moved", str(self._wish))
        except StateStoreError as error:
            scheduler.log(self.name, f"moves nothing: {type(error).__name__}")
        except RayError as error:
            raise Violation(f"{self.name}: an error that no caller can tell from others escaped: {error!r}") from error
        finally:
            self.is_over = True
