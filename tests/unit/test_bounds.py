"""Users are warned of operators whose state grows without a bound, and of no others."""

from __future__ import annotations

import linecache
import warnings

import pytest
from msgspec import structs

from coordinator.model.schema import Field, OperatorKind, StateSchema
from spark_jobs.plan.operator_rules import UnboundedStateWarning, unbounded_reason, warn_if_unbounded
from store_actors.operators.join_schema import join_schema
from store_actors.operators.top_schema import top_schema

KEY, TIME = Field("k0", "string"), Field("k1", "timestamp")
AGGREGATION = StateSchema((KEY,), (), (), None, None, "update")
MARKED = structs.replace(AGGREGATION, delay_ms=1000)
ENDING = structs.replace(MARKED, keys=(KEY, TIME), expiry_key="k1")
DUPLICATES = structs.replace(AGGREGATION, operator=OperatorKind.DEDUPLICATE, output_mode="append")
VALUE = Field("c0", "int64")
ORDER = [{"column": "c0", "descending": True, "nulls_first": False}]


def join(left: str | None, right: str | None) -> StateSchema:
    sides = [(Field(f"{side}_t", "timestamp"),) for side in "lr"]
    return join_schema((KEY,), sides[0], sides[1], {"join_type": "inner", "output": [[], []], "expiry": [left, right]})


GROWING = {
    "aggregation without a watermark": (AGGREGATION, "every group.*call withWatermark.*group by a window"),
    "aggregation with a watermark of no grouping column": (MARKED, "every group.*add its column, or a window"),
    "duplicates without a watermark": (DUPLICATES, "call withWatermark, and use dropDuplicatesWithinWatermark"),
    "duplicates without event time": (
        structs.replace(DUPLICATES, delay_ms=1000),
        "there is a watermark, use dropDuplicatesWithinWatermark, or have the event time among",
    ),
    "join": (join(None, None), "its left and its right side for ever.*withWatermark on both.*how far apart"),
    "join, left side": (join(None, "r_t"), "its left side for ever"),
    "join, right side": (join("l_t", None), "its right side for ever"),
    "topN": (top_schema([KEY], [VALUE], 3, ORDER), "topN.*window of it, to the partitioning columns"),
    "keepLast": (
        top_schema([KEY], [VALUE], 1, ORDER, ties="last", rank=False),
        "keepLast.*window of it, to the keys",
    ),
}
BOUNDED = {
    "windows": ENDING,
    "one group of everything": structs.replace(AGGREGATION, keys=()),
    "complete mode": structs.replace(AGGREGATION, output_mode="complete"),
    "duplicates with event time": structs.replace(ENDING, operator=OperatorKind.DEDUPLICATE),
    "join in a range of time": join("l_t", "r_t"),
    "first rows of everything": top_schema([], [VALUE], 3, ORDER),
    "first rows of windows": top_schema([KEY, TIME], [VALUE], 3, ORDER, expiry="k1", delay_ms=1000),
    "limit": structs.replace(AGGREGATION, keys=(), operator=OperatorKind.LIMIT),
    "state of the user's own function": structs.replace(AGGREGATION, operator=OperatorKind.GROUP_STATE),
}


@pytest.mark.parametrize("case", GROWING)
def test_the_warning_of_a_state_that_nothing_ends_names_operator_state_and_remedy(case: str) -> None:
    schema, text = GROWING[case]
    with pytest.warns(UnboundedStateWarning, match=rf"{text}.*\[state=`clicks`\]$"):
        warn_if_unbounded(schema, "clicks")


@pytest.mark.parametrize("case", BOUNDED)
def test_bounded_state_gives_no_warning(case: str) -> None:
    assert unbounded_reason(BOUNDED[case]) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_unbounded(BOUNDED[case], "clicks")


def test_the_warning_points_to_the_line_of_the_caller() -> None:
    with pytest.warns(UnboundedStateWarning) as caught:
        warn_if_unbounded(AGGREGATION, "clicks")
    assert caught[0].filename == __file__
    assert linecache.getline(__file__, caught[0].lineno).strip() == 'warn_if_unbounded(AGGREGATION, "clicks")'
