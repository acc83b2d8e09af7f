"""The dashboard's model of a fleet: rows, differences that browsers apply, phases of a batch, and events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.telemetry.batch_times import PHASES, phases
from statefleet.dashboard.differences import difference
from statefleet.dashboard.events import Event, EventKind, Seen, events_between
from statefleet.dashboard.model import FleetModel
from tests.dashboard_views import apply_difference
from tests.fed_fleet import FedFleet

NOW_MS = 1_735_689_600_000
ROWS = st.dictionaries(st.sampled_from("abc"), st.none() | st.integers(0, 2), max_size=3)
TABLES = st.fixed_dictionaries(
    {
        name: st.dictionaries(st.sampled_from("xyz"), ROWS.map(lambda row: {"a": 0, "b": 0, "c": 0, **row}))
        for name in ("s", "t")
    }
)


@given(TABLES, TABLES)
def test_a_browser_makes_the_new_picture_of_the_previous_one_and_the_difference(before: Any, after: Any) -> None:
    changes = json.loads(json.dumps(difference(before, after)))
    assert apply_difference(before, changes) == after
    assert bool(changes) == (before != after)


def test_only_what_changed_is_sent() -> None:
    before = {"shards": {"q/0": {"version": 1, "rows": 5}, "q/1": {"version": 1, "rows": 7}}}
    after = {"shards": {"q/0": {"version": 2, "rows": 5}, "q/1": {"version": 1, "rows": 7}}}
    assert difference(before, after) == {"shards": {"set": {"q/0": {"version": 2}}, "gone": []}}


# -- phases -------------------------------------------------------------------------------------------------------


def batch(**changes: int | None) -> dict[str, int | None]:
    times = {
        "planned_ms": 1000, "asked_ms": 1300, "leased_ms": 1310, "begun_ms": 1330, "apply_ms": 50, "write_ms": 70,
        "counted_ms": 1480, "ended_ms": 1600,
    }  # fmt: skip
    return {**times, **changes}


def test_the_phases_of_a_batch_add_up_to_its_time() -> None:
    times = dict(zip(PHASES, phases(batch()), strict=True))
    assert times == {"spark": 300, "lease": 10, "hand_over": 20, "apply": 50, "write": 70, "commit": 30, "end": 120}
    assert sum(ms for ms in times.values() if ms) == 1600 - 1000


def test_a_lease_that_came_with_the_commit_before_takes_nothing() -> None:
    times = phases(batch(asked_ms=None, leased_ms=None))
    assert times == [330, None, None, 50, 70, 30, 120]


def test_unknown_times_are_not_made_up() -> None:
    assert phases(batch(apply_ms=None, write_ms=None, counted_ms=None)) == [300, 10, 20, None, None, None, None]
    assert phases(batch(planned_ms=None))[0] is None
    assert phases(dict.fromkeys(batch())) == [None] * 7


def test_clocks_that_disagree_make_no_time_negative() -> None:
    assert min(ms for ms in phases(batch(begun_ms=900, ended_ms=1)) if ms is not None) == 0


# -- events -------------------------------------------------------------------------------------------------------


def seen(**changes: Any) -> Seen:
    fleet = FedFleet(1, 3)
    report = fleet.watch({})
    actors = {actor["actor_name"]: actor for actor in report["store_actors"]}
    return replace(Seen((1, NOW_MS - 5), actors, {query["name"]: query for query in report["queries"]}), **changes)


def changed(before: Seen, **changes: Any) -> Seen:
    (query,) = before.queries.values()
    return replace(before, queries={"query-00": {**query, **changes}})


def shards(before: Seen, shard: int, **changes: Any) -> Seen:
    (query,) = before.queries.values()
    rows = [{**row, **changes} if row["partition_id"] == shard else row for row in query["shards"]]
    return changed(before, shards=rows)


def only(before: Seen, after: Seen) -> Event:
    (event,) = events_between(before, after, NOW_MS)
    return event


MOVE = {
    "epoch": 9, "version": 100, "from": "a", "from_instance": "i", "to": "b", "reason": "spread evenly", "moved_bytes": 12,
    "moved_ms": 3, "error": "",
}  # fmt: skip


def test_nothing_happened_where_nothing_changed() -> None:
    before = seen()
    assert events_between(before, before, NOW_MS) == []
    assert events_between(before, changed(before, rows_per_second=7.0, version=102), NOW_MS) == []


def test_a_move_is_one_event_with_its_reason() -> None:
    before = seen()
    after = shards(before, 1, moves=[MOVE])
    event = only(before, after)
    assert (event.kind, event.state, event.shard, event.is_bad) == (EventKind.MOVE, "query-00", 1, False)
    assert event.text == "a → b at version 100: spread evenly; 12 Bytes from memory in 3 ms"
    moved_again = shards(after, 1, moves=[MOVE, {**MOVE, "epoch": 10, "to": "c", "moved_bytes": None}])
    assert only(after, moved_again).text == "a → c at version 100: spread evenly"


def test_a_move_from_a_store_actor_that_was_lost_is_a_recovery() -> None:
    before = seen()
    name, *_ = before.actors
    lost = replace(before, actors={**before.actors, name: {**before.actors[name], "alive": False}})
    assert only(lost, shards(lost, 1, moves=[{**MOVE, "from": name}])).kind is EventKind.RECOVERY
    assert only(before, shards(before, 1, moves=[{**MOVE, "from": name}])).kind is EventKind.MOVE


def test_a_shard_on_the_next_incarnation_of_its_store_actor_is_a_recovery_also_if_the_loss_was_not_seen() -> None:
    before = seen()
    name, *_ = before.actors
    event = only(before, shards(before, 1, moves=[{**MOVE, "from": name, "to": name, "moved_bytes": None}]))
    assert event.kind is EventKind.RECOVERY
    assert event.text == "read again by a restart of 10.0.0.4#0 at version 100: spread evenly"


def test_a_move_that_failed_is_trouble() -> None:
    before = seen()
    event = only(before, shards(before, 0, moves=[{**MOVE, "error": "no room"}]))
    assert event.is_bad
    assert "stays at a" in event.text
    assert "no room" in event.text


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"alive": False}, "is lost (pid 4100)"), ({"instance_id": "other", "pid": 5000}, "is back (pid 5000)")],
)
def test_store_actors_that_are_lost_or_return_are_events(changes: Mapping[str, Any], text: str) -> None:
    before = seen()
    name, *_ = before.actors
    after = replace(before, actors={**before.actors, name: {**before.actors[name], **changes}})
    assert text in only(before, after).text


def test_a_store_actor_whose_next_incarnation_was_reported_before_it_answers_is_back_once_it_does() -> None:
    before = seen()
    name, *_ = before.actors
    reports = [{"alive": True}, {"alive": False, "instance_id": "next"}, {"alive": True, "instance_id": "next"}]
    alive, lost, back = (replace(before, actors={name: {**before.actors[name], **report}}) for report in reports)
    assert "is lost" in only(alive, lost).text
    assert "is back" in only(lost, back).text


EXECUTOR = {
    "executor_id": "2",
    "host": "10.0.0.7",
    "alive": True,
    "lost_at_ms": None,
    "reason": "",
    "is_expected": False,
}


def test_an_executor_that_is_lost_is_trouble_once_and_one_that_was_ended_is_not() -> None:
    before = replace(seen(), executors={"app/2": EXECUTOR})
    lost = {**EXECUTOR, "alive": False, "lost_at_ms": NOW_MS - 70, "reason": "killed by the system"}
    after = replace(before, executors={"app/2": lost})
    event = only(before, after)
    assert (event.kind, event.at_ms, event.is_bad) == (EventKind.EXECUTOR, NOW_MS - 70, True)
    assert event.text == "executor 2 on 10.0.0.7 was lost: killed by the system"
    assert events_between(after, after, NOW_MS) == []
    assert only(replace(before, executors={}), after).text == event.text, "it came and went between two looks"
    ended = only(before, replace(before, executors={"app/2": {**lost, "is_expected": True}}))
    assert not ended.is_bad
    assert only(replace(before, executors={}), before).text == "executor 2 on 10.0.0.7 is there"


def test_a_batch_that_becomes_overdue_is_trouble_while_it_runs_and_once() -> None:
    batch = {"batch_id": 7, "running_ms": 4000, "is_overdue": False, "text": "batch 7 runs"}
    before = replace(seen(), running={"query-00": batch})
    overdue = {**batch, "is_overdue": True, "text": "batch 7 of query-00 has been running for 29.3 s"}
    after = replace(before, running={"query-00": overdue})
    event = only(before, after)
    assert (event.kind, event.state, event.text, event.is_bad) == (EventKind.SLOW, "query-00", overdue["text"], True)
    assert events_between(after, replace(after, running={"query-00": {**overdue, "running_ms": 9}}), NOW_MS) == []
    assert only(after, replace(after, running={"query-00": {**overdue, "batch_id": 8}})).kind is EventKind.SLOW


def test_what_one_cause_does_to_several_shards_has_it_in_common() -> None:
    before = seen()
    (query,) = before.queries.values()
    moves = [{**MOVE, "version": 100 + shard["partition_id"]} for shard in query["shards"]]
    after = changed(
        before, shards=[{**shard, "moves": [move]} for shard, move in zip(query["shards"], moves, strict=True)]
    )
    causes = {event.cause for event in events_between(before, after, NOW_MS)}
    assert causes == {"query-00: spread evenly"}
    refusal = {"at_ms": NOW_MS, "partition_id": 0, "kind": "StoreUnavailableError"}
    refusals = [{**refusal, "number": n, "shard": n, "text": f"the store actor is lost (shard={n})"} for n in (1, 2)]
    first, second = events_between(before, changed(before, refusals=refusals), NOW_MS)
    assert first.cause == second.cause == "query-00: StoreUnavailableError: the store actor is lost"


def test_a_coordinator_that_is_lost_returns_or_restarts_is_an_event() -> None:
    before = seen()
    away, restarted = replace(before, coordinator=None), replace(before, coordinator=(2, NOW_MS))
    assert "does not answer" in only(before, away).text
    assert "answers (pid 2)" in only(away, restarted).text
    assert "started again" in only(before, restarted).text


def test_runs_refusals_and_versions_that_go_back_are_events() -> None:
    before = seen()
    taken_over = only(before, changed(before, run_id="77777777aaaa"))
    assert taken_over.text == "run 77777777 of the query began; run 3f2a9c00 may not commit any more"
    refusal = {
        "number": 1,
        "at_ms": NOW_MS - 50,
        "partition_id": 2,
        "shard": 2,
        "kind": "FencedError",
        "text": "a newer run",
    }
    after = changed(before, refusals=[refusal])
    event = only(before, after)
    assert (event.kind, event.at_ms, event.shard, event.is_bad) == (EventKind.FENCE, NOW_MS - 50, 2, True)
    assert events_between(after, changed(after, rows_late=1), NOW_MS) == []
    (went_back,) = events_between(before, changed(before, version=100), NOW_MS)
    assert (went_back.kind, went_back.is_bad) == (EventKind.RECOVERY, True)


def test_snapshots_and_truncations_of_several_shards_are_one_event() -> None:
    before = seen()
    (query,) = before.queries.values()
    after = changed(
        before, shards=[{**shard, "snapshot_version": 100 + shard["partition_id"]} for shard in query["shards"]]
    )
    assert only(before, after).text == "snapshots of 3 shards up to version 100 to 102"
    assert (
        only(before, shards(before, 0, oldest_version=85)).text == "older versions let go of 1 shard up to version 85"
    )


def test_a_slow_batch_is_one_event_in_the_coordinators_words() -> None:
    before = seen()
    slow = {"number": 3, "at_ms": NOW_MS - 9, "batch_id": 7, "shard": 1, "took_ms": 9000, "text": "batch 7 took 9.0 s"}
    after = changed(before, slow_batches=[slow])
    event = only(before, after)
    assert (event.kind, event.at_ms, event.shard, event.is_bad) == (EventKind.SLOW, NOW_MS - 9, 1, True)
    assert event.text == "batch 7 took 9.0 s"
    assert events_between(after, changed(after, rows_late=1), NOW_MS) == []
    assert only(after, changed(after, slow_batches=[{**slow, "number": 1, "text": "anew"}])).text == "anew"


# -- the model ----------------------------------------------------------------------------------------------------


def test_a_browser_that_follows_has_the_same_picture_as_one_that_opens_later() -> None:
    fleet, model = FedFleet(3, 12), FleetModel()
    model.take(fleet.watch({}), {}, NOW_MS)
    picture = json.loads(json.dumps(model.view()["tables"]))
    for look in range(4):
        report = fleet.watch(model.stamps)
        if look == 2:
            fleet.move("query-01", 2, 5, "wanted there")
            fleet.unanswering = {fleet.actors[0]["actor_name"]}
        update = model.take(report, fleet.answering(report), NOW_MS + look)
        assert update
        picture = apply_difference(picture, json.loads(json.dumps(update.changes)))
    assert picture == json.loads(json.dumps(model.view()["tables"]))
    assert [event["kind"] for event in model.view()["events"]] == ["actor", "move"]
    assert picture["actors"][fleet.actors[0]["actor_name"]]["alive"] is False
    assert len(picture["batches"]) == 3 * 5


def test_queries_missing_from_a_report_stay_and_those_without_a_stamp_are_dropped() -> None:
    fleet, model = FedFleet(2, 4), FleetModel()
    model.take(fleet.watch({}), {}, NOW_MS)
    report = {**fleet.watch({}), "queries": []}
    assert not model.take(report, {}, NOW_MS)
    report["stamps"] = {"query-00": "1"}
    update = model.take(report, {}, NOW_MS)
    assert update.changes["queries"]["gone"] == ["query-01"]
    assert set(update.changes["shards"]["gone"]) == {"query-01/0", "query-01/1"}
    assert model.shard("query-01", 0) is None
    assert model.shard("query-00", 1) is not None
    assert model.shard("query-00", 2) is model.shard("query-00", -1) is None


def test_a_replayed_batch_replaces_the_batches_that_were_not_committed() -> None:
    fleet, model = FedFleet(1, 2), FleetModel()
    for _ in range(4):
        report = fleet.watch({})
        model.take(report, {}, NOW_MS)
    (query,) = report["queries"]
    replayed = {**query, "batches": query["batches"][:2], "version": 102}
    model.take({**report, "queries": [replayed]}, {}, NOW_MS)
    assert sorted(row["version"] for row in model.view()["tables"]["batches"].values()) == [101, 102]


def test_an_unreachable_coordinator_is_shown_beside_the_last_known_picture() -> None:
    fleet, model = FedFleet(1, 2), FleetModel()
    assert model.unreachable("no fleet", NOW_MS)
    model.take(fleet.watch({}), {}, NOW_MS)
    update = model.unreachable("no answer", NOW_MS)
    assert update.changes == {"fleet": {"set": {"fleet": {"error": "no answer"}}, "gone": []}}
    assert not model.unreachable("no answer", NOW_MS), "said once"
    assert len(model.view()["tables"]["shards"]) == 2
    update = model.take(fleet.watch({}), {}, NOW_MS)
    assert update.changes["fleet"]["set"]["fleet"]["error"] is None
    assert [event["kind"] for event in update.events] == ["coordinator"]
