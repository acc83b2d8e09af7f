"""A query that keeps two keyed stores: reads, puts and removes of each batch, and what serial dictionaries make of them.

A value is the history of its key since it was last removed (as Elle's lists that only grow): the batches that touched it, each with
the number of the task attempt that did. So a lost update, one applied twice, a removed key that comes back, and a value built on
an attempt that does not count can be read off it. Both stores must tell the same attempt for a batch: they commit together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from ray.exceptions import RayActorError

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import StateStoreError
from coordinator.model.identities import DEFAULT_STORE, TaskIdentity
from coordinator.model.schema import Field
from coordinator.model.state_metadata import StateMetadata
from coordinator.storage.protocol import ObjectStore
from store_actors.client.fleet_client import FleetClient
from store_actors.client.state_store import ReadStateStore, StateStore
from store_actors.client.worker_client import WorkerClient
from store_actors.connections.session_calls import answered, decoded_answer, encoded_call
from store_actors.connections.worker_calls import WorkerCalls
from store_actors.messages.requests import OpenRequest, StoreSpec
from store_actors.serving.keyed_stores import KeyedStores
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.partitions import Partitions
from tests.simulation.scheduler import Violation
from tests.simulation.workload import AggregationWorkload, Entry, Read

_SPECS = (
    StoreSpec(DEFAULT_STORE, (Field("key", "string"),), (Field("history", "string"),)),
    StoreSpec("sizes", (Field("key", "int64"),), (Field("size", "int64"), Field("history", "string"))),
)
_KEYS: dict[str, tuple[Any, ...]] = {DEFAULT_STORE: ("a", "b", "c"), "sizes": (1, 2, 3)}

#: Batches that touched a key, in order.
Touched = tuple[int, ...]
#: key -> what touched it
Model = dict[Any, Touched]
#: key -> (batch, stamp) of each that touched it
Histories = dict[Any, list[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Step:
    """Of one store: keys to remove, or to append the batch to."""

    store: str
    removes: bool
    keys: tuple[Any, ...]


class KeyedWorkload:
    """Batches of one query with two stores; see :class:`tests.simulation.workload.AggregationWorkload`.

    Attributes
    ----------
    states
        ``states[shard][version][store]``: the model after that many batches.
    """

    stores = tuple(spec.name for spec in _SPECS)
    forms = 1
    together = False

    def __init__(self, rng: random.Random, further_batches: int = 0) -> None:
        self.batches, self.shards = rng.randint(2, 3) + further_batches, rng.choice((1, 1, 2))
        self._steps = [[_draw_steps(rng) for _ in range(self.shards)] for _ in range(self.batches)]
        #: Version that a task reads first, if any, counted back from the newest.
        self._looks_back = [
            [rng.choice((None, None, None, 0, 1)) for _ in range(self.shards)] for _ in range(self.batches)
        ]
        self.states = [self._serial(shard) for shard in range(self.shards)]

    def _serial(self, shard: int) -> list[dict[str, Model]]:
        states: list[dict[str, Model]] = [{store: {} for store in self.stores}]
        for batch in range(self.batches):
            models = {store: dict(model) for store, model in states[-1].items()}
            for step in self._steps[batch][shard]:
                model = models[step.store]
                for key in step.keys:
                    before = model.pop(key, ())
                    if not step.removes:
                        model[key] = (*before, batch)
            states.append(models)
        return states

    # -- what tasks do ------------------------------------------------------------------------------------------------

    def metadata(self, state: str, query: str, form: int = 0) -> StateMetadata:
        return StateMetadata(state, query, self.shards, "keyed")

    def run_task(
        self, client: FleetClient, tasks: Sequence[TaskIdentity], metadata: StateMetadata, stamp: int, form: int
    ) -> None:
        (task,) = tasks
        looks_back = self._looks_back[task.batch_id][task.partition_id]
        if looks_back is not None and task.batch_id >= looks_back:
            # Readers are other programs: what they fail at is not the batch's trouble.
            with suppress(StateStoreError, RayActorError), _findings_first():
                self._look(client, task, None if looks_back == 0 else task.batch_id - looks_back)
        with _findings_first(), _worker(client).open_granted(task, metadata, _SPECS)[0] as handle:
            self._update(handle, task, stamp)
            handle.commit()

    def _look(self, client: FleetClient, task: TaskIdentity, version: int | None) -> None:
        with client.open_read(task.state_name, task.partition_id, _SPECS, version) as handle:
            by_store = {store: _read_all(handle.store(store)) for store in self.stores}
        self._compare(f"version {handle.version} as read", task.partition_id, handle.version, by_store)

    def _update(self, handle: StateStore, task: TaskIdentity, stamp: int) -> None:
        batch, shard = task.batch_id, task.partition_id
        if handle.version != batch:
            raise Violation(f"batch {batch} of shard {shard} reads version {handle.version}: updates are lost")
        models = {store: dict(model) for store, model in self.states[shard][batch].items()}
        for step in self._steps[batch][shard]:
            store, model = handle.store(step.store), models[step.store]
            if step.removes:
                present = [key for key in step.keys if model.pop(key, None) is not None]
                removed = store.remove(_batch_of(step.store, step.keys))
                if removed != len(present):
                    raise Violation(f"batch {batch} of shard {shard} removes {removed} keys of {step}, not {present}")
            else:
                before = _append(store, step, batch, stamp)
                expected = {key: model[key] for key in step.keys if key in model}
                _compare(f"what batch {batch} of shard {shard} reads for {step}", before, expected)
                model.update({key: (*model.get(key, ()), batch) for key in step.keys})

    # -- what must hold -----------------------------------------------------------------------------------------------

    def check_version(
        self, objects: ObjectStore, coordinator: Any, grant: LeaseGrant, version: int, forms: Sequence[int]
    ) -> None:
        shard = grant.lease.store_id.partition_id
        handle = read_version(objects, coordinator, grant, version, _SPECS)
        by_store = {store: _read_all(handle.store(store)) for store in self.stores}
        self._compare(f"version {version} as loaded", shard, version, by_store)

    def check_history(
        self, shard: int, chains: dict[str, list[Entry]], read: Read, form_of: Callable[[str], int]
    ) -> None:
        by_store: dict[str, Histories] = {store: {} for store in self.stores}
        for versions in zip(*(chains[store] for store in self.stores), strict=True):
            for entry in versions:
                delta, histories = read(entry), by_store[entry["store_name"]]
                kinds = delta.column("__change").to_pylist()
                for (key, history), kind in zip(_histories_of(delta).items(), kinds, strict=True):
                    histories.pop(key, None)
                    if kind == 0:
                        histories[key] = history
            version = versions[0]["version"]
            self._compare(f"version {version} by its deltas", shard, version, by_store)

    def check_snapshot(self, snapshot: Entry, read: Read) -> None:
        expected = self.states[snapshot["partition_id"]][snapshot["version"]][snapshot["store_name"]]
        _compare(f"snapshot {snapshot['file']}", _histories_of(read(snapshot)), expected)

    def _compare(self, subject: str, shard: int, version: int, by_store: dict[str, Histories]) -> None:
        """Compare a version of all stores together: which batches touched each key, and which attempt did in each batch."""
        attempts: dict[int, set[int]] = {}
        for store, histories in by_store.items():
            _compare(f"{subject}, of shard {shard}, store {store}", histories, self.states[shard][version][store])
            for batch, stamp in (touch for history in histories.values() for touch in history):
                attempts.setdefault(batch, set()).add(stamp)
        mixed = {batch: stamps for batch, stamps in attempts.items() if len(stamps) > 1}
        if mixed:
            raise Violation(f"{subject}, of shard {shard}: several attempts of a batch count: {mixed} in {by_store}")


Workload = AggregationWorkload | KeyedWorkload


def read_version(
    objects: ObjectStore, coordinator: Any, grant: LeaseGrant, version: int, specs: tuple[StoreSpec, ...]
) -> ReadStateStore:
    """Return a version of a shard's keyed stores as a newcomer reads them, with the project's own code."""
    stores, store_id = KeyedStores(Partitions(objects, coordinator, StoreMetrics())), grant.lease.store_id
    task = TaskIdentity(store_id.state_name, "", "", version, store_id.partition_id, 0, "auditor")
    session, _ = stores.open_read(OpenRequest(task, grant.lease, version, specs))

    def ask(method: str, *args: Any) -> Any:
        return getattr(stores, method.removeprefix("session_"))(session, *args)

    return ReadStateStore(ask, store_id, version)


@contextmanager
def _findings_first() -> Iterator[None]:
    """Leaving a handle may fail, too: that must not hide a violation."""
    try:
        yield
    except StateStoreError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, Violation):
                raise cause from None
            cause = cause.__context__
        raise


def _worker(client: FleetClient) -> WorkerClient:
    """Return the stores as a Python worker of Spark's has them, by the messages of its connection."""
    calls = WorkerCalls(client, lambda tasks, metadata: [], lambda grant: True, lambda error: None)

    def call(method: str, *arguments: Any) -> Any:
        return decoded_answer(method, answered(calls, encoded_call(method, arguments)))

    return WorkerClient(call)


def _draw_steps(rng: random.Random) -> list[Step]:
    steps = []
    for _ in range(rng.randint(0, 3)):
        store = rng.choice(tuple(_KEYS))
        keys = tuple(rng.sample(_KEYS[store], rng.randint(1, 2)))
        steps.append(Step(store, rng.random() < 0.35, keys))
    return steps


def _compare(subject: str, actual: Histories, expected: Model) -> None:
    touched = {key: tuple(batch for batch, _ in history) for key, history in actual.items()}
    if touched != expected:
        raise Violation(f"{subject} differs from the serial model's: batches by key {touched}, should be {expected}")


def _append(store: StateStore, step: Step, batch: int, stamp: int) -> Histories:
    """Append the batch to keys' histories, as a user's function would; return what they were before."""
    rows_before = store.multi_get(_batch_of(step.store, step.keys))
    before = _histories_of(rows_before.filter(rows_before.column("__found")).drop_columns(["__found"]))
    after = {key: [*before.get(key, []), (batch, stamp)] for key in step.keys}
    rows = _batch_of(step.store, step.keys, after)
    if stamp % 2:
        store.later("put", rows)
    else:
        store.put(rows)
    return before


def _batch_of(store: str, keys: tuple[Any, ...], histories: Histories | None = None) -> pa.RecordBatch:
    """Return keys of a store, with the values that hold these histories."""
    columns = {"key": pa.array(keys, pa.string() if store == DEFAULT_STORE else pa.int64())}
    if histories is not None:
        written = [" ".join(f"{batch}:{stamp}" for batch, stamp in histories[key]) for key in keys]
        columns["history"] = pa.array(written, pa.string())
        if store != DEFAULT_STORE:
            columns["size"] = pa.array([len(histories[key]) for key in keys], pa.int64())
    return pa.record_batch(columns)


def _histories_of(rows: pa.Table | pa.RecordBatch) -> Histories:
    histories: Histories = {}
    for row in rows.to_pylist():
        history = [tuple(map(int, touch.split(":"))) for touch in row["history"].split(" ")]
        if row["key"] in histories or row.get("size", len(history)) != len(history):
            raise Violation(f"a key is there twice, or columns of a row are of several versions: {rows.to_pylist()}")
        histories[row["key"]] = [(batch, stamp) for batch, stamp in history]
    return histories


def _read_all(store: ReadStateStore) -> Histories:
    histories: Histories = {}
    for batch in store.iterator():
        of_batch = _histories_of(batch)
        if of_batch.keys() & histories.keys():
            raise Violation(f"keys {sorted(of_batch.keys() & histories.keys())} are there twice")
        histories |= of_batch
    return histories
