"""The columnar exchange without Spark: each shard unpacks the rows that map tasks packed for it."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.schema import Accumulator, AccumulatorKind, Field, StateSchema
from spark_jobs.worker import exchange
from spark_jobs.worker.batch import BatchHeader
from spark_jobs.worker.exchange import (
    END,
    HASH_COLUMN,
    HEADER,
    ROUTE_COLUMN,
    ExchangeTask,
    unpack,
    unpack_shards,
)
from spark_jobs.worker.routing import murmur3_int
from store_actors.messages import ShardInput
from tests.unit.shuffled_rows import KEYED, Row, batch_of, hash_of, shuffle

HEADERS = [BatchHeader("query", "run", 3, shard, late_ms=5, evict_ms=7, time_ms=9) for shard in range(4)]


def totals(inputs: list[ShardInput]) -> dict[tuple[Any, Any], tuple[int, int | None]]:
    groups: dict[tuple[Any, Any], tuple[int, int | None]] = {}
    for shard_input in inputs:
        rows = [(row["k"], row["s"], 1, row["v"]) for row in shard_input.raw.to_pylist()]
        rows += [(row["k"], row["s"], row["n"], row["t"]) for row in shard_input.partial.to_pylist()]
        for k, s, n, t in rows:
            count, total = groups.get((k, s), (0, None))
            groups[k, s] = (count + n, total if t is None else t + (total or 0))
    return groups


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.one_of(st.none(), st.integers(-5, 40)),
            st.one_of(st.none(), st.sampled_from(["", "a", "ä" * 50])),
            st.one_of(st.none(), st.integers(-9, 9)),
        ),
        max_size=200,
    ),
    shards=st.integers(1, 7),
    combine=st.booleans(),
    chunk_bytes=st.sampled_from([1, 200, 1 << 15]),
    block_rows=st.sampled_from([1, 30, 1 << 18]),
)
def test_every_row_reaches_the_shard_of_its_hash_once(
    rows: list[Row], shards: int, combine: bool, chunk_bytes: int, block_rows: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_WORTHWHILE", 1.0 if combine else -1.0)
        patch.setattr(exchange, "_CHUNK_BYTES", chunk_bytes)
        patch.setattr(exchange, "_BLOCK_ROWS", block_rows)
        tasks = [[batch_of(rows[:50]), batch_of(rows[50:60])], [batch_of(rows[60:])]]
        received = [task.rows for task in shuffle(KEYED, tasks, shards)]
    assert sum(shard_input.rows_read for shard_input in received) == len(rows)
    assert all((shard_input.raw if combine else shard_input.partial).num_rows == 0 for shard_input in received)
    expected: dict[tuple[Any, Any], tuple[int, int | None]] = {}
    for k, s, v in rows:
        n, t = expected.get((k, s), (0, None))
        expected[k, s] = (n + 1, t if v is None else v + (t or 0))
    assert totals(received) == expected
    for shard, shard_input in enumerate(received):
        for k, s in totals([shard_input]):
            assert hash_of((k, s, 0)) % shards == shard


def test_blocks_are_combined_where_groups_repeat() -> None:
    distinct = [(int(k), None, 1) for k in np.arange(40_000)]
    repeated = [(int(k) % 1000, None, 1) for k in np.arange(40_000)]
    (spread,) = [task.rows for task in shuffle(KEYED, [[batch_of(distinct)]], 1)]
    (dense,) = [task.rows for task in shuffle(KEYED, [[batch_of(repeated)]], 1)]
    assert (spread.raw.num_rows, spread.partial.num_rows) == (40_000, 0)
    assert (dense.raw.num_rows, dense.partial.num_rows) == (0, 1000)
    assert spread.rows_read == dense.rows_read == 40_000


def marker_batch(source: int, chunk: bytes | None = None) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "rows_read": pa.array([0], pa.int64()),
            "input": pa.array([0], pa.int8()),
            "source": pa.array([source], pa.int16()),
            "chunk": pa.array([chunk], pa.binary()),
        }
    )


def header_batch(header: BatchHeader) -> pa.RecordBatch:
    return marker_batch(HEADER, json.dumps(asdict(header)).encode())


def test_the_first_row_of_a_partition_has_the_batchs_header() -> None:
    header = BatchHeader("query", "run", 3, 1, late_ms=5, evict_ms=7, time_ms=9, former_time_ms=8)
    received = unpack([header_batch(header), marker_batch(END)], KEYED)
    assert (received.header, received.rows.rows_read) == (header, 0)
    assert unpack([], KEYED).header is None


def test_rows_of_a_task_that_was_killed_are_not_taken_for_all_of_them() -> None:
    first, second = (BatchHeader("query", "run", 3, shard, 5, 7, 9, 8) for shard in (1, 2))
    sent = [header_batch(first), marker_batch(END), header_batch(second)]
    whole = unpack_shards(sent, KEYED)
    assert next(whole).header == first
    with pytest.raises(EOFError, match="the rows of shard 2 ended in the middle of batch 3"):
        next(whole)


@settings(deadline=None)
@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_a_task_separates_its_shards_wherever_arrow_batches_end(size: int, dice: random.Random) -> None:
    rows: list[Row] = [(dice.randrange(9), None, value) for value in range(50)]
    sent = list(ExchangeTask(KEYED, 4)(iter([batch_of(rows[:20]), batch_of(rows[20:])])))
    of_shards = [pa.Table.from_batches([header_batch(HEADERS[shard])]) for shard in range(4)]
    for batch in sent:
        for index, route in enumerate(batch.column(ROUTE_COLUMN).to_pylist()):
            shard = murmur3_int(route) % 4
            of_shards[shard] = pa.concat_tables(
                [of_shards[shard], pa.Table.from_batches([batch.slice(index, 1).drop_columns([ROUTE_COLUMN])])],
                promote_options="permissive",
            )
    order = dice.sample(range(4), 4)
    end = pa.Table.from_batches([marker_batch(END)])
    ended = [table for shard in order for table in (of_shards[shard], end)]
    task = pa.concat_tables(ended, promote_options="permissive").combine_chunks()
    received = list(unpack_shards(task.to_batches(max_chunksize=size), KEYED))
    assert [part.header for part in received] == [HEADERS[shard] for shard in order]
    separate = shuffle(KEYED, [[batch_of(rows[:20]), batch_of(rows[20:])]], 4)
    for shard, part in zip(order, received, strict=True):
        assert totals([part.rows]) == totals([separate[shard].rows])
        assert part.rows.rows_read == separate[shard].rows.rows_read


def test_rows_that_arrow_could_not_count_together_stay_in_pieces() -> None:
    collect = Accumulator(AccumulatorKind.COLLECT_LIST, ("t",), (Field("a0_values", "list<string>", False),))
    schema = StateSchema((Field("k", "string"),), (Field("t", "string"),), (collect,), None, None, "update")
    rows = pa.record_batch({"k": ["a", "b"], "a0_values": [["x" * 30], ["y" * 30, "z"]]}, schema=schema.row_schema())
    sent = pa.record_batch(
        {
            "rows_read": pa.array([2], pa.int64()),
            "input": pa.array([1], pa.int8()),
            "source": pa.array([0], pa.int16()),
            "chunk": pa.array([rows.serialize().to_pybytes()]),
        }
    )
    whole = unpack([sent] * 6, schema).rows.partial
    received = unpack([sent] * 6, schema, 3 * rows.nbytes).rows.partial
    assert [len(chunk) for chunk in received.column("a0_values").chunks] == [6, 6]
    assert (whole.column("a0_values").num_chunks, received) == (1, whole)


def test_a_shard_without_rows_gets_empty_tables_of_the_right_types() -> None:
    (empty,) = shuffle(KEYED, [], 1)
    assert (empty.rows.raw.schema, empty.rows.partial.schema) == (KEYED.raw_schema(), KEYED.row_schema())
    assert (empty.rows.rows_read, empty.header) == (0, None)


def test_timestamps_keep_their_instant_in_any_session_time_zone() -> None:
    schema = StateSchema((Field("k", "timestamp"),), (), KEYED.accumulators[:1], None, None, "update")
    column = pa.array([1_700_000_000_000_000], pa.timestamp("us", tz="Europe/Berlin"))
    batch = pa.record_batch([column, pa.array([7], pa.int32())], names=["k", HASH_COLUMN])
    (task,) = shuffle(schema, [[batch]], 1)
    assert task.rows.raw.column("k").cast(pa.int64()).to_pylist() == [1_700_000_000_000_000]
    assert task.rows.raw.schema == schema.raw_schema()
