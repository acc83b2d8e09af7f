"""The rows that Spark's shuffle gives the task of a user's function or processor: those of one shard, and then one with the batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from store_actors.client.operator_task import BatchHeader
from store_actors.engine import pieces
from store_actors.engine.columns import in_schema
from store_actors.messages.requests import ShardInput

#: The column of an operator's rows besides the keys and inputs: Spark's ``hash(keys)``.
HASH_COLUMN = "__hash"
#: The column by which Spark's shuffle gives a row to its shard (``OperatorRows.scala``), and the one of the row after a shard's last,
#: which has a :class:`~store_actors.client.operator_task.BatchHeader` there and nulls elsewhere.
ROUTE_COLUMN = "__route"
END_COLUMN = "__end"


@dataclass(frozen=True, slots=True)
class Received:
    """The part of a micro-batch that one shard received."""

    rows: ShardInput
    header: BatchHeader


def unpack(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, state: str, piece_bytes: int = pieces.PIECE_BYTES
) -> Received:
    """Return the part of a micro-batch that Spark's shuffle gave one shard, in the columns of a schema, which are among those of the
    rows.

    `batches` are the rows that a task received, of which the last one is the end. A larger result has several pieces of `piece_bytes`,
    since Arrow counts the strings of lists in 32 bits. Raises EOFError if the rows end in the middle: the task was killed, or could not
    fetch the next ones. What Spark sends a worker ends alike then.
    """
    header: BatchHeader | None = None
    rows: list[pa.RecordBatch] = []
    for batch in batches:
        if not batch.num_rows:
            continue
        if header is not None:
            raise EOFError(f"rows follow the end of a shard's; nothing of the batch was committed [state=`{state}`]")
        end = batch.column(END_COLUMN)[-1]
        if end.is_valid:
            header, batch = BatchHeader.of_json(end.as_py()), batch.slice(0, batch.num_rows - 1)
        rows.append(in_schema(schema, batch))
    if header is None:
        raise EOFError(
            "the rows of a shard ended in the middle of a batch; nothing of them was committed, and Spark's next attempt of the task "
            f"sends all of them [state=`{state}`]"
        )
    # Few pieces, so that the store actor is sent a few large buffers.
    table = pa.Table.from_batches(pieces.batches(pa.Table.from_batches(rows, schema), piece_bytes), schema)
    return Received(ShardInput((table,), table.num_rows), header)
