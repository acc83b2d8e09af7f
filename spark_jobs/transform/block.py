"""The block of keys that a processor is working on: what is shared by its state variables and timers.

State comes and goes for all keys of a block at once: a variable is read when the processor first asks for it, and what the processor
did to it is written when the block is done. Each is a call or two to the store actor, whatever the number of keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.errors import InvalidRequestError
from spark_jobs.functions.group_task import FOUND
from spark_jobs.functions.groups import Numbers, single_chunk
from spark_jobs.functions.values import Raw
from spark_jobs.transform.variables import EXPIRY, PLACE, Variable
from spark_jobs.worker.state_store import StateStore

__all__ = ["Block", "BlockPart", "DeletedBlock", "VariableStore", "spread"]


class BlockPart(Protocol):
    """What keeps something for the keys of a block."""

    def write(self) -> None:
        """Write what was changed for the block's keys, and forget what was read."""


class Block:
    """Where a processor is: the keys that it works on, and which of them is the current one.

    Parameters
    ----------
    leaves
        Names of the operator's key leaves.

    Attributes
    ----------
    keys
        Keys of the block.
    now_ms
        Processing time of the batch.
    """

    def __init__(self, leaves: Sequence[str] = ()) -> None:
        self.leaves = list(leaves)
        self.keys: pa.Table = pa.table({})
        self.now_ms = 0
        self._place = -1
        self._store: StateStore | None = None
        self._parts: list[BlockPart] = []

    def join(self, part: BlockPart) -> None:
        """Have a part written with each block."""
        self._parts.append(part)

    def open(self, store: StateStore, now_ms: int) -> None:
        """State is in `store` from here on."""
        self._store, self.now_ms = store, now_ms

    def store(self, name: str) -> StateStore:
        """One of the stores."""
        assert self._store is not None, "there is a block only once the store is open"
        return self._store.store(name)

    @contextmanager
    def of(self, keys: pa.Table) -> Iterator[None]:
        """Work on these keys; at the end what was done to them is written."""
        self.keys, self._place = keys, -1
        yield
        self._place = -1
        for part in self._parts:
            part.write()

    def enter(self, place: int) -> None:
        """Go to one of the block's keys."""
        self._place = place

    def leave(self) -> None:
        """Be at no key."""
        self._place = -1

    def here(self) -> int:
        """Place of the current key.

        Raises
        ------
        InvalidRequestError
            There is none: the processor is in ``init`` or ``close``.
        """
        if self._place < 0:
            raise InvalidRequestError(
                "state and timers belong to a key: use them in handleInputRows, handleExpiredTimer and handleInitialState only"
            )
        return self._place


class DeletedBlock(Block):
    """Stands in for the block of a variable that the processor has deleted."""

    def here(self) -> int:
        """Nowhere."""
        raise InvalidRequestError("the processor has deleted this state variable in init; it cannot be used")


class VariableStore:
    """Reads and writes one variable for the keys of the block.

    Parameters
    ----------
    block
        The keys.
    variable
        What it holds.
    """

    def __init__(self, block: Block, variable: Variable) -> None:
        self.block, self.variable = block, variable

    @property
    def store(self) -> StateStore:
        """The variable's store."""
        return self.block.store(self.variable.store_name)

    @property
    def expiry_ms(self) -> int | None:
        """When what is written now is no longer there; None is never."""
        return None if self.variable.ttl_ms is None else self.block.now_ms + self.variable.ttl_ms

    def find(self, keys: pa.Table) -> tuple[pa.Table, list[bool]]:
        """Rows under keys, and which of them are there and have not expired."""
        found = self.store.multi_get(keys)
        alive = single_chunk(found.column(FOUND))
        if self.variable.ttl_ms is not None:
            expires = pc.greater(single_chunk(found.column(EXPIRY.name)), self.block.now_ms)
            alive = pc.and_(alive, pc.fill_null(expires, True))
        return found, alive.to_pylist()

    def keys(self, places: Sequence[int] | Numbers, numbers: Sequence[int] | Numbers | None = None) -> pa.Table:
        """Keys of the store: those at places of the block, of a list or map with the numbers of elements."""
        keys = self.block.keys.take(pa.array(places, pa.int64()))
        return keys if numbers is None else keys.append_column(PLACE.name, pa.array(numbers, pa.int64()))

    def put(self, keys: pa.Table, columns: Mapping[str, Any]) -> None:
        """Write rows."""
        if keys.num_rows:
            self.store.later("put", pa.table([*keys.columns, *columns.values()], [*keys.column_names, *columns]))

    def remove(self, keys: pa.Table) -> None:
        """Remove rows; those that are not there are ignored."""
        if keys.num_rows:
            self.store.later("remove", keys)

    def value_columns(self, rows: Sequence[Raw]) -> dict[str, pa.Array]:
        """Columns of the store for values."""
        columns = self.variable.columns
        arrays = columns.held(self.variable.rows.arrays(rows, columns.schema.types))
        return dict(zip((field.name for field in columns.fields), arrays, strict=True))

    def user_key_columns(self, keys: Sequence[Raw]) -> dict[str, pa.Array]:
        """Columns of the store for keys of a map."""
        columns = self.variable.key_columns
        arrays = columns.held(self.variable.key_rows.arrays(keys, columns.schema.types))
        return dict(zip((field.name for field in columns.fields), arrays, strict=True))

    def values(self, rows: pa.Table) -> list[Raw]:
        """Values in rows of the store."""
        return self.variable.rows.tuples(self.variable.columns.shown(rows))

    def user_keys(self, rows: pa.Table) -> list[Raw]:
        """Keys of a map in rows of the store."""
        return self.variable.key_rows.tuples(self.variable.key_columns.shown(rows))

    def expiries(self, moments: Sequence[int | None]) -> dict[str, pa.Array]:
        """The column of when rows expire, if the variable has one."""
        return {} if self.variable.ttl_ms is None else {EXPIRY.name: pa.array(moments, pa.int64())}

    def evict(self) -> int:
        """Remove all rows, of any key, that have expired; returns how many."""
        if self.variable.ttl_ms is None:
            return 0
        due = self.store.due(self.block.now_ms)
        gone = [*self.block.leaves, *([PLACE.name] if PLACE.name in due.column_names else [])]
        self.remove(due.select(gone))
        return int(due.num_rows)


def spread(begins: Numbers, ends: Numbers) -> tuple[Numbers, Numbers]:
    """All numbers of some ranges, one after another, and for each the range that it is of."""
    counts = ends - begins
    owners = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(begins, counts)
    return numbers, owners
