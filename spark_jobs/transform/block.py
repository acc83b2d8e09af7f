"""The block of keys that a processor works on, which its state variables and timers share.

State is read and written for all keys of a block at once: a variable is read when the processor first uses it, and its changes are
written when the block is done. Each takes a call or two to the store actor for any number of keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.functions.groups import Numbers, single_chunk
from spark_jobs.functions.user_state_task import FOUND
from spark_jobs.functions.values import Raw
from spark_jobs.plan.spark_errors import StateCallError
from spark_jobs.transform.variables import BEGIN, END, EXPIRY, HEAD, PLACE, Variable
from store_actors.client.state_store import StateStore


class BlockPart(Protocol):
    """State of the keys of a block: a variable, or the timers."""

    def write(self) -> None:
        """Write the changes for the block's keys, and drop what was read."""


class Block:
    """The keys that a processor works on, and the index of the current one."""

    def __init__(self, leaves: Sequence[str] = ()) -> None:
        self.leaves = list(leaves)
        self.keys: pa.Table = pa.table({})
        self.now_ms = 0
        self._index = -1
        self._store: StateStore | None = None
        self._parts: list[BlockPart] = []

    def join(self, part: BlockPart) -> None:
        """Register a variable or the timers, to be written with each block."""
        self._parts.append(part)

    def open(self, store: StateStore, now_ms: int) -> None:
        """Use a store and a processing time from here on."""
        self._store, self.now_ms = store, now_ms

    def store(self, name: str) -> StateStore:
        assert self._store is not None, "there is a block only once the store is open"
        return self._store.store(name)

    @contextmanager
    def of(self, keys: pa.Table) -> Iterator[None]:
        """Work on these keys; at the end their changes are written."""
        self.keys, self._index = keys, -1
        yield
        self._index = -1
        for part in self._parts:
            part.write()

    def enter(self, index: int) -> None:
        """Make a key of the block the current one, by its index."""
        self._index = index

    def here(self, failing: str = "") -> int:
        """Return the index of the current key; raises InvalidRequestError if there is none: the processor is in ``init`` or ``close``.

        `failing` is how PySpark's error about the call begins, by which its own tests know it; empty where no test does.
        """
        if self._index < 0:
            raise StateCallError(
                "state and timers belong to a key: use them in handleInputRows, handleExpiredTimer and handleInitialState only"
            )
        return self._index


class DeletedBlock(Block):
    """The block of a variable that the processor has deleted."""

    def here(self, failing: str = "") -> int:
        """Raise an error: the variable was deleted."""
        prefix = f"{failing}: " if failing else ""
        raise StateCallError(f"{prefix}the processor has deleted this state variable in init; it cannot be used")


class VariableStore:
    """Reads and writes one variable for the keys of the block."""

    def __init__(self, block: Block, variable: Variable) -> None:
        self.block, self.variable = block, variable

    @property
    def store(self) -> StateStore:
        return self.block.store(self.variable.store_name)

    @property
    def expiry_ms(self) -> int | None:
        """When a row that is written now expires, in milliseconds of processing time; None for never."""
        return None if self.variable.ttl_ms is None else self.block.now_ms + self.variable.ttl_ms

    def find(self, keys: pa.Table) -> tuple[pa.Table, list[bool]]:
        """Return the rows of keys, and for each whether it exists and has not expired."""
        rows = self.store.multi_get(keys)
        alive = single_chunk(rows.column(FOUND))
        if self.variable.ttl_ms is not None:
            expires = pc.greater(single_chunk(rows.column(EXPIRY.name)), self.block.now_ms)
            alive = pc.and_(alive, pc.fill_null(expires, True))
        return rows, alive.to_pylist()

    def keys(self, indices: Sequence[int] | Numbers, numbers: Sequence[int] | Numbers | None = None) -> pa.Table:
        """Return keys of the store: the block's keys at indices, with the numbers of elements for a list or map."""
        keys = self.block.keys.take(pa.array(indices, pa.int64()))
        return keys if numbers is None else keys.append_column(PLACE.name, pa.array(numbers, pa.int64()))

    def put(self, keys: pa.Table, columns: Mapping[str, Any]) -> None:
        if keys.num_rows:
            self.store.later("put", pa.table([*keys.columns, *columns.values()], [*keys.column_names, *columns]))

    def remove(self, keys: pa.Table) -> None:
        """Remove the rows of keys; keys without a row are ignored."""
        if keys.num_rows:
            self.store.later("remove", keys)

    def value_columns(self, rows: Sequence[Raw]) -> dict[str, pa.Array]:
        """Return the store's columns for values."""
        columns = self.variable.columns
        arrays = columns.held(self.variable.rows.arrays(rows, columns.schema.types))
        return dict(zip((field.name for field in columns.fields), arrays, strict=True))

    def user_key_columns(self, keys: Sequence[Raw]) -> dict[str, pa.Array]:
        """Return the store's columns for keys of a map."""
        columns = self.variable.key_columns
        arrays = columns.held(self.variable.key_rows.arrays(keys, columns.schema.types))
        return dict(zip((field.name for field in columns.fields), arrays, strict=True))

    def values(self, rows: pa.Table) -> list[Raw]:
        return self.variable.rows.tuples(self.variable.columns.shown(rows))

    def user_keys(self, rows: pa.Table) -> list[Raw]:
        return self.variable.key_rows.tuples(self.variable.key_columns.shown(rows))

    def expiries(self, times_ms: Sequence[int | None]) -> dict[str, pa.Array]:
        """Return the column with the time at which rows expire; empty for a variable without a time to live."""
        return {} if self.variable.ttl_ms is None else {EXPIRY.name: pa.array(times_ms, pa.int64())}

    def evict(self) -> int:
        """Remove the expired rows of all keys; return how many."""
        if self.variable.ttl_ms is None:
            return 0
        due = self.store.due(self.block.now_ms)
        key_columns = [*self.block.leaves, *([PLACE.name] if PLACE.name in due.column_names else [])]
        self.remove(due.select(key_columns))
        return int(due.num_rows)


def spread(begins: Numbers, ends: Numbers) -> tuple[Numbers, Numbers]:
    """Return all numbers of some ranges, one range after another, and for each number the index of its range."""
    counts = ends - begins
    owners = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(begins, counts)
    return numbers, owners


@dataclass(slots=True)
class Head:
    """The range of the elements' numbers of a list or map, and when the last of them expires (None: never)."""

    begin: int
    end: int
    expiry_ms: int | None

    def until(self, expiry_ms: int | None) -> int | None:
        """Return when the last element expires, after elements are added that expire at a time."""
        return None if self.expiry_ms is None or expiry_ms is None else max(self.expiry_ms, expiry_ms)


@dataclass(slots=True)
class Elements:
    """Elements in the store, by key of the block: numbers, rows, and the keys of maps."""

    numbers: list[list[int]]
    rows: list[list[Raw]]
    user_keys: list[list[Raw]]


class VariableState(ABC):
    """The base of the states of variables."""

    def __init__(self, block: Block, variable: Variable) -> None:
        self.variable = variable
        self._block, self._rows = block, variable.rows
        self._store = VariableStore(block, variable)
        block.join(self)

    @abstractmethod
    def write(self) -> None:
        """Write the changes for the block's keys, and drop what was read."""

    def evict(self) -> int:
        """Remove the expired rows of all keys; return how many."""
        return self._store.evict()

    def drop(self) -> None:
        """Refuse all further use, as the variable was deleted."""
        self._block = DeletedBlock()


class ElementState(VariableState):
    """The base of lists and maps: heads, and the elements that they refer to."""

    def __init__(self, block: Block, variable: Variable) -> None:
        super().__init__(block, variable)
        self._heads: list[Head | None] | None = None
        self._elements: Elements | None = None

    def _head(self, index: int) -> Head | None:
        """Return the head of a key; None if it has no elements, or all have expired."""
        if self._heads is None:
            size = self._store.block.keys.num_rows
            rows, alive = self._store.find(self._store.keys(range(size), [HEAD] * size))
            begins, ends = (rows.column(field.name).to_pylist() for field in (BEGIN, END))
            expiries = rows.column(EXPIRY.name).to_pylist() if self.variable.ttl_ms is not None else [None] * size
            self._heads = [
                Head(*facts) if is_alive else None
                for is_alive, *facts in zip(alive, begins, ends, expiries, strict=True)
            ]
        return self._heads[index]

    def _read(self) -> Elements:
        """Return the elements of all the block's keys that have not expired."""
        if self._elements is None:
            self._head(0)
            assert self._heads is not None
            heads = [(index, head) for index, head in enumerate(self._heads) if head is not None]
            begins = np.array([head.begin for _, head in heads], np.int64)
            ends = np.array([head.end for _, head in heads], np.int64)
            numbers, owners = spread(begins, ends)
            indices = np.array([index for index, _ in heads], np.int64)[owners]
            rows, alive = self._store.find(self._store.keys(indices, numbers))
            is_alive = np.array(alive, np.bool_)
            self._elements = self._by_key(rows.filter(pa.array(is_alive)), indices[is_alive], numbers[is_alive])
        return self._elements

    def _by_key(self, rows: pa.Table, indices: Numbers, numbers: Numbers) -> Elements:
        size = self._store.block.keys.num_rows
        elements = Elements([[] for _ in range(size)], [[] for _ in range(size)], [[] for _ in range(size)])
        keys = self._store.user_keys(rows) if self.variable.user_key is not None else [()] * rows.num_rows
        values = self._store.values(rows)
        for index, number, key, value in zip(indices.tolist(), numbers.tolist(), keys, values, strict=True):
            elements.numbers[index].append(number)
            elements.rows[index].append(value)
            elements.user_keys[index].append(key)
        return elements

    def _write_rows(self, elements: ElementChanges, heads: dict[int, Head | None]) -> None:
        """Write elements, and the heads of keys (None: the key no longer has elements)."""
        new_heads = {index: head for index, head in heads.items() if head is not None}
        size, tops = len(elements.indices), len(new_heads)
        columns = {
            name: pa.concat_arrays([column, pa.nulls(tops, column.type)])
            for name, column in (
                *(
                    self._store.user_key_columns(elements.user_keys) if self.variable.user_key is not None else {}
                ).items(),
                *self._store.value_columns(elements.rows).items(),
            )
        }
        columns[BEGIN.name] = pa.array([None] * size + [head.begin for head in new_heads.values()], pa.int64())
        columns[END.name] = pa.array([None] * size + [head.end for head in new_heads.values()], pa.int64())
        expiries = [self._store.expiry_ms] * size + [head.expiry_ms for head in new_heads.values()]
        keys = self._store.keys([*elements.indices, *new_heads], [*elements.numbers, *[HEAD] * tops])
        self._store.put(keys, {**columns, **self._store.expiries(expiries)})
        ended = [index for index, head in heads.items() if head is None]
        removed = [*elements.removed_indices, *ended], [*elements.removed_numbers, *[HEAD] * len(ended)]
        self._store.remove(self._store.keys(*removed))

    def _forget(self) -> None:
        self._heads, self._elements = None, None


@dataclass(slots=True)
class ElementChanges:
    """Elements of several keys to write, and the numbers of elements to remove."""

    indices: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    rows: list[Raw] = field(default_factory=list)
    user_keys: list[Raw] = field(default_factory=list)
    removed_indices: list[int] = field(default_factory=list)
    removed_numbers: list[int] = field(default_factory=list)

    def put(self, index: int, number: int, row: Raw, user_key: Raw = ()) -> None:
        self.indices.append(index)
        self.numbers.append(number)
        self.rows.append(row)
        self.user_keys.append(user_key)

    def remove(self, index: int, numbers: Iterable[int]) -> None:
        """Remove elements of a key."""
        new = list(numbers)
        self.removed_indices += [index] * len(new)
        self.removed_numbers += new
