"""Elements of lists and maps of the keys of a block: heads, and the rows that they refer to (:mod:`spark_jobs.transform.variables`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from spark_jobs.functions.groups import Numbers
from spark_jobs.functions.values import Raw
from spark_jobs.transform.block import Block, DeletedBlock, VariableStore, spread
from spark_jobs.transform.variables import BEGIN, END, EXPIRY, HEAD, Variable


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


class ElementState:
    """The base of lists and maps: heads, and the elements that they refer to."""

    def __init__(self, block: Block, variable: Variable) -> None:
        self._block, self._rows, self._variable = block, variable.rows, variable
        self._store = VariableStore(block, variable)
        self._heads: list[Head | None] | None = None
        self._elements: Elements | None = None

    def _head(self, index: int) -> Head | None:
        """Return the head of a key; None if it has no elements, or all have expired."""
        if self._heads is None:
            size = self._store.block.keys.num_rows
            rows, alive = self._store.find(self._store.keys(range(size), [HEAD] * size))
            begins, ends = (rows.column(field.name).to_pylist() for field in (BEGIN, END))
            expiries = rows.column(EXPIRY.name).to_pylist() if self._variable.ttl_ms is not None else [None] * size
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
        keys = self._store.user_keys(rows) if self._variable.user_key is not None else [()] * rows.num_rows
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
                    self._store.user_key_columns(elements.user_keys) if self._variable.user_key is not None else {}
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

    def evict(self) -> int:
        """Remove the expired elements of all keys; return how many rows that were."""
        return self._store.evict()

    def drop(self) -> None:
        """Refuse all further use, as the variable was deleted."""
        self._block = DeletedBlock()


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
        """Write an element of a key."""
        self.indices.append(index)
        self.numbers.append(number)
        self.rows.append(row)
        self.user_keys.append(user_key)

    def remove(self, index: int, numbers: Iterable[int]) -> None:
        """Remove elements of a key."""
        new = list(numbers)
        self.removed_indices += [index] * len(new)
        self.removed_numbers += new
