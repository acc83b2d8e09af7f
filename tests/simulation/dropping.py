"""A state that is dropped while its query runs, and another query that begins with its name."""

from __future__ import annotations

import json
from typing import Any

from ray.exceptions import RayError

from coordinator.model.errors import StateStoreError
from coordinator.service.client import CoordinatorClient
from tests.simulation.scheduler import Party, Violation
from tests.simulation.storage import RememberedObjects


class Dropper(Party):
    """Drops a state, says that its query is over, and is gone.

    Parameters
    ----------
    world
        Makes clients of the coordinator.
    """

    def __init__(self, world: Any, name: str, state: str) -> None:
        super().__init__(name, "node-0")
        self._world = world
        self._state = state
        self.is_over = False
        world.scheduler.spawn(self, self._run)

    def _run(self) -> None:
        scheduler = self._world.scheduler
        try:
            coordinator: CoordinatorClient = self._world.new_coordinator_client()
            coordinator.drop(self._state, dry_run=False, is_over=True)
            scheduler.fault(self.name, "drop_answered")
        except StateStoreError as error:
            scheduler.log(self.name, f"does not know whether it dropped: {type(error).__name__}")
        except RayError as error:
            raise Violation(f"{self.name}: an error that no caller can tell from others escaped: {error!r}") from error
        finally:
            self.is_over = True


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
