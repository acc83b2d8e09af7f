"""An asyncio event loop without clock or threads: its blocking calls become fibers, or run on the spot."""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

#: Runs a blocking function and settles the future; a fiber in schedules, at once in audits.
RunBlocking = Callable[[Callable[[], Any], "asyncio.Future[Any]"], None]


def run_at_once(function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
    """Call a blocking function now and settle the future with what comes of it."""
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 - it is the caller's
        outcome: tuple[Any, Exception | None] = (None, error)
    else:
        outcome = (result, None)
    if future.cancelled():
        return
    if outcome[1] is None:
        future.set_result(outcome[0])
    else:
        future.set_exception(outcome[1])


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The loop that asyncio's tasks, futures, locks and ``to_thread`` need; callbacks run in order, as asyncio promises.

    Parameters
    ----------
    run_blocking
        What ``to_thread`` does with a function.
    after
        Calls a function after so many seconds, if ever: an audit is over before any time has passed.
    """

    def __init__(
        self,
        run_blocking: RunBlocking = run_at_once,
        after: Callable[[float, Callable[[], None]], None] = lambda _seconds, _callback: None,
    ) -> None:
        self._run_blocking, self._after = run_blocking, after
        self._callbacks: deque[asyncio.Handle] = deque()
        self._tasks: list[asyncio.Task[Any]] = []

    def has_work(self) -> bool:
        return bool(self._callbacks)

    def run_ready(self) -> None:
        """Run callbacks until none is left."""
        outer = events._get_running_loop()
        events._set_running_loop(self)
        try:
            while self._callbacks:
                handle = self._callbacks.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            events._set_running_loop(outer)

    def result_of(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine that never has to wait for anybody else."""
        task = self.create_task(coroutine)
        self.run_ready()
        return task.result()

    def abandon(self) -> None:
        """The process is gone: nothing of it goes on."""
        self._callbacks.clear()
        for task in self._tasks:
            task.get_coro().close()
        self._callbacks.clear()

    # -- asyncio's side -------------------------------------------------------------------------------------------

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self._callbacks.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        handle = asyncio.TimerHandle(delay, callback, args, self, context)
        self._after(delay, lambda: self._callbacks.append(handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer is passed over when it fires."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks = [earlier for earlier in self._tasks if not earlier.done()]
        self._tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        self._run_blocking(partial(func, *args), future)
        return future

    def set_default_executor(self, executor: Any) -> None:
        """Nothing: see :meth:`run_in_executor`."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Silent: errors of a process that dies have no reader; others reach the caller that waits for them."""

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return events._get_running_loop() is self

    def is_closed(self) -> bool:
        return False

    def time(self) -> float:
        return 0.0
