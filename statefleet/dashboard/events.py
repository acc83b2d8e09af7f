"""What happened between two looks at a fleet. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from coordinator.model.text import size_text

__all__ = ["Event", "EventKind", "Seen", "events_between"]

#: What ends the first part of an error's text.
_FIGURES = re.compile(r" \(|; |, ")
#: Its number on its node, at the end of a name; the first one has none.
_NUMBER = re.compile(r"-(\d+)$")
#: What the names of all store actors of a fleet begin with.
_OF_FLEET = re.compile(r"^statefleet-store-[0-9a-f]+-")


class EventKind(StrEnum):
    """What an event is about."""

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
    """Something that happened.

    Attributes
    ----------
    at_ms
        When it happened, where somebody took that down; else when it was noticed.
    state, shard
        Of which; None where it is about others.
    is_bad
        Whether somebody should look.
    cause
        Events that have it in common are shown as one: the state's name and a sentence; empty for an event of its own.
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
    """A fleet as it was seen at a look.

    Attributes
    ----------
    coordinator
        What tells its lives apart, and None while it does not answer.
    actors, queries
        By name; of actors ``alive`` is as it is shown.
    executors
        Spark's, by application and id.
    running
        By query, batches that have been running for some seconds.
    """

    coordinator: tuple[int, int] | None = None
    actors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    queries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    executors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    running: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def events_between(before: Seen, after: Seen, now_ms: int) -> list[Event]:
    """What happened between two looks, in an order in which it may have."""
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
    was, now = before.coordinator, after.coordinator
    kind = EventKind.COORDINATOR
    if now is None and was is not None:
        yield Event(
            now_ms, kind, "the coordinator does not answer; what is shown is as of the last answer", is_bad=True
        )
    elif now is not None and was is None:
        yield Event(now_ms, kind, f"the coordinator answers (pid {now[0]})")
    elif now != was and now is not None:
        yield Event(now[1], kind, f"the coordinator started anew (pid {now[0]}) and read the logs", is_bad=True)


def _of_actors(before: Seen, after: Seen, now_ms: int) -> Iterator[Event]:
    kind = EventKind.ACTOR
    for name, actor in after.actors.items():
        former = before.actors.get(name)
        who = f"store actor {_short(name, after.actors)}"
        if former is None:
            yield Event(now_ms, kind, f"{who} started")
        elif former["alive"] and not actor["alive"]:
            yield Event(now_ms, kind, f"{who} is lost (pid {former['pid']})", is_bad=True)
        elif actor["alive"] and (former["instance_id"] != actor["instance_id"] or not former["alive"]):
            yield Event(now_ms, kind, f"{who} is back (pid {actor['pid']})")


def _of_executors(before: Seen, after: Seen, now_ms: int) -> Iterator[Event]:
    kind = EventKind.EXECUTOR
    for key, executor in after.executors.items():
        former = before.executors.get(key)
        name = f"executor {executor['executor_id']} on {executor['host']}"
        if executor["alive"]:
            if former is None:
                yield Event(now_ms, kind, f"{name} is there")
        elif former is None or former["alive"]:
            how = "was ended" if executor["is_expected"] else "was lost"
            why = f": {executor['reason']}" if executor["reason"] else ""
            at_ms = executor["lost_at_ms"] or now_ms
            yield Event(at_ms, kind, f"{name} {how}{why}", is_bad=not executor["is_expected"])


def _of_overdue_batches(before: Seen, after: Seen, now_ms: int) -> Iterator[Event]:
    """Batches that have taken much longer than usual since the look before, and are not over."""
    for name, batch in after.running.items():
        former = before.running.get(name)
        was_overdue = former is not None and former["batch_id"] == batch["batch_id"] and former["is_overdue"]
        if batch["is_overdue"] and not was_overdue:
            yield Event(now_ms, EventKind.SLOW, batch["text"], name, is_bad=True)


def _short(name: str | None, actors: Mapping[str, Mapping[str, Any]]) -> str:
    """A store actor as people are told it: by the address of its node, and its number there."""
    if name is None:
        return "nobody"
    short = _OF_FLEET.sub("", name)
    host = actors.get(name, {}).get("host")
    number = _NUMBER.search(short)
    return (
        f"store-{short}"
        if host is None and short != name
        else short
        if host is None
        else f"{host}#{number[1] if number else 0}"
    )


def _of_query(
    name: str, former: Mapping[str, Any] | None, query: Mapping[str, Any], before: Seen, now_ms: int
) -> Iterator[Event]:
    if former is None:
        if before.coordinator is not None:
            yield Event(now_ms, EventKind.QUERY, f"a state of {query['num_shards']} shards was made", name)
        return
    yield from _of_runs(name, former, query, now_ms)
    yield from _of_refusals(name, former, query)
    if former["num_shards"] != query["num_shards"]:
        text = f"rescaled from {former['num_shards']} to {query['num_shards']} shards"
        yield Event(now_ms, EventKind.MOVE, text, name)
    else:
        yield from _of_moves(name, former, query, before, now_ms)
        yield from _of_maintenance(name, former, query, now_ms)
    yield from _of_slow_batches(name, former, query)


def _of_runs(name: str, former: Mapping[str, Any], query: Mapping[str, Any], now_ms: int) -> Iterator[Event]:
    if former["run_id"] != query["run_id"]:
        text = f"run {query['run_id'][:8]} of the query began"
        if former["run_id"] and former["active"]:
            text += f"; run {former['run_id'][:8]} may not commit any more"
        yield Event(now_ms, EventKind.QUERY, text, name)
    elif former["active"] and not query["active"]:
        yield Event(now_ms, EventKind.QUERY, f"run {query['run_id'][:8]} of the query ended", name)
    if query["version"] < former["version"]:
        text = f"went back from version {former['version']} to {query['version']}, to repeat what did not count"
        yield Event(now_ms, EventKind.RECOVERY, text, name, is_bad=True)


def _of_refusals(name: str, former: Mapping[str, Any], query: Mapping[str, Any]) -> Iterator[Event]:
    for one in _newly_numbered(former.get("refusals", ()), query.get("refusals", ())):
        kind = EventKind.FENCE if one["kind"] == "FencedError" else EventKind.QUERY
        text = f"{one['kind']}: {one['text']}"
        # What it is about stands before the first parenthesis or semicolon; after it are a task's own figures.
        cause = f"{name}: {_FIGURES.split(text)[0]}"
        yield Event(one["at_ms"], kind, text, name, one["shard"], is_bad=True, cause=cause)


def _of_moves(
    name: str, former: Mapping[str, Any], query: Mapping[str, Any], before: Seen, now_ms: int
) -> Iterator[Event]:
    for old, new in zip(former["shards"], query["shards"], strict=True):
        known = {_identity(move) for move in old.get("moves", ())}
        for move in new.get("moves", ()):
            if _identity(move) not in known:
                yield _moved(name, new["partition_id"], move, before, now_ms)


def _identity(move: Mapping[str, Any]) -> tuple[Any, ...]:
    return move["epoch"], move["version"], move["to"], move["error"]


def _moved(name: str, shard: int, move: Mapping[str, Any], before: Seen, now_ms: int) -> Event:
    if move["error"]:
        stays, goes = (_short(move[end], before.actors) for end in ("from", "to"))
        text = f"stays at {stays}, was to go to {goes} ({move['reason']}): {move['error']}"
        return Event(now_ms, EventKind.MOVE, text, name, shard, is_bad=True, cause=f"{name}: {text}")
    source = before.actors.get(move["from"] or "")
    # Who had it was lost by then, or is another life of the same name.
    was_lost = source is not None and (not source["alive"] or move["from"] == move["to"])
    kind = EventKind.RECOVERY if was_lost else EventKind.MOVE
    way = f"{_short(move['from'], before.actors)} → {_short(move['to'], before.actors)}"
    if move["from"] == move["to"]:
        way = f"read again by the next life of {_short(move['to'], before.actors)}"
    text = f"{way} at version {move['version']}: {move['reason']}"
    if move["moved_bytes"] is not None:
        text += f"; {size_text(move['moved_bytes'])} from memory in {move['moved_ms']} ms"
    return Event(now_ms, kind, text, name, shard, cause=f"{name}: {move['reason']}")


def _of_maintenance(name: str, former: Mapping[str, Any], query: Mapping[str, Any], now_ms: int) -> Iterator[Event]:
    pairs = list(zip(former["shards"], query["shards"], strict=True))
    snapshots = _raised(pairs, "snapshot_version")
    if snapshots:
        yield Event(now_ms, EventKind.MAINTENANCE, f"snapshots of {_shards(snapshots)}", name)
    floors = _raised(pairs, "oldest_version")
    if floors:
        yield Event(now_ms, EventKind.MAINTENANCE, f"older versions let go of {_shards(floors)}", name)


def _raised(pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], name: str) -> list[int]:
    """What a figure has risen to, of the shards where it has."""
    return [new[name] for old, new in pairs if (new.get(name) or 0) > (old.get(name) or 0)]


def _shards(versions: list[int]) -> str:
    low, high = min(versions), max(versions)
    return f"{len(versions)} {'shard' if len(versions) == 1 else 'shards'} up to version {low if low == high else f'{low} to {high}'}"


def _of_slow_batches(name: str, former: Mapping[str, Any], query: Mapping[str, Any]) -> Iterator[Event]:
    for one in _newly_numbered(former.get("slow_batches", ()), query.get("slow_batches", ())):
        yield Event(one["at_ms"], EventKind.SLOW, one["text"], name, one["shard"], is_bad=True)


def _newly_numbered(
    former: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """Those that the coordinator numbered since the look before."""
    known = max((one["number"] for one in former), default=0)
    if told and told[-1]["number"] < known:
        known = 0  # another coordinator counts
    yield from (one for one in told if one["number"] > known)
