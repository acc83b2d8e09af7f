"""The connection of a task of a continuous query: pieces of rows and markers come, and what they emit is sent, for as long as the run.

``EpochTask.scala`` is the other side. The connection begins as any of :mod:`store_actors.connections.hand_over`, with proof, request
and operator, and an Arrow stream that only has the schema of the rows. Then follow frames, each with its kind in a byte. Integers have
the highest byte first.

From the task: a piece (shard, epoch, number of rows, length) and its rows, in Spark's own format
(:mod:`~store_actors.connections.unsafe_rows`), or as an Arrow stream where that does not have their types; a marker (epoch, watermark,
longest wait of a row, number of shards), and for each shard how many rows it was sent in the epoch. To the task: emitted rows (how many
rows they answer, their number and length); the answer of each shard to a marker (its epoch), after which nothing of the epoch follows
from it; or the text of an error, after its length, and then the connection ends.

A task waits for the answers to all its pieces before it ends an epoch, and bounds what it has sent and not been answered. So what waits
to be sent here is bounded, too.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
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
from store_actors.serving.metrics import StoreMetrics

_PIECE, _MARKER = 1, 2
_ROWS, _MARKED, _FAILED = b"\1", b"\2", b"\3"
#: Shard, epoch, rows and bytes of a piece; epoch, watermark, longest wait (ns) and shards of a marker, and of each shard the rows.
_PIECE_HEAD, _MARKER_HEAD, _SHARD_ROWS = struct.Struct(">iqii"), struct.Struct(">qqqi"), struct.Struct(">iq")
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
    metrics: StoreMetrics
    runtime: Runtime
    check_fitness: Callable[[], None]

    def serve(self, request: Mapping[str, Any], operator: bytes, source: BinaryIO, task: socket.socket) -> None:
        """Take a task's frames, which `source` has of its connection, until it ends that, and answer them.

        Raises
        ------
        StateStoreError, ValueError
            The run cannot go on; the task has been sent the error.
        OSError
            The connection is lost.
        """
        answers = _Answers(task, self.runtime)
        try:
            self._serve(request, OperatorTask.of_json(operator), source, answers)
        except OSError:
            raise
        except Exception as error:
            answers.fail(error)
            raise
        finally:
            answers.finish()

    def _serve(self, request: Mapping[str, Any], operator: OperatorTask, source: BinaryIO, answers: _Answers) -> None:
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
                shard: structs.replace(
                    header.task(metadata.state_name, request["attempt"], request["executor"]), is_epoch=True
                )
                for shard, header in headers.items()
            },
            (request["task"], request["tasks"]),
        )
        # Where a shard fails beside the task's frames, the task learns it though it may have nothing to send.
        shards = self.runs.join(run, answers.fail)
        try:
            formats = _format(request["unsafe_rows"]), _format(request["unsafe_results"])
            stream = EpochStream(
                request["task"], rows, operator, shards, *formats, self.metrics, self.runtime.clock.elapsed_s
            )
            stream.take_all(source, answers.send)
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
    metrics: StoreMetrics
    elapsed_s: Callable[[], float]

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
                begun_s = self.elapsed_s()
                self.shards[shard].take(self.task, epoch, Piece(piece, _Answer(rows, send, self.result_format)))
                self.metrics.folded(rows, self.elapsed_s() - begun_s)
            elif kind[0] == _MARKER:
                epoch, watermark_ms, longest_ns, shards = _MARKER_HEAD.unpack(_read(source, _MARKER_HEAD.size))
                self.metrics.latency_s = longest_ns / 1e9
                marked = []
                for _ in range(shards):
                    shard, rows = _SHARD_ROWS.unpack(_read(source, _SHARD_ROWS.size))
                    if shard not in self.shards:
                        raise ValueError(f"malformed marker: it is of shard {shard}")
                    self.shards[shard].mark(
                        Marker(self.task, epoch, rows, watermark_ms), _Answer(0, send, self.result_format, epoch)
                    )
                    marked.append(self.shards[shard])
                # All are answered first: the task goes on meanwhile.
                for shard_to_seal in marked:
                    shard_to_seal.seal()
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


class _Answers:
    """Sends answers in their order: at once where the connection takes them, which saves a switch to another thread; or else on one.

    Nothing follows an error. After the connection was lost answers are dropped: its reader ends the run. Thread-safe.
    """

    def __init__(self, task: socket.socket, runtime: Runtime) -> None:
        self._task, self._threads = task, runtime.threads
        self._guard = self._threads.lock()
        self._waiting: deque[bytes] = deque()
        #: Set once all that waits is sent; None if nothing waits.
        self._sent: Any = None
        self._is_over = False

    def send(self, answer: bytes) -> None:
        """Send an answer, now or later; this does not wait."""
        with self._guard:
            if not self._is_over:
                self._put(answer)

    def fail(self, error: BaseException) -> None:
        """Send why the run cannot go on; the task ends the connection then."""
        text = f"{type(error).__name__}: {error}".encode()
        with self._guard:
            if not self._is_over:
                self._put(_FAILED + _LENGTH.pack(len(text)) + text)
            self._is_over = True

    def _put(self, answer: bytes) -> None:
        if self._sent is None:
            answer = answer[self._sent_at_once(answer) :]
            if not answer:
                return
            self._sent = self._threads.future()
            self._threads.start(self._send_waiting, "statefleet-epoch-answers")
        self._waiting.append(answer)

    def _sent_at_once(self, answer: bytes) -> int:
        try:
            return self._task.send(answer, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(answer)

    def _send_waiting(self) -> None:
        while True:
            with self._guard:
                if not self._waiting:
                    self._sent.set_result(None)
                    self._sent = None
                    return
                answer = self._waiting.popleft()
            with suppress(OSError):
                self._task.sendall(answer)

    def finish(self) -> None:
        """Send nothing more, and wait until all is sent."""
        with self._guard:
            self._is_over = True
            sent = self._sent
        if sent is not None:
            sent.result()


def _read(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        raise EOFError("the task ended in the middle of a frame")
    return data
