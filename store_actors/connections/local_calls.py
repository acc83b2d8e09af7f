"""Calls of a store actor by its own process, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.runtime.runtime import Pool, Runtime
from coordinator.service.calls import RayActors

#: Calls of tasks at once; a node has as many tasks as cores.
_AT_ONCE = 64


class LocalActors(RayActors):
    """The fleet's actors as the process of a store actor sees them; see :class:`~coordinator.service.calls.Actors`.

    Parameters
    ----------
    name, process
        The store actor of this process. Its calls are made by threads of the process, with their arguments as they are.
    """

    def __init__(self, name: str, process: Any, runtime: Runtime) -> None:
        super().__init__()
        self._name = name
        self._local = _Handle(process, runtime.threads.pool(_AT_ONCE, "statefleet-local-call"))

    def find(self, name: str) -> Any | None:
        return self._local if name == self._name else super().find(name)

    def wait(self, references: Sequence[Any], timeout_s: float) -> bool:
        # This process does not look after itself: :meth:`get` waits for its own calls.
        return isinstance(references[0], _Call) or super().wait(references, timeout_s)

    def get(self, reference: Any, timeout_s: float | None = None) -> Any:
        return reference.result() if isinstance(reference, _Call) else super().get(reference, timeout_s)

    def put(self, value: Any) -> Any:
        # Ray puts the arguments of its own calls by itself.
        return value


@dataclass(frozen=True, slots=True)
class _Handle:
    process: Any
    threads: Pool

    def __getattr__(self, method: str) -> _Method:
        return _Method(getattr(self.process, method), self.threads)


@dataclass(frozen=True, slots=True)
class _Method:
    call: Callable[..., Any]
    threads: Pool

    def remote(self, *args: Any) -> _Call:
        return _Call(self.threads.submit(self.call, *args).result)


@dataclass(frozen=True, slots=True)
class _Call:
    """A reference to the result of a call, which :attr:`result` waits for."""

    result: Callable[[], Any]
