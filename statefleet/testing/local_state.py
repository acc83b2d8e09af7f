"""The keyed stores of a processor's state in this process, in place of a fleet: one shard, one version after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import pyarrow as pa

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.identities import ActorLocation, StateStoreId, TaskIdentity
from coordinator.model.leases import Lease
from coordinator.model.load_plans import LoadPlan
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.watermarks import Watermarks
from spark_jobs.worker.state_store import StateStore
from store_actors.keyed.shard import KeyedShard, ReadHandle, UpdateHandle
from store_actors.messages import BatchFacts, StoreSpec, Write

__all__ = ["LocalState"]

_ID = StateStoreId("memory:///tests", 0, 0)
_LOCATION = ActorLocation("local", "local", "local", "localhost", 0)


class LocalState:
    """A client of stores in this process; see :class:`~spark_jobs.functions.user_state_task.ProgramClient`.

    Attributes
    ----------
    watermarks
        Watermarks of the newest version.
    """

    def __init__(self) -> None:
        self.watermarks = Watermarks()
        self._shards: dict[str, KeyedShard] = {}
        self._version = 0

    def open_granted(
        self, task: TaskIdentity, metadata: StateMetadata, stores: tuple[StoreSpec, ...]
    ) -> tuple[StateStore, LeaseGrant]:
        """Return a handle that makes the next version of the stores, and its lease."""
        for spec in stores:
            if spec.name not in self._shards:
                self._shards[spec.name] = KeyedShard(spec.keys, spec.values, spec.due)
        handles = {spec.name: self._shards[spec.name].begin(self._version) for spec in stores}
        lease = Lease(_ID, task.run_id, 1, _LOCATION)
        store = StateStore(_Session(self, handles), _ID, self._version)
        return store, LeaseGrant(lease, self._version, self.watermarks)

    def load_plans(self, task: TaskIdentity, store_names: Sequence[str]) -> Mapping[str, LoadPlan]:
        """Return no files: there is no earlier run whose variables could be deleted."""
        return {name: LoadPlan((), (), 0) for name in store_names}

    def committed(self, version: int, facts: BatchFacts) -> None:
        """Record that the stores are at a version."""
        self._version, self.watermarks = version, facts.watermarks

    def read(self) -> StateStore:
        """Return a handle that reads the newest version."""
        handles = {name: shard.read() for name, shard in self._shards.items()}
        return StateStore(_Session(self, handles), _ID, self._version)

    def rows(self, store: str) -> pa.Table:
        """Return all rows of a store."""
        return self._shards[store].snapshot()


class _Session:
    """The session of a handle, as a store actor has it; see :data:`~spark_jobs.worker.state_store.Ask`."""

    def __init__(self, state: LocalState, handles: Mapping[str, UpdateHandle | ReadHandle]) -> None:
        self._state, self._handles = state, handles
        self._scans: dict[int, Iterator[pa.RecordBatch]] = {}
        self._numbers = count()
        self._is_committed = False

    def __call__(self, method: str, *args: Any) -> Any:
        return getattr(self, f"_{method}")(*args)

    def _session_call(self, store: str, method: str, args: tuple[Any, ...], writes: Sequence[Write]) -> Any:
        self._write(writes)
        result = getattr(self._handles[store], method)(*args)
        if method not in ("iterator", "prefix_scan", "range_scan"):
            return result
        number = next(self._numbers)
        self._scans[number] = iter(result)
        return number

    def _write(self, writes: Sequence[Write]) -> None:
        for store, method, args in writes:
            getattr(self._handles[store], method)(*args)

    def _next_batch(self, number: int) -> pa.RecordBatch | None:
        return next(self._scans[number], None)

    def _commit_session(self, facts: BatchFacts, writes: Sequence[Write]) -> int:
        self._write(writes)
        updates = [handle for handle in self._handles.values() if isinstance(handle, UpdateHandle)]
        for handle in updates:
            handle.prepare(facts.watermarks.input_ms, rows_in=facts.rows_in, rows_late=facts.rows_late)
        version = max(handle.commit().version for handle in updates)
        self._is_committed = True
        self._state.committed(version, facts)
        return version

    def _session_committed(self) -> bool:
        return self._is_committed

    def _end_session(self) -> None:
        for handle in self._handles.values():
            if isinstance(handle, UpdateHandle):
                handle.abort()
            else:
                handle.release()
