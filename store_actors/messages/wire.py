"""Errors and rows as they are sent over connections, of whose bytes none are unpickled."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from coordinator.model import errors
from coordinator.model.errors import StateStoreError


def error_facts(error: StateStoreError) -> dict[str, Any]:
    """Return an error as class name, message, and context as strings or numbers."""
    context = {
        name: value if isinstance(value, str | int | float) else str(value) for name, value in error.context.items()
    }
    return {"error": type(error).__name__, "message": error.message, "context": context}


def error_of(facts: dict[str, Any]) -> StateStoreError:
    """Return the error of :func:`error_facts`; of a class that this release does not have, as a StateStoreError."""
    kind = getattr(errors, facts["error"], None) if facts["error"] in errors.__all__ else None
    error: StateStoreError = (kind or StateStoreError)(facts["message"], **facts["context"])
    return error


def as_stream(rows: pa.Table | pa.RecordBatch) -> bytes:
    """Return rows as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write(rows)
    written: bytes = sink.getvalue().to_pybytes()
    return written
