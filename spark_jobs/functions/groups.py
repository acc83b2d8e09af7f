"""Rows of many keys as Arrow, grouped by key, and user-defined state as columns of a keyed store.

State of an atomic type is a column of the store. Values of other types (arrays, maps, structs) are stored as binary
(:func:`~store_actors.engine.columns.packed`); their types are in the query's own state type.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coordinator.model.identities import DEFAULT_STORE
from coordinator.model.schema import Field
from coordinator.model.type_names import payload_type, type_to_string
from store_actors.engine.columns import packed, unpacked
from store_actors.messages.requests import StoreSpec

Numbers: TypeAlias = npt.NDArray[np.int64]

#: Whether a key has state; without state, a row only has a timeout.
EXISTS = Field("exists", "bool", nullable=False)
#: When a key times out, in microseconds since the epoch; null if it does not.
TIMEOUT = Field("timeout_us", "int64")


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows grouped by key."""

    #: Key columns, a row for each key.
    keys: pa.Table
    #: All columns; rows of a key are adjacent, in the order of their arrival.
    rows: pa.Table
    #: Rows from ``offsets[i]`` to ``offsets[i + 1]`` belong to key `i`.
    offsets: Numbers

    @classmethod
    def of(cls, rows: pa.Table, keys: Sequence[str]) -> Groups:
        """Group rows by key columns. Nulls are equal, and so are NaNs."""
        codes = key_codes(rows, keys)
        order = np.argsort(codes, kind="stable")
        ordered = codes[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        return cls(
            rows.select(list(keys)).take(pa.array(order[starts])),
            rows.take(pa.array(order)),
            np.append(starts, rows.num_rows),
        )

    @classmethod
    def without_rows(cls, keys: pa.Table, schema: pa.Schema) -> Groups:
        return cls(keys, schema.empty_table(), np.zeros(keys.num_rows + 1, np.int64))

    def __len__(self) -> int:
        size: int = self.keys.num_rows
        return size

    def part(self, begin: int, end: int) -> Groups:
        """Return a range of the keys, by index."""
        offsets = self.offsets[begin : end + 1]
        rows = self.rows.slice(offsets[0], offsets[-1] - offsets[0])
        return Groups(self.keys.slice(begin, end - begin), rows, offsets - offsets[0])


def key_codes(rows: pa.Table, keys: Sequence[str]) -> Numbers:
    """Return a number for each row, equal for rows of the same key. Nulls are equal, and so are NaNs."""
    codes = np.zeros(rows.num_rows, np.int64)
    for name in keys:
        column = single_chunk(rows.column(name))
        if pa.types.is_nested(column.type):
            # Imported here, as it loads the engine's compiled code.
            from store_actors.engine.words import nested_keys

            column = nested_keys(column)
        encoded = column.dictionary_encode(null_encoding="encode")
        codes = codes * max(1, len(encoded.dictionary)) + encoded.indices.to_numpy()
        if len(keys) > 1:
            # Dense again, so that the product of many columns cannot overflow.
            codes = np.unique(codes, return_inverse=True)[1].astype(np.int64)
    return codes


class Rows(Protocol):
    """The conversion of keys and rows for a processor, and of the rows that it emits: DataFrames
    (:class:`~spark_jobs.functions.frames.PandasForm`), or Rows (``transformWithState``).
    """

    @property
    def max_rows(self) -> int:
        """Number of rows from which on emitted rows are sent."""

    def keys(self, keys: pa.Table) -> Iterator[tuple[Any, ...]]:
        """Return each key as a tuple."""

    def rows(self, groups: Groups) -> Iterator[Iterator[Any]]:
        """Return the rows of each key."""

    def checked(self, emitted: Any) -> Iterator[Any]:
        """Yield the rows that a processor returned; refuse anything else."""

    def size(self, emitted: Any) -> int:
        """Return the number of rows in an emitted piece."""

    def table(self, emitted: Sequence[Any]) -> pa.Table:
        """Return the emitted rows as Arrow columns."""


def tables_of(form: Rows, calls: Iterable[Iterator[Any]]) -> Iterator[pa.Table]:
    """Yield the rows that calls emit, as tables; each call is read to its end before the next begins."""
    pending: list[Any] = []
    size = 0
    for emitted in calls:
        for piece in emitted:
            if form.size(piece):
                pending.append(piece)
                size += form.size(piece)
        if size > form.max_rows:
            yield form.table(pending)
            pending, size = [], 0
    if pending:
        yield form.table(pending)


@dataclass(frozen=True)
class StateColumns:
    """A user's state type, and its value columns in a keyed store."""

    schema: pa.Schema
    prefix: str = "s"

    def _is_nested(self, index: int) -> bool:
        return bool(pa.types.is_nested(self.schema.types[index]))

    @property
    def fields(self) -> tuple[Field, ...]:
        """The store's columns, in the order of the user's."""
        fields = []
        for index, column in enumerate(self.schema):
            if self._is_nested(index):
                # The name includes the type, as bytes of another type could not be read.
                type_hash = zlib.crc32(str(column.type).encode())
                fields.append(Field(f"{self.prefix}_{column.name}_{type_hash:08x}", "binary"))
            else:
                fields.append(Field(f"{self.prefix}_{column.name}", type_to_string(column.type)))
        return tuple(fields)

    def group_store(self, keys: tuple[Field, ...]) -> StoreSpec:
        """Return the spec of the store of a function with state: each key's state, whether it has any, and its timeout."""
        return StoreSpec(DEFAULT_STORE, keys, (*self.fields, EXISTS, TIMEOUT), TIMEOUT.name)

    def held(self, values: Sequence[pa.Array]) -> list[pa.Array]:
        """Return the store's columns for the user's columns."""
        return [packed(array) if self._is_nested(index) else array for index, array in enumerate(values)]

    def shown(self, rows: pa.Table) -> list[pa.Array]:
        """Return the user's columns of rows of the store."""
        columns = [single_chunk(rows.column(field.name)) for field in self.fields]
        return [
            unpacked(array, kind) if pa.types.is_nested(kind) else array.cast(kind)
            for array, kind in zip(columns, self.schema.types, strict=True)
        ]

    def shown_trees(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name of each of the user's columns, and its tree over the store's (:mod:`store_actors.operators.expressions`)."""
        for index, (column, field) in enumerate(zip(self.schema, self.fields, strict=True)):
            stored = {"op": "column", "name": field.name}
            unpacked_tree = {"op": "unpacked", "type": payload_type(column.type), "args": [stored]}
            yield column.name, unpacked_tree if self._is_nested(index) else stored


def single_chunk(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays([pa.array([], column.type), *column.chunks])
