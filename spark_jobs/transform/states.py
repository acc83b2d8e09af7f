"""State variables as a processor uses them, with the methods of PySpark's; calls work on memory (:mod:`spark_jobs.transform.block`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from coordinator.model.errors import InvalidRequestError
from spark_jobs.functions.values import Raw
from spark_jobs.transform.block import Block, DeletedBlock, VariableStore
from spark_jobs.transform.elements import Head, Many, Written
from spark_jobs.transform.variables import Variable

__all__ = ["ListState", "MapState", "ValueState"]


class ValueState:
    """One value of the current key: a Row with a field for each column of its schema; a tuple will do to set it."""

    def __init__(self, block: Block, variable: Variable) -> None:
        self._block, self._rows = block, variable.rows
        self._store = VariableStore(block, variable)
        self._held: list[Raw | None] | None = None
        #: By place of the key, what it is to be; None is nothing.
        self._changed: dict[int, Raw | None] = {}
        block.join(self)

    def exists(self) -> bool:
        """Whether there is a value."""
        return self._raw() is not None

    def get(self) -> tuple[Any, ...] | None:
        """The value; None if there is none."""
        raw = self._raw()
        return None if raw is None else self._rows.row(raw)

    def update(self, newValue: tuple[Any, ...]) -> None:
        """Set the value; its time to live begins anew.

        Raises
        ------
        InvalidRequestError
            It is no tuple of the schema's columns.
        """
        place = self._block.here()
        self._changed[place] = self._rows.raw(newValue)

    def clear(self) -> None:
        """Remove the value, if there is one."""
        self._changed[self._block.here()] = None

    def _raw(self) -> Raw | None:
        place = self._block.here()
        if place in self._changed:
            return self._changed[place]
        if self._held is None:
            found, alive = self._store.find(self._block.keys)
            self._held = [row if there else None for row, there in zip(self._store.values(found), alive, strict=True)]
        return self._held[place]

    def write(self) -> None:
        """Write what was changed for the block's keys, and forget what was read."""
        updated = {place: raw for place, raw in self._changed.items() if raw is not None}
        if updated:
            columns = self._store.value_columns(list(updated.values()))
            expiries = self._store.expiries([self._store.expiry_ms] * len(updated))
            self._store.put(self._store.keys(list(updated)), {**columns, **expiries})
        self._store.remove(self._store.keys([place for place, raw in self._changed.items() if raw is None]))
        self._held, self._changed = None, {}

    def evict(self) -> int:
        """Remove expired values of all keys; returns how many."""
        return self._store.evict()

    def drop(self) -> None:
        """Be of no use any more."""
        self._block = DeletedBlock()


@dataclass(slots=True)
class _NewElements:
    """What was done to a list: elements after those that it had, or in place of them."""

    in_place: bool = False
    added: list[Raw] = field(default_factory=list)


class ListState(Many):
    """A list of the current key: Rows with a field for each column of its schema, in the order in which they were appended.

    With a time to live each element has its own. Appending does not read the list.
    """

    def __init__(self, block: Block, variable: Variable) -> None:
        super().__init__(block, variable)
        self._changed: dict[int, _NewElements] = {}
        block.join(self)

    def exists(self) -> bool:
        """Whether the list has elements."""
        place = self._block.here()
        change = self._changed.get(place)
        if change is not None and (change.added or change.in_place):
            return bool(change.added)
        return self._head(place) is not None

    def get(self) -> Iterator[tuple[Any, ...]]:
        """The elements."""
        place = self._block.here()
        change = self._changed.get(place)
        rows = [] if change is not None and change.in_place else self._read().rows[place]
        return map(self._rows.row, [*rows, *(change.added if change is not None else ())])

    def put(self, newState: list[tuple[Any, ...]]) -> None:
        """Set the elements.

        Raises
        ------
        InvalidRequestError
            There are none (use ``clear``), or one is no tuple of the schema's columns.
        """
        self._changed[self._block.here()] = _NewElements(True, self._checked(newState))

    def appendValue(self, newState: tuple[Any, ...]) -> None:
        """Append an element.

        Raises
        ------
        InvalidRequestError
            It is no tuple of the schema's columns.
        """
        place = self._block.here()
        raw = self._rows.raw(newState)
        self._changed.setdefault(place, _NewElements()).added.append(raw)

    def appendList(self, newState: list[tuple[Any, ...]]) -> None:
        """Append elements.

        Raises
        ------
        InvalidRequestError
            There are none, or one is no tuple of the schema's columns.
        """
        place = self._block.here()
        rows = self._checked(newState)
        self._changed.setdefault(place, _NewElements()).added += rows

    def clear(self) -> None:
        """Remove all elements."""
        self._changed[self._block.here()] = _NewElements(True)

    def _checked(self, given: Iterable[tuple[Any, ...]]) -> list[Raw]:
        rows = [self._rows.raw(one) for one in given]
        if not rows:
            raise InvalidRequestError(
                "a list is not set to, or appended, nothing; use clear to remove it", variable=self._variable.name
            )
        return rows

    def write(self) -> None:
        """Write what was changed for the block's keys, and forget what was read."""
        if self._changed:
            written = Written()
            heads = {place: self._written(place, change, written) for place, change in self._changed.items()}
            self._write_rows(written, heads)
        self._changed = {}
        self._forget()

    def _written(self, place: int, change: _NewElements, written: Written) -> Head | None:
        """Put a key's elements to what is written; returns its new head."""
        head, expiry_ms = self._head(place), self._store.expiry_ms
        begin = end = 0
        if head is not None and change.in_place:
            written.remove(place, range(max(head.begin, len(change.added)), head.end))
        elif head is not None:
            # Elements before the first one that is left have expired.
            known = None if self._elements is None else self._elements.numbers[place]
            begin, end = head.begin if known is None else min(known, default=head.end), head.end
            expiry_ms = head.until(expiry_ms)
        for number, row in enumerate(change.added, end):
            written.put(place, number, row)
        end += len(change.added)
        return Head(begin, end, expiry_ms) if end > begin else None


@dataclass(slots=True)
class _Map:
    """A key's map: values, at which places they are, and what was done to it."""

    values: dict[Raw, Raw]
    numbers: dict[Raw, int]
    free: list[int]
    updated: dict[Raw, None] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    is_changed: bool = False


class MapState(Many):
    """A map of the current key: Rows under Rows, with a field for each column of the two schemas.

    With a time to live each entry has its own. A map is read as a whole.
    """

    def __init__(self, block: Block, variable: Variable) -> None:
        super().__init__(block, variable)
        self._keys = variable.key_rows
        self._maps: dict[int, _Map] = {}
        block.join(self)

    def exists(self) -> bool:
        """Whether the map has entries."""
        return bool(self._map().values)

    def getValue(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The value under a key; None if there is none."""
        raw = self._map().values.get(self._key(key))
        return None if raw is None else self._rows.row(raw)

    def containsKey(self, key: tuple[Any, ...]) -> bool:
        """Whether there is a value under a key."""
        return self._key(key) in self._map().values

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        """Set the value under a key; its time to live begins anew.

        Raises
        ------
        InvalidRequestError
            One of the two is no tuple of its schema's columns.
        """
        one, raw, value_raw = self._map(), self._key(key), self._rows.raw(value)
        one.values[raw] = value_raw
        one.updated[raw] = None
        one.is_changed = True

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Keys with their values, in no particular order."""
        return zip(self.keys(), self.values(), strict=True)

    def keys(self) -> Iterator[tuple[Any, ...]]:
        """The keys, in no particular order."""
        return map(self._keys.row, list(self._map().values))

    def values(self) -> Iterator[tuple[Any, ...]]:
        """The values, in the order of :meth:`keys`."""
        return map(self._rows.row, list(self._map().values.values()))

    def removeKey(self, key: tuple[Any, ...]) -> None:
        """Remove the value under a key, if there is one."""
        one, raw = self._map(), self._key(key)
        if one.values.pop(raw, None) is not None:
            one.updated.pop(raw, None)
            self._free(one, raw)

    def clear(self) -> None:
        """Remove all entries."""
        one = self._map()
        for raw in one.values:
            self._free(one, raw)
        one.values.clear()
        one.updated.clear()

    def _free(self, one: _Map, key: Raw) -> None:
        one.is_changed = True
        number = one.numbers.pop(key, None)
        if number is not None:
            one.free.append(number)
            one.gone.add(number)

    def _key(self, key: tuple[Any, ...]) -> Raw:
        return _findable(self._keys.raw(key))

    def _map(self) -> _Map:
        place = self._block.here()
        if place not in self._maps:
            elements, head = self._read(), self._head(place)
            keys = [_findable(key) for key in elements.user_keys[place]]
            numbers = dict(zip(keys, elements.numbers[place], strict=True))
            taken = set(numbers.values())
            free = [number for number in range(0 if head is None else head.end) if number not in taken]
            self._maps[place] = _Map(dict(zip(keys, elements.rows[place], strict=True)), numbers, free)
        return self._maps[place]

    def write(self) -> None:
        """Write what was changed for the block's keys, and forget what was read."""
        changed = {place: one for place, one in self._maps.items() if one.is_changed}
        if changed:
            written = Written()
            self._write_rows(written, {place: self._written(place, one, written) for place, one in changed.items()})
        self._maps = {}
        self._forget()

    def _written(self, place: int, one: _Map, written: Written) -> Head | None:
        """Put a key's entries to what is written; returns its new head."""
        head, end = self._head(place), len(one.numbers) + len(one.free)
        for key in one.updated:
            if key not in one.numbers:
                one.numbers[key] = one.free.pop() if one.free else end
                end = max(end, one.numbers[key] + 1)
            one.gone.discard(one.numbers[key])
            written.put(place, one.numbers[key], one.values[key], key)
        written.remove(place, one.gone)
        if not one.values:
            # Expired entries that are still there are removed by their own time.
            return None
        expiry_ms = self._store.expiry_ms if one.updated or head is None else head.expiry_ms
        return Head(0, max(one.numbers.values()) + 1, expiry_ms if head is None else head.until(expiry_ms))


def _findable(key: Raw) -> Raw:
    # A NaN is found again in a dict only if it is the same object.
    return tuple([math.nan if part != part else part for part in key])
