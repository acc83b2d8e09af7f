"""Queries of keys and their results; and of few keys the encoding: the rows of any number of shards as one piece of bytes.

Many keys are sent by Ray, which passes on the buffers of Arrow data without a copy. Messages of a direct connection
(:mod:`store_actors.connections.direct_calls`) are JSON and Arrow data, which run no code: bytes from a socket are never unpickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coordinator.model.errors import StateStoreError
from coordinator.model.identities import StateStoreId
from store_actors.messages.requests import ReadRequest, is_json
from store_actors.messages.wire import as_stream, error_facts, error_of

#: Rows are few if they have at most this many bytes.
_FEW_BYTES = 1 << 15
#: Before the JSON of what is encoded, its length.
_LENGTH = struct.Struct("<I")


def is_few(rows: pa.Table | pa.RecordBatch) -> bool:
    """Return whether rows are so few that a copy costs nothing that counts."""
    # get_total_buffer_size does not go column by column, but counts the whole buffers of which a slice is a part.
    return bool(rows.get_total_buffer_size() <= _FEW_BYTES or rows.nbytes <= _FEW_BYTES)


@dataclass(frozen=True, slots=True)
class FoundRows:
    """The rows that a query found in one shard."""

    version: int
    #: Newest committed version that the store actor has in memory; -1 if it has none.
    newest: int
    #: For each row the index of its key among the query's keys, in ascending order.
    places: npt.NDArray[np.int64]
    rows: pa.Table


#: Result of a query; None if another attempt wrote the version meanwhile.
KeyResult: TypeAlias = FoundRows | StateStoreError | None


@dataclass(frozen=True, slots=True)
class KeyQuery:
    """Keys to look for on some shards."""

    requests: Sequence[ReadRequest]
    keys: Sequence[pa.Table]

    @property
    def is_small(self) -> bool:
        """Whether the keys are few."""
        return is_few(pa.concat_tables(self.keys))

    def __iter__(self) -> Iterator[tuple[ReadRequest, pa.Table]]:
        return zip(self.requests, self.keys, strict=True)

    def encoded(self) -> bytes:
        """Return the query as JSON and Arrow data."""
        projections = list(dict.fromkeys(request.projection for request in self.requests))
        facts = [
            [
                *_fields(request.store_id),
                request.version,
                request.attempt_id,
                projections.index(request.projection),
                request.is_latest,
            ]
            for request in self.requests
        ]
        return _joined({"requests": facts, "forms": len(projections)}, projections, self.keys)

    @classmethod
    def decoded(cls, encoded: bytes) -> KeyQuery:
        """Return the query that :meth:`encoded` encoded.

        Raises
        ------
        ValueError
            A projection is not JSON, or the bytes are not such an encoding.
        """
        facts, blobs, keys = _parted(encoded)
        projections = blobs[: facts["forms"]]
        if not all(map(is_json, projections)):
            raise ValueError("a look-up's form is JSON")
        requests = [
            ReadRequest(_store_id(*store), version, attempt, projections[index], is_latest)
            for *store, version, attempt, index, is_latest in facts["requests"]
        ]
        return cls(requests, keys)


@dataclass(frozen=True, slots=True)
class KeyResults:
    """The results of the requests of a :class:`KeyQuery`, in their order."""

    each: Sequence[KeyResult]

    def encoded(self) -> bytes:
        """Return the results as JSON and Arrow data; an error as class name, message and context as strings or numbers."""
        rows = [result.rows for result in self.each if isinstance(result, FoundRows)]
        return _joined({"each": [_result_facts(result) for result in self.each]}, [], rows)

    @classmethod
    def decoded(cls, encoded: bytes) -> KeyResults:
        """Return the results that :meth:`encoded` encoded.

        Raises
        ------
        ValueError
            The bytes are not such an encoding.
        """
        facts, _, tables = _parted(encoded)
        rows = iter(tables)
        return cls([_result_of(fields, rows) for fields in facts["each"]])


def _result_facts(result: KeyResult) -> Any:
    if isinstance(result, FoundRows):
        return [result.version, result.newest, result.places.tolist()]
    if result is None:
        return None
    return error_facts(result)


def _result_of(facts: Any, rows: Iterator[pa.Table]) -> KeyResult:
    if isinstance(facts, list):
        version, newest, places = facts
        return FoundRows(version, newest, np.array(places, np.int64), next(rows))
    if facts is None:
        return None
    return error_of(facts)


def _fields(store_id: StateStoreId) -> tuple[str, int, int, str]:
    return store_id.checkpoint_root_location, store_id.operator_id, store_id.partition_id, store_id.store_name


@lru_cache(maxsize=4096)
def _store_id(root: str, operator_id: int, partition_id: int, store_name: str) -> StateStoreId:
    return StateStoreId(root, operator_id, partition_id, store_name)


def _joined(facts: dict[str, Any], blobs: Sequence[bytes], tables: Sequence[pa.Table]) -> bytes:
    """Return JSON, pieces of bytes and tables joined: the length of the JSON, the JSON with the lengths of the pieces, the pieces."""
    packed = _packed(tables)
    if packed is None:
        data = [as_stream(table) for table in tables]
    else:
        *data, facts["lengths"] = packed
    parts = [*blobs, *data]
    head = json.dumps({**facts, "blobs": len(blobs), "sizes": [len(part) for part in parts]}).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *parts])


def _parted(encoded: bytes) -> tuple[dict[str, Any], list[bytes], Sequence[pa.Table]]:
    """Return the JSON, the pieces of bytes and the tables that :func:`_joined` joined."""
    (length,) = _LENGTH.unpack_from(encoded)
    begin = _LENGTH.size + length
    facts = json.loads(encoded[_LENGTH.size : begin])
    parts = []
    for size in facts["sizes"]:
        parts.append(encoded[begin : begin + size])
        begin += size
    blobs, data = parts[: facts["blobs"]], parts[facts["blobs"] :]
    if "lengths" in facts:
        schema, rows = data
        return facts, blobs, _unpacked(schema, rows, facts["lengths"])
    return facts, blobs, [pa.ipc.open_stream(stream).read_all() for stream in data]


def _packed(tables: Sequence[pa.Table]) -> tuple[bytes, bytes, list[int]] | None:
    """Return few rows of one schema in one piece: the schema, the rows, and the number of rows of each table; None for other tables."""
    if not tables or any(table.schema != tables[0].schema for table in tables):
        return None
    joined = pa.concat_tables(tables)
    if not is_few(joined):
        return None
    (rows, *_) = joined.combine_chunks().to_batches() or [None]
    written = b"" if rows is None else rows.serialize().to_pybytes()
    return joined.schema.serialize().to_pybytes(), written, [table.num_rows for table in tables]


def _unpacked(encoded_schema: bytes, written: bytes, lengths: Sequence[int]) -> Sequence[pa.Table]:
    schema = _schema(encoded_schema)
    if not written:
        return [schema.empty_table() for _ in lengths]
    rows, tables, begin = pa.ipc.read_record_batch(written, schema), [], 0
    for length in lengths:
        tables.append(pa.Table.from_batches([rows.slice(begin, length)]))
        begin += length
    return tables


@lru_cache(maxsize=256)
def _schema(written: bytes) -> pa.Schema:
    """Return a schema from its encoding; the many queries of a reader have few schemas."""
    return pa.ipc.read_schema(pa.py_buffer(written))
