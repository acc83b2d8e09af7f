"""The order of steps: fibers (blocking code that can be paused anywhere it does I/O), parties that die or freeze, a trace.

The project's stores and logs are plain blocking code. Each call of theirs runs in a greenlet of its own: exactly one has the
baton, and it gives it back at every storage or message step. Which one gets it next is drawn from the seed, so a schedule is a
function of its seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from greenlet import getcurrent, greenlet

_MAX_STEPS = 40_000


class Violation(AssertionError):
    """Something that must hold did not."""


class NoEndError(Violation):
    """A schedule took too long: a party waits for ever, or all hinder each other."""


class Crashed(BaseException):
    """The process that runs this code is gone. Not an Exception: nothing in the project may catch and survive it."""


class Step(Protocol):
    """Something the scheduler can let go on."""

    finished: bool

    def ready(self) -> bool: ...

    def step(self) -> None: ...


class Party:
    """A process: it may die, or freeze and go on later without knowing."""

    def __init__(self, name: str, node: str) -> None:
        self.name, self.node = name, node
        self.dead = False
        self.frozen_until = 0
        #: Steps at which it froze, and until which.
        self.frozen: list[tuple[int, int]] = []
        self.fibers: list[Fiber] = []

    def ended(self) -> None:
        """Called once, when the process is gone."""


class Fiber:
    """An activity of a party."""

    def __init__(self, scheduler: Scheduler, party: Party, body: Callable[[], object]) -> None:
        self.party, self.finished = party, False
        self.wake: Callable[[], bool] | None = None
        self._scheduler, self._body = scheduler, body
        self._greenlet: greenlet | None = None

    def ready(self) -> bool:
        return self.party.frozen_until <= self._scheduler.now and (self.wake is None or self.wake())

    def step(self) -> None:
        if self._greenlet is None:
            if self.party.dead:
                self.finished = True
                return
            self._greenlet = greenlet(self._run)
        outer, self._scheduler.current = self._scheduler.current, self
        # A fiber that hands the baton over gets it back: it may end others, from within its own step.
        self._greenlet.parent = getcurrent()
        self._greenlet.switch()
        self._scheduler.current = outer

    def _run(self) -> None:
        try:
            self._body()
        except Crashed:
            pass
        except BaseException as error:  # noqa: BLE001 - a fiber's last error, of any kind
            self._scheduler.failure = self._scheduler.failure or error
        self.finished = True

    def pause(self, wake: Callable[[], bool] | None) -> None:
        """Give the baton back until it is given again (and `wake` holds)."""
        if self.party.dead:
            raise Crashed
        self.wake = wake
        assert self._greenlet is not None
        assert self._greenlet.parent is not None
        self._greenlet.parent.switch()
        self.wake = None
        if self.party.dead:
            raise Crashed


class Event:
    """Something that happens once, at a moment drawn by the scheduler: a message arrives, a late write lands."""

    def __init__(self, happen: Callable[[], None], ready: Callable[[], bool]) -> None:
        self.ready, self._happen, self.finished = ready, happen, False

    def step(self) -> None:
        self.finished = True
        self._happen()


class Scheduler:
    """Draws what goes on next.

    Parameters
    ----------
    rng
        The schedule's only source of chance.
    stickiness
        Probability that the last to step goes on again; 0 mixes most, 0.95 gives long undisturbed runs.
    """

    def __init__(self, rng: random.Random, stickiness: float) -> None:
        self.rng, self.now = rng, 0
        self.current: Fiber | None = None
        self.failure: BaseException | None = None
        self.trace: list[tuple[int, str, str]] = []
        self.faults: Counter[str] = Counter()
        self._stickiness = stickiness
        self._steps: list[Step] = []
        self._last: Step | None = None

    # -- called by the simulated world ----------------------------------------------------------------------------

    def add(self, step: Step) -> None:
        self._steps.append(step)

    def spawn(self, party: Party, body: Callable[[], object]) -> Fiber:
        """Start an activity of a party; it first goes on when drawn."""
        fiber = Fiber(self, party, body)
        party.fibers = [earlier for earlier in party.fibers if not earlier.finished]
        party.fibers.append(fiber)
        self.add(fiber)
        return fiber

    def later(self, happen: Callable[[], None], *, delay: int = 0, when: Callable[[], bool] | None = None) -> None:
        """Have something happen at a step not before `delay` steps from now."""
        at = self.now + delay
        self.add(Event(happen, lambda: self.now >= at and (when is None or when())))

    def pause(self, text: str = "", wake: Callable[[], bool] | None = None) -> None:
        """A step of the running fiber: others may go on, the party may die, before it does."""
        assert self.current is not None, "only a fiber can wait"
        if text:
            self.log(self.current.party.name, text)
        self.current.pause(wake)

    def log(self, who: str, text: str) -> None:
        self.trace.append((self.now, who, text))

    def fault(self, who: str, kind: str, text: str = "") -> None:
        """Note an injected fault."""
        self.faults[kind] += 1
        self.log(who, f"** {kind} {text}")

    @property
    def party(self) -> Party:
        assert self.current is not None
        return self.current.party

    def kill(self, party: Party) -> None:
        """End a process; its activities end where they stand, and their attempts on the way out fail."""
        if party.dead:
            return
        party.dead, party.frozen_until = True, 0
        for fiber in party.fibers:
            while not fiber.finished:
                fiber.step()
        party.ended()

    # -- running --------------------------------------------------------------------------------------------------

    def run(self, each_step: Callable[[], None], done: Callable[[], bool]) -> None:
        """Let things go on until `done`.

        Raises
        ------
        Violation
            No party can go on, or it takes too long.
        BaseException
            Any error that a fiber did not handle.
        """
        while not done():
            self.now += 1
            if self.now > _MAX_STEPS:
                raise NoEndError(f"no end after {_MAX_STEPS} steps")
            each_step()
            self._one_step()
            if self.failure is not None:
                raise self.failure

    def _one_step(self) -> None:
        last = self._last
        # The others are not asked where it does not matter: asking takes most of a schedule's time.
        if last is not None and not last.finished and last.ready() and self.rng.random() < self._stickiness:
            last.step()
            return
        steps = self._steps
        count = len(steps)
        # Drawn without replacement until one can go on, which is as fair as asking all of them first, and asks fewer.
        while count:
            index = int(self.rng.random() * count)
            step = steps[index]
            count -= 1
            if step.finished:
                # The place is taken by one not yet drawn, and that one's by the last of those that were.
                steps[index] = steps[count]
                steps[count] = steps[-1]
                steps.pop()
            elif step.ready():
                self._last = step
                step.step()
                return
            else:
                steps[index], steps[count] = steps[count], step
