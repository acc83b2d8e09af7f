"""The connection of a task of a continuous query: pieces of rows and markers come, and what they emit is sent, for as long as the run.

``PieceStream.scala`` is the other side. The connection begins as any of :mod:`store_actors.connections.hand_over`, with proof, request
and operator, and an Arrow stream that only has the schema of the rows. Then follow frames, each with its kind in a byte. Integers have
the highest byte first.

From the task: a piece (shard, epoch, number of rows, length) and its rows, in Spark's own format
(:mod:`~store_actors.engine.unsafe_rows`), or as an Arrow stream where that does not have their types; a marker (epoch, watermark,
longest wait of a row, number of shards), and for each shard how many rows it was sent in the epoch. To the task: results (how many rows
of its own they answer, their number and length), those of a shard all to one task; the answer of each shard to a marker (its epoch),
after which nothing of the epoch follows from it; or the text of an error, after its length, and then the connection ends.

A task of another node that gets nothing for half a minute takes the store actor's machine for lost: each connection has an empty answer
from time to time.

A task bounds what it has sent and not been answered, and a piece is answered once its results are with the system's socket of the task
that gets them. So what waits to be sent here is bounded, too: a slow sink stops all sources.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import pyarrow as pa
from msgspec import structs

from coordinator.model.schema import OperatorKind, StateSchema
from coordinator.runtime.runtime import Runtime
from store_actors.client.operator_task import BatchHeader, InputColumns, OperatorTask, visible
from store_actors.connections.function_stream import MakeCalls, WorkerConnection
from store_actors.connections.sender import FrameSender
from store_actors.engine import unsafe_rows
from store_actors.engine.pieces import batches
from store_actors.epochs.barrier import Marker
from store_actors.epochs.folding import Emitted, emitted_table
from store_actors.epochs.functions import FunctionRuns, FunctionShard
from store_actors.epochs.result_epochs import ResultEpochs
from store_actors.epochs.runs import EpochRuns, RunRequest
from store_actors.epochs.shard import EpochShard, Piece, RunTask
from store_actors.messages.requests import ShardInput
from store_actors.messages.wire import as_stream
from store_actors.operators.aggregate import ChangedGroups, UnsafeInput
from store_actors.serving.metrics import StoreMetrics

_PIECE, _MARKER = 1, 2
_ROWS, _MARKED, _FAILED = b"\1", b"\2", b"\3"
#: Shard, epoch, rows and bytes of a piece; epoch, watermark, longest wait (ns) and shards of a marker, and of each shard the rows.
_PIECE_HEAD, _MARKER_HEAD, _SHARD_ROWS = struct.Struct(">iqii"), struct.Struct(">qqqi"), struct.Struct(">iq")
#: Rows that are answered, rows that follow and their bytes; the epoch of a marker; the length of a text.
_ROWS_HEAD, _EPOCH, _LENGTH = struct.Struct(">iii"), struct.Struct(">q"), struct.Struct(">i")

#: Seconds between empty answers.
_BEAT_S = 5.0
#: Bytes of rows of a frame of results, at most, unless a record batch is larger.
_FRAME_BYTES = 1 << 24


class Beats:
    """Says to tasks that this process is there, as long as they are connected. Thread-safe."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._guard = runtime, runtime.threads.lock()
        self._tasks: set[FrameSender] = set()
        self._is_running = False

    def begin(self, task: FrameSender) -> None:
        """Begin with a task; a thread for all starts with the first one."""
        with self._guard:
            self._tasks.add(task)
            is_first, self._is_running = not self._is_running, True
        if is_first:
            self._runtime.threads.start(self._run, "statefleet-beats")

    def end(self, task: FrameSender) -> None:
        """End with a task."""
        with self._guard:
            self._tasks.discard(task)

    def _run(self) -> None:
        while True:
            self._runtime.clock.sleep(_BEAT_S)
            with self._guard:
                tasks = list(self._tasks)
            for task in tasks:
                task.beat(_ROWS + _ROWS_HEAD.pack(0, 0, 0))


@dataclass(frozen=True, slots=True)
class EpochServer:
    """Serves the tasks of continuous queries."""

    runs: EpochRuns
    functions: FunctionRuns
    metrics: StoreMetrics
    runtime: Runtime
    #: Raises a StateStoreError if this process must take no work.
    check_fitness: Callable[[], None]
    #: Makes what the worker of a function calls.
    make_calls: MakeCalls
    #: Of all connections of tasks.
    beats: Beats

    def serve(self, request: Mapping[str, Any], operator: bytes, source: BinaryIO, task: FrameSender) -> None:
        """Take a task's frames, which `source` has of its connection, until it ends that, and answer them by `task`.

        Raises
        ------
        StateStoreError, ValueError
            The run cannot go on; the task has been sent the error.
        OSError
            The connection is lost.
        """
        if request.get("is_worker"):
            self._serve_worker(request, source, task)
            return
        order = ResultEpochs(request["batch"]["batch_id"], len(request["shards"]), self.runtime.threads)
        connection = _TaskConnection(task, _format(request["unsafe_results"]), order)
        self.beats.begin(task)
        try:
            if operator:
                self._serve(request, OperatorTask.of_json(operator), source, connection)
            else:
                self._serve_function(request, source, connection)
        except OSError:
            raise
        except Exception as error:
            connection.fail(error)
            raise
        finally:
            self.beats.end(task)
            connection.finish()

    def _serve(
        self, request: Mapping[str, Any], operator: OperatorTask, source: BinaryIO, connection: _TaskConnection
    ) -> None:
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
        shards = self.runs.join(run, connection)
        try:
            self._take_all(request, source, connection, shards, _reader(operator.schema, rows, request["unsafe_rows"]))
        except Exception as error:
            # Before the others learn that the run is over, and this task with them.
            connection.fail(error)
            raise
        finally:
            self.runs.leave(run, shards, "a task of the run has ended")

    def _take_all(
        self,
        request: Mapping[str, Any],
        source: BinaryIO,
        connection: _TaskConnection,
        shards: Mapping[int, TakingShard],
        read: PieceReader,
    ) -> None:
        elapsed_s = self.runtime.clock.elapsed_s
        EpochStream(request["task"], connection, read, shards, self.metrics, elapsed_s).take_all(source)

    def _serve_function(self, request: Mapping[str, Any], source: BinaryIO, connection: _TaskConnection) -> None:
        """Take the frames of a task whose rows a user's function gets."""
        rows = pa.ipc.open_stream(source).read_all().schema
        state, run_id, why = request["state"], request["batch"]["run_id"], "a task of the run has ended"
        try:
            shards = self._function_shards(request, connection)
            for shard in shards.values():
                shard.join(request["task"], connection)
            read = partial(_read_tables, _format(request["unsafe_rows"]), rows, (lambda table: table,))
            self._take_all(request, source, connection, shards, read)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            connection.fail(error)
            raise
        finally:
            self.functions.end(state, run_id, why)

    def _serve_worker(self, request: Mapping[str, Any], source: BinaryIO, worker: FrameSender) -> None:
        """Take the calls of a worker; and, in a continuous query, have a function called by it until one of the two ends the run."""
        connection = WorkerConnection(worker, self.make_calls)
        why = "the process that calls the function has ended"
        try:
            shard = None
            if "tasks" in request:
                (shard,) = self._function_shards(request, None).values()
            why = connection.serve(shard, source)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise
        finally:
            if "tasks" in request:
                self.functions.end(request["state"], request["batch"]["run_id"], why)
            connection.finish()

    def _function_shards(
        self, request: Mapping[str, Any], connection: _TaskConnection | None
    ) -> Mapping[int, FunctionShard]:
        self.check_fitness()
        batch = request["batch"]
        return self.functions.shards(
            request["state"], batch["run_id"], batch["batch_id"], request["tasks"], request["shards"], connection
        )


#: A shard that takes pieces and markers.
TakingShard = EpochShard | FunctionShard


class _UnsafeRows:
    """Rows in Spark's own format."""

    def decoded(self, content: bytes, schema: pa.Schema) -> pa.Table:
        """Return the rows of a piece, whose columns a schema has; errors as of :func:`~unsafe_rows.decoded`."""
        return pa.Table.from_batches([unsafe_rows.decoded(content, schema, 1)])

    def encoded(self, results: Emitted) -> Iterator[tuple[int, bytes]]:
        """Yield blocks of results, each with the number of its rows."""
        block = results.block() if isinstance(results, ChangedGroups) else None
        if block is not None:
            # Small pieces do not pass through Arrow, which takes most of their time.
            yield len(results.rows), block.tobytes()
            return
        for batch in visible(emitted_table(results)).to_batches():
            for count, rows in unsafe_rows.blocks(batch):
                yield count, rows.tobytes()


class _ArrowRows:
    """Rows as Arrow streams, with the methods of :class:`_UnsafeRows`."""

    def decoded(self, content: bytes, schema: pa.Schema) -> pa.Table:
        return pa.ipc.open_stream(content).read_all()

    def encoded(self, results: Emitted) -> Iterator[tuple[int, bytes]]:
        for batch in batches(visible(emitted_table(results)), _FRAME_BYTES):
            if batch.num_rows:
                yield batch.num_rows, as_stream(batch)


#: How rows are sent.
RowFormat = _UnsafeRows | _ArrowRows


def _format(is_unsafe: bool) -> RowFormat:
    return _UnsafeRows() if is_unsafe else _ArrowRows()


#: Returns the rows of a piece; raises a ValueError if there are none.
PieceReader = Callable[[bytes], ShardInput | UnsafeInput]


def _reader(schema: StateSchema, rows: pa.Schema, is_unsafe: bool) -> PieceReader:
    """Return how pieces of an operator are read, whose rows have a schema, and then the route."""
    inputs = [InputColumns.of(number, kind, rows) for number, kind in enumerate(schema.input_schemas())]
    renamed = inputs[0].renamed(rows) if is_unsafe and schema.operator is OperatorKind.AGGREGATE else None
    if renamed is not None:
        return partial(_read_unsafe, renamed)
    return partial(_read_tables, _format(is_unsafe), rows, [columns.table for columns in inputs])


def _read_unsafe(rows: pa.Schema, content: bytes) -> UnsafeInput:
    block = unsafe_rows.UnsafeBlock(content, rows, 1)
    return UnsafeInput(block, block.num_rows)


def _read_tables(
    row_format: RowFormat, rows: pa.Schema, inputs: Sequence[Callable[[pa.Table], pa.Table]], content: bytes
) -> ShardInput:
    table = row_format.decoded(content, rows)
    return ShardInput(tuple(input_of(table) for input_of in inputs), table.num_rows)


@dataclass(frozen=True, slots=True)
class EpochStream:
    """The frames of a task's connection."""

    #: ``number``, ``task``: The task's number in its run, and its end of the connection.
    number: int
    task: RunTask
    read: PieceReader
    shards: Mapping[int, TakingShard]
    metrics: StoreMetrics
    elapsed_s: Callable[[], float]

    def take_all(self, source: BinaryIO) -> None:
        """Take frames until the connection ends."""
        while kind := source.read(1):
            if kind[0] == _PIECE:
                shard, epoch, rows, size = _PIECE_HEAD.unpack(_read(source, _PIECE_HEAD.size))
                if size <= 0 or shard not in self.shards:
                    raise ValueError(f"malformed piece: it has {size} bytes of shard {shard}")
                piece = self.read(_read(source, size))
                if piece.rows_read != rows:
                    raise ValueError(f"malformed piece: {rows} rows were sent, and {piece.rows_read} came")
                begun_s = self.elapsed_s()
                self.shards[shard].take(self.number, epoch, Piece(piece, self.task))
                self.metrics.folded(rows, self.elapsed_s() - begun_s)
            elif kind[0] == _MARKER:
                epoch, watermark_ms, longest_ns, shards = _MARKER_HEAD.unpack(_read(source, _MARKER_HEAD.size))
                self.metrics.latency_s = longest_ns / 1e9
                marked = []
                for _ in range(shards):
                    shard, rows = _SHARD_ROWS.unpack(_read(source, _SHARD_ROWS.size))
                    if shard not in self.shards:
                        raise ValueError(f"malformed marker: it is of shard {shard}")
                    marker = Marker(self.number, epoch, rows, watermark_ms, -(-longest_ns // 10**6))
                    self.shards[shard].mark(marker, self.task)
                    marked.append(self.shards[shard])
                # All are answered first: the task goes on meanwhile. A commit would take turns with the seals, for which rows wait.
                for marked_shard in marked:
                    marked_shard.seal()
                for marked_shard in marked:
                    marked_shard.commit()
            else:
                raise ValueError(f"malformed frame: its kind is {kind[0]}")


class _TaskConnection:
    """Sends a task what it gets, as of :class:`~store_actors.epochs.shard.RunTask`. Nothing follows an error. Thread-safe."""

    def __init__(self, task: FrameSender, results: RowFormat, order: ResultEpochs) -> None:
        self._results, self._order = results, order
        self._send, self.finish = task.send, task.finish

    def answer(self, rows: int) -> None:
        self._send(_ROWS + _ROWS_HEAD.pack(rows, 0, 0))

    def emit(self, epoch: int, results: Emitted, piece: Piece | None) -> None:
        blocks = list(self._results.encoded(results))
        self._order.emit(epoch, partial(self._send_blocks, blocks, piece))

    def _send_blocks(self, blocks: Sequence[tuple[int, bytes]], piece: Piece | None) -> None:
        # The task's own piece is answered by the last frame itself.
        own = piece.rows.rows_read if piece is not None and piece.task is self else 0
        for count, block in blocks[:-1]:
            self._send(_ROWS + _ROWS_HEAD.pack(0, count, len(block)) + block)
        count, block = blocks[-1] if blocks else (0, b"")
        frame = _ROWS + _ROWS_HEAD.pack(own, count, len(block)) + block
        if piece is None or own:
            self._send(frame)
        else:
            self._send(frame if blocks else b"", partial(piece.task.answer, piece.rows.rows_read))

    def end_epoch(self, epoch: int) -> None:
        self._order.end_epoch(partial(self._send, _MARKED + _EPOCH.pack(epoch)))

    def fail(self, error: BaseException) -> None:
        """Send why the run cannot go on; the task ends the connection then."""
        text = f"{type(error).__name__}: {error}".encode()
        self._send(_FAILED + _LENGTH.pack(len(text)) + text, is_last=True)


def _read(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        raise EOFError("the task ended in the middle of a frame")
    return data
