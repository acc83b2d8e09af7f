"""A processor of ``transformWithState`` tested without Spark and Ray: rows, clock and watermark in, output rows and state out.

The batches are done by the code that runs in Spark's tasks (:class:`~spark_jobs.functions.user_state_task.UserStateTask`), on keyed
stores in this process.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import DEFAULT_STORE, TaskIdentity
from coordinator.model.schema import OperatorKind, StateSchema
from coordinator.model.state_metadata import StateMetadata
from spark_jobs.functions.grouped_input import function_mode, struct_type
from spark_jobs.functions.user_state_task import UserStateTask
from spark_jobs.functions.values import RowValues
from spark_jobs.transform.block import Block
from spark_jobs.transform.handle import StatefulProcessorHandle
from spark_jobs.transform.plan import check_event_time, declared_variables, pickled_processor
from spark_jobs.transform.processor import StatefulProcessor
from spark_jobs.transform.states import ListState, MapState, ValueState
from spark_jobs.transform.task import ProcessorProgram, load_processor
from spark_jobs.transform.variables import TimeMode, accumulators_of
from spark_jobs.worker.batch import BatchHeader
from spark_jobs.worker.exchange import Received
from spark_jobs.worker.fleet_client import FleetAddress
from statefleet.testing.ddl import PythonSchemas, parse_columns
from statefleet.testing.local_state import LocalState
from statefleet.testing.processor_input import ProcessorInput
from store_actors.messages import ShardInput

__all__ = ["ProcessorTester"]

_QUERY = "tested"


class ProcessorTester:
    """Runs a processor batch by batch, in this process.

    A batch is one of Spark's: the processor is unpickled and initialised, gets its rows by key, then its expired timers; then values
    that have outlived their time to live are removed, and the state is committed. If the processor raises an error, the state stays as
    it was before the batch.

    Parameters
    ----------
    processor
        The processor, as ``transformWithState`` takes it.
    outputStructType
        Columns of the rows that it emits, as Spark's type or in DDL.
    outputMode, timeMode
        As in ``transformWithState``.
    rows
        Columns of its input, as Spark's type or in DDL.
    key
        Names of the columns by which it is grouped, of atomic types.
    watermark
        Column of event time and the delay, as in ``withWatermark``: ``("ts", "10 minutes")``. With it, the watermark follows the rows,
        and in time mode EventTime rows that are late are left out.
    initialState
        Rows of the initial state, in columns `initialColumns` (by default `rows`).
    eventTimeColumnName
        As in ``transformWithState``: a row of the output whose event time is not after the watermark is refused.
    in_pandas
        Whether the processor is one of ``transformWithStateInPandas``, which gets and emits DataFrames.
    now_ms
        The clock at first, in milliseconds since the epoch.

    Raises
    ------
    InvalidRequestError
        An argument is not valid.

    Examples
    --------
    >>> tester = ProcessorTester(Count(), "user string, n bigint", rows="user string, page string", key="user")  # doctest: +SKIP
    >>> tester.process([("ann", "/"), ("ann", "/a")])  # doctest: +SKIP
    [Row(user='ann', n=2)]
    >>> tester.state("count", "ann")  # doctest: +SKIP
    Row(n=2)
    """

    def __init__(
        self,
        processor: StatefulProcessor,
        outputStructType: T.StructType | str,
        outputMode: str = "Update",
        timeMode: str = "None",
        *,
        rows: T.StructType | str,
        key: str | Sequence[str],
        watermark: tuple[str, str | timedelta] | None = None,
        initialState: Iterable[Any] | None = None,
        initialColumns: T.StructType | str | None = None,
        eventTimeColumnName: str = "",
        in_pandas: bool = False,
        now_ms: int = 0,
    ) -> None:
        self._time_mode = TimeMode.of(timeMode)
        output = _struct(outputStructType, "outputStructType")
        names = [key] if isinstance(key, str) else list(key)
        mode = function_mode(outputMode, None)
        self._input = ProcessorInput(_struct(rows, "rows"), names, watermark)
        check_event_time(eventTimeColumnName, output, mode, self._input.delay_ms)
        self._output = RowValues(output, "the output")
        self._schemas = PythonSchemas()
        pickled = pickled_processor(processor)
        variables = declared_variables(pickled, self._time_mode, self._schemas)
        schema = StateSchema(
            keys=self._input.keys,
            inputs=self._input.fields,
            accumulators=accumulators_of(variables),
            expiry_key=None,
            delay_ms=self._input.delay_ms,
            output_mode=mode,
            operator=OperatorKind.TRANSFORM,
        )
        initial = None
        if initialState is not None:
            columns = (
                self._input
                if initialColumns is None
                else ProcessorInput(_struct(initialColumns, "initialColumns"), names)
            )
            initial = columns.initial(initialState, columns.form(output, in_pandas=in_pandas))
        program = ProcessorProgram(
            processor=pickled,
            view=self._input.view,
            form=self._input.form(output, in_pandas=in_pandas),
            time_mode=self._time_mode,
            variables=variables,
            schemas=dict(self._schemas),
            initial=initial,
            event_time=eventTimeColumnName,
            has_watermark=watermark is not None or self._time_mode is TimeMode.EVENT_TIME,
        )
        self._task = UserStateTask(
            program=program,
            drops_late_rows=self._time_mode is TimeMode.EVENT_TIME,
            due_per_ms=1 if self._time_mode is TimeMode.PROCESSING_TIME else None,
            schema=schema,
            metadata=StateMetadata(_QUERY, _QUERY, 1, schema.output_mode, schema),
            address=FleetAddress("memory:///tests", "local"),
        )
        self._state = LocalState()
        self._run_id, self._batch_id = uuid.uuid4().hex, 0
        self._now_ms, self._watermark_ms = now_ms, 0

    @property
    def now_ms(self) -> int:
        """The clock (processing time of the next batch), in milliseconds since the epoch."""
        return self._now_ms

    @property
    def watermark_ms(self) -> int:
        """The watermark, in milliseconds since the epoch; 0 before there is any."""
        return self._watermark_ms

    # -- batches --------------------------------------------------------------------------------------------------

    def process(self, rows: Iterable[Any]) -> list[T.Row]:
        """Do a batch of rows; return the rows that the processor emits.

        If the rows move the watermark, the batch without rows that Spark then runs is done as well.

        Parameters
        ----------
        rows
            Tuples in the order of the columns, dicts by their names, or Rows; times without a zone are in the zone of this process, as
            in Spark.

        Raises
        ------
        InvalidRequestError
            A row does not fit the columns, or the processor did something that a query refuses.
        """
        table = self._input.table(rows)
        emitted = self._batch(table, self._watermark_ms)
        newest_ms = self._input.newest_ms(table)
        return emitted if newest_ms is None or newest_ms <= self._watermark_ms else emitted + self._move(newest_ms)

    def advance_clock(self, ms: int) -> list[T.Row]:
        """Move the clock on by some milliseconds and do a batch without rows; return the rows that timers emit.

        Raises
        ------
        InvalidRequestError
            The number is negative.
        """
        if ms < 0:
            raise InvalidRequestError("the clock of a query does not go back", ms=ms)
        self._now_ms += ms
        return self._batch(self._input.table([]), self._watermark_ms)

    def advance_watermark(self, to_ms: int) -> list[T.Row]:
        """Move the watermark to a time and do the batch without rows that Spark then runs; return the rows that timers emit.

        Raises
        ------
        InvalidRequestError
            The time is before the watermark.
        """
        if to_ms < self._watermark_ms:
            raise InvalidRequestError("a watermark does not go back", to_ms=to_ms, watermark_ms=self._watermark_ms)
        return self._move(to_ms)

    def _move(self, to_ms: int) -> list[T.Row]:
        emitted = self._batch(self._input.table([]), to_ms)
        self._watermark_ms = to_ms
        return emitted

    def _batch(self, table: pa.Table, evict_ms: int) -> list[T.Row]:
        header = BatchHeader(_QUERY, self._run_id, self._batch_id, 0, self._watermark_ms, evict_ms, self._now_ms)
        task = TaskIdentity(
            _QUERY, _QUERY, self._run_id, self._batch_id, 0, 0, "this process", batch_time_ms=self._now_ms
        )
        received = Received(ShardInput((table,), table.num_rows), header)
        emitted = self._task.run(received, task, self._state)
        self._batch_id += 1
        return [self._output.row(raw) for part in emitted for raw in self._output.tuples(part.itercolumns())]

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self, name: str, *key: Any) -> Any:
        """Return the state of a variable for a key, by the clock of now: values that have outlived their time to live are not there.

        Returns
        -------
        Row, list of Rows, or dict of Rows by Rows
            Of a value (None if there is none), a list or a map.

        Raises
        ------
        InvalidRequestError
            There is no such variable, or the key does not fit the columns.
        """
        with self._reading(self._input.key_table([key])) as handle:
            return _value(self._variable(handle, name))

    def timers(self, *key: Any) -> list[int]:
        """Return the times of a key's timers, in milliseconds, the earliest first."""
        with self._reading(self._input.key_table([key])) as handle:
            return handle.timers.times()

    def keys(self, name: str) -> list[tuple[Any, ...]]:
        """Return the keys that have a value, element or entry of a variable, sorted by their text.

        Raises
        ------
        InvalidRequestError
            There is no such variable.
        """
        if not self._batch_id:
            return []
        program = self._task.program
        assert isinstance(program, ProcessorProgram)
        stores = {variable.name: variable.store_name for variable in program.variables}
        leaves = [field.name for field in self._input.keys]
        rows = self._state.rows(stores.get(name, DEFAULT_STORE)).select(leaves)
        keys = rows.group_by(leaves).aggregate([]).select(leaves).combine_chunks()
        live_keys = []
        with self._reading(keys) as handle:
            variable, block = self._variable(handle, name), self._block
            for index, values in enumerate(self._input.user_keys(keys)):
                block.enter(index)
                if variable.exists():
                    live_keys.append(values)
        return sorted(live_keys, key=repr)

    @contextmanager
    def _reading(self, keys: pa.Table) -> Iterator[StatefulProcessorHandle]:
        """Yield a handle whose variables and timers are those of the first of some keys."""
        if not self._batch_id:
            raise InvalidRequestError("there is no state before the first batch")
        program = self._task.program
        assert isinstance(program, ProcessorProgram)
        block = self._block = Block([field.name for field in self._input.keys])
        handle = StatefulProcessorHandle(block, self._time_mode, self._schemas)
        processor = load_processor(program.processor)
        processor.init(handle)
        try:
            with self._state.read() as store:
                block.open(store, self._now_ms)
                with block.of(keys):
                    block.enter(0)
                    yield handle
        finally:
            processor.close()

    def _variable(self, handle: StatefulProcessorHandle, name: str) -> ValueState | ListState | MapState:
        states = dict(zip((variable.name for variable in handle.variables), handle.states, strict=True))
        if name not in states:
            raise InvalidRequestError("the processor has no such state variable", name=name, variables=list(states))
        return states[name]


def _value(variable: ValueState | ListState | MapState) -> Any:
    if isinstance(variable, MapState):
        return dict(variable.iterator())
    return list(variable.get()) if isinstance(variable, ListState) else variable.get()


def _struct(definition: T.StructType | str, subject: str) -> T.StructType:
    return struct_type(parse_columns(definition) if isinstance(definition, str) else definition, subject)
