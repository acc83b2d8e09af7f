"""The reader's side of direct connections to store actors, for queries of a few keys (:mod:`store_actors.connections.direct_calls`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import AuthenticationError

from coordinator.runtime.runtime import Runtime
from store_actors.connections.direct_calls import DirectAddress, DirectMessages, connect

log = logging.getLogger(__name__)

#: Seconds that a caller waits for a connection or for an answer until it asks by Ray.
_PATIENCE_S = 1.0
#: Seconds until the next attempt after no connection came about.
_AGAIN_S = 30.0
#: Unused connections to one store actor.
_SPARE = 4
#: Seconds after which unused connections are closed: their store actor may be gone for good.
_IDLE_S = 300.0


@dataclass(slots=True)
class _Incarnation:
    """An incarnation of a store actor, and the connections to it."""

    instance_id: str
    #: Connections that no call uses now.
    spare: list[DirectMessages] = field(default_factory=list)
    is_connecting: bool = False
    #: No connection is tried before this time.
    not_before_s: float = 0.0
    used_s: float = 0.0

    def close_spare(self) -> None:
        """Close the connections that no call uses."""
        while self.spare:
            self.spare.pop().close()


class DirectClient:
    """The reader's side: the connections of one process. Thread-safe.

    No call waits for a connection: a call that finds none goes by Ray, and starts one for the next call.

    Parameters
    ----------
    address_of
        Asks a store actor, by its name, for its address; returns None if it has none now.
    """

    def __init__(self, address_of: Callable[[str], DirectAddress | None], runtime: Runtime) -> None:
        self._address_of = address_of
        self._clock = runtime.clock
        self._threads = runtime.threads
        self._reset()

    def _reset(self) -> None:
        self._guard = self._threads.lock()
        #: By the name of the store actor.
        self._incarnations: dict[str, _Incarnation] = {}
        self._pid = os.getpid()

    def begin(self, actor_name: str, instance_id: str, call: bytes) -> Callable[[], bytes | None] | None:
        """Send a call to an incarnation of a store actor.

        Returns
        -------
        Callable or None
            Waits for the answer, and returns None if the caller has to ask by Ray; None if there is no connection.
        """
        incarnation, connection = self._taken(actor_name, instance_id)
        if connection is None:
            return None
        try:
            connection.send(call)
        except OSError:
            self._close(incarnation, connection)
            return None
        return partial(self._received, incarnation, connection)

    def _received(self, incarnation: _Incarnation, connection: DirectMessages) -> bytes | None:
        try:
            # The kernel's limit starts again with every signal.
            if not connection.poll(_PATIENCE_S):
                raise TimeoutError("no answer")
            answer = connection.receive()
        except TimeoutError:
            # It has much to do, or hangs: no other call need wait for as long.
            incarnation.not_before_s = self._clock.elapsed_s() + _AGAIN_S
            self._close(incarnation, connection)
            return None
        except (OSError, EOFError):
            self._close(incarnation, connection)
            return None
        except AuthenticationError:
            log.warning("an answer of a store actor was changed on its way, and is not used; its look-ups go by Ray")
            incarnation.not_before_s = self._clock.elapsed_s() + _AGAIN_S
            self._close(incarnation, connection)
            return None
        with self._guard:
            if len(incarnation.spare) < _SPARE:
                incarnation.spare.append(connection)
        return answer

    def _taken(self, actor_name: str, instance_id: str) -> tuple[_Incarnation, DirectMessages | None]:
        if self._pid != os.getpid():
            # A forked process would receive its parent's answers on these connections, and the parent's lock may never be released.
            self._reset()
        now_s = self._clock.elapsed_s()
        with self._guard:
            incarnation = self._incarnations.get(actor_name)
            if incarnation is None or incarnation.instance_id != instance_id:
                if incarnation is not None:
                    incarnation.close_spare()
                self._close_idle(now_s - _IDLE_S)
                incarnation = self._incarnations[actor_name] = _Incarnation(instance_id)
            incarnation.used_s = now_s
            if incarnation.spare:
                return incarnation, incarnation.spare.pop()
            if not incarnation.is_connecting and incarnation.not_before_s <= now_s:
                self._threads.start(partial(self._connect, actor_name, incarnation), "statefleet-connect")
                incarnation.is_connecting, incarnation.not_before_s = True, now_s + _AGAIN_S
            return incarnation, None

    def _close_idle(self, horizon_s: float) -> None:
        """Close the connections to store actors that were last asked before `horizon_s`."""
        for actor_name, incarnation in list(self._incarnations.items()):
            if incarnation.used_s < horizon_s:
                incarnation.close_spare()
                del self._incarnations[actor_name]

    def _connect(self, actor_name: str, incarnation: _Incarnation) -> None:
        connection = None
        try:
            address = self._address_of(actor_name)
            connection = None if address is None else connect(address, _PATIENCE_S)
        except Exception:  # calls go by Ray, which reports what is wrong
            log.info("no connection to %s; its look-ups go by Ray", actor_name, exc_info=True)
        with self._guard:
            incarnation.is_connecting = False
            if connection is not None:
                incarnation.spare.append(connection)
                incarnation.not_before_s = 0.0

    def _close(self, incarnation: _Incarnation, connection: DirectMessages) -> None:
        """Close a connection that failed, and those that no call uses: they broke with it, or are as slow."""
        connection.close()
        with self._guard:
            incarnation.close_spare()
