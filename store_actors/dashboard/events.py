"""What happened between two looks at a fleet. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from coordinator.text import size_text

__all__ = ["Event", "EventKind", "Seen", "events_between"]

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
    """

    at_ms: int
    kind: EventKind
    text: str
    state: str | None = None
    shard: int | None = None
    is_bad: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """A fleet as it was seen at a look.

    Attributes
    ----------
    coordinator
        What tells its lives apart, and None while it does not answer.
    actors, queries
        By name; of actors ``alive`` is as it is shown.
    """

    coordinator: tuple[int, int] | None = None
    actors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    queries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def events_between(before: Seen, after: Seen, now_ms: int) -> list[Event]:
    """What happened between two looks, in an order in which it may have."""
    return [
        *_of_coordinator(before, after, now_ms),
        *_of_actors(before, after, now_ms),
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
        where = f"on {actor['host']}"
        if former is None:
            yield Event(now_ms, kind, f"store actor {_short(name)} started {where}")
        elif former["alive"] and not actor["alive"]:
            yield Event(now_ms, kind, f"store actor {_short(name)} {where} is lost (pid {former['pid']})", is_bad=True)
        elif actor["alive"] and (former["instance_id"] != actor["instance_id"] or not former["alive"]):
            yield Event(now_ms, kind, f"store actor {_short(name)} {where} is back (pid {actor['pid']})")


def _short(name: str | None) -> str:
    """A store actor as people are told it: by its node, and its number there."""
    return "nobody" if name is None else _OF_FLEET.sub("store-", name)


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
        yield Event(one["at_ms"], kind, f"{one['kind']}: {one['text']}", name, one["shard"], is_bad=True)


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
        text = f"stays at {_short(move['from'])}, was to go to {_short(move['to'])} ({move['reason']}): {move['error']}"
        return Event(now_ms, EventKind.MOVE, text, name, shard, is_bad=True)
    giver = before.actors.get(move["from"] or "")
    # Who had it was lost by then, or is another life of the same name.
    was_lost = giver is not None and (not giver["alive"] or move["from"] == move["to"])
    kind = EventKind.RECOVERY if was_lost else EventKind.MOVE
    way = f"{_short(move['from'])} → {_short(move['to'])}"
    if move["from"] == move["to"]:
        way = f"read again by the next life of {_short(move['to'])}"
    text = f"{way} at version {move['version']}: {move['reason']}"
    if move["moved_bytes"] is not None:
        text += f"; {size_text(move['moved_bytes'])} from memory in {move['moved_ms']} ms"
    return Event(now_ms, kind, text, name, shard)


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
