"""Rows in Spark's binary format, from and to Arrow."""

from __future__ import annotations

import io
import itertools
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store_actors.engine.unsafe_rows import MOST_BLOCK_BYTES, are_supported, read_blocks, write_blocks, write_end
from tests.unit.unsafe_batches import batches_of_all_types


def _blocks(*batches: pa.RecordBatch) -> bytes:
    sink = io.BytesIO()
    for batch in batches:
        write_blocks(batch, sink)
    write_end(sink)
    return sink.getvalue()


def _table(data: bytes, schema: pa.Schema, further: int = 0) -> pa.Table:
    source = io.BytesIO(data)
    table = pa.Table.from_batches(read_blocks(source, schema, further), schema)
    assert source.read() == b""
    table.validate(full=True)
    return table


@given(batches_of_all_types(), st.integers(0, 5))
def test_rows_come_back(batch: pa.RecordBatch, skipped: int) -> None:
    batch = batch.slice(min(skipped, batch.num_rows - 1))
    assert are_supported(batch.schema)
    assert _table(_blocks(batch, batch), batch.schema) == pa.Table.from_batches([batch, batch])


def test_a_row_is_as_spark_has_it() -> None:
    # As ``UnsafeProjection`` makes it of (-2 as an int, null as a string, 'four', true).
    columns = [pa.array([-2], pa.int32()), pa.array([None], pa.string()), pa.array(["four"]), pa.array([True])]
    batch = pa.RecordBatch.from_arrays(columns, names=["a", "b", "c", "d"])
    row = struct.pack("<QiIQIIQ4s4x", 0b10, -2, 0, 0, 4, 40, 1, b"four")
    assert _blocks(batch) == struct.pack(">i", 8 + len(row)) + struct.pack("<Q", len(row)) + row + bytes(4)


def test_further_columns_are_left_out() -> None:
    words = np.array([[0, 5, 77], [0b01, 0, 77]], np.uint64)
    data = struct.pack(">i", words.nbytes) + words.tobytes() + bytes(4)
    assert _table(data, pa.schema([("n", pa.int64())]), 1).column("n").to_pylist() == [5, None]


@pytest.mark.parametrize(
    "order", list(itertools.permutations([0, MOST_BLOCK_BYTES - 24, MOST_BLOCK_BYTES - 23, 3 * MOST_BLOCK_BYTES]))
)
def test_a_block_has_one_row_or_no_more_than_its_bytes(order: tuple[int, ...]) -> None:
    # With many small rows before a few large ones, the mean says nothing of either.
    texts = ["y"] * 20_000 + ["x" * size for size in order]
    batch = pa.record_batch({"t": texts})
    data, rows = _blocks(batch), 0
    source = io.BytesIO(data)
    while size := struct.unpack(">i", source.read(4))[0]:
        block = source.read(size)
        table = _table(struct.pack(">i", size) + block + bytes(4), batch.schema)
        assert size <= MOST_BLOCK_BYTES or len(table) == 1
        rows += len(table)
    assert rows == len(texts)
    assert _table(data, batch.schema) == pa.Table.from_batches([batch])


@pytest.mark.parametrize("has_offsets", [False, True])
def test_a_batch_without_rows_is_no_block(has_offsets: bool) -> None:
    # Arrow need not have offsets of no texts. A block of no bytes would be the end.
    texts = pa.Array.from_buffers(pa.string(), 0, [None, pa.py_buffer(b"") if has_offsets else None, pa.py_buffer(b"")])
    sink = io.BytesIO()
    write_blocks(pa.RecordBatch.from_arrays([texts], ["t"]), sink)
    assert sink.getvalue() == b""


def test_rows_without_columns_are_not_written() -> None:
    with pytest.raises(ValueError, match="without columns"):
        write_blocks(pa.RecordBatch.from_struct_array(pa.array([{}, {}], pa.struct([]))), io.BytesIO())


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.decimal128(19, 0), pa.timestamp("ns"), pa.null()])
def test_other_types_are_not_supported(kind: pa.DataType) -> None:
    assert not are_supported(pa.schema([("n", pa.int64()), ("o", kind)]))


_TEXT = pa.schema([("t", pa.string())])


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (struct.pack(">i", 100) + bytes(50), EOFError, "in the middle of its rows"),
        (struct.pack(">i", -5), ValueError, "a block of -5 bytes"),
        (struct.pack(">iQ", 16, 0) + bytes(8), ValueError, "a size that it cannot have"),
        (struct.pack(">i", 24) + struct.pack("<QQII", 16, 0, 100, 16), ValueError, "longer than all of them"),
        (struct.pack(">i", 32) + struct.pack("<QQIIQ", 24, 0, 9, 24, 0), ValueError, "not inside them"),
    ],
)
def test_what_are_no_rows_is_refused(data: bytes, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        _table(data, _TEXT)
