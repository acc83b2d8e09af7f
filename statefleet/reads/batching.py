"""Queries by single keys of several threads, sent in batches.

The first key is sent at once. Keys that arrive while its call is under way are sent as one call after it. So the cost of a call is
shared by all keys that arrived meanwhile, and the busier the machine is, the larger the batches are. A key whose call hangs, because
its shard was lost, delays the other keys of its batch for a bounded time only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from coordinator.runtime.runtime import Threads

Key = TypeVar("Key")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class _Batch(Generic[Key, Result]):
    """Keys of one call. The thread of the first key makes the call."""

    #: Done when the batch may be sent.
    turn: Future[None]
    #: Result of each key, in their order; None if each key has to be queried alone.
    results: Future[Sequence[Result] | None]
    keys: list[Key] = field(default_factory=list)


class Batcher(Generic[Key, Result]):
    """Queries of one kind, batched. Thread-safe.

    `find_all` queries keys with one call, and returns the result of each in their order. With several keys it may give up early. A
    batch waits for the call before it for `turn_s` seconds; a key waits for the result of its batch for `batch_s` seconds before it is
    queried alone.
    """

    def __init__(
        self,
        find_all: Callable[[Sequence[Key]], Sequence[Result]],
        threads: Threads,
        *,
        turn_s: float = 0.02,
        batch_s: float = 0.25,
    ) -> None:
        self._find_all = find_all
        self._turn_s, self._batch_s = turn_s, batch_s
        self._new_future = threads.future
        self._lock = threads.lock()
        self._calls = 0
        #: The batch that further keys may still join.
        self._open: _Batch[Key, Result] | None = None

    def find(self, key: Key) -> Result:
        """Return the result of a key, from a call that begins after this one.

        Raises
        ------
        Exception
            The error of a call for this key alone.
        """
        with self._lock:
            batch = self._open
            is_first = batch is None
            if batch is None:
                batch = _Batch(self._new_future(), self._new_future())
                if self._calls:
                    self._open = batch
                else:
                    self._calls += 1
                    batch.turn.set_result(None)
            index = len(batch.keys)
            batch.keys.append(key)
        if is_first:
            self._send(batch)
        results = None
        with suppress(TimeoutError):
            results = batch.results.result(self._batch_s)
        return self._find_all([key])[0] if results is None else results[index]

    def _send(self, batch: _Batch[Key, Result]) -> None:
        results = None
        try:
            with suppress(TimeoutError):
                batch.turn.result(self._turn_s)
            self._close(batch)
            results = self._find_all(batch.keys)
        except Exception:
            # Each key of several is queried alone, so that its caller gets the error of that key.
            if len(batch.keys) == 1:
                raise
        finally:
            self._close(batch)
            with self._lock:
                self._calls -= 1
                if self._open is not None and not self._open.turn.done():
                    self._open.turn.set_result(None)
            batch.results.set_result(results)

    def _close(self, batch: _Batch[Key, Result]) -> None:
        """Let no further key join a batch."""
        with self._lock:
            if self._open is batch:
                self._open = None
                self._calls += 1
