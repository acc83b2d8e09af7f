"""More text than Arrow counts in one array: tables come in pieces, on every way out of a shard and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, permutations
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.identities import StateStoreId
from coordinator.model.schema import Accumulator, Field, OperatorKind, StateSchema
from spark_jobs.worker.import_task import in_pieces as import_pieces
from store_actors.engine.pieces import batches, cut
from store_actors.keyed.read_handle import BATCH_ROWS
from store_actors.keyed.shard import KeyedShard
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.operators.deduplicate import DeduplicateShard
from store_actors.operators.join import JoinShard
from store_actors.operators.join_schema import join_schema
from store_actors.operators.top import top_shard
from store_actors.operators.top_schema import top_schema
from store_actors.serving import files
from store_actors.serving.files import as_snapshot, encode_snapshot, identity_in_state

#: Bytes of a piece in these tests, and the number of texts.
LIMIT, COUNT = 5000, 60
TEXTS = [f"{number:02}" + "x" * 400 for number in range(COUNT)]
#: The places of texts that no piece has room for.
LARGE = {"none": (), "first": (0,), "last": (COUNT - 1,), "middle": (30, 31), "many": range(0, COUNT, 7)}


@pytest.fixture(params=LARGE.values(), ids=LARGE)
def texts(request: pytest.FixtureRequest) -> list[str]:
    """Texts in their order, some of them longer than a piece."""
    return [text + "y" * LIMIT if number in request.param else text for number, text in enumerate(TEXTS)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 100))
def test_pieces_are_as_large_as_they_may_be(sizes: list[int], limit: int) -> None:
    pieces = list(cut(np.array(sizes, np.int64), limit))
    assert [size for piece in pieces for size in sizes[piece]] == sizes
    for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
        assert sum(sizes[piece]) <= limit or piece.stop - piece.start == 1
        if following is not None:
            assert sum(sizes[piece]) + sizes[following.start] > limit


@settings(deadline=None)
@given(st.lists(st.lists(st.text(max_size=9), max_size=5), max_size=6), st.integers(1, 200))
def test_batches_have_all_rows_in_order(chunks: list[list[str]], limit: int) -> None:
    table = pa.table({"a": pa.chunked_array(chunks, pa.string())})
    assert pa.Table.from_batches(batches(table, limit), table.schema) == table
    for batch in batches(table, limit):
        assert batch.nbytes <= limit or batch.num_rows <= 5


def in_pieces(table: pa.Table, *names: str) -> None:
    """Check that each column has several chunks, all small."""
    for name in names:
        chunks = table.column(name).chunks
        assert len(chunks) > 1, name
        assert all(chunk.nbytes <= LIMIT or len(chunk) == 1 for chunk in chunks), name


def small(shard: Any) -> Any:
    """Return the shard, with small pieces."""
    tables = [side.table for side in shard._sides] if isinstance(shard, JoinShard) else [shard.table]
    for table in tables:
        table.piece_bytes = table.snapshot_bytes = LIMIT
    return shard


def raw(schema: StateSchema, **columns: Sequence[object]) -> ShardInput:
    """Return a batch in several chunks."""
    table = pa.table({name: pa.array(values) for name, values in columns.items()}).cast(schema.raw_schema())
    half = table.num_rows // 2
    table = pa.concat_tables([table.slice(0, half), table.slice(half)])
    return ShardInput((table, *(other.empty_table() for other in schema.input_schemas()[1:])), table.num_rows)


SUMS = StateSchema(
    keys=(Field("k", "string"),),
    inputs=(Field("v", "string"),),
    accumulators=(
        Accumulator(AccumulatorKind.MAX, ("v",), (Field("a0_max", "string"),)),
        Accumulator(AccumulatorKind.COLLECT_LIST, ("v",), (Field("a1_values", "list<string>", False),)),
    ),
    expiry_key=None,
    delay_ms=None,
    output_mode="update",
)


def test_an_aggregation_emits_its_groups_in_pieces(texts: list[str]) -> None:
    shard = small(AggregateShard(SUMS))
    change = shard.apply(raw(SUMS, k=texts * 2, v=texts[::-1] * 2), 0, 1)
    shard.commit()
    expected = {(key, value, (value, value)) for key, value in zip(texts, texts[::-1], strict=True)}
    reloaded = small(AggregateShard(SUMS))
    reloaded.load(change.delta, 1, 0)
    for table in (change.delta, shard.snapshot(), reloaded.snapshot()):
        in_pieces(table, "k", "a0_max", "a1_values")
        assert {(row["k"], row["a0_max"], tuple(row["a1_values"])) for row in table.to_pylist()} == expected
    partial = ShardInput((SUMS.raw_schema().empty_table(), shard.snapshot()), 1)
    assert shard.apply(partial, 0, 2).delta.num_rows == COUNT
    assert {tuple(row["a1_values"]) for row in shard.snapshot().to_pylist()} == {(text,) * 4 for text in texts}


DUPLICATES = StateSchema(
    (Field("k", "string"), Field("t", "timestamp")), (Field("c0", "string"),), (), "t", 0, "append",
    operator=OperatorKind.DEDUPLICATE, options={"late_us": 0},
)  # fmt: skip
TIMES = np.arange(1, COUNT + 1).astype("datetime64[s]")


@pytest.mark.parametrize("room", [-1, 0, 1])
def test_small_pieces_of_an_epoch_are_one_record_batch_of_its_file(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    shard = DeduplicateShard(DUPLICATES)
    shard.open(1)
    for text, time in zip(TEXTS, TIMES, strict=True):
        shard.fold(raw(DUPLICATES, k=[text, text], t=[time, time], c0=[text, "second"]))
    change = shard.seal(0)
    monkeypatch.setattr(files, "PIECE_BYTES", change.delta.nbytes + room)
    data, _ = files.encode_delta(change, DUPLICATES, {})
    with pa.ipc.open_file(data) as file:
        assert file.num_record_batches == (COUNT if room < 0 else 1)
        assert file.read_all().equals(change.delta)
    assert change.delta["k"].to_pylist() == change.delta["c0"].to_pylist() == TEXTS


def test_a_deduplication_emits_its_first_rows_in_pieces(texts: list[str]) -> None:
    schema = DUPLICATES
    shard = small(DeduplicateShard(schema))
    rows = raw(schema, k=texts, t=TIMES, c0=texts[::-1])
    twice = ShardInput((pa.concat_tables([rows.raw, rows.raw]),), 2 * COUNT)
    change = shard.apply(twice, 0, 1)
    shard.commit()
    in_pieces(change.delta, "k")
    output = shard.output(change.delta)
    assert list(zip(output["k"].to_pylist(), output["c0"].to_pylist(), strict=True)) == [
        *zip(texts, texts[::-1], strict=True)
    ]
    closed = shard.apply(raw(schema, k=[], t=np.array([], "datetime64[s]"), c0=[]), 10**6, 2)
    in_pieces(closed.delta, "k")
    assert (closed.rows_removed, len(shard)) == (COUNT, 0)


@pytest.mark.parametrize("n", [1, 2])
def test_first_rows_come_in_pieces(texts: list[str], n: int) -> None:
    order = [{"column": "v", "descending": True, "nulls_first": False}]
    schema = top_schema((Field("k", "string"),), (Field("v", "string"),), n, order)
    shard = small(top_shard(schema))
    change = shard.apply(raw(schema, k=texts * 2, v=texts + texts[::-1]), 0, 1)
    shard.commit()
    in_pieces(change.delta, "k", "v")
    largest = {key: max(key, value) for key, value in zip(texts, texts[::-1], strict=True)}
    rows_of_key = Counter(key for key in change.delta["k"].to_pylist())
    assert rows_of_key == dict.fromkeys(texts, n)
    assert {(row["k"], row["v"]) for row in shard.snapshot().to_pylist()} >= set(largest.items())


@pytest.mark.parametrize("condition", [False, True])
def test_a_join_meets_and_emits_in_pieces(texts: list[str], condition: bool) -> None:
    options: dict[str, Any] = {"join_type": "full_outer"}
    if condition:
        options["condition"] = {"op": ">=", "args": [{"op": "column", "name": "l0"}, {"op": "column", "name": "r0"}]}
    schema = join_schema((Field("k0", "string"),), (Field("l0", "string"),), (Field("r0", "string"),), options)
    shard = small(JoinShard(schema))
    sides = [pa.table({"k0": ["k"] * COUNT, name: texts}) for name in ("l0", "r0")]
    change = shard.apply(ShardInput(tuple(sides), 2 * COUNT), 0, 1)
    shard.commit()
    in_pieces(change.emitted, "l0", "r0")
    expected = {(left, right) for left in texts for right in texts if not condition or left >= right}
    assert set(zip(*(change.emitted[name].to_pylist() for name in ("l0", "r0")), strict=True)) == expected
    reloaded = small(JoinShard(schema))
    reloaded.load(change.delta, 1, 0)
    in_pieces(reloaded.snapshot(), "l0", "r0")
    assert len(reloaded) == 2 * COUNT


def test_a_keyed_store_is_read_in_pieces(texts: list[str]) -> None:
    shard = KeyedShard((Field("k", "string"),), (Field("v", "string"), Field("at", "int64")), "at")
    small_table = shard._table.table
    small_table.piece_bytes = LIMIT
    handle = shard.begin(0)
    rows = pa.table({"k": texts, "v": texts[::-1], "at": range(COUNT)})
    handle.put(rows)
    expected = {row["k"]: row["v"] for row in rows.to_pylist()}
    tables = [handle.updates(), handle.due(COUNT), handle.multi_get(rows.select(["k"])), handle.prepare().delta]
    handle.commit()
    tables += [shard.snapshot(), shard.read().range_scan("k").read_all()]
    for table in tables:
        in_pieces(table, "v")
        assert {row["k"]: row["v"] for row in table.to_pylist()} == expected
    assert tables[-1]["k"].to_pylist() == texts
    assert shard.read().range_scan("k", texts[3], texts[9]).read_all()["k"].to_pylist() == texts[3:9]
    handle = shard.begin(1)
    assert handle.remove_where(lambda batch: pa.array([key < texts[20] for key in batch["k"].to_pylist()])) == 20
    assert handle.multi_get(rows.select(["k"]))["__found"].to_pylist() == [False] * 20 + [True] * (COUNT - 20)


#: Numbers of 8 bytes in a piece; in their tables there are as many, one more or less, one or none, in every order.
NUMBERS = 100
ORDERS = list(permutations((0, 1, NUMBERS - 1, NUMBERS, NUMBERS + 1)))


def numbers_of(counts: Sequence[int]) -> list[pa.Table]:
    """Return a table of each of these numbers of rows, all with other numbers."""
    return [pa.table({"n": np.arange(count) + 1000 * place}) for place, count in enumerate(counts)]


def test_imported_rows_are_in_pieces_of_the_least_size() -> None:
    for counts in ORDERS:
        tables = numbers_of(counts)
        batches_of = (pa.record_batch(table.columns[0].chunks, ["n"]) for table in tables)
        pieces = list(import_pieces(batches_of, least_bytes=8 * NUMBERS))
        assert pa.concat_tables(pieces).equals(pa.concat_tables(tables))
        assert all(piece.num_rows >= NUMBERS for piece in pieces[:-1])
        assert all(piece.num_rows - len(piece["n"].chunks[-1]) < NUMBERS for piece in pieces)


def test_a_snapshot_has_all_rows_in_whatever_sizes_they_come() -> None:
    schema = StateSchema.keyed((Field("n", "int64"),), ())
    identity = identity_in_state(StateStoreId("s", 0, 0), "a")
    piece_bytes = as_snapshot(*numbers_of([NUMBERS]), schema).nbytes
    for counts in ORDERS:
        tables = [table.cast(schema.row_schema()) for table in numbers_of(counts)]
        files = list(encode_snapshot(tables, 1, 0, schema, {}, identity, piece_bytes))
        stored = [pa.ipc.open_file(file.data).read_all()["n"].to_pylist() for file in files]
        assert [len(rows) for rows in stored] == [file.rows for file in files]
        assert list(chain(*stored)) == pa.concat_tables(tables)["n"].to_pylist()
        assert all(len(rows) >= NUMBERS for rows in stored[:-1])


@pytest.mark.parametrize("count", [0, 1, BATCH_ROWS - 1, BATCH_ROWS, BATCH_ROWS + 1, 2 * BATCH_ROWS + 1])
def test_a_keyed_store_is_scanned_and_cleared_around_the_rows_of_a_batch(count: int) -> None:
    shard = KeyedShard((Field("k", "int64"),), (Field("v", "int64"),))
    numbers = np.arange(count)
    handle = shard.begin(0)
    handle.put(pa.table({"k": numbers, "v": -numbers}))
    handle.prepare()
    handle.commit()
    for scan in (shard.read().iterator(), shard.read().range_scan("k", 0)):
        found = list(scan)
        assert all(0 < batch.num_rows <= BATCH_ROWS for batch in found)
        assert sorted(chain(*(batch["k"].to_pylist() for batch in found))) == numbers.tolist()
    handle = shard.begin(1)
    assert handle.remove_where(lambda batch: batch["k"].to_numpy() % 2 == 0) == (count + 1) // 2
    assert sorted(handle.iterator().read_all()["k"].to_pylist()) == numbers[1::2].tolist()
