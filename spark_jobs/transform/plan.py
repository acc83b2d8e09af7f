"""``transformWithState`` and ``transformWithStateInPandas``, analysed by Spark, as the fleet runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame, GroupedData
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.schema import OperatorKind, StateSchema
from coordinator.model.state_metadata import StateMetadata
from spark_jobs.functions.grouped_input import GroupedInput, function_mode, pandas_settings, struct_type
from spark_jobs.functions.groups import Rows
from spark_jobs.functions.user_state_task import UserStateTask
from spark_jobs.plan.catalyst import WATERMARK_KEY
from spark_jobs.plan.logical import quoted
from spark_jobs.plan.operator_plan import OperatorPlan, ReduceTask
from spark_jobs.plan.spark_errors import InvalidTypeError, RefusedQueryError, UnpicklableError
from spark_jobs.session.spark_connect import check_classic
from spark_jobs.transform.block import Block
from spark_jobs.transform.processor import ParsedSchemas, StatefulProcessor, StatefulProcessorHandle
from spark_jobs.transform.task import InitialRows, ProcessorProgram, RowForm, load_processor
from spark_jobs.transform.variables import TimeMode, Variable, accumulators_of, view_of
from spark_jobs.worker.exchange import HASH_COLUMN
from store_actors.engine.columns import in_schema


@dataclass(frozen=True)
class Transformation:
    """The arguments of ``transformWithState``."""

    processor: StatefulProcessor
    output: T.StructType | str
    output_mode: str
    time_mode: str
    initial: GroupedData | None
    event_time: str
    in_pandas: bool


def _chunks_of_shards(
    schema: pa.Schema, num_shards: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield shards, and rows of them as Arrow record batches in bytes."""
    for batch in batches:
        shards = np.mod(batch.column(HASH_COLUMN).to_numpy(), np.int32(num_shards))
        rows, present = in_schema(schema, batch), np.unique(shards)
        chunks = [rows.filter(pa.array(shards == shard)).serialize().to_pybytes() for shard in present]
        yield pa.record_batch({"shard": pa.array(present, pa.int32()), "chunk": pa.array(chunks, pa.binary())})


@dataclass(frozen=True, kw_only=True)
class TransformPlan(OperatorPlan):
    """A processor as an operator's plan, which makes its tasks."""

    rows: GroupedInput
    program: ProcessorProgram

    def finish(self, emitted: DataFrame) -> DataFrame:
        """Return the rows that the processor emits, with their event time marked for the operators that follow."""
        event_time = self.program.event_time
        if not event_time:
            return emitted
        marked = F.col(quoted(event_time)).alias(event_time, metadata={WATERMARK_KEY: self.rows.delay_ms})
        return emitted.select(*(marked if name == event_time else F.col(quoted(name)) for name in self.emitted.names))

    @property
    def due_per_ms(self) -> int | None:
        """Units of the timers' due column in a millisecond, if they fire by processing time."""
        return 1 if self.program.time_mode is TimeMode.PROCESSING_TIME else None

    def reduce_task(self, schema: StateSchema, metadata: StateMetadata) -> ReduceTask:
        return UserStateTask(
            program=self.program,
            drops_late_rows=self.program.time_mode is TimeMode.EVENT_TIME,
            due_per_ms=self.due_per_ms,
            schema=schema,
            metadata=metadata,
        )


@dataclass(frozen=True, kw_only=True)
class StartedPlan(TransformPlan):
    """A plan whose state starts from rows of a batch DataFrame; see :class:`~spark_jobs.plan.operator_plan.Collector`."""

    state: GroupedInput
    state_form: Rows

    def collected(self, newest: int, num_shards: int) -> StartedPlan:
        """Return the plan with the initial state, as long as the first batch of a shard may have to be done."""
        # At version 1 the first batch may have failed elsewhere, and be done again.
        if newest > 1:
            return self
        rows = self.state
        schema = StateSchema(rows.keys, rows.inputs, (), None, None, "update", OperatorKind.TRANSFORM).raw_schema()
        task = partial(_chunks_of_shards, schema, num_shards)
        parts: dict[int, list[bytes]] = {}
        for shard, chunk in rows.frame.mapInArrow(task, "shard int, chunk binary").collect():
            parts.setdefault(shard, []).append(bytes(chunk))
        context = rows.frame.sparkSession.sparkContext
        sent = {shard: context.broadcast(part) for shard, part in parts.items()}
        initial = InitialRows(sent, schema, rows.view, self.state_form)
        return replace(self, program=replace(self.program, initial=initial))


def build_transform(grouped: GroupedData, definition: Transformation, stateful_mode: str | None) -> TransformPlan:
    """Plan ``df.groupBy(..).transformWithState(...)`` or its pandas form; `stateful_mode` is the output mode that ``fleet.stateful``
    was given, if it was.

    Raises InvalidRequestError if an argument is not valid, or what the processor's ``init`` asks for.
    """
    mode, time_mode = function_mode(definition.output_mode, stateful_mode), TimeMode.of(definition.time_mode)
    output = struct_type(definition.output, "outputStructType")
    processor = pickled_processor(definition.processor)
    schemas = ParsedSchemas()
    variables = _declared_variables(processor, time_mode, schemas)
    rows = GroupedInput.of(grouped, late_times=time_mode is TimeMode.EVENT_TIME)
    _check_event_time(definition.event_time, output, mode, rows.delay_ms)
    schema = StateSchema(
        keys=rows.keys,
        inputs=rows.inputs,
        accumulators=accumulators_of(variables),
        expiry_key=None,
        delay_ms=rows.delay_ms,
        output_mode=mode,
        operator=OperatorKind.TRANSFORM,
        options={"time_mode": time_mode.value},
        shown=view_of(variables, rows.keys, rows.view),
    )
    kind: Callable[..., TransformPlan] = TransformPlan
    if definition.initial is not None:
        state = _initial(definition.initial, rows)
        kind = partial(StartedPlan, state=state, state_form=_form(definition, output, state))
    return kind(
        inputs=(rows.frame,),
        schema=schema,
        emitted=output,
        appends=mode == "append",
        rows=rows,
        program=ProcessorProgram(
            processor=processor,
            view=rows.view,
            form=_form(definition, output, rows),
            time_mode=time_mode,
            variables=variables,
            schemas=dict(schemas),
            initial=None,
            event_time=definition.event_time,
            has_watermark=rows.delay_ms is not None,
        ),
    )


def pickled_processor(processor: StatefulProcessor) -> bytes:
    """Return a processor's pickled form.

    Raises
    ------
    InvalidRequestError
        It does not extend ``StatefulProcessor``, or cannot be pickled.
    """
    if not isinstance(processor, StatefulProcessor):
        raise InvalidTypeError(
            "statefulProcessor is an object of a class that extends statefleet.StatefulProcessor, or with Spark 4 PySpark's own",
            got=type(processor).__name__,
        )
    try:
        pickled: bytes = cloudpickle.dumps(processor)  # type: ignore[attr-defined, no-untyped-call]
    except Exception as error:
        raise UnpicklableError(
            f"the processor cannot be pickled ({error}), as it must to reach the workers; make what cannot be in init",
            processor=type(processor).__name__,
        ) from error
    return pickled


def _declared_variables(pickled: bytes, time_mode: TimeMode, schemas: ParsedSchemas) -> tuple[Variable, ...]:
    """Return the variables that ``init`` asks for, of a copy of the processor."""
    processor = load_processor(pickled)
    handle = StatefulProcessorHandle(Block(), time_mode, schemas)
    processor.init(handle)
    processor.close()
    return handle.variables


def _check_event_time(name: str, output: T.StructType, mode: str, delay_ms: int | None) -> None:
    """Check the event time of a processor's output; there is no delay where the input has no watermark."""
    if not name:
        return
    if name not in output.names or not isinstance(output[name].dataType, T.TimestampType):
        raise RefusedQueryError(
            "eventTimeColumnName is a timestamp column of outputStructType",
            eventTimeColumnName=name,
            columns=output.simpleString(),
        )
    if delay_ms is None:
        raise RefusedQueryError(
            "eventTimeColumnName needs a watermark: call withWatermark before fleet.stateful", eventTimeColumnName=name
        )
    if mode != "append":
        raise RefusedQueryError(
            "operators follow one whose rows stand: use outputMode Append with eventTimeColumnName", outputMode=mode
        )


def _form(definition: Transformation, output: T.StructType, rows: GroupedInput) -> Rows:
    settings = pandas_settings(rows.frame.sparkSession)
    if not definition.in_pandas:
        return RowForm(output, rows.key_type, rows.row_type, settings["max_rows"])
    # pandas is loaded where it is used.
    from spark_jobs.functions.frames import PandasForm

    return PandasForm(output, **settings)


def _initial(grouped: object, rows: GroupedInput) -> GroupedInput:
    """Return the rows of the initial state; refuse groups by other types than those of the stream's `rows`."""
    check_classic(grouped)
    if not isinstance(grouped, GroupedData) or grouped._df.isStreaming:
        raise InvalidTypeError(
            "initialState is a batch DataFrame grouped by the same columns: initial.groupBy(...)",
            got=type(grouped).__name__,
        )
    initial = GroupedInput.of(grouped, late_times=False)
    types = [[(field.name, field.type) for field in grouped_rows.keys] for grouped_rows in (rows, initial)]
    if types[0] != types[1]:
        raise RefusedQueryError(
            "the initial state is grouped by columns of other types than the stream; cast them",
            stream=rows.key_type.simpleString(),
            initialState=initial.key_type.simpleString(),
        )
    return initial
