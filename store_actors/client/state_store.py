"""Spark's ``StateStore`` and ``ReadStateStore`` for Python: handles on the keyed state of one partition, in Arrow batches.

A handle belongs to one partition and one version, and holds all the operator's named stores. Its methods work on the store ``default``;
``handle.store(name)`` is the same handle seen through another of its stores. State is in the store actor; a call sends or
returns a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict
from types import TracebackType
from typing import Any, Literal, Self

import pyarrow as pa
from msgspec import structs

from coordinator.model.errors import InvalidRequestError, OperationOutOfOrderError
from coordinator.model.identities import DEFAULT_STORE, StateStoreId
from coordinator.model.names import check_store_name
from coordinator.model.schema import Field
from coordinator.model.type_names import type_to_string
from store_actors.keyed.checks import Condition, Rows
from store_actors.messages.requests import BatchFacts, StoreSpec, Write

#: A call of a handle's store actor: from a method and its arguments to the result.
Ask = Callable[..., Any]


def store_specs(
    keys: pa.Schema | None, values: pa.Schema | None, stores: Mapping[str, tuple[pa.Schema, pa.Schema]] | None
) -> tuple[StoreSpec, ...]:
    """Return the specs of an operator's stores, given as one store ``default`` or by name.

    Raises
    ------
    InvalidRequestError
        Neither or both are given, a name is not a folder, or a column has a type that state cannot hold.
    """
    if (stores is None) == (keys is None or values is None):
        raise InvalidRequestError("give either keys and values of one store, or stores by name")
    named = {DEFAULT_STORE: (keys, values)} if stores is None else stores
    for name in named:
        check_store_name(name)
    return tuple(StoreSpec(name, _fields(parts[0]), _fields(parts[1])) for name, parts in named.items())


def _fields(schema: pa.Schema) -> tuple[Field, ...]:
    try:
        return tuple(Field(field.name, type_to_string(field.type), field.nullable) for field in schema)
    except ValueError as error:
        raise InvalidRequestError("a store cannot hold this type", schema=str(schema), cause=error) from error


def default_store(store_id: StateStoreId, stores: tuple[StoreSpec, ...]) -> StateStoreId:
    """Return the identity of the first store, on which a new handle works."""
    return structs.replace(store_id, store_name=stores[0].name)


class _Session:
    """The session that handles on several stores share: calls of its store actor, and the writes that go with the next call."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.committed = False
        self._writes: list[Write] = []

    def keep(self, write: Write) -> None:
        """Keep a write, which is done before the next call."""
        self._writes.append(write)

    def call(self, method: str, *args: Any) -> Any:
        """Do the kept writes and a call, and return its result. If that fails, the writes stay to be done."""
        answer = self.ask(method, *args, tuple(self._writes))
        self._writes.clear()
        return answer


class ReadStateStore:
    """Reads one version of a partition's keyed state. Made by ``Fleet.read_state_store``.

    Every method raises OperationOutOfOrderError once the handle is released (or committed, or aborted).

    Parameters
    ----------
    ask
        Sends a call to the session in the store actor.
    store_id
        Partition and store whose state it is.
    version
        The version that is read (of a :class:`StateStore`, the one before its updates).
    """

    def __init__(self, ask: Ask, store_id: StateStoreId, version: int) -> None:
        self._session = _Session(ask)
        self.id = store_id
        self.version = version

    def store(self, name: str) -> Self:
        """Return the same handle, for another of its stores."""
        handle = copy(self)
        handle.id = structs.replace(self.id, store_name=name)
        return handle

    def _call(self, method: str, *args: Any) -> Any:
        return self._session.call("session_call", self.id.store_name, method, args)

    def get(self, *key: object) -> dict[str, Any] | None:
        """Return the values of a key, given as its parts in the order of the key columns; None if there is no such key."""
        row: dict[str, Any] | None = self._call("get", key)
        return row

    def multi_get(self, keys: Rows) -> pa.Table:
        """Return a row for each key, in their order: key columns, value columns (null where the key is missing), ``__found``."""
        return self._call("multi_get", keys)

    def iterator(self) -> Iterator[pa.RecordBatch]:
        """Return all rows as they are now, in no particular order; later puts and removes are not among them."""
        return self._scan("iterator")

    def prefix_scan(self, prefixes: Rows) -> Iterator[pa.RecordBatch]:
        """Return the rows whose leftmost key columns equal a row of `prefixes`."""
        return self._scan("prefix_scan", prefixes)

    def range_scan(self, column: str, start: object = None, end: object = None) -> Iterator[pa.RecordBatch]:
        """Return the rows with ``start <= column < end`` ordered by that key column; None leaves an end open; nulls come last."""
        return self._scan("range_scan", column, start, end)

    def _scan(self, method: str, *args: Any) -> Iterator[pa.RecordBatch]:
        # Opened now: the scan has the rows of this moment, not of the moment when the first batch is requested.
        scan_id = self._call(method, *args)

        def batches() -> Iterator[pa.RecordBatch]:
            while (batch := self._session.ask("next_batch", scan_id)) is not None:
                yield batch

        return batches()

    @property
    def metrics(self) -> dict[str, int]:
        """``num_keys``, ``memory_used_bytes``, ``rows_updated``, ``rows_removed`` of this handle's store."""
        return asdict(self._call("metrics"))

    def release(self) -> None:
        """End reading."""
        self._session.ask("end_session")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class StateStore(ReadStateStore):
    """Makes the next version of a partition's keyed state. Made by ``Fleet.state_store``, or given to a function of
    ``map_partitions_with_state_store``. As a context manager it aborts unless it was committed.
    """

    def put(self, rows: Rows | None = None, **columns: object) -> None:
        """Set the values of keys, given as a batch or, of one key, by column name. The last row of a key counts.

        Raises
        ------
        InvalidRequestError
            A column is missing, of another type, or null where it may not be. Nothing was changed.
        """
        if (rows is None) == (not columns):
            raise InvalidRequestError("put takes a batch, or the columns of one row by name")
        if rows is None:
            self._call("put_row", columns)
        else:
            self._call("put", rows)

    def remove(self, what: Rows | Condition | Sequence[object]) -> int:
        """Remove keys (a batch of key columns, or one key as a tuple), or every row for which a condition is true.

        Returns
        -------
        int
            Number of keys that were removed.
        """
        if isinstance(what, pa.Table | pa.RecordBatch):
            return int(self._call("remove", what))
        if isinstance(what, tuple | list):
            return int(self._call("remove_key", tuple(what)))
        return int(self._call("remove_where", what))

    def later(self, method: Literal["put", "remove"], rows: Rows) -> None:
        """Put or remove a batch with the next call of any of the handle's stores, which also raises its error.

        So the last writes go with the commit, and cost no call of their own.
        """
        self._session.keep((self.id.store_name, method, (rows,)))

    def updates(self) -> pa.Table:
        """Return the net changes against the version before: key and value columns, ``__change`` (added, changed, removed)."""
        return self._call("updates")

    def due(self, limit: int) -> pa.Table:
        """Return the rows that are due at or before `limit`, by the store's due column (``StoreSpec.due``)."""
        return self._call("due", limit)

    def commit(self, watermark_ms: BatchFacts | int | None = None) -> int:
        """Make the updates of all the handle's stores durable, as one version; return the version.

        Parameters
        ----------
        watermark_ms
            Watermark that goes with the version, in milliseconds since the epoch (by default that of the version before), or the
            facts of an operator's batch.

        Raises
        ------
        FencedError
            A newer owner holds the partition; nothing was counted.
        OperationOutOfOrderError
            The handle has been committed or aborted.
        """
        if self._session.committed:
            raise OperationOutOfOrderError("the handle is committed already", version=self.version)
        version = int(self._session.call("commit_session", watermark_ms))
        self._session.committed = True
        return version

    def seal(self, facts: BatchFacts) -> None:
        """Make the updates of all the handle's stores one version, and go on with the next one while it becomes durable.

        Of the handle of an epoch, over the connection of its worker: that ends if the version is not committed.

        Raises
        ------
        StateStoreError
            The version before was not committed; or as of :meth:`commit`.
        """
        self.version = int(self._session.call("seal_session", facts))

    def abort(self) -> None:
        """Drop the updates.

        Raises
        ------
        OperationOutOfOrderError
            The handle is committed.
        """
        self._session.ask("end_session")

    @property
    def has_committed(self) -> bool:
        """Whether the version was made."""
        # After a commit without an answer only the store actor knows.
        return self._session.committed or bool(self._session.ask("session_committed"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.has_committed:
            self.abort()
