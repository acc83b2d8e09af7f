"""Look-ups of keys and their answers, as they travel: few rows, whosever shards they are of, as one piece of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coordinator.errors import StateStoreError
from store_actors.messages import ReadRequest

__all__ = ["FoundRows", "LookUp", "Outcome", "Outcomes", "is_few"]

#: Rows of at most so many bytes are few.
_FEW_BYTES = 1 << 15


def is_few(rows: pa.Table | pa.RecordBatch) -> bool:
    """Whether rows are few enough to be copied without a thought."""
    # The first is not asked column by column, but counts all of what a slice is a part of.
    return bool(rows.get_total_buffer_size() <= _FEW_BYTES or rows.nbytes <= _FEW_BYTES)


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Answer to a look-up of one shard.

    Attributes
    ----------
    version
        That was read.
    newest
        Newest counted version that the store actor has in memory; -1 if it has none.
    places
        Of each row the place of its key among those asked for, in ascending order.
    rows
        As they are shown.
    """

    version: int
    newest: int
    places: npt.NDArray[np.int64]
    rows: pa.Table


#: What came of a look-up; None if the version was made anew by another attempt meanwhile.
Outcome: TypeAlias = FoundRows | StateStoreError | None


class LookUp:
    """Keys to look for on some shards.

    Parameters
    ----------
    requests
        One for each shard.
    keys
        Of each shard; all of one schema.
    """

    __slots__ = ("keys", "requests")

    def __init__(self, requests: Sequence[ReadRequest], keys: Sequence[pa.Table]) -> None:
        self.requests, self.keys = tuple(requests), tuple(keys)

    @property
    def is_small(self) -> bool:
        """Whether the keys are few."""
        return is_few(pa.concat_tables(self.keys))

    def __iter__(self) -> Iterator[tuple[ReadRequest, pa.Table]]:
        return zip(self.requests, self.keys, strict=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _look_up, (self.requests, _packed(self.keys))


class Outcomes:
    """What came of each request of a :class:`LookUp`, in their order."""

    __slots__ = ("each",)

    def __init__(self, each: Sequence[Outcome]) -> None:
        self.each = tuple(each)

    def __reduce__(self) -> tuple[Any, ...]:
        told = [(one.version, one.newest, one.places) if isinstance(one, FoundRows) else one for one in self.each]
        return _outcomes, (told, _packed([one.rows for one in self.each if isinstance(one, FoundRows)]))


#: Tables as they are, or few rows of one schema: it, the rows as bytes and how many each table has.
_Packed: TypeAlias = Sequence[pa.Table] | tuple[bytes, bytes, list[int]]


def _packed(tables: Sequence[pa.Table]) -> _Packed:
    """Tables to be pickled. Ray takes the buffers of a table apart, which of few rows takes longer than all the rest.

    Of many rows nothing is copied: they go through shared memory.
    """
    if not tables or any(one.schema != tables[0].schema for one in tables):
        return list(tables)
    joined = pa.concat_tables(tables)
    if not is_few(joined):
        return list(tables)
    (rows, *_) = joined.combine_chunks().to_batches() or [None]
    written = b"" if rows is None else rows.serialize().to_pybytes()
    return joined.schema.serialize().to_pybytes(), written, [one.num_rows for one in tables]


def _unpacked(packed: _Packed) -> Sequence[pa.Table]:
    if isinstance(packed, list):
        return packed
    told, written, lengths = packed
    schema = _schema(told)
    if not written:
        return [schema.empty_table() for _ in lengths]
    rows, tables, begin = pa.ipc.read_record_batch(written, schema), [], 0
    for length in lengths:
        tables.append(pa.Table.from_batches([rows.slice(begin, length)]))
        begin += length
    return tables


@lru_cache(maxsize=256)
def _schema(written: bytes) -> pa.Schema:
    """A schema as it was told: a reader's many look-ups are all of the same few."""
    return pa.ipc.read_schema(pa.py_buffer(written))


def _look_up(requests: Sequence[ReadRequest], keys: _Packed) -> LookUp:
    return LookUp(requests, _unpacked(keys))


def _outcomes(told: Sequence[Any], rows: _Packed) -> Outcomes:
    tables = iter(_unpacked(rows))
    each: list[Outcome] = []
    for one in told:
        if isinstance(one, tuple):
            version, newest, places = one
            each.append(FoundRows(version, newest, places, next(tables)))
        else:
            each.append(one)
    return Outcomes(each)
