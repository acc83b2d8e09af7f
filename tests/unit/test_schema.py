"""A schema's JSON, which every file carries: it is written as before, and all older forms are read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from coordinator.model.schema import Accumulator, AccumulatorKind, EventTime, Field, OperatorKind, StateSchema
from coordinator.model.watermarks import Watermarks

TOP = StateSchema(
    keys=(Field("k0", "string"), Field("__row", "int64", False)),
    inputs=(Field("c0", "timestamp"),),
    accumulators=(Accumulator(AccumulatorKind.VALUE, (), (Field("c0", "timestamp"),)),),
    expiry_key="k0_1",
    delay_ms=5000,
    output_mode="update",
    operator=OperatorKind.TOP,
    options={"n": 2, "ties": "first"},
    event_time=EventTime(("t/0", "t/1"), ("below",), ("below/0",), "max"),
)
NO_EVENT_TIME = StateSchema((Field("k0", "string"),), (), (), None, None, "update", event_time=EventTime())
UNNAMED = StateSchema((Field("k0", "string"),), (), (), None, 7, "update")

#: JSON of the code before EventTime, whose fields were options then.
WRITTEN = {
    TOP: (
        '{"keys": [{"name": "k0", "type": "string", "nullable": true, "spark": null}, {"name": "__row", "type": "int64", "nullable": '
        'false, "spark": null}], "inputs": [{"name": "c0", "type": "timestamp", "nullable": true, "spark": null}], "accumulators": '
        '[{"kind": "value", "inputs": [], "state": [{"name": "c0", "type": "timestamp", "nullable": true, "spark": null}], "meaning": '
        '"", "cast": ""}], "expiry_key": "k0_1", "delay_ms": 5000, "output_mode": "update", "operator": "top", "options": {"n": 2, '
        '"ties": "first", "sources": ["t/0", "t/1"], "upstream": ["below"], "upstream_sources": ["below/0"], "policy": "max"}}'
    ),
    NO_EVENT_TIME: (
        '{"keys": [{"name": "k0", "type": "string", "nullable": true, "spark": null}], "inputs": [], "accumulators": [], '
        '"expiry_key": null, "delay_ms": null, "output_mode": "update", "operator": "aggregate", "options": {"sources": [], '
        '"upstream": [], "upstream_sources": [], "policy": "min"}}'
    ),
    UNNAMED: (
        '{"keys": [{"name": "k0", "type": "string", "nullable": true, "spark": null}], "inputs": [], "accumulators": [], '
        '"expiry_key": null, "delay_ms": 7, "output_mode": "update", "operator": "aggregate", "options": {}}'
    ),
}


@pytest.mark.parametrize("schema", WRITTEN)
def test_the_json_is_unchanged(schema: StateSchema) -> None:
    assert json.dumps(schema.to_json()) == WRITTEN[schema]
    assert StateSchema.from_json(json.loads(WRITTEN[schema])) == schema


def test_files_from_before_operators_had_kinds_and_options_are_read() -> None:
    data = json.loads(WRITTEN[UNNAMED])
    del data["operator"], data["options"]
    assert StateSchema.from_json(data) == UNNAMED


def test_in_complete_mode_nothing_ends_and_only_sessions_of_event_time_have_late_rows() -> None:
    windows = replace(UNNAMED, expiry_key="k0")
    assert windows.in_output_mode("append") == replace(windows, output_mode="append")
    assert windows.in_output_mode("complete") == replace(windows, output_mode="complete", expiry_key=None)
    sessions = replace(windows, operator=OperatorKind.SESSION)
    assert sessions.in_output_mode("complete").delay_ms == 7
    of_another_time = replace(sessions, expiry_key=None)
    assert of_another_time.in_output_mode("complete").delay_ms is None
    assert TOP.in_output_mode("complete") is TOP


def test_sources_are_known_by_their_names() -> None:
    below = Watermarks(10, 4, {"below/0": 10})
    after = TOP.watermarks_after(Watermarks(), {1: 30}, [below])
    assert after == Watermarks(4, 0, {"t/1": 30, "below/0": 10})
    assert UNNAMED.watermarks_after(Watermarks(), {0: 30}) == Watermarks(30, 0, {"0": 30})
    assert NO_EVENT_TIME.watermarks_after(Watermarks(5), {}) == Watermarks(5)
