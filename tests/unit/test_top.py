"""First rows of each partition: order of values, replayed cases, and a shard against plain lists."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import cmp_to_key
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from coordinator.model.errors import InvalidRequestError, StateMismatchError
from coordinator.model.schema import Field, StateSchema
from store_actors.engine.versions import CHANGE_COLUMN, UPDATED, Change, Compaction
from store_actors.messages import ShardInput
from store_actors.operators.top import FirstShard, TopShard, top_shard
from store_actors.operators.top_schema import RANK_COLUMN, top_schema
from tests.unit.freezing import FreezingMachine

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Row = dict[str, Any]
Order = list[dict[str, Any]]


def by(column: str, *, descending: bool = False, nulls_first: bool = False) -> dict[str, Any]:
    return {"column": column, "descending": descending, "nulls_first": nulls_first}


def at(seconds: float | None) -> datetime | None:
    return None if seconds is None else EPOCH + timedelta(seconds=seconds)


def input_of(schema: StateSchema, rows: list[Row]) -> ShardInput:
    return ShardInput.of_raw(schema, pa.RecordBatch.from_pylist(rows, schema=schema.raw_schema()))


def comparable(value: Any) -> Any:
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value)
    return value.encode() if isinstance(value, str) else value


def comparison(order: Order) -> Callable[[Row, Row], int]:
    """Which of two rows comes first: below 0 the left one."""

    def compare(left: Row, right: Row) -> int:
        for one in order:
            a, b = left[one["column"]], right[one["column"]]
            if a is None or b is None:
                if (a is None) != (b is None):
                    return -1 if (a is None) == one["nulls_first"] else 1
                continue
            if comparable(a) != comparable(b):
                return -1 if (comparable(a) < comparable(b)) != one["descending"] else 1
        return 0

    return compare


def in_order(rows: Iterable[Row], order: Order, ties: str) -> list[Row]:
    """Rows, given in the order of arrival, in that of the table."""
    arrived = list(rows)
    return sorted(arrived if ties == "first" else reversed(arrived), key=cmp_to_key(comparison(order)))


@dataclass(frozen=True)
class Kept:
    row: Row
    arrival: int
    rank: int


@dataclass
class Model:
    """The table as lists, with what a batch emits: (id, rank) pairs."""

    schema: StateSchema
    tables: dict[Any, list[Kept]] = field(default_factory=dict)
    watermark_ms: int = 0
    arrivals: int = 0

    def partition(self, row: Row) -> Any:
        return tuple(row[one.name] for one in self.schema.input_keys)

    def expired(self, row: Row, watermark_ms: int) -> bool:
        expiry = row[self.schema.expiry_key] if self.schema.expiry_key else None
        return expiry is not None and expiry <= EPOCH + timedelta(milliseconds=watermark_ms)

    def ordered(self, kept: list[Kept]) -> list[Kept]:
        by_id = {one.row["id"]: one for one in kept}
        arrived = sorted(kept, key=lambda one: one.arrival)
        options = self.schema.options
        ordered = in_order((one.row for one in arrived), options["order"], options["ties"])
        return [replace(by_id[row["id"]], rank=place + 1) for place, row in enumerate(ordered)]

    def after(self, rows: list[Row], watermark_ms: int) -> tuple[Model, set[tuple[int, int | None]], int]:
        """(next version, what is emitted, late rows)"""
        options = self.schema.options
        on_time = [row for row in rows if not self.expired(row, self.watermark_ms)]
        tables, emitted = dict(self.tables), set[tuple[int, int | None]]()
        for number, row in enumerate(on_time):
            tables[self.partition(row)] = [*tables.get(self.partition(row), []), Kept(row, self.arrivals + number, 0)]
        by_key = self.schema.expiry_key in {one.name for one in self.schema.keys}
        has_rank = RANK_COLUMN in self.schema.row_schema().names
        for key, kept in list(tables.items()):
            former = {one.row["id"]: one.rank for one in self.tables.get(key, [])}
            chosen = self.ordered(kept)[: options["n"]]
            gone = [one for one in chosen if self.expired(one.row, watermark_ms)]
            left = self.ordered([one for one in chosen if one not in gone])
            final = chosen if by_key else [*left, *(one for one in gone if one.row["id"] not in former)]
            for one in final:
                before = former.get(one.row["id"])
                if before is None or (has_rank and before != one.rank):
                    emitted.add((one.row["id"], one.rank if has_rank else None))
            if options["emit_removed"]:
                stayed = {one.row["id"] for one in (chosen if by_key else left)}
                emitted |= {(number, None) for number in former if number not in stayed}
            tables[key] = left
        left_over = {key: kept for key, kept in tables.items() if kept}
        after = Model(self.schema, left_over, watermark_ms, self.arrivals + len(on_time))
        return after, emitted, len(rows) - len(on_time)

    def rows(self) -> set[tuple[int, int | None]]:
        has_rank = RANK_COLUMN in self.schema.row_schema().names
        return {(one.row["id"], one.rank if has_rank else None) for kept in self.tables.values() for one in kept}


def pairs(table: pa.Table) -> set[tuple[int, int | None]]:
    found = [(row["id"], row.get(RANK_COLUMN)) for row in table.to_pylist()]
    assert len(set(found)) == len(found), "a row appears twice"
    return set(found)


# -- the order of values ----------------------------------------------------------------------------------------------

VALUES: dict[str, list[Any]] = {
    "bool": [False, True],
    "int8": [-128, -1, 0, 1, 127],
    "int64": [-(2**63), -5, 0, 7, 2**63 - 1],
    "float32": [-math.inf, -1.5, -0.0, 0.0, 2.5, math.inf, math.nan],
    "float64": [-math.inf, -1e300, -5e-324, -0.0, 0.0, 5e-324, 3.0, math.inf, math.nan],
    "decimal(38,0)": [Decimal(-(10**37)), Decimal(-(2**64)), Decimal(-1), Decimal(0), Decimal(2**63), Decimal(2**64)],
    "decimal(9,2)": [Decimal("-1.10"), Decimal("-1.01"), Decimal("0.00"), Decimal("99.99")],
    "string": ["", "\x00", "Z", "a", "ab", "b", "ä", "é", "￿", "😀"],
    "binary": [b"", b"\x00", b"\x00\x00", b"\x7f", b"\x80", b"\xff"],
    "date32": [date(1900, 1, 1), date(1970, 1, 1), date(2040, 6, 1)],
    "timestamp": [datetime(1900, 1, 1, tzinfo=UTC), EPOCH, datetime(2040, 6, 1, tzinfo=UTC)],
    "timestamp_ntz": [datetime(1900, 1, 1), datetime(2040, 6, 1)],
    "duration": [timedelta(-1), timedelta(0), timedelta(microseconds=1)],
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("nulls_first", [False, True])
@pytest.mark.parametrize("ties", ["first", "last"])
def test_values_of_every_type_come_in_sparks_order(kind: str, descending: bool, nulls_first: bool, ties: str) -> None:
    order = [by("v", descending=descending, nulls_first=nulls_first)]
    schema = top_schema((), (Field("id", "int64"), Field("v", kind)), 5, order, ties=ties)
    chosen = random.Random(f"{kind}{ties}")
    shard, model = TopShard(schema), Model(schema)
    for version in range(1, 6):
        rows = [{"id": version * 100 + place, "v": chosen.choice([None, *VALUES[kind]])} for place in range(4)]
        change = shard.apply(input_of(schema, rows), 0, version)
        shard.commit()
        model, emitted, _ = model.after(rows, 0)
        assert pairs(shard.output(change.delta)) == emitted
        assert pairs(shard.snapshot()) == model.rows()


def test_all_values_of_a_type_are_sorted_alike_by_python_and_the_shard() -> None:
    for kind, values in VALUES.items():
        schema = top_schema((), (Field("id", "int64"), Field("v", kind)), 100, [by("v")])
        rows = [{"id": number, "v": value} for number, value in enumerate(values)]
        mixed = random.Random(7).sample(rows, len(rows))
        shard = TopShard(schema)
        emitted = shard.output(shard.apply(input_of(schema, mixed), 0, 1).delta)
        ranked = [row["id"] for row in sorted(emitted.to_pylist(), key=lambda row: row[RANK_COLUMN])]
        assert ranked == [row["id"] for row in in_order(mixed, [by("v")], "first")], kind


# -- cases ------------------------------------------------------------------------------------------------------------

BIDS = top_schema(
    (Field("auction", "int64"),),
    (Field("bidder", "string"), Field("price", "int64")),
    2,
    [by("price", descending=True)],
)
LATEST = top_schema(
    (Field("user", "string"),),
    (Field("ts", "timestamp"), Field("page", "string")),
    1,
    [by("ts", descending=True)],
    ties="last",
    rank=False,
)


def bids(*rows: tuple[int, str, int]) -> ShardInput:
    return input_of(BIDS, [dict(zip(("auction", "bidder", "price"), row, strict=True)) for row in rows])


def applied(shard: FirstShard | TopShard, rows: ShardInput, watermark_ms: int = 0) -> list[tuple[Any, ...]]:
    change = shard.apply(rows, watermark_ms, shard.version + 1)
    shard.commit()
    return sorted((tuple(row.values()) for row in shard.output(change.delta).to_pylist()), key=repr)


def test_a_batch_emits_new_rows_and_rows_whose_rank_changed() -> None:
    shard = top_shard(BIDS)
    assert applied(shard, bids((1, "a", 10), (1, "b", 20), (2, "c", 5))) == [
        (1, "a", 10, 2),
        (1, "b", 20, 1),
        (2, "c", 5, 1),
    ]
    assert applied(shard, bids((1, "d", 5), (2, "e", 4))) == [(2, "e", 4, 2)]
    assert applied(shard, bids((1, "f", 15))) == [(1, "f", 15, 2)]
    assert applied(shard, bids((1, "g", 30))) == [(1, "b", 20, 2), (1, "g", 30, 1)]
    assert applied(shard, bids()) == []


def test_an_equal_bid_does_not_take_the_place_of_an_earlier_one() -> None:
    shard = top_shard(BIDS)
    assert applied(shard, bids((1, "a", 10), (1, "b", 10), (1, "c", 10))) == [(1, "a", 10, 1), (1, "b", 10, 2)]
    assert applied(shard, bids((1, "d", 10))) == []


def test_removed_rows_are_emitted_with_a_null_rank_if_asked_for() -> None:
    schema = replace(BIDS, options={**BIDS.options, "emit_removed": True})
    shard = top_shard(schema)
    applied(shard, bids((1, "a", 10), (1, "b", 20)))
    assert applied(shard, bids((1, "c", 30))) == [(1, "a", 10, None), (1, "b", 20, 2), (1, "c", 30, 1)]
    single = top_shard(replace(schema, options={**schema.options, "n": 1}))
    applied(single, bids((1, "a", 10)))
    assert applied(single, bids((1, "c", 30))) == [(1, "a", 10, None), (1, "c", 30, 1)]


def visits(*rows: tuple[str | None, float | None, str]) -> ShardInput:
    return input_of(LATEST, [{"user": user, "ts": at(seconds), "page": page} for user, seconds, page in rows])


def test_keep_last_keeps_the_newest_row_and_of_equal_times_the_one_that_came_last() -> None:
    shard = top_shard(LATEST)
    assert isinstance(shard, FirstShard)
    assert applied(shard, visits(("u", 5, "x"), ("u", 3, "y"), (None, 1, "z"), ("v", 1, "p"), ("v", 1, "q"))) == [
        ("u", at(5), "x"),
        ("v", at(1), "q"),
        (None, at(1), "z"),
    ]
    assert applied(shard, visits(("u", 4, "late"), ("v", 1, "r"), (None, None, "no time"))) == [("v", at(1), "r")]
    assert applied(shard, visits(("w", None, "first"), ("w", 0, "then"))) == [("w", at(0), "then")]
    assert len(shard) == 4


def test_the_first_of_a_partition_with_ties_for_the_first_stays() -> None:
    shard = top_shard(replace(BIDS, options={**BIDS.options, "n": 1}))
    assert isinstance(shard, FirstShard)
    assert applied(shard, bids((1, "a", 10), (1, "b", 10))) == [(1, "a", 10, 1)]
    assert applied(shard, bids((1, "c", 10))) == []
    assert applied(shard, bids((1, "d", 11))) == [(1, "d", 11, 1)]


def test_columns_that_are_only_ordered_by_are_not_emitted() -> None:
    schema = top_schema((), (Field("id", "int64"),), 1, [by("o0")], order_columns=(Field("o0", "float64"),))
    shard = top_shard(schema)
    assert applied(shard, input_of(schema, [{"id": 1, "o0": 2.0}, {"id": 2, "o0": 1.0}])) == [(2, 1)]


def test_closing_a_window_emits_its_last_ranks_and_nothing_more() -> None:
    schema = top_schema(
        (Field("end", "timestamp"),),
        (Field("id", "int64"), Field("v", "int64")),
        2,
        [by("v")],
        expiry="end",
        delay_ms=0,
    )
    shard = top_shard(schema)
    applied(shard, input_of(schema, [{"end": at(10), "id": 1, "v": 5}, {"end": at(20), "id": 2, "v": 5}]))
    assert applied(shard, input_of(schema, [{"end": at(10), "id": 3, "v": 4}]), 10_000) == [
        (at(10), 1, 5, 2),
        (at(10), 3, 4, 1),
    ]
    assert len(shard) == 1
    change = shard.apply(input_of(schema, [{"end": at(10), "id": 4, "v": 1}]), 20_000, 3)
    assert (change.rows_late, change.rows_removed, len(shard), shard.output(change.delta).num_rows) == (1, 1, 0, 0)


def test_rows_move_up_when_one_before_them_expires() -> None:
    schema = top_schema((), (Field("id", "int64"), Field("ts", "timestamp")), 3, [by("id")], expiry="ts", delay_ms=0)
    shard = top_shard(schema)
    rows = [{"id": number, "ts": at(ts)} for number, ts in ((1, 5), (2, 50), (3, None))]
    applied(shard, input_of(schema, rows))
    assert applied(shard, input_of(schema, []), 5_000) == [(2, at(50), 1), (3, None, 2)]


def test_keep_last_forgets_a_key_by_the_time_of_its_newest_row() -> None:
    schema = replace(LATEST, expiry_key="ts", delay_ms=0)
    shard = top_shard(schema)
    applied(shard, visits(("u", 5, "x")))
    applied(shard, visits(("u", 15, "y")), 5_000)
    assert len(shard) == 1
    applied(shard, visits(), 14_000)
    assert len(shard) == 1
    applied(shard, visits(), 15_000)
    assert len(shard) == 0


def test_options_that_make_no_sense_are_refused() -> None:
    for options in ({"n": 0}, {"ties": "both"}, {"rank": False, "emit_removed": True}):
        with pytest.raises(InvalidRequestError, match="correct the options"):
            top_schema((), (Field("id", "int64"),), **{"n": 3, "order": [by("id")], **options})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="no part of the state"):
        top_shard(top_schema((), (Field("id", "int64"),), 1, [by("missing")]))


def test_state_of_several_rows_is_not_taken_for_that_of_one() -> None:
    change = top_shard(BIDS).apply(bids((1, "a", 10), (1, "b", 20)), 0, 1)
    with pytest.raises(StateMismatchError, match="several rows"):
        top_shard(replace(BIDS, options={**BIDS.options, "n": 1})).load(change.delta, 1, 0)


def test_strings_of_rows_that_left_the_table_are_let_go() -> None:
    for n in (1, 2):
        schema = replace(LATEST, options={**LATEST.options, "n": n})
        shard = top_shard(schema)
        for version in range(1, 60):
            rows = [(f"u{user}", version, f"{version} {user} ".ljust(500, "x")) for user in range(100)]
            applied(shard, visits(*rows))
        assert shard.table.pool.nbytes < 8 << 20
        assert shard.rollback(57)
        written = {page.split()[0] for page in shard.snapshot().column("page").to_pylist()}
        assert written == ({"57"} if n == 1 else {"56", "57"})


def test_a_stream_of_many_batches_equals_pandas() -> None:
    generator = np.random.default_rng(5)
    schema = top_schema((Field("k", "int64"),), (Field("id", "int64"), Field("v", "float64")), 5, [by("v")])
    shard = top_shard(schema)
    everything = []
    for version in range(1, 21):
        size = int(generator.integers(0, 3000))
        batch = pd.DataFrame(
            {
                "k": generator.integers(0, 80, size),
                "id": np.arange(size) + version * 10_000,
                "v": np.round(generator.normal(size=size), 1),
            }
        )
        everything.append(batch)
        rows = pa.RecordBatch.from_pandas(batch, schema=schema.raw_schema(), preserve_index=False)
        shard.apply(ShardInput.of_raw(schema, rows), 0, version)
        shard.commit()
    expected = pd.concat(everything).sort_values("v", kind="stable").groupby("k").head(5)
    expected[RANK_COLUMN] = expected.groupby("k").cumcount() + 1
    got = shard.snapshot().select(["k", "id", "v", RANK_COLUMN]).to_pandas().sort_values(["k", RANK_COLUMN])
    assert got.values.tolist() == expected.sort_values(["k", RANK_COLUMN]).values.tolist()


# -- against lists ----------------------------------------------------------------------------------------------------

COLUMNS = (
    Field("id", "int64"),
    Field("ts", "timestamp"),
    Field("f", "float64"),
    Field("s", "string"),
    Field("d", "decimal(30,2)"),
)
ORDERS = st.lists(
    st.builds(by, st.sampled_from(["ts", "f", "s", "d"]), descending=st.booleans(), nulls_first=st.booleans()),
    min_size=1,
    max_size=2,
)
ROW = st.fixed_dictionaries(
    {
        "k": st.sampled_from([None, "a", "b", "", "ab"]),
        "end": st.sampled_from([None, *(at(seconds) for seconds in (5, 10, 15, 20))]),
        "ts": st.one_of(st.none(), st.integers(0, 30).map(at)),
        "f": st.sampled_from([None, math.nan, -0.0, 0.0, 1.5, -2.0]),
        "s": st.one_of(st.none(), st.text("abä", max_size=2)),
        "d": st.sampled_from([None, Decimal("-1.00"), Decimal(2**70), Decimal("0.50")]),
    }
)


class TopMachine(FreezingMachine):
    @initialize(
        n=st.integers(1, 4),
        order=ORDERS,
        ties=st.sampled_from(["first", "last"]),
        tell=st.sampled_from(["rank", "removed", "rows"]),
        expiry=st.sampled_from([None, "end", "ts"]),
        partition=st.sampled_from([("k",), ("end", "k"), ("end",), ()]),
    )
    def start(self, n: int, order: Order, ties: str, tell: str, expiry: str | None, partition: tuple[str, ...]) -> None:
        types = {"k": "string", "end": "timestamp"}
        keys = tuple(Field(name, types[name]) for name in partition)
        others = tuple(Field(name, kind) for name, kind in types.items() if name not in partition)
        self.schema = top_schema(
            keys, (*COLUMNS, *others), n, order, ties=ties, rank=tell != "rows", emit_removed=tell == "removed",
            expiry=expiry, delay_ms=None if expiry is None else 0,
        )  # fmt: skip
        self.shard = top_shard(self.schema)
        self.versions = {0: Model(self.schema)}
        self.changes: dict[int, Change] = {}
        self.pending: tuple[Change, Model] | None = None
        self.ids = 0

    @property
    def newest(self) -> Model:
        return self.versions[self.shard.version]

    @precondition(lambda self: self.pending is None)
    @rule(rows=st.lists(ROW, max_size=25), forward=st.sampled_from([0, 0, 1000, 4000]))
    def apply(self, rows: list[Row], forward: int) -> None:
        rows = [{**row, "id": self.ids + place} for place, row in enumerate(rows)]
        self.ids += len(rows)
        model, emitted, late = self.newest.after(rows, self.newest.watermark_ms + forward)
        change = self.shard.apply(input_of(self.schema, rows), model.watermark_ms, self.shard.version + 1)
        assert (change.rows_in, change.rows_late) == (len(rows), late)
        assert pairs(self.shard.output(change.delta)) == emitted
        self.pending = (change, model)

    @precondition(lambda self: self.pending is not None)
    @rule()
    def commit(self) -> None:
        assert self.pending is not None
        change, model = self.pending
        assert self.shard.commit() == change.version
        self.versions[change.version], self.changes[change.version] = model, change
        self.pending = None

    @precondition(lambda self: self.pending is not None)
    @rule()
    def abort(self) -> None:
        self.shard.abort()
        self.pending = None

    @precondition(lambda self: self.pending is None)
    @rule(back=st.integers(0, 3))
    def rollback(self, back: int) -> None:
        version, newest = max(0, self.shard.version - back), self.shard.version
        moved = self.shard.rollback(version)
        assert self.shard.version == (version if moved else newest)

    @precondition(lambda self: self.pending is None)
    @rule()
    def reload(self) -> None:
        fresh = top_shard(self.schema)
        for version in range(1, self.shard.version + 1):
            fresh.load(self.changes[version].delta, version, self.versions[version].watermark_ms)
        self.shard = fresh

    @precondition(lambda self: self.pending is None)
    @rule()
    def reload_from_a_snapshot(self) -> None:
        rows, fresh = self.shard.snapshot(), top_shard(self.schema)
        changes = pa.array(np.full(len(rows), UPDATED, np.int8))
        fresh.load(rows.append_column(CHANGE_COLUMN, changes), self.shard.version, self.newest.watermark_ms)
        self.shard = fresh

    @precondition(lambda self: self.pending is None and self._frozen is None)
    @rule()
    def compact(self) -> None:
        Compaction().run(self.shard)

    @invariant()
    def equals_model(self) -> None:
        model = self.pending[1] if self.pending else self.newest
        assert pairs(self.shard.snapshot()) == model.rows()
        assert len(self.shard) == len(model.rows())
        if not self.pending:
            assert self.shard.watermark_ms == model.watermark_ms


TopMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestTopAgainstLists = TopMachine.TestCase
