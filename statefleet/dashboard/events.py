"""Events of a fleet between two polls. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from humanize import naturalsize

from coordinator.model.names import store_actor_text

__all__ = ["Event", "EventKind", "Seen", "events_between"]

#: End of the first part of an error's text, before its values.
_VALUES = re.compile(r" \(|; |, ")


class EventKind(StrEnum):
    """Subject of an event."""

    MOVE = "move"
    RECOVERY = "recovery"
    FENCE = "fence"
    SLOW = "slow"
    MAINTENANCE = "maintenance"
    QUERY = "query"
    ACTOR = "actor"
    EXECUTOR = "executor"
    COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class Event:
    """An event.

    Attributes
    ----------
    at_ms
        When it happened, if that is known; else when it was noticed.
    state, shard
        State and shard of the event; None where it has none.
    is_bad
        Whether it needs attention.
    cause
        Events with the same cause are shown as one: the state's name and a sentence; empty for an event that is shown alone.
    """

    at_ms: int
    kind: EventKind
    text: str
    state: str | None = None
    shard: int | None = None
    is_bad: bool = False
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """A fleet at one poll.

    Attributes
    ----------
    coordinator
        Process id and start of its incarnation; None while it does not answer.
    actors, queries
        Rows by name; ``alive`` of an actor is as it is shown.
    executors
        Spark's executors, by application and id.
    running
        Batches that have been running for some seconds, by query.
    """

    coordinator: tuple[int, int] | None = None
    actors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    queries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    executors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    running: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def events_between(before: Seen, after: Seen, now_ms: int) -> list[Event]:
    """Return the events between two polls, in a possible order."""
    return [
        *_of_coordinator(before, after, now_ms),
        *_of_actors(before, after, now_ms),
        *_of_executors(before, after, now_ms),
        *_of_overdue_batches(before, after, now_ms),
        *(
            event
            for name, query in after.queries.items()
            if query is not before.queries.get(name)
            for event in _of_query(name, before.queries.get(name), query, before, now_ms)
        ),
        *(
            Event(now_ms, EventKind.QUERY, "the state is not there any more", name)
            for name in before.queries
            if name not in after.queries and after.coordinator is not None
        ),
    ]


def _of_coordinator(before: Seen, after: Seen, now_ms: int) -> Iterator[Event]:
    previous, now = before.coordinator, after.coordinator
    kind = EventKind.COORDINATOR
    if now is None and previous is not None:
        yield Event(
            now_ms, kind, "the coordinator does not answer; what is shown is as of the last answer", is_bad=True
        )
    elif now is not None and previous is None:
        yield Event(now_ms, kind, f"the coordinator answers (pid {now[0]})")
    elif now != previous and now is not None:
        yield Event(now[1], kind, f"the coordinator started again (pid {now[0]}) and read the logs", is_bad=True)


def _of_actors(before: Seen, after: Seen, now_ms: int) -> Iterator[Event]:
    kind = EventKind.ACTOR
    for name, actor in after.actors.items():
        previous = before.actors.get(name)
        subject = f"store actor {_actor_text(name, after.actors)}"
        if previous is None:
            yield Event(now_ms, kind, f"{subject} started")
        elif previous["alive"] and not actor["alive"]:
            yield Event(now_ms, kind, f"{subject} is lost (pid {previous['pid']})", is_bad=True)
        elif actor["alive"] and (previous["instance_id"] != actor["instance_id"] or not previous["alive"]):
            yield Event(now_ms, kind, f"{subject} is back (pid {actor['pid']})")


def _of_executors(before: Seen, after: Seen, now_ms: int) -> Iterator[Event]:
    kind = EventKind.EXECUTOR
    for key, executor in after.executors.items():
        previous = before.executors.get(key)
        name = f"executor {executor['executor_id']} on {executor['host']}"
        if executor["alive"]:
            if previous is None:
                yield Event(now_ms, kind, f"{name} is there")
        elif previous is None or previous["alive"]:
            end = "was ended" if executor["is_expected"] else "was lost"
            why = f": {executor['reason']}" if executor["reason"] else ""
            at_ms = executor["lost_at_ms"] or now_ms
            yield Event(at_ms, kind, f"{name} {end}{why}", is_bad=not executor["is_expected"])


def _of_overdue_batches(before: Seen, after: Seen, now_ms: int) -> Iterator[Event]:
    """Yield the running batches that have exceeded their usual time since the poll before."""
    for name, batch in after.running.items():
        previous = before.running.get(name)
        was_overdue = previous is not None and previous["batch_id"] == batch["batch_id"] and previous["is_overdue"]
        if batch["is_overdue"] and not was_overdue:
            yield Event(now_ms, EventKind.SLOW, batch["text"], name, is_bad=True)


def _actor_text(name: str | None, actors: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a store actor of a move as users see it."""
    return "none" if name is None else store_actor_text(name, actors.get(name, {}).get("host"))


def _of_query(
    name: str, previous: Mapping[str, Any] | None, query: Mapping[str, Any], before: Seen, now_ms: int
) -> Iterator[Event]:
    if previous is None:
        if before.coordinator is not None:
            yield Event(now_ms, EventKind.QUERY, f"a state of {query['num_shards']} shards was made", name)
        return
    yield from _of_runs(name, previous, query, now_ms)
    yield from _of_refusals(name, previous, query)
    if previous["num_shards"] != query["num_shards"]:
        text = f"rescaled from {previous['num_shards']} to {query['num_shards']} shards"
        yield Event(now_ms, EventKind.MOVE, text, name)
    else:
        yield from _of_moves(name, previous, query, before, now_ms)
        yield from _of_maintenance(name, previous, query, now_ms)
    yield from _of_slow_batches(name, previous, query)


def _of_runs(name: str, previous: Mapping[str, Any], query: Mapping[str, Any], now_ms: int) -> Iterator[Event]:
    if previous["run_id"] != query["run_id"]:
        text = f"run {query['run_id'][:8]} of the query began"
        if previous["run_id"] and previous["active"]:
            text += f"; run {previous['run_id'][:8]} may not commit any more"
        yield Event(now_ms, EventKind.QUERY, text, name)
    elif previous["active"] and not query["active"]:
        yield Event(now_ms, EventKind.QUERY, f"run {query['run_id'][:8]} of the query ended", name)
    if query["version"] < previous["version"]:
        text = f"went back from version {previous['version']} to {query['version']}, to repeat what did not count"
        yield Event(now_ms, EventKind.RECOVERY, text, name, is_bad=True)


def _of_refusals(name: str, previous: Mapping[str, Any], query: Mapping[str, Any]) -> Iterator[Event]:
    for refusal in _newly_numbered(previous.get("refusals", ()), query.get("refusals", ())):
        kind = EventKind.FENCE if refusal["kind"] == "FencedError" else EventKind.QUERY
        text = f"{refusal['kind']}: {refusal['text']}"
        # The cause ends at the first parenthesis or semicolon; the values of the task follow.
        cause = f"{name}: {_VALUES.split(text)[0]}"
        yield Event(refusal["at_ms"], kind, text, name, refusal["shard"], is_bad=True, cause=cause)


def _of_moves(
    name: str, previous: Mapping[str, Any], query: Mapping[str, Any], before: Seen, now_ms: int
) -> Iterator[Event]:
    for old, new in zip(previous["shards"], query["shards"], strict=True):
        earlier = {_identity(move) for move in old.get("moves", ())}
        for move in new.get("moves", ()):
            if _identity(move) not in earlier:
                yield _moved(name, new["partition_id"], move, before, now_ms)


def _identity(move: Mapping[str, Any]) -> tuple[Any, ...]:
    return move["epoch"], move["version"], move["to"], move["error"]


def _moved(name: str, shard: int, move: Mapping[str, Any], before: Seen, now_ms: int) -> Event:
    if move["error"]:
        stays, goes = (_actor_text(move[end], before.actors) for end in ("from", "to"))
        text = f"stays at {stays}, was to go to {goes} ({move['reason']}): {move['error']}"
        return Event(now_ms, EventKind.MOVE, text, name, shard, is_bad=True, cause=f"{name}: {text}")
    source = before.actors.get(move["from"] or "")
    # The store actor that had the shard was lost by then, or is another incarnation of the same name.
    was_lost = source is not None and (not source["alive"] or move["from"] == move["to"])
    kind = EventKind.RECOVERY if was_lost else EventKind.MOVE
    way = f"{_actor_text(move['from'], before.actors)} → {_actor_text(move['to'], before.actors)}"
    if move["from"] == move["to"]:
        way = f"read again by a restart of {_actor_text(move['to'], before.actors)}"
    text = f"{way} at version {move['version']}: {move['reason']}"
    if move["moved_bytes"] is not None:
        text += f"; {naturalsize(move['moved_bytes'])} from memory in {move['moved_ms']} ms"
    return Event(now_ms, kind, text, name, shard, cause=f"{name}: {move['reason']}")


def _of_maintenance(name: str, previous: Mapping[str, Any], query: Mapping[str, Any], now_ms: int) -> Iterator[Event]:
    pairs = list(zip(previous["shards"], query["shards"], strict=True))
    snapshots = _raised(pairs, "snapshot_version")
    if snapshots:
        yield Event(now_ms, EventKind.MAINTENANCE, f"snapshots of {_shards(snapshots)}", name)
    oldest = _raised(pairs, "oldest_version")
    if oldest:
        yield Event(now_ms, EventKind.MAINTENANCE, f"older versions let go of {_shards(oldest)}", name)


def _raised(pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], name: str) -> list[int]:
    """Return the new value of a field for the shards where it has risen."""
    return [new[name] for old, new in pairs if (new.get(name) or 0) > (old.get(name) or 0)]


def _shards(versions: list[int]) -> str:
    low, high = min(versions), max(versions)
    return f"{len(versions)} {'shard' if len(versions) == 1 else 'shards'} up to version {low if low == high else f'{low} to {high}'}"


def _of_slow_batches(name: str, previous: Mapping[str, Any], query: Mapping[str, Any]) -> Iterator[Event]:
    for batch in _newly_numbered(previous.get("slow_batches", ()), query.get("slow_batches", ())):
        yield Event(batch["at_ms"], EventKind.SLOW, batch["text"], name, batch["shard"], is_bad=True)


def _newly_numbered(
    previous: Sequence[Mapping[str, Any]], reported: Sequence[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """Yield the entries that the coordinator has numbered since the poll before."""
    newest = max((entry["number"] for entry in previous), default=0)
    if reported and reported[-1]["number"] < newest:
        newest = 0  # another coordinator counts
    yield from (entry for entry in reported if entry["number"] > newest)
