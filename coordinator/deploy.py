"""How the coordinator is deployed on Ray, and how it is called while it may be restarting."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from coordinator.errors import StateStoreError, StoreUnavailableError
from coordinator.model import Maintenance

__all__ = [
    "HUNG_AFTER_S",
    "NAMESPACE",
    "CoordinatorClient",
    "answer",
    "call",
    "coordinator_name",
    "ensure_coordinator",
    "fleet_id_of",
    "find_coordinator",
]

log = logging.getLogger(__name__)

#: Ray namespace of all the fleet's actors.
NAMESPACE = "statefleet"

#: How long a call waits for a coordinator that is restarting, in seconds.
DEADLINE_S = 60.0
#: Seconds without an answer to a ping after which an actor that has a call to answer counts as hung.
HUNG_AFTER_S = 20.0


def fleet_id_of(uri: str) -> str:
    """Short id of the fleet of a normalised URI: part of its actors' names."""
    return hashlib.blake2b(uri.encode(), digest_size=4).hexdigest()


def coordinator_name(uri: str) -> str:
    """Name of the coordinator of a normalised URI."""
    return f"statefleet-coordinator-{fleet_id_of(uri)}"


def find_coordinator(uri: str) -> Any | None:
    """Handle of a running coordinator; None if the fleet isn't up."""
    try:
        return ray.get_actor(coordinator_name(uri), namespace=NAMESPACE)
    except ValueError:
        return None


def ensure_coordinator(uri: str, storage_options: Mapping[str, str] | None, maintenance: Maintenance) -> Any:
    """Handle of the fleet's coordinator, started (with these options) and proven to work if it wasn't there.

    Raises
    ------
    StorageUnavailableError
        The object store can't be used.
    """
    handle: Any = find_coordinator(uri)
    if handle is not None:
        return handle
    # Late: most callers only look the actor up.
    from coordinator.actor import Coordinator

    actor = ray.remote(Coordinator).options(
        name=coordinator_name(uri),
        namespace=NAMESPACE,
        # The fleet outlives the drivers that use it.
        lifetime="detached",
        get_if_exists=True,
        # Its memory is a cache of the manifest logs, so Ray may restart it as often as it dies.
        max_restarts=-1,
        # Lost answers are repeated by `call`, which knows how long to wait and what to say.
        max_task_retries=0,
        num_cpus=0,
        max_concurrency=1000,
    )
    handle = actor.remote(uri, dict(storage_options) if storage_options else None, fleet_id_of(uri), maintenance)
    try:
        call(handle, "open")
    except StateStoreError:
        # A coordinator that can't reach its store would be found, and trusted, by the next caller.
        ray.kill(handle, no_restart=True)
        raise
    return handle


def answer(handle: Any, reference: Any) -> Any:
    """Result of an actor's method, however long it takes; an actor that hangs is ended, and Ray starts it anew.

    Raises
    ------
    ray.exceptions.RayActorError
        The actor died, or it hung (a process that is stopped, deadlocked or cut off) and was ended.
    """
    while not ray.wait([reference], timeout=HUNG_AFTER_S / 4)[0]:
        ping = handle.ping.remote()
        if not ray.wait([ping, reference], timeout=HUNG_AFTER_S)[0]:
            log.warning("an actor does not answer; it is ended and starts anew: %r", handle)
            ray.kill(handle, no_restart=False)
            raise RayActorError(error_msg=f"the actor did not answer a ping for {HUNG_AFTER_S:.0f} s")
    return ray.get(reference)


def call(
    handle: Any, method: str, *args: Any, deadline_s: float = DEADLINE_S, renew: Callable[[], Any] | None = None
) -> Any:
    """Call the coordinator, repeating while it restarts (all its methods may be repeated).

    Parameters
    ----------
    renew
        Gives the handle for the next try after a lost one; by default it is the same one.

    Raises
    ------
    StateStoreError
        What the coordinator raised.
    StoreUnavailableError
        It did not come back before the deadline.
    """
    deadline = time.monotonic() + deadline_s
    pause_s = 0.02
    while True:
        try:
            return answer(handle, getattr(handle, method).remote(*args))
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, StateStoreError) else error) from None
        except RayActorError as error:
            if time.monotonic() > deadline:
                raise StoreUnavailableError(
                    "the coordinator did not come back in time; committed versions are safe in the object store; see "
                    "`ray list actors` and its log, then repeat",
                    method=method,
                    cause=error,
                ) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)
            if renew is not None:
                handle = renew()


class CoordinatorClient:
    """The coordinator of a fleet as a long-lived process sees it: also the one of a fleet that was shut down and connected to again.

    Parameters
    ----------
    uri, storage_options, maintenance
        As of :func:`ensure_coordinator`.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, str] | None, maintenance: Maintenance) -> None:
        self._uri = uri
        self._handle = ensure_coordinator(uri, storage_options, maintenance)

    def call(self, method: str, *args: Any) -> Any:
        """See :func:`call`."""
        return call(self._handle, method, *args, renew=self._renewed)

    def _renewed(self) -> Any:
        # Who shut it down wants no other one before somebody connects.
        self._handle = find_coordinator(self._uri) or self._handle
        return self._handle
