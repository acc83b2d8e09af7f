"""Files of a shard: Arrow IPC, LZ4-compressed, readable by any Arrow tool (``docs/format.md``).

A delta holds what one commit changed, a snapshot all rows of one version, in as many files as it needs. Columns are the operator's
``row_schema`` and ``__change`` (a snapshot's rows are all updates); the file's schema metadata carries whose it is, the version, the
one it builds on, the watermark, the operator's schema and Spark's (``StructType.json()``) under the key ``statefleet``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from coordinator.model.commits import CommitEntry, SnapshotEntry, StoredFile
from coordinator.model.errors import CorruptStateError
from coordinator.model.file_format import FORMAT, check_format, check_place
from coordinator.model.identities import StateStoreId
from coordinator.model.schema import StateSchema
from store_actors.engine.versions import CHANGE_COLUMN, UPDATED, Change

__all__ = [
    "PIECE_BYTES",
    "EncodedPiece",
    "as_snapshot",
    "corrupt_file",
    "decode_file",
    "delta_path",
    "place_in_state",
    "encode_delta",
    "encode_snapshot",
    "room_of",
    "schema_of",
    "snapshot_path",
]

_METADATA_KEY = b"statefleet"
#: Uncompressed bytes of rows at which a file of a snapshot ends and the next begins, so that writing one takes little memory beside
#: the state.
PIECE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """A file of a snapshot: its number from 0, its bytes, their CRC-32, the rows in it."""

    number: int
    data: bytes
    checksum: int
    rows: int


def delta_path(store_id: StateStoreId, version: int, attempt_id: str) -> str:
    """Return a delta's path relative to the fleet's URI. The attempt makes it unique, so no file is ever overwritten."""
    return f"{store_id.path()}/{version}-{attempt_id}.delta"


def snapshot_path(store_id: StateStoreId, version: int, attempt_id: str, piece: int = 0) -> str:
    """Return the path of a snapshot's piece relative to the fleet's URI, unique as a delta's. Pieces after the first are numbered."""
    return f"{store_id.path()}/{version}-{attempt_id}{f'-{piece}' if piece else ''}.snapshot"


def place_in_state(store_id: StateStoreId, attempt_id: str) -> dict[str, Any]:
    """Return the metadata of a file: its format, its store, and the attempt that committed its version."""
    return {
        "format": FORMAT,
        "state": store_id.state_name,
        "partition": store_id.partition_id,
        "store": store_id.store_name,
        "attempt": attempt_id,
    }


def encode_delta(change: Change, schema: StateSchema, place: Mapping[str, Any]) -> tuple[bytes, int]:
    """Return the bytes of a delta's file, and their CRC-32.

    Parameters
    ----------
    place
        Metadata of :func:`place_in_state`.
    """
    facts = {"version": change.version, "base_version": change.base_version, "watermark_ms": change.watermark_ms}
    return _encode(change.delta, {**place, **facts}, schema)


def encode_snapshot(
    tables: Iterable[pa.Table],
    version: int,
    watermark_ms: int,
    schema: StateSchema,
    room: Mapping[str, Any],
    place: Mapping[str, Any],
    piece_bytes: int = PIECE_BYTES,
) -> Iterator[EncodedPiece]:
    """The files of a snapshot, one after the other; at least one.

    Parameters
    ----------
    tables
        All rows, in ``row_schema``; each is asked for when the ones before are encoded.
    room
        What the store needs to hold the rows (``VersionedStore.room``), for a process that loads them.
    place
        Metadata of :func:`place_in_state`.
    piece_bytes
        Bytes of rows, before they are compressed, from which on a file is closed.
    """
    facts = {**place, "version": version, "watermark_ms": watermark_ms, "room": dict(room)}
    file_schema = _file_schema(schema)
    number, open_file = 0, _OpenFile(file_schema, facts, schema)
    for table in tables:
        if open_file.size >= piece_bytes:
            yield EncodedPiece(number, *open_file.closed(), open_file.rows)
            number, open_file = number + 1, _OpenFile(file_schema, {**facts, "piece": number + 1}, schema)
        open_file.write(as_snapshot(table, schema))
    yield EncodedPiece(number, *open_file.closed(), open_file.rows)


def as_snapshot(rows: pa.Table, schema: StateSchema) -> pa.Table:
    """Rows in ``row_schema`` as a snapshot has them: each as if it had been updated, ``__change`` last."""
    changes = pa.nulls(rows.num_rows, pa.int8()).fill_null(UPDATED)
    return pa.Table.from_arrays([*rows.columns, changes], schema=_file_schema(schema))


def _file_schema(schema: StateSchema) -> pa.Schema:
    return schema.row_schema().append(pa.field(CHANGE_COLUMN, pa.int8()))


class _OpenFile:
    """A file that is being encoded."""

    def __init__(self, columns: pa.Schema, facts: dict[str, Any], schema: StateSchema) -> None:
        described = columns.with_metadata({_METADATA_KEY: json.dumps({**facts, **_described(schema)}).encode()})
        self._sink = pa.BufferOutputStream()
        self._writer = pa.ipc.new_file(self._sink, described, options=pa.ipc.IpcWriteOptions(compression="lz4"))
        self.rows = 0
        #: Bytes that a reader gets; the file has fewer.
        self.size = 0

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table)
        self.rows += table.num_rows
        self.size += table.nbytes

    def closed(self) -> tuple[bytes, int]:
        """Return the bytes of a delta's file, and their CRC-32."""
        self._writer.close()
        data = self._sink.getvalue().to_pybytes()
        return data, zlib.crc32(data)


def _encode(rows: pa.Table, facts: dict[str, Any], schema: StateSchema) -> tuple[bytes, int]:
    file = _OpenFile(rows.schema, facts, schema)
    file.write(rows)
    return file.closed()


@lru_cache(maxsize=64)
def _described(schema: StateSchema) -> dict[str, Any]:
    return {"schema": schema.undescribed().to_json(), "spark": schema.spark_schema()}


def schema_of(rows: pa.Table) -> StateSchema:
    """The operator's schema that a file's rows (of :func:`decode_file`) were written in."""
    return StateSchema.from_json(json.loads(rows.schema.metadata[_METADATA_KEY])["schema"])


def room_of(rows: pa.Table) -> Mapping[str, Any]:
    """Return what a store needs to hold the rows of a snapshot of several files, of which this is the first."""
    room: Mapping[str, Any] = json.loads(rows.schema.metadata[_METADATA_KEY])["room"]
    return room


def decode_file(data: bytes, entry: CommitEntry | SnapshotEntry, piece: StoredFile | None = None) -> pa.Table:
    """Table of a delta or snapshot file, checked against its manifest entry.

    Parameters
    ----------
    piece
        Which of a snapshot's files it is; by default the first.

    Raises
    ------
    CorruptStateError
        Size or checksum differ from the manifest's, the bytes are no Arrow file, or the file says that it is another one. Names file,
        shard and version.
    NewerFormatError
        A later release wrote it.
    """
    piece = StoredFile(entry.file, entry.file_bytes, entry.checksum) if piece is None else piece
    if len(data) != piece.file_bytes or zlib.crc32(data) != piece.checksum:
        raise corrupt_file(entry, "its size or checksum differs from the manifest's", piece.file)
    try:
        rows = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    except pa.ArrowInvalid as error:
        raise corrupt_file(entry, f"it is not a readable Arrow file ({error})", piece.file) from error
    facts = json.loads((rows.schema.metadata or {}).get(_METADATA_KEY, b"{}"))
    check_format(facts, piece.file)
    check_place(facts, _expected(entry, piece), piece.file)
    return rows


def _expected(entry: CommitEntry | SnapshotEntry, piece: StoredFile) -> dict[str, Any]:
    """Return what a file of an entry says of itself. A branch has files of the state it came from, whose name is in their paths."""
    expected = {
        "state": entry.file.partition("/")[0],
        "partition": entry.partition_id,
        "store": entry.store_name,
        "attempt": entry.attempt_id,
        "version": entry.version,
    }
    if isinstance(entry, CommitEntry):
        return {**expected, "base_version": entry.base_version}
    return {**expected, "piece": entry.pieces.index(piece) or None}


def corrupt_file(entry: CommitEntry | SnapshotEntry, reason: str, file: str | None = None) -> CorruptStateError:
    """Return the error for a file that the manifest names and that cannot be used."""
    if isinstance(entry, SnapshotEntry):
        text, facts = "a snapshot file cannot be used", {}
    else:
        text, facts = "a delta file cannot be used", {"readable_up_to_version": entry.base_version}
    return CorruptStateError(
        f"{text}: {reason}; versions before it are intact; nothing was written; restore the file from a backup of the "
        "object store",
        file=file or entry.file,
        partition=entry.partition_id,
        version=entry.version,
        **facts,
    )
