"""State variables as a processor uses them, with PySpark's methods; calls work on memory (:mod:`spark_jobs.transform.block`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from spark_jobs.functions.values import Raw
from spark_jobs.plan.spark_errors import StateCallError
from spark_jobs.transform.block import Block, ElementChanges, ElementState, Head, VariableState
from spark_jobs.transform.variables import Variable

#: PySpark says so of lists, too.
_CHECKING = "Error checking value state exists"


class ValueState(VariableState):
    """A value of the current key: a Row with a field for each column of its schema. It can be set by a tuple."""

    def __init__(self, block: Block, variable: Variable) -> None:
        super().__init__(block, variable)
        #: Values of the block's keys as read; None before that.
        self._stored: list[Raw | None] | None = None
        #: By index of the key, its new value; None removes it.
        self._changed: dict[int, Raw | None] = {}

    def exists(self) -> bool:
        """Return whether there is a value."""
        return self._raw(_CHECKING) is not None

    def get(self) -> tuple[Any, ...] | None:
        """Return the value; None if there is none."""
        raw = self._raw()
        return None if raw is None else self._rows.row(raw)

    def update(self, newValue: tuple[Any, ...]) -> None:
        """Set the value; its time to live starts again.

        Raises
        ------
        InvalidRequestError
            The value is not a tuple of the schema's columns.
        """
        index = self._block.here()
        self._changed[index] = self._rows.raw(newValue)

    def clear(self) -> None:
        """Remove the value, if there is one."""
        self._changed[self._block.here()] = None

    def _raw(self, failing: str = "") -> Raw | None:
        index = self._block.here(failing)
        if index in self._changed:
            return self._changed[index]
        if self._stored is None:
            rows, alive = self._store.find(self._block.keys)
            self._stored = [
                value if is_alive else None for value, is_alive in zip(self._store.values(rows), alive, strict=True)
            ]
        return self._stored[index]

    def write(self) -> None:
        updated = {index: raw for index, raw in self._changed.items() if raw is not None}
        if updated:
            columns = self._store.value_columns(list(updated.values()))
            expiries = self._store.expiries([self._store.expiry_ms] * len(updated))
            self._store.put(self._store.keys(list(updated)), {**columns, **expiries})
        self._store.remove(self._store.keys([index for index, raw in self._changed.items() if raw is None]))
        self._stored, self._changed = None, {}


@dataclass(slots=True)
class _NewElements:
    """Changes to a list: elements after its present ones, or in place of them."""

    replaces: bool = False
    added: list[Raw] = field(default_factory=list)


class ListState(ElementState):
    """A list of the current key: Rows with a field for each column of its schema, in the order in which they were appended.

    With a time to live, each element expires by itself. Appending does not read the list.
    """

    def __init__(self, block: Block, variable: Variable) -> None:
        super().__init__(block, variable)
        self._changed: dict[int, _NewElements] = {}

    def exists(self) -> bool:
        """Return whether the list has elements."""
        index = self._block.here(_CHECKING)
        change = self._changed.get(index)
        if change is not None and (change.added or change.replaces):
            return bool(change.added)
        return self._head(index) is not None

    def get(self) -> Iterator[tuple[Any, ...]]:
        """Return the elements."""
        index = self._block.here()
        change = self._changed.get(index)
        rows = [] if change is not None and change.replaces else self._read().rows[index]
        return map(self._rows.row, [*rows, *(change.added if change is not None else ())])

    def put(self, newState: list[tuple[Any, ...]]) -> None:
        """Set the elements.

        Raises
        ------
        InvalidRequestError
            There are no elements (use ``clear``), or an element is not a tuple of the schema's columns.
        """
        self._changed[self._block.here()] = _NewElements(True, self._checked(newState))

    def appendValue(self, newState: tuple[Any, ...]) -> None:
        """Append an element.

        Raises
        ------
        InvalidRequestError
            The element is not a tuple of the schema's columns.
        """
        index = self._block.here()
        raw = self._rows.raw(newState)
        self._changed.setdefault(index, _NewElements()).added.append(raw)

    def appendList(self, newState: list[tuple[Any, ...]]) -> None:
        """Append elements.

        Raises
        ------
        InvalidRequestError
            There are no elements, or an element is not a tuple of the schema's columns.
        """
        index = self._block.here()
        rows = self._checked(newState)
        self._changed.setdefault(index, _NewElements()).added += rows

    def clear(self) -> None:
        """Remove all elements."""
        self._changed[self._block.here()] = _NewElements(True)

    def _checked(self, elements: Iterable[tuple[Any, ...]]) -> list[Raw]:
        rows = [self._rows.raw(element) for element in elements]
        if not rows:
            raise StateCallError(
                "a list is not set to, or appended, nothing; use clear to remove it", variable=self.variable.name
            )
        return rows

    def write(self) -> None:
        if self._changed:
            changes = ElementChanges()
            heads = {index: self._collect(index, change, changes) for index, change in self._changed.items()}
            self._write_rows(changes, heads)
        self._changed = {}
        self._forget()

    def _collect(self, index: int, change: _NewElements, changes: ElementChanges) -> Head | None:
        """Add a key's elements to the changes to write; return its new head."""
        head, expiry_ms = self._head(index), self._store.expiry_ms
        begin = end = 0
        if head is not None and change.replaces:
            changes.remove(index, range(max(head.begin, len(change.added)), head.end))
        elif head is not None:
            # Elements before the first known element have expired.
            stored_numbers = None if self._elements is None else self._elements.numbers[index]
            begin, end = head.begin if stored_numbers is None else min(stored_numbers, default=head.end), head.end
            expiry_ms = head.until(expiry_ms)
        for number, row in enumerate(change.added, end):
            changes.put(index, number, row)
        end += len(change.added)
        return Head(begin, end, expiry_ms) if end > begin else None


@dataclass(slots=True)
class _Map:
    """A key's map: its values, their element numbers, and its changes."""

    values: dict[Raw, Raw]
    numbers: dict[Raw, int]
    free: list[int]
    updated: dict[Raw, None] = field(default_factory=dict)
    removed: set[int] = field(default_factory=set)
    is_changed: bool = False


class MapState(ElementState):
    """A map of the current key: Rows under Rows, with a field for each column of the two schemas.

    With a time to live, each entry expires by itself. A map is read as a whole.
    """

    def __init__(self, block: Block, variable: Variable) -> None:
        super().__init__(block, variable)
        self._keys = variable.key_rows
        self._maps: dict[int, _Map] = {}

    def exists(self) -> bool:
        """Return whether the map has entries."""
        return bool(self._map("Error checking map state exists").values)

    def getValue(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the value under a key; None if there is none."""
        raw = self._map().values.get(self._key(key))
        return None if raw is None else self._rows.row(raw)

    def containsKey(self, key: tuple[Any, ...]) -> bool:
        """Return whether there is a value under a key."""
        return self._key(key) in self._map().values

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        """Set the value under a key; its time to live starts again.

        Raises
        ------
        InvalidRequestError
            The key or the value is not a tuple of its schema's columns.
        """
        entries, raw, value_raw = self._map(), self._key(key), self._rows.raw(value)
        entries.values[raw] = value_raw
        entries.updated[raw] = None
        entries.is_changed = True

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Return the keys with their values, in no particular order."""
        return zip(self.keys(), self.values(), strict=True)

    def keys(self) -> Iterator[tuple[Any, ...]]:
        """Return the keys, in no particular order."""
        return map(self._keys.row, list(self._map().values))

    def values(self) -> Iterator[tuple[Any, ...]]:
        """Return the values, in the order of :meth:`keys`."""
        return map(self._rows.row, list(self._map().values.values()))

    def removeKey(self, key: tuple[Any, ...]) -> None:
        """Remove the value under a key, if there is one."""
        entries, raw = self._map(), self._key(key)
        if entries.values.pop(raw, None) is not None:
            entries.updated.pop(raw, None)
            self._free(entries, raw)

    def clear(self) -> None:
        """Remove all entries."""
        entries = self._map()
        for raw in entries.values:
            self._free(entries, raw)
        entries.values.clear()
        entries.updated.clear()

    def _free(self, entries: _Map, key: Raw) -> None:
        entries.is_changed = True
        number = entries.numbers.pop(key, None)
        if number is not None:
            entries.free.append(number)
            entries.removed.add(number)

    def _key(self, key: tuple[Any, ...]) -> Raw:
        return _findable(self._keys.raw(key))

    def _map(self, failing: str = "") -> _Map:
        index = self._block.here(failing)
        if index not in self._maps:
            elements, head = self._read(), self._head(index)
            keys = [_findable(key) for key in elements.user_keys[index]]
            numbers = dict(zip(keys, elements.numbers[index], strict=True))
            used = set(numbers.values())
            free = [number for number in range(0 if head is None else head.end) if number not in used]
            self._maps[index] = _Map(dict(zip(keys, elements.rows[index], strict=True)), numbers, free)
        return self._maps[index]

    def write(self) -> None:
        changed = {index: entries for index, entries in self._maps.items() if entries.is_changed}
        if changed:
            changes = ElementChanges()
            heads = {index: self._collect(index, entries, changes) for index, entries in changed.items()}
            self._write_rows(changes, heads)
        self._maps = {}
        self._forget()

    def _collect(self, index: int, entries: _Map, changes: ElementChanges) -> Head | None:
        """Add a key's entries to the changes to write; return its new head."""
        head, end = self._head(index), len(entries.numbers) + len(entries.free)
        for key in entries.updated:
            if key not in entries.numbers:
                entries.numbers[key] = entries.free.pop() if entries.free else end
                end = max(end, entries.numbers[key] + 1)
            entries.removed.discard(entries.numbers[key])
            changes.put(index, entries.numbers[key], entries.values[key], key)
        changes.remove(index, entries.removed)
        if not entries.values:
            # Expired entries that remain are removed by their own time.
            return None
        expiry_ms = self._store.expiry_ms if entries.updated or head is None else head.expiry_ms
        return Head(0, max(entries.numbers.values()) + 1, expiry_ms if head is None else head.until(expiry_ms))


def _findable(key: Raw) -> Raw:
    # A dict finds a NaN only if it is the same object.
    return tuple([math.nan if value != value else value for value in key])
