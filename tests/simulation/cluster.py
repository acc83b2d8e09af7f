"""A simulated Ray: named actors with several lives, and messages that are delayed, reordered and lost.

The project's Coordinator, StoreActor and FleetClient run on it unchanged. What Ray promises is kept: a call arrives at most
once; a caller that gets an answer got the method's; a caller that gets a RayActorError knows nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from coordinator.model.errors import StateStoreError
from tests.simulation.clock import SimulatedClock
from tests.simulation.event_loop import SimulatedLoop, run_at_once
from tests.simulation.scheduler import Party, Scheduler

#: Step from which on everybody reaches the present life of an actor, so that long work comes to its end.
_HEALED = 6000


class Ref:
    """The answer to a call, once there is one."""

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None

    def settle(self, value: Any, error: Exception | None) -> None:
        if not self.done:
            self.done, self.value, self.error = True, value, error


class Life(Party):
    """An incarnation of a named actor: a process that holds an instance of an actor class.

    Parameters
    ----------
    make
        Makes the actor, as a fiber of this life.
    """

    def __init__(self, cluster: Cluster, name: str, label: str, node: str, make: Callable[[], Any]) -> None:
        super().__init__(label, node)
        self.actor_name, self.make = name, make
        self.actor: Any = None
        self.owed: list[Ref] = []
        self._cluster = cluster
        cluster.scheduler.spawn(self, self._boot)

    def _boot(self) -> None:
        try:
            self.actor = self.make()
        except StateStoreError as error:
            # Ray ends an actor whose constructor fails; its next caller has it made again.
            self._cluster.scheduler.log(self.name, f"does not start: {type(error).__name__}")
            self._cluster.scheduler.later(lambda: self._cluster.end(self))

    def can_receive(self) -> bool:
        return self.dead or (self.actor is not None and self.frozen_until <= self._cluster.scheduler.now)

    def receive(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], ref: Ref) -> None:
        """Run a method in a fiber of the process."""
        self._cluster.scheduler.spawn(self, lambda: self._serve(method, args, kwargs, ref))

    def _serve(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], ref: Ref) -> None:
        try:
            value = getattr(self.actor, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - Ray hands a method's error to its caller
            self.answer(method, ref, None, error)
        else:
            self.answer(method, ref, value, None)

    def answer(self, method: str, ref: Ref, value: Any, error: Exception | None) -> None:
        """Send a result on its way."""
        if method in ("open_update", "open_read") and error is None:
            self._cluster.sessions[value[0]] = self
        said = f"raises {type(error).__name__}" if error else "answers"
        self._cluster.scheduler.log(self.name, f"{method} {said}")
        ray_error = None if error is None else _as_ray_tells(method, error)
        self._cluster.scheduler.later(lambda: ref.settle(value, ray_error))


class AsyncLife(Life):
    """A life of an asynchronous actor: all its methods share one event loop."""

    def __init__(self, cluster: Cluster, name: str, label: str, node: str, make: Callable[[], Any]) -> None:
        super().__init__(cluster, name, label, node, make)
        self._loop = SimulatedLoop(self._run_blocking, cluster.after)  # type: ignore[abstract]
        self.finished = False
        cluster.scheduler.add(self)

    def ended(self) -> None:
        self.finished = True
        self._loop.abandon()

    def ready(self) -> bool:
        awake = self.frozen_until <= self._cluster.scheduler.now
        return awake and self._loop.has_work()

    def step(self) -> None:
        self._loop.run_ready()

    def _run_blocking(self, function: Callable[[], Any], future: Any) -> None:
        self._cluster.scheduler.spawn(self, lambda: run_at_once(function, future))

    def receive(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], ref: Ref) -> None:
        self._loop.create_task(self._serve_async(method, args, kwargs, ref))

    async def _serve_async(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], ref: Ref) -> None:
        try:
            value = await getattr(self.actor, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - Ray hands a method's error to its caller
            self.answer(method, ref, None, error)
        else:
            self.answer(method, ref, value, None)


def _as_ray_tells(method: str, error: Exception) -> RayTaskError:
    ray_error: RayTaskError = RayTaskError(
        method, "", pickle.loads(pickle.dumps(error)), proctitle="simulated", pid=1, ip="127.0.0.1"
    )  # type: ignore[no-untyped-call]
    return ray_error


class Cluster:
    """The incarnation that answers to each name, and the messages between incarnations."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: SimulatedClock,
        fault_rate: Callable[[], float],
        restart: Callable[[Life], None],
    ) -> None:
        self.scheduler, self.clock = scheduler, clock
        self._fault_rate, self._restart = fault_rate, restart
        self.current: dict[str, Life] = {}
        #: Lives that were given up but go on; some of their callers still reach them.
        self.zombies: dict[str, list[Life]] = {}
        #: Where each session was opened. A caller that reached one life of an actor goes on with it, until it learns of the next.
        self.sessions: dict[str, Life] = {}

    def end(self, life: Life) -> None:
        """A life is over; unless it had been replaced, callers meet a dead actor until the next one begins."""
        if life.dead:
            return
        self.scheduler.kill(life)
        self.lost(life)
        if self.current[life.actor_name] is life:
            self.scheduler.later(lambda: self._restart(life), delay=self.scheduler.rng.randrange(40))

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Have a timer of a process fire."""
        self.scheduler.later(callback, delay=self.clock.steps(seconds))

    def lost(self, life: Life) -> None:
        """Ray gives an incarnation up: its callers get an error."""
        for ref in life.owed:
            self.scheduler.later(lambda ref=ref: ref.settle(None, _actor_error(life.name)))  # type: ignore[misc]
        life.owed = []

    def send(self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ref:
        """Call a method of the actor that answers to a name."""
        rng, ref = self.scheduler.rng, Ref()
        life = self.current[name]
        zombies = [life for life in self.zombies.get(name, ()) if not life.dead]
        if zombies and self.scheduler.now < _HEALED and rng.random() < 0.3:
            life = rng.choice(zombies)
        session = self.sessions.get(args[0]) if args and isinstance(args[0], str) else None
        if session is not None and not session.dead and rng.random() < 0.95:
            life = session
        sender = self.scheduler.party.name
        self.scheduler.log(sender, f"calls {method} of {life.name}")
        life.owed = [request for request in life.owed if not request.done]
        life.owed.append(ref)
        if rng.random() < self._fault_rate():
            kind = rng.choice(("lost_request", "lost_answer"))
            self.scheduler.fault(sender, f"message.{kind}", f"{method} of {life.name}")
            delay = rng.randrange(30)
            self.scheduler.later(lambda: ref.settle(None, _actor_error(life.name)), delay=delay)
            if kind == "lost_request":
                return ref
        self.scheduler.later(lambda: self._deliver(life, method, args, kwargs, ref), when=life.can_receive)
        return ref

    def _deliver(self, life: Life, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], ref: Ref) -> None:
        if life.dead:
            ref.settle(None, _actor_error(life.name))
        else:
            life.receive(method, args, kwargs, ref)


def _actor_error(name: str) -> RayActorError:
    return RayActorError(error_msg=f"simulated: {name} died or cannot be reached")


class SimulatedActors:
    """The fleet's actors as the running process sees them; see :class:`coordinator.service.calls.RayActors`."""

    hung_after_s = 20.0

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def find(self, name: str) -> Handle:
        return Handle(self._cluster, name)

    def wait(self, references: Sequence[Ref], timeout_s: float) -> bool:
        scheduler = self._cluster.scheduler
        deadline = scheduler.now + 1 + self._cluster.clock.steps(timeout_s)
        if len(references) == 1:
            # Asked so often that a generator would be felt.
            (only,) = references
            scheduler.pause(wake=lambda: only.done or scheduler.now >= deadline)
        else:
            scheduler.pause(wake=lambda: scheduler.now >= deadline or any(ref.done for ref in references))
        return any(ref.done for ref in references)

    def get(self, reference: Ref, timeout_s: float | None = None) -> Any:
        if timeout_s is None:
            self._cluster.scheduler.pause(wake=lambda: reference.done)
        elif not self.wait([reference], timeout_s):
            raise TimeoutError
        if reference.error is not None:
            raise reference.error
        return reference.value

    def put(self, value: Any) -> Any:
        return value

    def is_starting(self, handle: Handle) -> bool:
        return False

    def kill(self, handle: Handle, *, restart: bool) -> None:
        """End an actor's present life; Ray does that while its caller goes on."""
        life = self._cluster.current[handle.name]
        self._cluster.scheduler.fault(self._cluster.scheduler.party.name, "hung_actor_ended", life.name)
        self._cluster.scheduler.later(lambda: self._cluster.end(life))

    def node_id(self) -> str:
        return self._cluster.scheduler.party.node

    def node_answers(self, node_id: str) -> bool:
        """A process that is paused looks like a node that is cut off, though it goes on later."""
        now = self._cluster.scheduler.now
        return not any(life.node == node_id and life.frozen_until > now for life in self._cluster.current.values())


class Handle:
    """An actor handle: by name, so it follows the actor to its next life, as Ray's do."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self.name = cluster, name

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        return SimpleNamespace(remote=lambda *args, **kwargs: self._cluster.send(self.name, method, args, kwargs))
