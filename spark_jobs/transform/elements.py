"""Elements of lists and maps of the keys of a block: heads, and rows that they lead to (:mod:`spark_jobs.transform.variables`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from spark_jobs.functions.groups import Numbers
from spark_jobs.functions.values import Raw
from spark_jobs.transform.block import Block, DeletedBlock, VariableStore, spread
from spark_jobs.transform.variables import BEGIN, END, EXPIRY, HEAD, Variable

__all__ = ["Elements", "Head", "Many", "Written"]


@dataclass(slots=True)
class Head:
    """Where the elements of a list or map are, and when the last of them expires (None: never)."""

    begin: int
    end: int
    expiry_ms: int | None

    def until(self, expiry_ms: int | None) -> int | None:
        """When the last element expires, with those that expire then."""
        return None if self.expiry_ms is None or expiry_ms is None else max(self.expiry_ms, expiry_ms)


@dataclass(slots=True)
class Elements:
    """Elements of the block's keys as the store has them: key by key, numbers and rows."""

    numbers: list[list[int]]
    rows: list[list[Raw]]
    user_keys: list[list[Raw]]


class Many:
    """What lists and maps have in common: heads, and the elements that they lead to."""

    def __init__(self, block: Block, variable: Variable) -> None:
        self._block, self._rows, self._variable = block, variable.rows, variable
        self._store = VariableStore(block, variable)
        self._heads: list[Head | None] | None = None
        self._elements: Elements | None = None

    def _head(self, place: int) -> Head | None:
        """Head of a key; None if it has no elements, or they have all expired."""
        if self._heads is None:
            size = self._store.block.keys.num_rows
            found, alive = self._store.find(self._store.keys(range(size), [HEAD] * size))
            begins, ends = (found.column(one.name).to_pylist() for one in (BEGIN, END))
            expiries = found.column(EXPIRY.name).to_pylist() if self._variable.ttl_ms is not None else [None] * size
            self._heads = [
                Head(*facts) if there else None for there, *facts in zip(alive, begins, ends, expiries, strict=True)
            ]
        return self._heads[place]

    def _read(self) -> Elements:
        """Elements of all the block's keys that have not expired."""
        if self._elements is None:
            self._head(0)
            assert self._heads is not None
            heads = [(place, head) for place, head in enumerate(self._heads) if head is not None]
            begins = np.array([head.begin for _, head in heads], np.int64)
            ends = np.array([head.end for _, head in heads], np.int64)
            numbers, owners = spread(begins, ends)
            places = np.array([place for place, _ in heads], np.int64)[owners]
            found, alive = self._store.find(self._store.keys(places, numbers))
            there = np.array(alive, np.bool_)
            self._elements = self._by_key(found.filter(pa.array(there)), places[there], numbers[there])
        return self._elements

    def _by_key(self, rows: pa.Table, places: Numbers, numbers: Numbers) -> Elements:
        size = self._store.block.keys.num_rows
        parts = Elements([[] for _ in range(size)], [[] for _ in range(size)], [[] for _ in range(size)])
        keys = self._store.user_keys(rows) if self._variable.user_key is not None else [()] * rows.num_rows
        values = self._store.values(rows)
        for place, number, key, value in zip(places.tolist(), numbers.tolist(), keys, values, strict=True):
            parts.numbers[place].append(number)
            parts.rows[place].append(value)
            parts.user_keys[place].append(key)
        return parts

    def _write_rows(self, elements: Written, heads: dict[int, Head | None]) -> None:
        """Write elements, and the heads of keys (None: the key has no elements any more)."""
        there = {place: head for place, head in heads.items() if head is not None}
        size, tops = len(elements.places), len(there)
        columns = {
            name: pa.concat_arrays([column, pa.nulls(tops, column.type)])
            for name, column in (
                *(
                    self._store.user_key_columns(elements.user_keys) if self._variable.user_key is not None else {}
                ).items(),
                *self._store.value_columns(elements.rows).items(),
            )
        }
        columns[BEGIN.name] = pa.array([None] * size + [head.begin for head in there.values()], pa.int64())
        columns[END.name] = pa.array([None] * size + [head.end for head in there.values()], pa.int64())
        expiries = [self._store.expiry_ms] * size + [head.expiry_ms for head in there.values()]
        keys = self._store.keys([*elements.places, *there], [*elements.numbers, *[HEAD] * tops])
        self._store.put(keys, {**columns, **self._store.expiries(expiries)})
        ended = [place for place, head in heads.items() if head is None]
        gone = [*elements.gone_places, *ended], [*elements.gone_numbers, *[HEAD] * len(ended)]
        self._store.remove(self._store.keys(*gone))

    def _forget(self) -> None:
        self._heads, self._elements = None, None

    def evict(self) -> int:
        """Remove expired elements of all keys; returns how many rows that were."""
        return self._store.evict()

    def drop(self) -> None:
        """Be of no use any more."""
        self._block = DeletedBlock()


@dataclass(slots=True)
class Written:
    """Elements to write, and the numbers of those to remove, of several keys."""

    places: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    rows: list[Raw] = field(default_factory=list)
    user_keys: list[Raw] = field(default_factory=list)
    gone_places: list[int] = field(default_factory=list)
    gone_numbers: list[int] = field(default_factory=list)

    def put(self, place: int, number: int, row: Raw, user_key: Raw = ()) -> None:
        """Write an element of a key."""
        self.places.append(place)
        self.numbers.append(number)
        self.rows.append(row)
        self.user_keys.append(user_key)

    def remove(self, place: int, numbers: Iterable[int]) -> None:
        """Remove elements of a key."""
        new = list(numbers)
        self.gone_places += [place] * len(new)
        self.gone_numbers += new
