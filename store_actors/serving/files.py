"""Files of a shard: Arrow IPC, LZ4-compressed, readable by any Arrow tool (``docs/format.md``).

A delta has the rows that one commit changed. A snapshot has all rows of one version, in one file or several. The columns are the
operator's ``row_schema`` and ``__change``; all rows of a snapshot are updates. The key ``statefleet`` of a file's schema metadata has
the store and the version that the file belongs to, the base version, the watermark, and the operator's schema, also as Spark's
(``StructType.json()``).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
from msgspec import to_builtins

from coordinator.model.commits import CommitEntry, SnapshotEntry, StoredFile
from coordinator.model.errors import CorruptStateError
from coordinator.model.identities import StateStoreId
from coordinator.model.schema import StateSchema
from coordinator.model.stored_json import FORMAT, check_format, check_place, from_json
from store_actors.engine.versions import CHANGE_COLUMN, UPDATED, Change

_METADATA_KEY = b"statefleet"
#: Uncompressed bytes of rows at which a file of a snapshot ends and the next begins: writing a snapshot needs little memory.
PIECE_BYTES = 1 << 26
#: Bytes of a delta from which on threads compress its columns: to wake them takes longer than a small one.
_THREADS_BYTES = 1 << 20


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
    """Return the unique path of a snapshot's piece, relative to the fleet's URI. Pieces after the first have their number in it."""
    return f"{store_id.path()}/{version}-{attempt_id}{f'-{piece}' if piece else ''}.snapshot"


def identity_in_state(store_id: StateStoreId, attempt_id: str) -> dict[str, Any]:
    """Return the metadata of a file: its format, its store, and the attempt that committed its version."""
    return {
        "format": FORMAT,
        "state": store_id.state_name,
        "partition": store_id.partition_id,
        "store": store_id.store_name,
        "attempt": attempt_id,
    }


def encode_delta(change: Change, schema: StateSchema, identity: Mapping[str, Any]) -> tuple[bytes, int]:
    """Return the bytes of a delta's file, and their CRC-32."""
    facts = {"version": change.version, "base_version": change.base_version, "watermark_ms": change.watermark_ms}
    size = change.delta.nbytes
    file = _OpenFile(change.delta.schema, {**identity, **facts}, schema, use_threads=size >= _THREADS_BYTES)
    # Rows that came in small pieces would be compressed piece by piece.
    file.write(change.delta.combine_chunks() if size <= PIECE_BYTES else change.delta)
    return file.closed()


def encode_snapshot(
    tables: Iterable[pa.Table],
    version: int,
    watermark_ms: int,
    schema: StateSchema,
    room: Mapping[str, Any],
    identity: Mapping[str, Any],
    piece_bytes: int = PIECE_BYTES,
) -> Iterator[EncodedPiece]:
    """Yield the files of a snapshot in order; there is at least one.

    Parameters
    ----------
    tables
        All rows, in ``row_schema``. A table is taken from the iterable once those before it are encoded.
    room
        Sizes that the rows need in memory (``VersionedStore.room``), for a process that loads them.
    piece_bytes
        Uncompressed bytes of rows at which a file is closed.
    """
    facts = {**identity, "version": version, "watermark_ms": watermark_ms, "room": dict(room)}
    file_schema = _file_schema(schema)
    number, open_file = 0, _OpenFile(file_schema, facts, schema)
    for table in tables:
        if open_file.size >= piece_bytes:
            yield EncodedPiece(number, *open_file.closed(), open_file.rows)
            number, open_file = number + 1, _OpenFile(file_schema, {**facts, "piece": number + 1}, schema)
        open_file.write(as_snapshot(table, schema))
    yield EncodedPiece(number, *open_file.closed(), open_file.rows)


def as_snapshot(rows: pa.Table, schema: StateSchema) -> pa.Table:
    """Return rows in ``row_schema`` with a last column ``__change`` that marks all of them as updated, as a snapshot has it."""
    changes = pa.nulls(rows.num_rows, pa.int8()).fill_null(UPDATED)
    return pa.Table.from_arrays([*rows.columns, changes], schema=_file_schema(schema))


def _file_schema(schema: StateSchema) -> pa.Schema:
    return schema.row_schema().append(pa.field(CHANGE_COLUMN, pa.int8()))


class _OpenFile:
    def __init__(
        self, columns: pa.Schema, facts: dict[str, Any], schema: StateSchema, *, use_threads: bool = True
    ) -> None:
        described = columns.with_metadata({_METADATA_KEY: json.dumps({**facts, **_described(schema)}).encode()})
        self._sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=use_threads)
        self._writer = pa.ipc.new_file(self._sink, described, options=options)
        self.rows = 0
        #: Uncompressed bytes of the rows so far.
        self.size = 0

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table)
        self.rows += table.num_rows
        self.size += table.nbytes

    def closed(self) -> tuple[bytes, int]:
        """Close the file; return its bytes and their CRC-32."""
        self._writer.close()
        data = self._sink.getvalue().to_pybytes()
        return data, zlib.crc32(data)


@lru_cache(maxsize=64)
def _described(schema: StateSchema) -> dict[str, Any]:
    return {"schema": to_builtins(schema.undescribed()), "spark": schema.spark_schema()}


def schema_of(rows: pa.Table) -> StateSchema:
    """Return the operator's schema in which the rows of a file were written; `rows` are those of :func:`decode_file`."""
    return from_json(json.loads(rows.schema.metadata[_METADATA_KEY])["schema"], StateSchema)


def room_of(rows: pa.Table) -> Mapping[str, Any]:
    """Return the sizes that a snapshot's rows need in memory (``VersionedStore.room``), from the rows of its first file."""
    room: Mapping[str, Any] = json.loads(rows.schema.metadata[_METADATA_KEY])["room"]
    return room


def decode_file(data: bytes, entry: CommitEntry | SnapshotEntry, piece: StoredFile | None = None) -> pa.Table:
    """Return the rows of a delta or snapshot file, which is checked against its manifest entry.

    Parameters
    ----------
    piece
        The file of the snapshot; by default its first.

    Raises
    ------
    CorruptStateError
        Size or checksum differ from the manifest's, the bytes are no Arrow file, or the file's metadata is that of another file. The
        error names file, shard and version.
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
    """Return the metadata that an entry's file must have. A branch also has files of its parent state, whose name their paths have."""
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
