"""A call of a store actor under leases, and for how long a task tries; Spark's workers, which may have no Ray, import it, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import StateStoreError

Result = TypeVar("Result")

#: How long a task waits for a store actor or the coordinator to come back before it fails (Spark then retries it).
DEADLINE_S = 120.0
#: The first pause before it asks again.
PAUSE_S = 0.05

#: Tasks (by number) with their leases.
Granted: TypeAlias = Sequence[tuple[int, LeaseGrant]]


@dataclass(frozen=True, slots=True)
class LeasedCall(Generic[Result]):
    """A method of a store actor that is called for tasks whose shards are leased to it."""

    method: str
    #: Returns the arguments of a call for some of the tasks, which it is given with the Ray node of this process.
    arguments: Callable[[Granted, str], tuple[Any, ...]]
    #: Returns the result of each task in the store actor's answer, which it is given with these tasks and its handle.
    results: Callable[[Any, Granted, Any], Sequence[Result | StateStoreError]]
