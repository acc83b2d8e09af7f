"""Calls of a store actor over the connection of a worker: MessagePack, with tables as Arrow streams. Nothing is unpickled.

A call is a method's name and its arguments, of the types that are listed here. An answer is an error of this project, or none, and the
method's result.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import StateStoreError
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import StateSchema
from coordinator.model.stored_json import converted
from coordinator.model.watermarks import Watermarks
from store_actors.messages.requests import BatchFacts, StoreSpec, Write
from store_actors.messages.wire import as_stream, error_facts, error_of

#: Of each method that may be called, its arguments and its result.
_METHODS: dict[str, tuple[Any, Any]] = {
    "open_session": (tuple[TaskIdentity, dict[str, Any], tuple[StoreSpec, ...]], tuple[str, LeaseGrant]),
    "filled_stores": (tuple[TaskIdentity, tuple[str, ...]], tuple[str, ...]),
    "session_call": (tuple[str, str, str, tuple[Any, ...], tuple[Write, ...]], Any),
    "next_batch": (tuple[str, str], Any),
    "commit_session": (tuple[str, BatchFacts | int | None, tuple[Write, ...]], int),
    "seal_session": (tuple[str, BatchFacts, tuple[Write, ...]], int),
    "session_committed": (tuple[str], bool),
    "end_session": (tuple[str], None),
    "import_piece": (tuple[Any], None),
    "import_rows": (tuple[TaskIdentity, dict[str, Any], StateSchema, Watermarks], None),
}
_TABLE, _BATCH = 1, 2


def encoded_call(method: str, arguments: tuple[Any, ...]) -> bytes:
    """Return a call as it is sent."""
    return _encoder.encode((method, arguments))


def answered(called: Any, call: bytes) -> bytes:
    """Do a call of an object's method; return the answer as it is sent.

    Raises
    ------
    ValueError
        The call is malformed; or it is of another method, or has other arguments, than may be called.
    """
    try:
        method, arguments = converted(_decoder.decode(call), tuple[str, Any])
        if method not in _METHODS:
            raise ValueError(f"of {method}")
        typed = converted(arguments, _METHODS[method][0])
    except (msgspec.MsgspecError, ValueError, OSError) as error:
        raise ValueError(f"malformed call: {error}") from error
    try:
        result = getattr(called, method)(*typed)
    except StateStoreError as error:
        return _encoder.encode((error_facts(error), None))
    return _encoder.encode((None, result))


def decoded_answer(method: str, answer: bytes) -> Any:
    """Return the result in an answer.

    Raises
    ------
    StateStoreError
        The method raised it.
    """
    error, result = _decoder.decode(answer)
    if error is not None:
        raise error_of(error)
    return converted(result, _METHODS[method][1])


def _extension(value: Any) -> Any:
    """Return a value that MessagePack does not have as one that it has."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, pa.Table | pa.RecordBatch):
        raise NotImplementedError(f"a store actor is not called with a {type(value).__name__}")
    return msgspec.msgpack.Ext(_TABLE if isinstance(value, pa.Table) else _BATCH, as_stream(value))


def _rows(code: int, content: memoryview) -> pa.Table | pa.RecordBatch:
    reader = pa.ipc.open_stream(content)
    if code == _BATCH:
        return reader.read_next_batch()
    return reader.read_all()


_encoder = msgspec.msgpack.Encoder(enc_hook=_extension)
_decoder = msgspec.msgpack.Decoder(ext_hook=_rows)
