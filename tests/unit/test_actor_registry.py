"""The registry knows which incarnation of a store actor is alive, whichever one workers remember."""

from __future__ import annotations

from msgspec import structs

from coordinator.model.identities import ActorLocation
from coordinator.placement.actor_registry import ActorRegistry

FIRST = ActorLocation("store-a", "1", "node", "host", 10)
SECOND = structs.replace(FIRST, instance_id="2", pid=20)


def test_a_new_incarnation_ends_the_previous_one() -> None:
    registry = ActorRegistry()
    registry.started(FIRST)
    assert not registry.is_dead(FIRST)
    registry.started(SECOND)
    assert registry.is_dead(FIRST)
    assert not registry.is_dead(SECOND)
    assert list(registry.all()) == [SECOND]


def test_a_worker_that_remembers_a_previous_incarnation_does_not_end_the_new_one() -> None:
    registry = ActorRegistry()
    registry.started(FIRST)
    registry.started(SECOND)
    assert registry.newest(FIRST) == SECOND
    assert not registry.is_dead(SECOND)


def test_a_restarted_registry_takes_the_incarnation_that_a_worker_remembers() -> None:
    registry = ActorRegistry()  # the coordinator has just restarted
    assert registry.newest(FIRST) == FIRST
    assert not registry.is_dead(FIRST)
    registry.started(SECOND)
    assert registry.newest(FIRST) == SECOND


def test_an_incarnation_that_a_worker_reports_follows_one_that_was_lost() -> None:
    registry = ActorRegistry()
    registry.started(FIRST)
    registry.lost("1")
    assert registry.newest(FIRST) == FIRST
    assert registry.is_dead(FIRST)
    assert registry.newest(SECOND) == SECOND
    assert registry.is_dead(FIRST)
    assert not registry.is_dead(SECOND)
