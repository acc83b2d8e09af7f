"""The connection of a task of a continuous query: pieces of rows and markers come, and what they emit is sent, for as long as the run.

``EpochTask.scala`` is the other side. The connection begins as any of :mod:`store_actors.connections.hand_over`, with proof, request
and operator, and an Arrow stream that only has the schema of the rows. Then follow frames, each with its kind in a byte. Integers have
the highest byte first.

From the task: a piece (shard, epoch, number of rows, length) and its rows, in Spark's own format
(:mod:`~store_actors.connections.unsafe_rows`), or as an Arrow stream where that does not have their types; a marker (epoch, watermark,
number of shards), and for each shard how many rows it was sent in the epoch. To the task: emitted rows (how many rows they answer,
their number and length); the answer of each shard to a marker (its epoch), after which nothing of the epoch follows from it; or the
text of an error, after its length, and then the connection ends.

A task waits for the answers to all its pieces before it ends an epoch, and bounds what it has sent and not been answered. So what waits
to be sent here is bounded, too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from queue import SimpleQueue
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
from msgspec import structs

from coordinator.runtime.runtime import Runtime
from store_actors.client.operator_task import BatchHeader, InputColumns, OperatorTask, visible
from store_actors.connections import unsafe_rows
from store_actors.engine.pieces import batches
from store_actors.epochs.barrier import Marker
from store_actors.epochs.runs import EpochRuns, RunRequest
from store_actors.epochs.shard import EpochShard, Piece
from store_actors.messages.requests import ShardInput

_PIECE, _MARKER = 1, 2
_ROWS, _MARKED, _FAILED = b"\1", b"\2", b"\3"
#: Shard, epoch, rows and bytes of a piece; epoch, watermark and shards of a marker, and of each shard the rows.
_PIECE_HEAD, _MARKER_HEAD, _SHARD_ROWS = struct.Struct(">iqii"), struct.Struct(">qqi"), struct.Struct(">iq")
#: Rows that are answered, rows that follow and their bytes; the epoch of a marker; the length of a text.
_ROWS_HEAD, _EPOCH, _LENGTH = struct.Struct(">iii"), struct.Struct(">q"), struct.Struct(">i")

#: Bytes of rows of a frame of results, at most, unless a record batch is larger.
_FRAME_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class EpochServer:
    """Serves the tasks of continuous queries.

    Attributes
    ----------
    check_fitness
        Raises a StateStoreError if this process must take no work.
    """

    runs: EpochRuns
    runtime: Runtime
    check_fitness: Callable[[], None]

    def serve(self, request: Mapping[str, Any], operator: bytes, source: BinaryIO, sink: BinaryIO) -> None:
        """Take a task's frames until it ends the connection, and answer them.

        Raises
        ------
        StateStoreError, ValueError
            The run cannot go on; the task has been sent the error.
        OSError
            The connection is lost.
        """
        answers = _Sender()
        sent = self.runtime.threads.future()
        self.runtime.threads.start(partial(answers.send_all, sink, sent.set_result), "statefleet-epoch-answers")
        try:
            self._serve(request, OperatorTask.of_json(operator), source, answers)
        except OSError:
            raise
        except Exception as error:
            answers.fail(error)
            raise
        finally:
            answers.end()
            sent.result()

    def _serve(self, request: Mapping[str, Any], operator: OperatorTask, source: BinaryIO, answers: _Sender) -> None:
        self.check_fitness()
        # All of the stream is read: frames follow it.
        rows = pa.ipc.open_stream(source).read_all().schema
        headers = {shard: BatchHeader(**request["batch"], shard=shard) for shard in request["shards"]}
        first = next(iter(headers.values()))
        schema = operator.schema.in_output_mode(first.output_mode or operator.schema.output_mode)
        metadata = operator.metadata.in_output_mode(schema)
        run = RunRequest(
            # A plan is made before its query has an id.
            structs.replace(metadata, query_id=first.query_id),
            schema,
            {
                shard: header.task(metadata.state_name, request["attempt"], request["executor"])
                for shard, header in headers.items()
            },
            (request["task"], request["tasks"]),
        )
        # Where a shard fails beside the task's frames, the task learns it though it may have nothing to send.
        shards = self.runs.join(run, answers.fail)
        try:
            formats = _format(request["unsafe_rows"]), _format(request["unsafe_results"])
            EpochStream(request["task"], rows, operator, shards, *formats).take_all(source, answers.send)
        except Exception as error:
            # Before the others learn that the run is over, and this task with them.
            answers.fail(error)
            raise
        finally:
            self.runs.leave(run, shards, "a task of the run has ended")


class RowFormat(Protocol):
    """How rows are sent."""

    def decoded(self, content: bytes, schema: pa.Schema) -> pa.Table:
        """Return the rows of a piece, whose columns a schema has; errors as of :func:`~unsafe_rows.decoded`."""

    def encoded(self, rows: pa.Table) -> Iterator[tuple[int, bytes]]:
        """Yield blocks of rows, each with the number of its rows."""


class _UnsafeRows:
    """Rows in Spark's own format."""

    def decoded(self, content: bytes, schema: pa.Schema) -> pa.Table:
        return pa.Table.from_batches([unsafe_rows.decoded(content, schema, 1)])

    def encoded(self, rows: pa.Table) -> Iterator[tuple[int, bytes]]:
        for batch in rows.to_batches():
            for count, block in unsafe_rows.blocks(batch):
                yield count, block.tobytes()


class _ArrowRows:
    """Rows as Arrow streams."""

    def decoded(self, content: bytes, schema: pa.Schema) -> pa.Table:
        return pa.ipc.open_stream(content).read_all()

    def encoded(self, rows: pa.Table) -> Iterator[tuple[int, bytes]]:
        for batch in batches(rows, _FRAME_BYTES):
            if batch.num_rows:
                sink = BytesIO()
                with pa.ipc.new_stream(sink, batch.schema) as stream:
                    stream.write_batch(batch)
                yield batch.num_rows, sink.getvalue()


def _format(is_unsafe: bool) -> RowFormat:
    return _UnsafeRows() if is_unsafe else _ArrowRows()


@dataclass(frozen=True, slots=True)
class EpochStream:
    """The frames of a task's connection.

    Attributes
    ----------
    task
        Number of the task in its run.
    rows
        Schema of its rows, without the route, which is the last column.
    row_format, result_format
        How its rows are sent, and those that it gets.
    """

    task: int
    rows: pa.Schema
    operator: OperatorTask
    shards: Mapping[int, EpochShard]
    row_format: RowFormat
    result_format: RowFormat

    def take_all(self, source: BinaryIO, send: Callable[[bytes], None]) -> None:
        """Take frames until the connection ends; answers are sent as they come."""
        columns = [
            InputColumns.of(number, schema, self.rows)
            for number, schema in enumerate(self.operator.schema.input_schemas())
        ]
        while kind := source.read(1):
            if kind[0] == _PIECE:
                shard, epoch, rows, size = _PIECE_HEAD.unpack(_read(source, _PIECE_HEAD.size))
                if size <= 0 or shard not in self.shards:
                    raise ValueError(f"malformed piece: it has {size} bytes of shard {shard}")
                table = self.row_format.decoded(_read(source, size), self.rows)
                if table.num_rows != rows:
                    raise ValueError(f"malformed piece: {rows} rows were sent, and {table.num_rows} came")
                piece = ShardInput(tuple(of_input.table(table) for of_input in columns), rows)
                self.shards[shard].take(self.task, epoch, Piece(piece, _Answer(rows, send, self.result_format)))
            elif kind[0] == _MARKER:
                epoch, watermark_ms, shards = _MARKER_HEAD.unpack(_read(source, _MARKER_HEAD.size))
                for _ in range(shards):
                    shard, rows = _SHARD_ROWS.unpack(_read(source, _SHARD_ROWS.size))
                    if shard not in self.shards:
                        raise ValueError(f"malformed marker: it is of shard {shard}")
                    self.shards[shard].mark(
                        Marker(self.task, epoch, rows, watermark_ms), _Answer(0, send, self.result_format, epoch)
                    )
            else:
                raise ValueError(f"malformed frame: its kind is {kind[0]}")


@dataclass(frozen=True, slots=True)
class _Answer:
    """Sends what a piece of some rows emits, or what an epoch does and the answer to its marker."""

    rows: int
    send: Callable[[bytes], None]
    format: RowFormat
    epoch: int | None = None

    def __call__(self, emitted: pa.Table | None) -> None:
        unanswered = self.rows
        for rows, block in () if emitted is None else self.format.encoded(visible(emitted)):
            self.send(_ROWS + _ROWS_HEAD.pack(unanswered, rows, len(block)) + block)
            unanswered = 0
        if unanswered:
            self.send(_ROWS + _ROWS_HEAD.pack(unanswered, 0, 0))
        if self.epoch is not None:
            self.send(_MARKED + _EPOCH.pack(self.epoch))


class _Sender:
    """What is sent to a task, in its order; nothing after an error. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[bytes | None] = SimpleQueue()
        self.send = self._waiting.put

    def fail(self, error: BaseException) -> None:
        """Send why the run cannot go on; the task ends the connection then."""
        text = f"{type(error).__name__}: {error}".encode()
        self.send(_FAILED + _LENGTH.pack(len(text)) + text)
        self.end()

    def end(self) -> None:
        """Send nothing more."""
        self.send(None)

    def send_all(self, sink: BinaryIO, end: Callable[[None], None]) -> None:
        """Send answers until the end. After the connection was lost they are dropped: its reader ends the run."""
        try:
            with suppress(OSError):
                while (answer := self._waiting.get()) is not None:
                    sink.write(answer)
                    if self._waiting.empty():
                        sink.flush()
                sink.flush()
        finally:
            end(None)


def _read(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        raise EOFError("the task ended in the middle of a frame")
    return data
