"""A fleet as the dashboard knows it: what the coordinator told last, newest batches, and events. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from statefleet.dashboard.differences import Row, Tables, difference
from statefleet.dashboard.events import Event, Seen, events_between
from statefleet.dashboard.view import actor_row, batch_row, executor_row, query_row, shard_id, shard_row

__all__ = ["FleetModel", "Update"]

#: Newest batches of each query, and newest events, that are kept.
_BATCHES = 40
_EVENTS = 500


@dataclass(frozen=True, slots=True)
class Update:
    """What a look found.

    Attributes
    ----------
    changes
        See :func:`~statefleet.dashboard.differences.difference`.
    """

    changes: Mapping[str, Any]
    events: Sequence[Row]

    def __bool__(self) -> bool:
        return bool(self.changes or self.events)


class FleetModel:
    """What is known of a fleet, look by look."""

    def __init__(self) -> None:
        #: As :meth:`Coordinator.watch <coordinator.service.coordinator.Coordinator.watch>` wants them back.
        self.stamps: dict[str, str] = {}
        self._told: Mapping[str, Any] = {}
        self._seen = Seen()
        self._batches: dict[str, dict[int, Row]] = {}
        self._tables: Tables = {}
        self._events: deque[Row] = deque(maxlen=_EVENTS)
        self._numbered = 0

    def take(self, told: Mapping[str, Any], answering: Mapping[str, bool], now_ms: int) -> Update:
        """Take in an answer of the coordinator.

        Parameters
        ----------
        told
            See :meth:`Coordinator.watch <coordinator.service.coordinator.Coordinator.watch>`.
        answering
            By the names of store actors, whether they answered when they were asked last.
        """
        self.stamps = dict(told["stamps"])
        changed = {query["name"]: query for query in told["queries"]}
        kept = {name: query for name, query in self._seen.queries.items() if name in self.stamps}
        queries = dict(sorted({**kept, **changed}.items()))
        drained = set(told["drained"])
        actors = {
            one["actor_name"]: actor_row(
                one, answers=answering.get(one["actor_name"]), is_drained=one["node_id"] in drained
            )
            for one in told["store_actors"]
        }
        coordinator = told["coordinator"]
        executors = {f"{one['application']}/{one['executor_id']}": executor_row(one) for one in told["executors"]}
        running = {name: batch for name, batch in told["running"].items() if name in queries}
        seen = Seen((coordinator["pid"], coordinator["started_at_ms"]), actors, queries, executors, running)
        is_first = not self._told
        self._told = told
        for name, query in changed.items():
            self._keep_batches(name, query)
        for name in [name for name in self._batches if name not in queries]:
            del self._batches[name]
        return self._update(seen, self._rows(seen, set(changed)), now_ms, is_first=is_first)

    def unreachable(self, why: str, now_ms: int) -> Update:
        """The coordinator did not answer: what is known stays, and is said to be old."""
        seen = replace(self._seen, coordinator=None)
        fleet = self._tables.get("fleet", {}).get("fleet", {})
        tables = {**self._tables, "fleet": {"fleet": {**fleet, "error": why}}}
        return self._update(seen, tables, now_ms, is_first=False)

    def view(self) -> dict[str, Any]:
        """All that is shown: rows by table and id, and events, oldest first."""
        return {"tables": self._tables, "events": list(self._events)}

    def shard(self, state_name: str, shard: int) -> Mapping[str, Any] | None:
        """Everything that is known of a shard; None if there is none."""
        query = self._seen.queries.get(state_name)
        shards = () if query is None else query["shards"]
        found: Mapping[str, Any] | None = shards[shard] if 0 <= shard < len(shards) else None
        return found

    def _keep_batches(self, name: str, query: Mapping[str, Any]) -> None:
        told = {one["version"]: batch_row(name, one) for one in query["batches"]}
        newest = max(told, default=0)
        # What another run began again did not count.
        kept = {version: row for version, row in self._batches.get(name, {}).items() if version <= newest}
        known = {**kept, **told}
        self._batches[name] = {version: known[version] for version in sorted(known)[-_BATCHES:]}

    def _rows(self, seen: Seen, changed: set[str]) -> Tables:
        """Tables of what is seen now; rows of queries that did not change are the ones that were there."""
        told = self._told
        fleet = {"uri": told["uri"], "fleet_id": told["fleet_id"], **told["coordinator"], "error": None}
        former = self._tables
        shards: dict[str, Row] = {}
        for name, query in seen.queries.items():
            for one in query["shards"]:
                key = shard_id(name, one["partition_id"])
                is_new = name in changed or key not in former.get("shards", {})
                shards[key] = shard_row(name, one) if is_new else former["shards"][key]
        return {
            "fleet": {"fleet": fleet},
            "actors": {name: dict(row) for name, row in seen.actors.items()},
            "executors": {key: dict(row) for key, row in seen.executors.items()},
            "queries": {name: query_row(query, seen.running.get(name)) for name, query in seen.queries.items()},
            "shards": shards,
            "batches": {
                f"{name}/{version}": row for name, rows in self._batches.items() for version, row in rows.items()
            },
        }

    def _update(self, seen: Seen, tables: Tables, now_ms: int, *, is_first: bool) -> Update:
        # At the first look nobody knows when what is there came about.
        happened = [] if is_first else events_between(self._seen, seen, now_ms)
        changes = difference(self._tables, tables)
        self._seen, self._tables = seen, tables
        return Update(changes, [self._numbered_row(event) for event in happened])

    def _numbered_row(self, event: Event) -> Row:
        self._numbered += 1
        row = {"id": self._numbered, **asdict(event)}
        self._events.append(row)
        return row
