"""Clock, ids and threads of a process, and the pace of repeated attempts.

The coordinator and the store actors get them as arguments, so that a simulation can replace them. No other module of the two reads a
clock, makes an id or starts a thread, except the object stores, which wait between their attempts.
"""

from __future__ import annotations

import gc
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeAlias

#: On Linux, the ordinary monotonic clock stops while the machine sleeps, and this one does not.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock:
    """The clock of this machine."""

    def now_s(self) -> float:
        """Return seconds since the epoch; the machine's clock can be set, also back."""
        return time.time()

    def elapsed_s(self) -> float:
        """Return seconds since a fixed moment, to measure durations. They never go back, and also count while the machine sleeps."""
        return time.clock_gettime(_CLOCK)

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        time.sleep(seconds)


class Lock(Protocol):
    """A lock with the methods of :class:`threading.RLock`."""

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the lock; return False if another thread has it and `blocking` is false."""

    def release(self) -> None:
        """Release the lock."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


#: Threads that run functions.
Pool: TypeAlias = Executor


class Threads:
    """Starts threads of this process and makes locks."""

    def lock(self) -> Lock:
        """Return a lock that the thread that has it may acquire again."""
        return threading.RLock()

    def pool(self, size: int, name: str) -> Pool:
        """Return a pool of threads, whose names begin with `name`."""
        return ThreadPoolExecutor(size, thread_name_prefix=name)

    def start(self, target: Callable[[], None], name: str) -> None:
        """Run a function on a new thread, which ends with the process."""
        threading.Thread(target=target, name=name, daemon=True).start()

    def future(self) -> Future[Any]:
        """Return an event that one thread sets and others wait for."""
        return Future()


def random_id() -> str:
    """Return 32 random hexadecimal digits."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Runtime:
    """The clock, ids and threads of a process; by default the machine's own."""

    clock: Clock = field(default_factory=Clock)
    new_id: Callable[[], str] = random_id
    threads: Threads = field(default_factory=Threads)
    #: Seed of the hashes of keys, so that a producer of keys cannot choose many keys with the same hash. No stored data depends on it.
    hash_seed: int = field(default_factory=partial(secrets.randbits, 128), repr=False)


def freeze_imports() -> None:
    """Exclude imported modules from Python's garbage collection: a full collection would halt each process for 0.2 s."""
    gc.collect()
    gc.freeze()


def now_ms(clock: Clock) -> int:
    """Return milliseconds since the epoch."""
    return int(clock.now_s() * 1000)


class Retry:
    """Paces the attempts of one call, by pauses that double up to a limit.

    Parameters
    ----------
    within_s
        Seconds after which no further attempt is to be made.
    first_pause_s, longest_pause_s
        The first pause, and the limit, in seconds.
    """

    def __init__(self, clock: Clock, within_s: float, *, first_pause_s: float, longest_pause_s: float) -> None:
        self._clock = clock
        self._deadline_s = clock.elapsed_s() + within_s
        self._pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s

    @property
    def is_over(self) -> bool:
        """Whether the time for attempts is over."""
        return self._clock.elapsed_s() > self._deadline_s

    def pause(self) -> None:
        """Wait before the next attempt."""
        self._clock.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
