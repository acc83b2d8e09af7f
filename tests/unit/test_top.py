"""First rows of each partition: order of values, replayed cases, and a shard against plain lists."""

from __future__ import annotations

import math
import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from msgspec import structs

from coordinator.model.errors import InvalidRequestError, StateMismatchError
from coordinator.model.schema import Field
from store_actors.operators.top import FirstShard, TopShard, top_shard
from store_actors.operators.top_schema import top_schema
from tests.unit.top_machine import EPOCH, TopModel, by, input_of, pairs

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
    chance = random.Random(f"{kind}{ties}")
    shard, model = TopShard(schema), TopModel(schema)
    for version in range(1, 6):
        rows = [{"id": version * 100 + index, "v": chance.choice([None, *VALUES[kind]])} for index in range(4)]
        change = shard.apply(input_of(schema, rows), 0, version)
        shard.commit()
        model, emitted, _ = model.after(rows, 0)
        assert pairs(shard.output(change.delta)) == emitted
        assert pairs(shard.snapshot()) == model.rows()


# -- cases ------------------------------------------------------------------------------------------------------------


def test_columns_that_are_only_ordered_by_are_not_emitted() -> None:
    schema = top_schema((), (Field("id", "int64"),), 1, [by("o0")], order_columns=(Field("o0", "float64"),))
    shard = top_shard(schema)
    change = shard.apply(input_of(schema, [{"id": 1, "o0": 2.0}, {"id": 2, "o0": 1.0}]), 0, 1)
    assert [tuple(row.values()) for row in shard.output(change.delta).to_pylist()] == [(2, 1)]


def test_options_that_make_no_sense_are_refused() -> None:
    for options in ({"n": 0}, {"ties": "both"}):
        with pytest.raises(InvalidRequestError, match="correct the options"):
            top_schema((), (Field("id", "int64"),), **{"n": 3, "order": [by("id")], **options})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="no part of the state"):
        top_shard(top_schema((), (Field("id", "int64"),), 1, [by("missing")]))


def test_state_of_several_rows_is_not_taken_for_that_of_one() -> None:
    schema = top_schema((Field("k", "int64"),), (Field("v", "int64"),), 2, [by("v")])
    change = top_shard(schema).apply(input_of(schema, [{"k": 1, "v": 10}, {"k": 1, "v": 20}]), 0, 1)
    of_one = top_shard(structs.replace(schema, options={**schema.options, "n": 1}))
    assert isinstance(of_one, FirstShard)
    with pytest.raises(StateMismatchError, match="several rows"):
        of_one.load(change.delta, 1, 0)
