"""The fleet's status as JSON, which all pages that ask share: the fleet is asked at most every two seconds, and only for a page."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any

from coordinator.model.metric_table import Sample

log = logging.getLogger(__name__)

#: After a request the fleet rests for this many times as long as the coordinator could answer no other call.
_REST = 20
#: Newest batches of each query that are kept: the coordinator reports fewer, charts show more.
_BATCHES = 40


class StatusCache:
    """The newest status of a fleet, which is asked for every `interval_s` seconds.

    `ask` returns :meth:`Coordinator.status_details <coordinator.service.coordinator.Coordinator.status_details>`; it is called in a
    thread. A coordinator that has not answered after `patience_s` seconds is reported. It is not asked again before it answers.
    """

    def __init__(
        self,
        ask: Callable[[], dict[str, Any]],
        now_ms: Callable[[], int],
        *,
        interval_s: float = 2.0,
        patience_s: float = 5.0,
    ) -> None:
        self._ask = ask
        self._interval_s, self._patience_s = interval_s, patience_s
        self._now_ms = now_ms
        self._batches: dict[str, dict[int, Any]] = {}
        self._fleet = "null"
        self._error: str | None = None
        self._asking: asyncio.Task[None] | None = None
        self._due_s = 0.0
        self._failed = 0

    async def samples(self) -> list[Sample]:
        """Return the metrics of the dashboard."""
        return [Sample("statefleet_dashboard_failed_looks_total", self._failed)]

    async def status(self) -> str:
        """Return the status as JSON, from at most two seconds ago unless there is an ``error``.

        It has ``now_ms``; ``error``, why the coordinator did not answer the last request, or null; and ``fleet``, its last answer, or
        null.
        """
        if self._asking is None and time.monotonic() >= self._due_s:
            self._asking = asyncio.create_task(self._refresh())
        error = None
        if self._asking is not None:
            done, _ = await asyncio.wait([self._asking], timeout=self._patience_s)
            if not done:
                error = f"no answer for {self._patience_s:.0f} s; queries go on once it is back"
        return f'{{"now_ms": {self._now_ms()}, "error": {json.dumps(error or self._error)}, "fleet": {self._fleet}}}'

    async def _refresh(self) -> None:
        rest_s = self._interval_s
        began_s = time.monotonic()
        try:
            self._fleet, took_ms = await asyncio.to_thread(self._answer)
            self._error = None
            rest_s = max(rest_s + began_s - time.monotonic(), _REST * took_ms / 1000)
        except Exception as error:  # any error: the next request may succeed
            log.exception("the fleet's status is not there; it is asked for again")
            self._failed += 1
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self._due_s = time.monotonic() + rest_s
            self._asking = None

    def _answer(self) -> tuple[str, int]:
        report = self._ask()
        names = {query["name"] for query in report["queries"]}
        self._batches = {name: batches for name, batches in self._batches.items() if name in names}
        for query in report["queries"]:
            query["batches"] = self._newest_batches(query["name"], query["batches"])
        return json.dumps(report, separators=(",", ":")), report["took_ms"]

    def _newest_batches(self, name: str, reported: list[dict[str, Any]]) -> list[dict[str, Any]]:
        newest = max((batch["version"] for batch in reported), default=0)
        # Batches that another run repeats were not committed.
        known = {version: batch for version, batch in self._batches.get(name, {}).items() if version <= newest}
        known |= {batch["version"]: batch for batch in reported}
        self._batches[name] = {version: known[version] for version in sorted(known)[-_BATCHES:]}
        return list(self._batches[name].values())
