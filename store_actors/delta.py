"""Delta files: one Arrow IPC file a commit (``docs/format.md``), LZ4-compressed, readable by any Arrow tool.

Columns are the operator's ``row_schema`` and ``__change``; the file's schema metadata carries the version, the one it
builds on, the watermark and the operator's schema under the key ``statefleet``.
"""

from __future__ import annotations

import json
import zlib

import pyarrow as pa

from coordinator.errors import CorruptStateError
from coordinator.model import CommitEntry, StateStoreId
from store_actors.schema import StateSchema
from store_actors.shard import Change

__all__ = ["decode_delta", "delta_path", "encode_delta"]

_METADATA_KEY = b"statefleet"


def delta_path(store_id: StateStoreId, version: int, attempt_id: str) -> str:
    """Path relative to the fleet's URI; the attempt makes it unique, so no file is ever overwritten."""
    return f"{store_id.path()}/{version}-{attempt_id}.delta"


def encode_delta(change: Change, schema: StateSchema) -> tuple[bytes, int]:
    """Bytes of the file and their CRC-32."""
    facts = {
        "version": change.version,
        "base_version": change.base_version,
        "watermark_ms": change.watermark_ms,
        "schema": schema.to_json(),
    }
    table = change.delta.replace_schema_metadata({_METADATA_KEY: json.dumps(facts).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    return data, zlib.crc32(data)


def decode_delta(data: bytes, entry: CommitEntry) -> pa.Table:
    """Table of a delta file, checked against its manifest entry.

    Raises
    ------
    CorruptStateError
        Size or checksum differ from the manifest's, or the bytes are no Arrow file. Names file, shard and version.
    """
    if len(data) != entry.file_bytes or zlib.crc32(data) != entry.checksum:
        raise corrupt_delta(entry, "its size or checksum differs from the manifest's")
    try:
        return pa.ipc.open_file(pa.BufferReader(data)).read_all()
    except pa.ArrowInvalid as error:
        raise corrupt_delta(entry, f"it is not a readable Arrow file ({error})") from error


def corrupt_delta(entry: CommitEntry, reason: str) -> CorruptStateError:
    """The error for a delta that the manifest names and nobody can use."""
    return CorruptStateError(
        f"a delta file cannot be used: {reason}; versions before it are intact; nothing was written; restore the file "
        "from a backup of the object store",
        file=entry.file,
        partition=entry.partition_id,
        version=entry.version,
    )
