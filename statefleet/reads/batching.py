"""Look-ups of single keys that several threads make at once: those that meet travel together.

The first goes at once. Those that come while it is under way are one call after it: what a call costs is paid once for as many keys as
came meanwhile, and the busier the machine, the more go together. A key that holds up its call, as the shard of it was lost, holds up
nobody else's for long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from coordinator.runtime.runtime import Future, Threads

__all__ = ["Batcher"]

Key = TypeVar("Key")
Found = TypeVar("Found")

#: How long keys wait for a call before theirs, in seconds.
_TURN_S = 0.02
#: How long a key waits for the others of its call until it is asked for alone, in seconds.
_COMPANY_S = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class _Together(Generic[Key, Found]):
    """Keys of one call. Whose is the first makes the call."""

    #: When they may go.
    turn: Future[None]
    #: What was found of each; None if each is to be asked for alone.
    found: Future[Sequence[Found] | None]
    keys: list[Key] = field(default_factory=list)


class Batcher(Generic[Key, Found]):
    """Look-ups of one kind. Thread-safe.

    Parameters
    ----------
    find_all
        Finds some keys with one call; returns what it found of each, in their order. Of several keys it need not try for long.
    threads
        Whose look-ups they are.
    """

    def __init__(self, find_all: Callable[[Sequence[Key]], Sequence[Found]], threads: Threads) -> None:
        self._find_all = find_all
        self._new_future = threads.future
        self._lock = threads.lock()
        self._calls = 0
        #: Whom others may still join.
        self._open: _Together[Key, Found] | None = None

    def find(self, key: Key) -> Found:
        """Find a key by a call that begins after this one.

        Raises
        ------
        Exception
            What a call for this key alone raises.
        """
        with self._lock:
            together = self._open
            is_first = together is None
            if together is None:
                together = _Together(self._new_future(), self._new_future())
                if self._calls:
                    self._open = together
                else:
                    self._calls += 1
                    together.turn.set_result(None)
            place = len(together.keys)
            together.keys.append(key)
        if is_first:
            self._ask(together)
        found = None
        with suppress(TimeoutError):
            found = together.found.result(_COMPANY_S)
        return self._find_all([key])[0] if found is None else found[place]

    def _ask(self, together: _Together[Key, Found]) -> None:
        """Wait for the turn of some keys, and ask for them."""
        found = None
        try:
            with suppress(TimeoutError):
                together.turn.result(_TURN_S)
            self._close(together)
            found = self._find_all(together.keys)
        except Exception:
            # Of several, each asks for its own, and is told what is wrong with that.
            if len(together.keys) == 1:
                raise
        finally:
            self._close(together)
            with self._lock:
                self._calls -= 1
                if self._open is not None and not self._open.turn.done():
                    self._open.turn.set_result(None)
            together.found.set_result(found)

    def _close(self, together: _Together[Key, Found]) -> None:
        """Let nobody join any more."""
        with self._lock:
            if self._open is together:
                self._open = None
                self._calls += 1
