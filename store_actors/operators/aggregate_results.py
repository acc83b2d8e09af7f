"""What an aggregation emits of its state: the state itself, or what Spark's final expression does not make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, StateSchema
from coordinator.model.type_names import string_to_type
from store_actors.engine import count_kernels, fold_kernels
from store_actors.engine.arrays import Mask, Words, whole_numbers
from store_actors.engine.lists import sketch_bytes
from store_actors.engine.words import nested_keys


def emits_state(schema: StateSchema) -> bool:
    """Return whether the fields of an operator's state are what it emits."""
    return not any(accumulator.result for accumulator in schema.accumulators)


def results_of(rows: pa.Table, schema: StateSchema) -> pa.Table:
    """Return the rows that an operator emits: its keys, and of each accumulator the fields that it emits.

    These are its state, except where Spark's final expression does not take that.
    """
    if emits_state(schema):
        return rows
    state = {field.name for field in schema.state_fields}
    columns = {name: rows.column(name) for name in rows.column_names if name not in state}
    for accumulator in schema.accumulators:
        emitted = [rows.column(field.name) for field in accumulator.state]
        if accumulator.result and rows.num_rows == 0:
            # Nothing says how wide a row is.
            emitted = [pa.array([], string_to_type(field.type)) for field in accumulator.emitted]
        elif accumulator.result:
            emitted = _RESULTS[accumulator.kind](accumulator, emitted[0].combine_chunks())
        columns.update(zip((field.name for field in accumulator.emitted), emitted, strict=True))
    return pa.table(columns)


def _words(state: pa.Array) -> Words:
    """Return the words of states that have a fixed number of them, a row each."""
    if len(state) == 0:
        return np.empty((0, state.type.byte_width // 8), np.uint64)
    words = np.frombuffer(state.buffers()[1], np.uint64).reshape(-1, state.type.byte_width // 8)
    return np.array(words[state.offset : state.offset + len(state)])


def _registers(accumulator: Accumulator, state: pa.Array) -> list[pa.Array]:
    out = np.empty((len(state), 2))
    fold_kernels.sum_registers(_words(state), out)
    return [pa.array(out[:, 0]), pa.array(out[:, 1])]


def _cast(accumulator: Accumulator, state: pa.Array) -> list[pa.Array]:
    return [state.cast(string_to_type(accumulator.result[0].type))]


def _counted(accumulator: Accumulator, state: pa.Array) -> list[pa.Array]:
    """Return the most frequent value, or percentiles (options ``percentages`` and ``rule`` of ``count_kernels.choose``)."""
    counted = state.flatten()
    values, counts = counted.field(0), np.array(counted.field(1), np.int64)
    ends = np.cumsum(np.array(pc.list_value_length(state), np.int64))
    percentages = np.array(accumulator.options.get("percentages", ()), np.float64)
    if "percentages" not in accumulator.options:
        comparable = nested_keys(values) if pa.types.is_nested(values.type) else values
        if pa.types.is_floating(values.type):
            # Java has one NaN, whatever its bits.
            comparable = pc.if_else(pc.is_nan(values), pa.scalar(np.nan, values.type), values)
        codes = np.array(comparable.dictionary_encode().indices, np.uint64)
        chosen = np.empty(len(state), np.int64)
        count_kernels.most_frequent(ends, codes, counts, chosen)
        return [values.take(pa.array(chosen, mask=chosen < 0))]
    out, valid = np.zeros((len(state), len(percentages))), np.zeros(len(state), np.uint8)
    rule = int(accumulator.options["rule"])
    count_kernels.choose(ends, _as_doubles(values), counts, percentages, rule, out, valid)
    return [_of_doubles(out, valid != 0, string_to_type(accumulator.result[0].type))]


def _as_doubles(values: pa.Array) -> npt.NDArray[np.float64]:
    if pa.types.is_floating(values.type):
        return np.array(values.cast(pa.float64()))
    return np.array(_integers(values), np.float64)


def _integers(values: pa.Array) -> pa.Array:
    return (values.cast(pa.int32()) if pa.types.is_date32(values.type) else values).cast(pa.int64())


def _of_doubles(numbers: npt.NDArray[np.float64], valid: Mask, kind: pa.DataType) -> pa.Array:
    """Cast numbers, or lists of them, to a type; integers are truncated as in Java."""
    is_list = pa.types.is_list(kind)
    element = kind.value_type if is_list else kind
    flat = numbers.reshape(-1)
    if pa.types.is_floating(element):
        values = pa.array(flat).cast(element)
    elif pa.types.is_date32(element):
        values = pa.array(flat.astype(np.int32)).cast(element)
    else:
        values = pa.array(whole_numbers(flat)).cast(pa.int64()).cast(element)
    if not is_list:
        return pc.if_else(pa.array(valid), values, pa.scalar(None, element))
    ends = np.arange(len(numbers) + 1, dtype=np.int32) * numbers.shape[1]
    return pa.ListArray.from_arrays(pa.array(ends), values, type=kind, mask=pa.array(~valid))


def _sketch(accumulator: Accumulator, state: pa.Array) -> list[pa.Array]:
    """Return the bytes of Spark's CountMinSketch: version 1, total, depth, width, factors, table, all big-endian."""
    words, depth = _words(state), int(accumulator.options["depth"])
    width = (words.shape[1] - 1 - depth) // depth
    head = np.tile(np.array([1], ">i4").view(np.uint8), (len(words), 1))
    shape = np.tile(np.array([depth, width], ">i4").view(np.uint8), (len(words), 1))
    big = np.ascontiguousarray(words.astype(">u8")).view(np.uint8).reshape(len(words), -1)
    content = np.concatenate([head, big[:, :8], shape, big[:, 8:]], axis=1)
    fixed = pa.Array.from_buffers(pa.binary(content.shape[1]), len(words), [None, pa.py_buffer(content)])
    return [fixed.cast(pa.binary())]


def _bins(accumulator: Accumulator, state: pa.Array) -> list[pa.Array]:
    """Return place and height of the bins that are used; null where none is."""
    words, kind = _words(state), string_to_type(accumulator.result[0].type)
    used = words[:, 0].view(np.int64) if len(words) else np.empty(0, np.int64)
    bins = words[:, 1:].view(np.float64).reshape(len(words), -1, 2)
    chosen = bins[np.arange(bins.shape[1]) < used[:, np.newaxis]]
    position, height = kind.value_type
    positions = _of_doubles(np.ascontiguousarray(chosen[:, :1]), np.ones(len(chosen), np.bool_), position.type)
    values = pa.StructArray.from_arrays([positions, pa.array(chosen[:, 1])], fields=[position, height])
    ends = np.concatenate([[0], np.cumsum(used)]).astype(np.int32)
    return [pa.ListArray.from_arrays(pa.array(ends), values, type=kind, mask=pa.array(used == 0))]


def _hll_sketch(accumulator: Accumulator, state: pa.Array) -> list[pa.Array]:
    return [sketch_bytes(state, int(accumulator.options["lg_k"]))]


_RESULTS: Mapping[AccumulatorKind, Callable[[Accumulator, pa.Array], list[pa.Array]]] = {
    AccumulatorKind.DISTINCT_REGISTERS: _registers,
    AccumulatorKind.COUNTED: _counted,
    AccumulatorKind.COUNT_MIN: _sketch,
    AccumulatorKind.COUNT_MIN_BYTES: _sketch,
    AccumulatorKind.HISTOGRAM: _bins,
    AccumulatorKind.HLL_SKETCH: _hll_sketch,
    AccumulatorKind.HLL_UNION: _hll_sketch,
    AccumulatorKind.BITMAP: _cast,
    AccumulatorKind.BITMAP_OR: _cast,
}
