"""A continuous query with a user's function: its program over two keyed stores, and their model.

The function counts the records of a name in a window, and adds their marks up, in one store each. It emits a row for each call, and one
as a group times out. A record that it gets twice it knows by its mark.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.identities import DEFAULT_STORE
from coordinator.model.schema import Field, OperatorKind, StateSchema
from coordinator.storage.protocol import ObjectStore
from spark_jobs.functions.user_program import EVENT_TIME_FIELD, UserBatch
from store_actors.client.state_store import StateStore
from store_actors.engine.versions import CHANGE_COLUMN, UPDATED
from store_actors.messages.requests import StoreSpec
from tests.simulation.event_time import WindowedStream, changed, check_same, seconds, unique
from tests.simulation.keyed import read_version
from tests.simulation.scheduler import Violation
from tests.simulation.streaming import Record
from tests.simulation.workload import Entry, Groups, Read

_SECOND_US = 1_000_000
_KEYS = (Field("end", "timestamp"), Field("name", "string"))
_SUMS = "sums"
SPECS = (
    StoreSpec(DEFAULT_STORE, _KEYS, (Field("n", "int64"), Field("due_us", "int64")), "due_us"),
    StoreSpec(_SUMS, _KEYS, (Field("total", "int64"),)),
)
#: The value column of each store.
_VALUES = {DEFAULT_STORE: "n", _SUMS: "total"}


class CalledStream(WindowedStream):
    """A source whose records a function is called for. Keys of results say whether they are of a group that has timed out."""

    stores = tuple(_VALUES)  # type: ignore[assignment]
    is_called = True
    _most_records, _last_steps = 50, (400, 400, 1500)
    emits = "emitted_by_calls"

    def _draw_schema(self, rng: random.Random) -> StateSchema:
        self._window_s, self.is_sealed = rng.choice((1, 2, 4)), False
        inputs, delay_ms = (Field("mark", "int64"), EVENT_TIME_FIELD), self.delay_s * 1000
        return StateSchema(_KEYS, inputs, (), None, delay_ms, "update", operator=OperatorKind.GROUP_STATE)

    def _columns(self, records: Sequence[Record]) -> dict[str, pa.Array]:
        times = pa.array([self.end_of(record) * _SECOND_US for record in records], pa.int64())
        return {**super()._columns(records), EVENT_TIME_FIELD.name: times}

    def results_of(self, table: pa.Table) -> Groups:
        if not table.num_columns:
            return {}
        columns = seconds(table, "end"), *(table[name].to_pylist() for name in ("name", "is_last"))
        rows = list(zip(table["n"].to_pylist(), table["total"].to_pylist(), [0] * table.num_rows, strict=True))
        return unique(list(zip(*columns, strict=True)), rows)

    # -- the model ----------------------------------------------------------------------------------------------------

    def _emitted(self, before: Groups, applied: Groups, closed: Groups) -> Groups:
        of_calls = {(*key, False): row for key, row in changed(before, applied).items()}
        return of_calls | {(*key, True): row for key, row in closed.items()}  # type: ignore[return-value]

    def happened_in(self, epoch: int) -> dict[str, int]:
        timed_out = [key for key in self.emitted_in(epoch) if key[2]]  # type: ignore[misc]
        return super().happened_in(epoch) | {"timed_out": len(timed_out)}

    def check_result(self, key: tuple[Any, ...], row: Any) -> None:
        super().check_result(key[:2], row)

    def _stored(self, version: int, partition: int) -> Mapping[str, Mapping[Any, int]]:
        """Return the values of each store of a partition."""
        rows = self.rows_at(version, partition)
        return {store: {key: row[at] for key, row in rows.items()} for at, store in enumerate(self.stores)}

    # -- audits -------------------------------------------------------------------------------------------------------

    def check_version(
        self, objects: ObjectStore, coordinator: Any, grant: LeaseGrant, version: int, forms: Sequence[int]
    ) -> None:
        """As of others, with the rows of both stores."""
        self._check_watermark(f"version {version} as leased", version, grant.watermarks.input_ms)
        partition = grant.lease.store_id.partition_id
        handle = read_version(objects, coordinator, grant, version, SPECS)
        for store, values in self._stored(version, partition).items():
            found = {
                key: value for rows in handle.store(store).iterator() for key, value in _values(rows, store).items()
            }
            check_same(f"version {version} of shard {partition}, store {store}, as loaded", found, values)

    def check_snapshot(self, snapshot: Entry, read: Read) -> None:
        if self._counts(snapshot):
            store = snapshot["store_name"]
            expected = self._stored(snapshot["version"], snapshot["partition_id"])[store]
            check_same(f"snapshot {snapshot['file']}", _values(read(snapshot), store), expected)

    def check_history(
        self, shard: int, chains: dict[str, list[Entry]], read: Read, form_of: Callable[[str], int]
    ) -> None:
        """As of others, with the rows of both stores."""
        self._check_commits(shard, chains)
        for store in self.stores:
            entries = [entry for entry in chains[store] if self._counts(entry)]
            rows = dict(self._stored(entries[0]["base_version"], shard)[store]) if entries else {}
            for entry in entries:
                delta = read(entry)
                for (key, value), kind in zip(
                    _values(delta, store).items(), delta[CHANGE_COLUMN].to_pylist(), strict=True
                ):
                    rows.pop(key, None)
                    if kind == UPDATED:
                        rows[key] = value
                subject = f"version {entry['version']} of shard {shard}, store {store}, by its deltas"
                check_same(subject, rows, self._stored(entry["version"], shard)[store])


class CountingProgram:
    """The program of a shard, as :class:`~spark_jobs.functions.user_program.OpenProgram`.

    Parameters
    ----------
    note
        Called with each batch that has rows.
    """

    stores = SPECS

    def __init__(self, note: Callable[[], None]) -> None:
        self._note = note

    def run(self, store: StateStore, batch: UserBatch) -> list[pa.Table]:
        """Count the records of a batch, and end the groups that have timed out."""
        emitted = []
        if batch.rows.num_rows:
            self._note()
            emitted.append(self._counted(store, batch.rows))
        due = store.due(batch.times.after.input_ms * 1000)
        if due.num_rows:
            ended = list(_values(due, DEFAULT_STORE))
            emitted.append(_results(_read(store, ended), is_last=True))
            for name in _VALUES:
                # With the next call, which may be that which seals the version.
                store.store(name).later("remove", _batch(ended))
        return emitted

    @staticmethod
    def _counted(store: StateStore, rows: pa.Table) -> pa.Table:
        keys = list(zip(seconds(rows, "end"), rows["name"].to_pylist(), strict=True))
        groups = _read(store, sorted(set(keys)))
        for key, mark in zip(keys, rows["mark"].to_pylist(), strict=True):
            n, total = groups[key]
            if total & mark:
                raise Violation(f"a function gets a record of {key} twice: {mark:b} is of {total:b}")
            groups[key] = n + 1, total + mark
        due = [end * _SECOND_US for end, _ in groups]
        columns = [list(column) for column in zip(*groups.values(), strict=True)]
        store.put(_batch(list(groups), n=columns[0], due_us=due))
        store.store(_SUMS).later("put", _batch(list(groups), total=columns[1]))
        return _results(groups, is_last=False)


#: By key, the number of records, and the sum of their marks.
_Counts = dict[tuple[int, str], tuple[int, int]]


def _read(store: StateStore, keys: Sequence[tuple[int, str]]) -> _Counts:
    """Return what the stores have of keys; nothing was counted of others."""
    columns = [store.store(name).multi_get(_batch(keys))[column].to_pylist() for name, column in _VALUES.items()]
    return {key: (n or 0, total or 0) for key, n, total in zip(keys, *columns, strict=True)}


def _batch(keys: Sequence[tuple[int, str]], **values: list[int]) -> pa.RecordBatch:
    """Return rows of a store, or keys."""
    ends = pa.array([end * _SECOND_US for end, _ in keys], pa.timestamp("us", tz="UTC"))
    columns = {"end": ends, "name": pa.array([name for _, name in keys], pa.string())}
    return pa.record_batch(columns | {name: pa.array(column, pa.int64()) for name, column in values.items()})


def _results(groups: _Counts, *, is_last: bool) -> pa.Table:
    columns = [list(column) for column in zip(*groups.values(), strict=True)]
    rows = pa.Table.from_batches([_batch(list(groups), n=columns[0], total=columns[1])])
    return rows.append_column("is_last", pa.array([is_last] * len(groups)))


def _values(rows: pa.Table | pa.RecordBatch, store: str) -> dict[tuple[int, str], int]:
    """Return the values of a store's rows."""
    keys = list(zip(seconds(rows, "end"), rows["name"].to_pylist(), strict=True))
    return unique(keys, rows[_VALUES[store]].to_pylist())
