"""Sums that fail on overflow: a batch that overflowed one is refused before it is committed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from coordinator.model.errors import SumOverflowError
from store_actors.engine.accumulator_rules import RULES
from store_actors.engine.arrays import Words
from store_actors.engine.layout import RowLayout


def check_overflow(layout: RowLayout, rows: Words) -> None:
    """Refuse rows in which a checked sum has overflowed: it is null though a value came.

    Raises
    ------
    SumOverflowError
        In Spark's words; says which sum.
    """
    for accumulator in layout.schema.accumulators:
        if not RULES[accumulator.kind].fails_on_overflow:
            continue
        total, is_empty = layout.slots_of(accumulator)
        is_null = rows[:, total.flag_word] & np.uint64(total.flag) == 0
        if np.any(is_null & (rows[:, is_empty.word] == 0)):
            raise SumOverflowError(
                f"{_words(total.type)}; the batch was not committed; state and checkpoint are as before it",
                aggregate=accumulator.meaning or accumulator.kind.value,
            )


def _words(data_type: pa.DataType) -> str:
    if pa.types.is_int64(data_type):
        return (
            "[ARITHMETIC_OVERFLOW] long overflow. Use 'try_sum' to tolerate overflow and return NULL instead. If necessary set "
            '"spark.sql.ansi.enabled" to "false" to bypass this error'
        )
    kind = "long" if pa.types.is_duration(data_type) else "integer"
    return f"[INTERVAL_ARITHMETIC_OVERFLOW] {kind} overflow. Use 'try_sum' to tolerate overflow and return NULL instead"
