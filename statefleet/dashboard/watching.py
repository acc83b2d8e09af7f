"""Polls of the fleet, one at a time however many browsers are connected, and the messages that browsers are sent."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.model.metric_table import Sample
from statefleet.dashboard.model import FleetModel, Update

__all__ = ["FleetProbe", "Message", "Watching"]

log = logging.getLogger(__name__)

#: Seconds between two polls while a browser is connected, and while none is: then for the events that a browser will see later.
_INTERVAL_S = 1.0
_IDLE_S = 10.0
#: The pause after a poll is this many times the time that it took, since the coordinator answers no other call meanwhile.
_REST = 20
#: Seconds after which a coordinator that has not answered is shown as not answering. It is not polled again before it answers.
_PATIENCE_S = 5.0
#: Maximum number of messages that wait for a browser; a browser that is further behind gets the whole view again.
_BEHIND = 16


class FleetProbe(Protocol):
    """Polls of a fleet. Both methods are called in a thread."""

    def watch(self, known_stamps: Mapping[str, str]) -> dict[str, Any]:
        """Return the changes of the fleet; see :meth:`Coordinator.watch <coordinator.service.coordinator.Coordinator.watch>`."""

    def answering(self, status: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return, by name, whether the store actors of a status answer."""


@dataclass(frozen=True, slots=True)
class Message:
    """A server-sent event."""

    event: str
    data: str

    def encoded(self) -> bytes:
        # JSON on one line, so that no name in it can end the event.
        return f"event: {self.event}\ndata: {self.data}\n\n".encode()


class Watching:
    """Polls the fleet and sends changes to subscribers.

    Parameters
    ----------
    probe
        The fleet.
    now_ms
        Returns the milliseconds since the epoch.
    """

    def __init__(self, probe: FleetProbe, now_ms: Callable[[], int]) -> None:
        self.model = FleetModel()
        self._probe = probe
        self._now_ms = now_ms
        self._subscribers: set[asyncio.Queue[Message | None]] = set()
        self._is_wanted = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()
        self._full: Message | None = None
        self._failed_looks = 0

    async def samples(self) -> list[Sample]:
        """Return the metrics of the dashboard."""
        return [
            Sample("statefleet_dashboard_browsers", len(self._subscribers)),
            Sample("statefleet_dashboard_failed_looks_total", self._failed_looks),
        ]

    def start(self) -> None:
        """Start to poll."""
        self._running = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop to poll."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def full(self) -> Message:
        """Return the whole view, for a new subscriber."""
        if self._full is None:
            self._full = self._message("view", self.model.view())
        return self._full

    async def looked(self, timeout_s: float) -> bool:
        """Wait for the first poll, and return whether it came within a time."""
        try:
            await asyncio.wait_for(self._looked.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    @contextmanager
    def subscribed(self) -> Iterator[asyncio.Queue[Message | None]]:
        """Subscribe to a queue of messages; None in it stands for the whole view."""
        queue: asyncio.Queue[Message | None] = asyncio.Queue()
        self._subscribers.add(queue)
        self._is_wanted.set()
        try:
            yield queue
        finally:
            self._subscribers.discard(queue)
            if not self._subscribers:
                self._is_wanted.clear()

    async def _run(self) -> None:
        while True:
            try:
                took_s = await self._look()
            except asyncio.CancelledError:
                raise
            except Exception as error:  # any error: the next poll may succeed
                log.exception("a look at the fleet failed; it is tried again")
                self._failed_looks += 1
                self._send(self.model.unreachable(f"{type(error).__name__}: {error}", self._now_ms()))
                took_s = 0.0
            await asyncio.sleep(max(_INTERVAL_S, _REST * took_s))
            if not self._subscribers:
                # Until a browser connects, or the time is over.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._is_wanted.wait(), _IDLE_S)

    async def _look(self) -> float:
        """Poll once, and return how long the coordinator was busy with it, in seconds."""
        poll = asyncio.create_task(asyncio.to_thread(self._probe.watch, self.model.stamps))
        try:
            done, _ = await asyncio.wait([poll], timeout=_PATIENCE_S)
            if not done:
                why = f"no answer for {_PATIENCE_S:.0f} s; queries go on once it is back"
                self._send(self.model.unreachable(why, self._now_ms()))
            report = await poll
        except asyncio.CancelledError:
            poll.cancel()
            raise
        answering = await asyncio.to_thread(self._probe.answering, report)
        self._send(self.model.take(report, answering, self._now_ms()))
        self._looked.set()
        return float(report["took_ms"]) / 1000

    def _send(self, update: Update) -> None:
        if not update:
            return
        self._full = None
        message = self._message("change", {"changes": update.changes, "events": update.events})
        for queue in self._subscribers:
            if queue.qsize() < _BEHIND:
                queue.put_nowait(message)
            elif queue.qsize() == _BEHIND:
                queue.put_nowait(None)

    def _message(self, event: str, data: Mapping[str, Any]) -> Message:
        return Message(event, json.dumps({**data, "now_ms": self._now_ms()}, separators=(",", ":")))
