"""Functions of ``applyInPandasWithState``: called for each key, over columns that are converted for all keys at once.

PySpark's own code converts the values, and state is PySpark's own ``GroupState``, so a function gets the same values as in Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.streaming.state import GroupState

from spark_jobs.functions.frames import PandasForm
from spark_jobs.functions.groups import Groups
from spark_jobs.functions.state_batch import NO_TIMEOUT, StateBatch
from spark_jobs.functions.values import to_arrow, to_python
from spark_jobs.plan.spark_errors import StateCallError

#: ``func(key, pdfs, state)``, which returns the DataFrames to emit.
PandasFunction = Callable[[tuple[Any, ...], Iterator[pd.DataFrame], GroupState], Iterable[pd.DataFrame]]


@dataclass(frozen=True)
class PandasCalls:
    """A function of a single key, called for many keys."""

    function: PandasFunction
    state: T.StructType
    form: PandasForm

    def __call__(self, groups: Groups, state: StateBatch) -> Iterator[pa.Table]:
        """Call the function for each key; yield the rows to emit, and change `state`."""
        form = self.form
        emitted: list[pd.DataFrame] = []
        rows = 0
        results: list[GroupState] = []
        inputs = _no_rows(groups) if state.has_timed_out else form.rows(groups)
        for key, frames, key_state in zip(form.keys(groups.keys), inputs, _states(self.state, state), strict=True):
            for frame in form.checked(self.function(key, frames, key_state)):
                if len(frame):
                    emitted.append(frame)
                    rows += len(frame)
            results.append(key_state)
            if rows > form.max_rows:
                yield form.table(emitted)
                emitted, rows = [], 0
        if emitted:
            yield form.table(emitted)
        self._keep(results, state)

    def _keep(self, results: Sequence[GroupState], state: StateBatch) -> None:
        """Set the changes of each key's state in the batch's columns."""
        updated = np.array([result._updated for result in results], np.bool_)
        removed = np.array([result._removed for result in results], np.bool_)
        if updated.any():
            empty = (None,) * len(self.state)
            rows = [tuple(result._value) if result._updated else empty for result in results]
            for row in rows:
                if len(row) != len(self.state):
                    raise StateCallError(
                        "the state was updated with another number of values than it has columns",
                        columns=self.state.names,
                        values=len(row),
                    )
            columns = zip(self.state.fields, zip(*rows, strict=True), strict=True)
            state.update(
                {item.name: [to_arrow(value, item.dataType) for value in column] for item, column in columns}, updated
            )
        if removed.any():
            state.remove(removed)
        state.keep_timeouts([result._timeout_timestamp for result in results])


def _no_rows(groups: Groups) -> Iterator[Iterator[pd.DataFrame]]:
    for _ in range(len(groups)):
        yield iter([pd.DataFrame(columns=groups.rows.column_names)])


def _states(kind: T.StructType, state: StateBatch) -> Iterator[GroupState]:
    columns = [
        [to_python(value, item.dataType) for value in array.to_pylist()]
        for item, array in zip(kind.fields, state.values.itercolumns(), strict=True)
    ]
    clock = state.clock
    for exists, *values in zip(state.exists.tolist(), *columns, strict=True):
        yield GroupState(
            optionalValue=T.Row(*values) if exists else None,  # type: ignore[arg-type]
            batchProcessingTimeMs=clock.processing_time_ms,
            eventTimeWatermarkMs=GroupState.NO_TIMESTAMP if clock.watermark_ms is None else clock.watermark_ms,
            timeoutConf=clock.timeout_conf,
            hasTimedOut=clock.has_timed_out,
            watermarkPresent=clock.watermark_ms is not None,
            defined=exists,
            updated=False,
            removed=False,
            timeoutTimestamp=NO_TIMEOUT,
            keyAsUnsafe=b"",
            valueSchema=kind,
        )
