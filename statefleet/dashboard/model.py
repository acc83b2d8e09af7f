"""The dashboard's model of a fleet: the coordinator's last report, the newest batches, and events. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from statefleet.dashboard.differences import Row, Tables, difference
from statefleet.dashboard.events import Event, Seen, events_between
from statefleet.dashboard.view import actor_row, batch_row, executor_row, query_row, shard_id, shard_row

__all__ = ["FleetModel", "Update"]

#: Number of the newest batches of each query, and of the newest events, that are kept.
_BATCHES = 40
_EVENTS = 500


@dataclass(frozen=True, slots=True)
class Update:
    """Changes since the last poll.

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
    """The state of a fleet, updated at each poll."""

    def __init__(self) -> None:
        #: Stamps that the next :meth:`Coordinator.watch <coordinator.service.coordinator.Coordinator.watch>` takes.
        self.stamps: dict[str, str] = {}
        self._report: Mapping[str, Any] = {}
        self._seen = Seen()
        self._batches: dict[str, dict[int, Row]] = {}
        self._tables: Tables = {}
        self._events: deque[Row] = deque(maxlen=_EVENTS)
        self._numbered = 0

    def take(self, report: Mapping[str, Any], answering: Mapping[str, bool], now_ms: int) -> Update:
        """Apply a report of the coordinator, and return the changes.

        Parameters
        ----------
        report
            See :meth:`Coordinator.watch <coordinator.service.coordinator.Coordinator.watch>`.
        answering
            By the name of each store actor, whether it answered the last ping.
        """
        self.stamps = dict(report["stamps"])
        changed = {query["name"]: query for query in report["queries"]}
        kept = {name: query for name, query in self._seen.queries.items() if name in self.stamps}
        queries = dict(sorted({**kept, **changed}.items()))
        drained = set(report["drained"])
        actors = {
            actor["actor_name"]: actor_row(
                actor, answers=answering.get(actor["actor_name"]), is_drained=actor["node_id"] in drained
            )
            for actor in report["store_actors"]
        }
        coordinator = report["coordinator"]
        executors = {
            f"{executor['application']}/{executor['executor_id']}": executor_row(executor)
            for executor in report["executors"]
        }
        running = {name: batch for name, batch in report["running"].items() if name in queries}
        snapshot = Seen((coordinator["pid"], coordinator["started_at_ms"]), actors, queries, executors, running)
        is_first = not self._report
        self._report = report
        for name, query in changed.items():
            self._keep_batches(name, query)
        for name in [name for name in self._batches if name not in queries]:
            del self._batches[name]
        return self._update(snapshot, self._rows(snapshot, set(changed)), now_ms, is_first=is_first)

    def unreachable(self, why: str, now_ms: int) -> Update:
        """Return the changes when the coordinator does not answer: the last view remains, marked as old."""
        snapshot = replace(self._seen, coordinator=None)
        fleet = self._tables.get("fleet", {}).get("fleet", {})
        tables = {**self._tables, "fleet": {"fleet": {**fleet, "error": why}}}
        return self._update(snapshot, tables, now_ms, is_first=False)

    def view(self) -> dict[str, Any]:
        """Return the whole view: rows by table and id, and events, oldest first."""
        return {"tables": self._tables, "events": list(self._events)}

    def shard(self, state_name: str, shard: int) -> Mapping[str, Any] | None:
        """Return the last report of a shard; None if there is no such shard."""
        query = self._seen.queries.get(state_name)
        shards = () if query is None else query["shards"]
        report: Mapping[str, Any] | None = shards[shard] if 0 <= shard < len(shards) else None
        return report

    def _keep_batches(self, name: str, query: Mapping[str, Any]) -> None:
        reported = {batch["version"]: batch_row(name, batch) for batch in query["batches"]}
        newest = max(reported, default=0)
        # Batches that another run repeats were not committed.
        kept = {version: row for version, row in self._batches.get(name, {}).items() if version <= newest}
        batches = {**kept, **reported}
        self._batches[name] = {version: batches[version] for version in sorted(batches)[-_BATCHES:]}

    def _rows(self, snapshot: Seen, changed: set[str]) -> Tables:
        """Return the tables of a report; rows of unchanged queries are the same objects as before."""
        report = self._report
        fleet = {"uri": report["uri"], "fleet_id": report["fleet_id"], **report["coordinator"], "error": None}
        previous = self._tables
        shards: dict[str, Row] = {}
        for name, query in snapshot.queries.items():
            for shard in query["shards"]:
                key = shard_id(name, shard["partition_id"])
                is_new = name in changed or key not in previous.get("shards", {})
                shards[key] = shard_row(name, shard) if is_new else previous["shards"][key]
        return {
            "fleet": {"fleet": fleet},
            "actors": {name: dict(row) for name, row in snapshot.actors.items()},
            "executors": {key: dict(row) for key, row in snapshot.executors.items()},
            "queries": {name: query_row(query, snapshot.running.get(name)) for name, query in snapshot.queries.items()},
            "shards": shards,
            "batches": {
                f"{name}/{version}": row for name, rows in self._batches.items() for version, row in rows.items()
            },
        }

    def _update(self, snapshot: Seen, tables: Tables, now_ms: int, *, is_first: bool) -> Update:
        # At the first poll it is not known when anything happened.
        happened = [] if is_first else events_between(self._seen, snapshot, now_ms)
        changes = difference(self._tables, tables)
        self._seen, self._tables = snapshot, tables
        return Update(changes, [self._numbered_row(event) for event in happened])

    def _numbered_row(self, event: Event) -> Row:
        self._numbered += 1
        row = {"id": self._numbered, **asdict(event)}
        self._events.append(row)
        return row
