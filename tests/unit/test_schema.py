"""A schema's JSON, which every file carries: it is written as before, and all older forms are read."""

from __future__ import annotations

import json

import pytest
from msgspec import structs, to_builtins

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, OperatorKind, StateSchema
from coordinator.model.stored_json import from_json

TOP = StateSchema(
    keys=(Field("k0", "string"), Field("__row", "int64", False)),
    inputs=(Field("c0", "timestamp"),),
    accumulators=(Accumulator(AccumulatorKind.VALUE, (), (Field("c0", "timestamp"),)),),
    expiry_key="k0_1",
    delay_ms=5000,
    output_mode="update",
    operator=OperatorKind.TOP,
    options={"n": 2, "ties": "first"},
)
DELAYED = StateSchema((Field("k0", "string"),), (), (), None, 7, "update")

#: The JSON in which manifests and files have them.
WRITTEN = {
    TOP: (
        '{"keys": [{"name": "k0", "type": "string", "nullable": true, "spark": null}, {"name": "__row", "type": "int64", "nullable": '
        'false, "spark": null}], "inputs": [{"name": "c0", "type": "timestamp", "nullable": true, "spark": null}], "accumulators": '
        '[{"kind": "value", "inputs": [], "state": [{"name": "c0", "type": "timestamp", "nullable": true, "spark": null}], "meaning": '
        '"", "cast": ""}], "expiry_key": "k0_1", "delay_ms": 5000, "output_mode": "update", "operator": "top", "options": {"n": 2, '
        '"ties": "first"}}'
    ),
    DELAYED: (
        '{"keys": [{"name": "k0", "type": "string", "nullable": true, "spark": null}], "inputs": [], "accumulators": [], '
        '"expiry_key": null, "delay_ms": 7, "output_mode": "update", "operator": "aggregate", "options": {}}'
    ),
}


@pytest.mark.parametrize("schema", WRITTEN)
def test_the_json_is_unchanged(schema: StateSchema) -> None:
    assert json.dumps(to_builtins(schema)) == WRITTEN[schema]
    assert from_json(json.loads(WRITTEN[schema]), StateSchema) == schema


def test_files_from_before_operators_had_kinds_and_options_are_read() -> None:
    data = json.loads(WRITTEN[DELAYED])
    del data["operator"], data["options"]
    assert from_json(data, StateSchema) == DELAYED


def test_in_complete_mode_nothing_ends_and_only_sessions_of_event_time_have_late_rows() -> None:
    windows = structs.replace(DELAYED, expiry_key="k0")
    assert windows.in_output_mode("append") == structs.replace(windows, output_mode="append")
    assert windows.in_output_mode("complete") == structs.replace(windows, output_mode="complete", expiry_key=None)
    sessions = structs.replace(windows, operator=OperatorKind.SESSION)
    assert sessions.in_output_mode("complete").delay_ms == 7
    of_another_time = structs.replace(sessions, expiry_key=None)
    assert of_another_time.in_output_mode("complete").delay_ms is None
    assert TOP.in_output_mode("complete") is TOP
