"""Files of a shard: Arrow IPC, LZ4-compressed, readable by any Arrow tool (``docs/format.md``).

A delta holds what one commit changed, a snapshot all rows of one version. Columns are the operator's ``row_schema`` and
``__change`` (a snapshot's rows are all updates); the file's schema metadata carries the version, the one it builds on, the
watermark, the operator's schema and Spark's (``StructType.json()``) under the key ``statefleet``.
"""

from __future__ import annotations

import json
import zlib
from functools import lru_cache
from typing import Any

import pyarrow as pa

from coordinator.errors import CorruptStateError
from coordinator.model import CommitEntry, SnapshotEntry, StateStoreId
from store_actors.engine.versions import CHANGE_COLUMN, UPDATED, Change
from store_actors.schema import StateSchema

__all__ = ["corrupt_file", "decode_file", "delta_path", "encode_delta", "encode_snapshot", "schema_of", "snapshot_path"]

_METADATA_KEY = b"statefleet"


def delta_path(store_id: StateStoreId, version: int, attempt_id: str) -> str:
    """Path relative to the fleet's URI; the attempt makes it unique, so no file is ever overwritten."""
    return f"{store_id.path()}/{version}-{attempt_id}.delta"


def snapshot_path(store_id: StateStoreId, version: int, attempt_id: str) -> str:
    """Path relative to the fleet's URI; unique as a delta's."""
    return f"{store_id.path()}/{version}-{attempt_id}.snapshot"


def encode_delta(change: Change, schema: StateSchema) -> tuple[bytes, int]:
    """Bytes of the file and their CRC-32."""
    facts = {"version": change.version, "base_version": change.base_version, "watermark_ms": change.watermark_ms}
    return _encode(change.delta, facts, schema)


def encode_snapshot(rows: pa.Table, version: int, watermark_ms: int, schema: StateSchema) -> tuple[bytes, int]:
    """Bytes of the file and their CRC-32; `rows` in ``row_schema``."""
    changes = pa.nulls(rows.num_rows, pa.int8()).fill_null(UPDATED)
    return _encode(
        rows.append_column(CHANGE_COLUMN, changes), {"version": version, "watermark_ms": watermark_ms}, schema
    )


def _encode(rows: pa.Table, facts: dict[str, Any], schema: StateSchema) -> tuple[bytes, int]:
    table = rows.replace_schema_metadata({_METADATA_KEY: json.dumps({**facts, **_described(schema)}).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    return data, zlib.crc32(data)


@lru_cache(maxsize=64)
def _described(schema: StateSchema) -> dict[str, Any]:
    return {"schema": schema.to_json(), "spark": schema.spark_schema()}


def schema_of(rows: pa.Table) -> StateSchema:
    """The operator's schema that a file's rows (of :func:`decode_file`) were written in."""
    return StateSchema.from_json(json.loads(rows.schema.metadata[_METADATA_KEY])["schema"])


def decode_file(data: bytes, entry: CommitEntry | SnapshotEntry) -> pa.Table:
    """Table of a delta or snapshot file, checked against its manifest entry.

    Raises
    ------
    CorruptStateError
        Size or checksum differ from the manifest's, or the bytes are no Arrow file. Names file, shard and version.
    """
    if len(data) != entry.file_bytes or zlib.crc32(data) != entry.checksum:
        raise corrupt_file(entry, "its size or checksum differs from the manifest's")
    try:
        return pa.ipc.open_file(pa.BufferReader(data)).read_all()
    except pa.ArrowInvalid as error:
        raise corrupt_file(entry, f"it is not a readable Arrow file ({error})") from error


def corrupt_file(entry: CommitEntry | SnapshotEntry, reason: str) -> CorruptStateError:
    """The error for a file that the manifest names and nobody can use."""
    if isinstance(entry, SnapshotEntry):
        text, facts = "a snapshot file cannot be used", {}
    else:
        text, facts = "a delta file cannot be used", {"readable_up_to_version": entry.base_version}
    return CorruptStateError(
        f"{text}: {reason}; versions before it are intact; nothing was written; restore the file from a backup of the "
        "object store",
        file=entry.file,
        partition=entry.partition_id,
        version=entry.version,
        **facts,
    )
