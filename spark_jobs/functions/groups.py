"""Rows of many keys as Arrow: put together by key, and user-defined state in the columns of a keyed store.

State of a type that a store holds is a column of the store. Values of other types (arrays, maps, structs) are held as binary
(:mod:`store_actors.engine.packed_values`), whose types the query's own state type gives.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coordinator.model.identities import DEFAULT_STORE
from coordinator.model.schema import Field
from coordinator.model.type_names import payload_type, type_to_string
from store_actors.engine.packed_values import packed, unpacked
from store_actors.messages import StoreSpec

__all__ = ["EXISTS", "TIMEOUT", "Groups", "StateColumns", "key_codes", "single_chunk"]

Numbers: TypeAlias = npt.NDArray[np.int64]

#: Whether a key has state; without it a row only has a timeout.
EXISTS = Field("exists", "bool", nullable=False)
#: When a key times out, in microseconds since the epoch; null if it does not.
TIMEOUT = Field("timeout_us", "int64")


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows put together by key.

    Attributes
    ----------
    keys
        Key columns, one row a key.
    rows
        All columns; rows of a key stand together, in the order in which they came.
    offsets
        Of key `i` are the rows from ``offsets[i]`` to ``offsets[i + 1]``.
    """

    keys: pa.Table
    rows: pa.Table
    offsets: Numbers

    @classmethod
    def of(cls, rows: pa.Table, keys: Sequence[str]) -> Groups:
        """Group rows by key columns. Nulls are equal, and NaNs are."""
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
        """Keys that no row came for."""
        return cls(keys, schema.empty_table(), np.zeros(keys.num_rows + 1, np.int64))

    def __len__(self) -> int:
        size: int = self.keys.num_rows
        return size

    def part(self, begin: int, end: int) -> Groups:
        """Some of the keys, by place."""
        offsets = self.offsets[begin : end + 1]
        rows = self.rows.slice(offsets[0], offsets[-1] - offsets[0])
        return Groups(self.keys.slice(begin, end - begin), rows, offsets - offsets[0])


def key_codes(rows: pa.Table, keys: Sequence[str]) -> Numbers:
    """A number for each row: the same for rows of the same key. Nulls are equal, and NaNs are."""
    codes = np.zeros(rows.num_rows, np.int64)
    for name in keys:
        column = single_chunk(rows.column(name))
        if pa.types.is_nested(column.type):
            # The engine's compiled code is loaded only by who needs it.
            from store_actors.engine.nested import nested_keys

            column = nested_keys(column)
        encoded = column.dictionary_encode(null_encoding="encode")
        codes = codes * max(1, len(encoded.dictionary)) + encoded.indices.to_numpy()
        if len(keys) > 1:
            # Dense again, so that the product of many columns cannot overflow.
            codes = np.unique(codes, return_inverse=True)[1].astype(np.int64)
    return codes


@dataclass(frozen=True)
class StateColumns:
    """A user's state type, and the value columns of a keyed store that hold it.

    Attributes
    ----------
    schema
        The user's columns.
    prefix
        Of the names of the store's columns.
    """

    schema: pa.Schema
    prefix: str = "s"

    def _is_nested(self, place: int) -> bool:
        return bool(pa.types.is_nested(self.schema.types[place]))

    @property
    def fields(self) -> tuple[Field, ...]:
        """Columns of the store, in the order of the user's."""
        named = []
        for place, one in enumerate(self.schema):
            if self._is_nested(place):
                # Bytes of another type could not be read: a column of another type is another column.
                named.append(Field(f"{self.prefix}_{one.name}_{zlib.crc32(str(one.type).encode()):08x}", "binary"))
            else:
                named.append(Field(f"{self.prefix}_{one.name}", type_to_string(one.type)))
        return tuple(named)

    def group_store(self, keys: tuple[Field, ...]) -> StoreSpec:
        """The store of a function with state: the state of each key, whether it has any, and its timeout."""
        return StoreSpec(DEFAULT_STORE, keys, (*self.fields, EXISTS, TIMEOUT), TIMEOUT.name)

    def held(self, values: Sequence[pa.Array]) -> list[pa.Array]:
        """Columns of the store for the user's columns."""
        return [packed(array) if self._is_nested(place) else array for place, array in enumerate(values)]

    def shown(self, rows: pa.Table) -> list[pa.Array]:
        """The user's columns of rows of the store."""
        columns = [single_chunk(rows.column(field.name)) for field in self.fields]
        return [
            unpacked(array, kind) if pa.types.is_nested(kind) else array.cast(kind)
            for array, kind in zip(columns, self.schema.types, strict=True)
        ]

    def shown_trees(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name of each of the user's columns, and how readers make it of the store's (:mod:`store_actors.operators.expressions`)."""
        for place, (one, field) in enumerate(zip(self.schema, self.fields, strict=True)):
            held = {"op": "column", "name": field.name}
            yield (
                one.name,
                {"op": "unpacked", "type": payload_type(one.type), "args": [held]} if self._is_nested(place) else held,
            )


def single_chunk(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column in one piece."""
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays([pa.array([], column.type), *column.chunks])
