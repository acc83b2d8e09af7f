"""Which life of a store actor counts, whatever workers remember."""

from __future__ import annotations

from dataclasses import replace

from coordinator.model.identities import ActorLocation
from coordinator.placement.actor_registry import ActorRegistry

FIRST = ActorLocation("store-a", "1", "node", "host", 10)
SECOND = replace(FIRST, instance_id="2", pid=20)


def test_a_new_life_ends_the_former_one() -> None:
    lives = ActorRegistry()
    lives.started(FIRST)
    assert not lives.is_dead(FIRST)
    lives.started(SECOND)
    assert lives.is_dead(FIRST)
    assert not lives.is_dead(SECOND)
    assert list(lives.all()) == [SECOND]


def test_a_worker_that_remembers_a_former_life_does_not_end_the_new_one() -> None:
    lives = ActorRegistry()
    lives.started(FIRST)
    lives.started(SECOND)
    assert lives.newest(FIRST) == SECOND
    assert not lives.is_dead(SECOND)


def test_what_a_worker_remembers_counts_where_nothing_is_known() -> None:
    lives = ActorRegistry()  # of a coordinator that has just restarted
    assert lives.newest(FIRST) == FIRST
    assert not lives.is_dead(FIRST)
    lives.started(SECOND)
    assert lives.newest(FIRST) == SECOND


def test_what_a_worker_found_follows_a_life_that_was_lost() -> None:
    lives = ActorRegistry()
    lives.started(FIRST)
    lives.lost("1")
    assert lives.newest(FIRST) == FIRST
    assert lives.is_dead(FIRST)
    assert lives.newest(SECOND) == SECOND
    assert lives.is_dead(FIRST)
    assert not lives.is_dead(SECOND)
