"""Which sessions on keyed stores a process knows: those that are open, and for a while those that ended. No Ray."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from coordinator.runtime.runtime import Lock
from store_actors.serving.keyed_partition import Ended, Session

__all__ = ["IDLE_S", "Sessions"]

#: Seconds without a call after which a session is taken for abandoned.
IDLE_S = 600.0


class Sessions:
    """Sessions by id. Thread-safe; whatever is done takes the same time however many there are.

    Parameters
    ----------
    guard
        Lock of the list itself.
    new_id
        Makes ids.
    elapsed_s
        A clock that only elapses, in seconds.
    """

    def __init__(self, guard: Lock, new_id: Callable[[], str], elapsed_s: Callable[[], float]) -> None:
        self._guard = guard
        self._new_id = new_id
        self._elapsed_s = elapsed_s
        #: Those that update. One that is left alone stays: its user's code may take that long, and who needs the partition takes over.
        self._writing: dict[str, Session] = {}
        #: Those that read and those that ended, each with its last use, the longest ago first.
        self._others: OrderedDict[str, tuple[float, Session | Ended]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._writing) + len(self._others)

    def add(self, session: Session) -> str:
        """Know a session that was just opened; returns its id. Those that read or ended and that nobody has used for long go."""
        session_id = self._new_id()
        session.on_end = partial(self._ended, session_id)
        with self._guard:
            horizon = self._elapsed_s() - IDLE_S
            while self._others and next(iter(self._others.values()))[0] < horizon:
                self._others.popitem(last=False)
            if session.partition.writer is session:
                self._writing[session_id] = session
            else:
                self._others[session_id] = (session.used_s, session)
        return session_id

    def find(self, session_id: str) -> Session | Ended | None:
        """A session, which is used now, or how it ended; None if it is not known, any more or at all."""
        with self._guard:
            session: Session | Ended | None = self._writing.get(session_id)
            now_s = self._elapsed_s()
            if session is None and session_id in self._others:
                session = self._others[session_id][1]
                self._remember(session_id, session, now_s)
            if isinstance(session, Session):
                session.used_s = now_s
            return session

    def _ended(self, session_id: str, how: Ended) -> None:
        with self._guard:
            self._writing.pop(session_id, None)
            self._remember(session_id, how, self._elapsed_s())

    def _remember(self, session_id: str, session: Session | Ended, now_s: float) -> None:
        self._others[session_id] = (now_s, session)
        self._others.move_to_end(session_id)
