"""One look at a time at the fleet, however many browsers look at the dashboard, and what each of them is sent of it."""

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

#: Seconds between two looks while a browser looks, and while none does: then for the events that it will see.
_INTERVAL_S = 1.0
_IDLE_S = 10.0
#: A coordinator that takes so long to tell is asked so many times as rarely: nobody is answered meanwhile.
_REST = 20
#: Seconds after which a coordinator that has not answered is said not to answer. It is not asked again before it does.
_PATIENCE_S = 5.0
#: Messages that wait for a browser; one that is further behind is shown everything anew.
_BEHIND = 16


class FleetProbe(Protocol):
    """The fleet, as it is looked at. Both are called in a thread."""

    def watch(self, known: Mapping[str, str]) -> dict[str, Any]:
        """See :meth:`Coordinator.watch <coordinator.service.coordinator.Coordinator.watch>`."""

    def answering(self, status: Mapping[str, Any]) -> Mapping[str, bool]:
        """Which of a status's store actors answer."""


@dataclass(frozen=True, slots=True)
class Message:
    """A server-sent event."""

    event: str
    data: str

    def encoded(self) -> bytes:
        # JSON on one line: nothing that anybody called anything can end it.
        return f"event: {self.event}\ndata: {self.data}\n\n".encode()


class Watching:
    """Looks at the fleet and tells subscribers what changed.

    Parameters
    ----------
    sight
        The fleet.
    now_ms
        Milliseconds since the epoch.
    """

    def __init__(self, sight: FleetProbe, now_ms: Callable[[], int]) -> None:
        self.model = FleetModel()
        self._sight = sight
        self._now_ms = now_ms
        self._subscribers: set[asyncio.Queue[Message | None]] = set()
        self._is_wanted = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()
        self._full: Message | None = None
        self._failed_looks = 0

    async def samples(self) -> list[Sample]:
        """Figures of the dashboard, as metrics."""
        return [
            Sample("statefleet_dashboard_browsers", len(self._subscribers)),
            Sample("statefleet_dashboard_failed_looks_total", self._failed_looks),
        ]

    def start(self) -> None:
        """Begin to look."""
        self._running = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Look no more."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def full(self) -> Message:
        """Everything, for who comes."""
        if self._full is None:
            self._full = self._message("view", self.model.view())
        return self._full

    async def looked(self, timeout_s: float) -> bool:
        """Whether the fleet was seen once, within a time."""
        try:
            await asyncio.wait_for(self._looked.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    @contextmanager
    def subscribed(self) -> Iterator[asyncio.Queue[Message | None]]:
        """A queue of messages; None in it stands for everything anew."""
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
            except Exception as error:  # whatever it is, the next look may do
                log.exception("a look at the fleet failed; it is tried again")
                self._failed_looks += 1
                self._tell(self.model.unreachable(f"{type(error).__name__}: {error}", self._now_ms()))
                took_s = 0.0
            await asyncio.sleep(max(_INTERVAL_S, _REST * took_s))
            if not self._subscribers:
                # Until somebody comes, or it is time.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._is_wanted.wait(), _IDLE_S)

    async def _look(self) -> float:
        """One look; returns how long the coordinator was kept from others."""
        asked = asyncio.create_task(asyncio.to_thread(self._sight.watch, self.model.stamps))
        try:
            done, _ = await asyncio.wait([asked], timeout=_PATIENCE_S)
            if not done:
                why = f"no answer for {_PATIENCE_S:.0f} s; queries go on once it is back"
                self._tell(self.model.unreachable(why, self._now_ms()))
            told = await asked
        except asyncio.CancelledError:
            asked.cancel()
            raise
        answering = await asyncio.to_thread(self._sight.answering, told)
        self._tell(self.model.take(told, answering, self._now_ms()))
        self._looked.set()
        return float(told["took_ms"]) / 1000

    def _tell(self, update: Update) -> None:
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
