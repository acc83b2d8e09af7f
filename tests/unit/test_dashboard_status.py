"""The status that pages of the dashboard share: when the fleet is asked, what is told while it does not answer, kept batches."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from statefleet.dashboard.status_cache import StatusCache
from tests.fed_fleet import FedFleet


class Asked:
    """A fleet that counts requests, and can fail, hang, and take its time."""

    def __init__(self) -> None:
        self.fed = FedFleet(2, 4)
        self.requests = 0
        self.took_ms = 0
        self.error = ""
        self.answers = threading.Event()
        self.answers.set()

    def status(self) -> dict[str, Any]:
        self.requests += 1
        self.answers.wait(10)
        if self.error:
            raise RuntimeError(self.error)
        return {**self.fed.status(), "took_ms": self.took_ms}


def cache_of(fleet: Asked, now_ms: int = 0) -> StatusCache:
    """Return a cache that is many times as fast as by itself."""
    return StatusCache(fleet.status, lambda: now_ms, interval_s=0.05, patience_s=0.2)


async def told(cache: StatusCache) -> tuple[str | None, int | None]:
    """Return the error and the version that a page is told."""
    answer = json.loads(await cache.status())
    fleet = answer["fleet"]
    return answer["error"], None if fleet is None else fleet["queries"][0]["version"]


async def test_pages_share_a_request_and_nobody_asks_while_no_page_does() -> None:
    fleet = Asked()
    cache = cache_of(fleet, now_ms=5)
    answers = await asyncio.gather(*(cache.status() for _ in range(8)))
    assert len(set(answers)) == fleet.requests == 1
    assert json.loads(answers[0])["now_ms"] == 5
    await asyncio.sleep(0.2)
    assert fleet.requests == 1
    assert await told(cache) == (None, 102)
    assert await told(cache) == (None, 102)
    assert fleet.requests == 2


async def test_the_last_picture_stays_while_the_coordinator_fails_or_hangs_and_it_is_not_asked_twice() -> None:
    fleet = Asked()
    cache = cache_of(fleet)
    fleet.error = "in trouble"
    assert await told(cache) == ("RuntimeError: in trouble", None)
    await asyncio.sleep(0.06)
    fleet.error = ""
    assert await told(cache) == (None, 101)
    await asyncio.sleep(0.06)
    fleet.answers.clear()
    for _ in range(2):
        error, version = await told(cache)
        assert ("no answer" in str(error), version) == (True, 101)
    assert fleet.requests == 3
    fleet.answers.set()
    assert await told(cache) == (None, 102)
    (sample,) = await cache.samples()
    assert sample.value == 1


async def test_a_slow_coordinator_is_asked_less_often() -> None:
    fleet = Asked()
    fleet.took_ms = 50
    cache = cache_of(fleet)
    await told(cache)
    await asyncio.sleep(0.3)
    assert await told(cache) == (None, 101), "the pause is twenty times as long as it took"


def test_more_batches_are_kept_than_reported_and_a_replayed_one_replaces_those_that_were_not_committed() -> None:
    fleet = FedFleet(1, 2)
    cache = StatusCache(fleet.status, lambda: 0)

    def versions() -> list[int]:
        (query,) = json.loads(cache._answer()[0])["queries"]
        return [batch["version"] for batch in query["batches"]]

    for _ in range(59):
        cache._answer()
    assert versions() == [*range(121, 161)]
    query = fleet.queries["query-00"]
    fleet.queries["query-00"] = {**query, "batches": query["batches"][:2], "version": 156}
    assert versions() == [*range(121, 158)]
    del fleet.queries["query-00"]
    fleet.queries["other"] = {**query, "name": "other"}
    cache._answer()
    assert list(cache._batches) == ["other"]
