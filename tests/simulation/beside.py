"""What goes on beside the batches of a query: its shards are moved, other numbers of them are asked for, its state is dropped."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError

from coordinator.model.errors import StateStoreError
from store_actors.actor.deploy import carry_out
from tests.simulation.scheduler import Party, Violation
from tests.simulation.storage import RememberedObjects


class Bystander(Party):
    """Does one thing, and is gone.

    Parameters
    ----------
    world
        Makes clients of the coordinator.
    act
        What it does. An error of Statefleet ends it; one of Ray's must not come out of a client.
    """

    def __init__(self, world: Any, name: str, node: str, act: Callable[[Bystander], None]) -> None:
        super().__init__(name, node)
        self.world, self._act = world, act
        self.is_over = False
        world.scheduler.spawn(self, self._run)

    def _run(self) -> None:
        try:
            self._act(self)
        except StateStoreError as error:
            self.world.scheduler.log(self.name, f"fails: {type(error).__name__}")
        except RayError as error:
            raise Violation(f"{self.name}: an error that no caller can tell from others escaped: {error!r}") from error
        finally:
            self.is_over = True


def move(mover: Bystander, state: str, shard: int, node: str) -> None:
    """Move a shard to a node, as a driver's thread or an operator's command does."""
    world = mover.world
    coordinator = world.new_coordinator_client()
    for outcome in carry_out(world.actors, coordinator, coordinator.plan_move(state, shard, node)):
        world.scheduler.fault(mover.name, "moved" if not outcome.error else "not_moved", f"shard {shard} to {node}")


def rescale(rescaler: Bystander, state: str, present: int, factor: int) -> None:
    """Ask for this many times as many shards while a query runs; with a factor below 0, for as many times fewer."""
    shards = present * factor if factor > 0 else max(1, present // -factor)
    rescaler.world.new_coordinator_client().rescale(state, shards, dry_run=False)
    rescaler.world.scheduler.fault(rescaler.name, "rescale_asked", str(shards))


def drop(dropper: Bystander, state: str) -> None:
    """Drop a state, and say that its query is over."""
    dropper.world.new_coordinator_client().drop(state, dry_run=False, is_over=True)
    dropper.world.scheduler.fault(dropper.name, "drop_answered")


class StateEnds:
    """The number of times that a state that had begun was dropped, and the query of the present one, by the records of its log.

    Parameters
    ----------
    objects
        What is really stored.
    """

    def __init__(self, objects: RememberedObjects, state: str) -> None:
        self._objects = objects
        self._prefix = f"{state}/manifest/"
        self._known_objects = 0
        self._read: set[str] = set()
        self.count = 0
        #: Empty until a run of the present state has begun.
        self.owner = ""

    def look(self) -> bool:
        """Read the records that came since the last look; return whether the state ended."""
        before = self.count
        if len(self._objects.ever) != self._known_objects:
            self._known_objects = len(self._objects.ever)
            for path in sorted(self._objects.ever.keys() - self._read):
                self._read.add(path)
                if path.startswith(self._prefix):
                    self._take(json.loads(self._objects.ever[path])["records"])
        return self.count > before

    def _take(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            if record["kind"] == "run_started":
                self.owner = record["query_id"]
            elif record["kind"] == "dropped":
                self.count += bool(self.owner)
                self.owner = ""
