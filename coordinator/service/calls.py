"""Calls of Ray actors: the part of Ray that they need, and how an answer is waited for."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import Any

import ray
from ray._private import state, worker
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayTaskError

from coordinator.model.errors import StateStoreError

log = logging.getLogger(__name__)

#: How long a node's raylet may take to accept a connection, in seconds. Its kernel does, however busy its processes are.
_KNOCK_S = 1.0

#: How long an actor may take to start, in seconds, before it counts as hung: on a busy machine Ray and the imports take tens of them.
START_S = 120.0

#: Ray namespace of all the fleet's actors.
NAMESPACE = "statefleet"


class RayActors:
    """The fleet's actors on the Ray cluster that this process is on."""

    def __init__(self, hung_after_s: float = 20.0) -> None:
        #: Seconds without an answer to a ping after which an actor that has a call to answer counts as hung.
        self.hung_after_s = hung_after_s
        #: Address and port of each node's raylet.
        self._raylets: dict[str, tuple[str, int]] = {}

    def find(self, name: str) -> Any | None:
        """Return the handle of a named actor; None if there is none."""
        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:  # how Ray says that there is none
            return None

    def wait(self, references: Sequence[Any], timeout_s: float) -> bool:
        """Return whether one of the answers is there within a time."""
        return bool(ray.wait(list(references), timeout=timeout_s)[0])

    def get(self, reference: Any, timeout_s: float | None = None) -> Any:
        """Return an answer; raises the method's error, RayActorError if the actor died, or TimeoutError after a time."""
        try:
            return ray.get(reference, timeout=timeout_s)
        except GetTimeoutError as error:
            raise TimeoutError from error
        except ActorUnschedulableError as error:  # of an actor that is gone with its node, and no RayActorError
            raise RayActorError(error_msg=str(error)) from error

    def put(self, value: Any) -> Any:
        """Return a reference to a value, for an argument that is large or sent more than once."""
        return ray.put(value)

    def is_starting(self, handle: Any) -> bool:
        """Return whether Ray still starts an actor, or starts it again: so long it answers no ping."""
        return state.actors(handle._actor_id.hex()).get("State") in (
            "DEPENDENCIES_UNREADY",
            "PENDING_CREATION",
            "RESTARTING",
        )

    def kill(self, handle: Any, *, restart: bool) -> None:
        """End an actor's process; with `restart` Ray starts it again."""
        ray.kill(handle, no_restart=not restart)

    def node_id(self) -> str:
        """Return the id of this process's Ray node."""
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    def node_answers(self, node_id: str) -> bool:
        """Return within a second whether a Ray node can be reached; Ray itself takes several to report a lost one."""
        if node_id not in self._raylets:
            nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
            self._raylets |= {
                node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes if node["Alive"]
            }
        raylet = self._raylets.get(node_id)
        if raylet is None:
            return False
        try:
            socket.create_connection(raylet, timeout=_KNOCK_S).close()
        except OSError:
            return False
        return True


def session_folder() -> str:
    """Return Ray's folder of this node's session: on a disk of the node, and known to its operators."""
    node: Any = worker._global_node
    return str(node.get_session_dir_path())


def answer(actors: RayActors, handle: Any, reference: Any) -> Any:
    """Return the result of an actor's method, however long it takes; an actor that hangs is ended, and Ray restarts it.

    Raises
    ------
    ray.exceptions.RayActorError
        The actor died, or it hung (a process that is stopped, deadlocked or cut off) and was ended.
    """
    while not actors.wait([reference], actors.hung_after_s / 4):
        ping = handle.ping.remote()
        if not (
            actors.wait([ping, reference], actors.hung_after_s)
            or (actors.is_starting(handle) and actors.wait([ping, reference], START_S))
        ):
            log.warning("an actor does not answer; it is ended and restarted: %r", handle)
            actors.kill(handle, restart=True)
            raise RayActorError(error_msg=f"the actor did not answer a ping for {actors.hung_after_s:.0f} s")
    return actors.get(reference)


def unwrapped(actors: RayActors, handle: Any, reference: Any) -> Any:
    """Return :func:`answer`; an error of this project is raised as itself, and not in Ray's wrapper."""
    try:
        return answer(actors, handle, reference)
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, StateStoreError) else error) from None
