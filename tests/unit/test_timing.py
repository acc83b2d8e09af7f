"""The times when Spark has to run a batch without data for an operator, by its schema."""

from __future__ import annotations

import pytest
from msgspec import structs
from pyspark.sql.streaming.state import GroupStateTimeout

from coordinator.model.schema import OperatorKind, StateSchema
from spark_jobs.plan.operator_rules import output_lag_ms, runs_again
from spark_jobs.transform.variables import TimeMode
from store_actors.operators.operator_names import operator_name

BARE = StateSchema((), (), (), None, None, "append")
TIMED = {
    "watermark": [
        BARE,
        structs.replace(BARE, output_mode="update"),
        structs.replace(BARE, operator=OperatorKind.DEDUPLICATE),
        structs.replace(BARE, operator=OperatorKind.JOIN, options={"expiry": [None, "r_time"]}),
        structs.replace(BARE, operator=OperatorKind.TOP, expiry_key="end"),
        structs.replace(
            BARE, operator=OperatorKind.GROUP_STATE, options={"timeout_conf": GroupStateTimeout.EventTimeTimeout}
        ),
        structs.replace(BARE, operator=OperatorKind.TRANSFORM, options={"time_mode": TimeMode.EVENT_TIME.value}),
        structs.replace(BARE, operator=OperatorKind.TRANSFORM, options={"time_mode": TimeMode.NONE.value}),
    ],
    "due": [
        structs.replace(
            BARE, operator=OperatorKind.GROUP_STATE, options={"timeout_conf": GroupStateTimeout.ProcessingTimeTimeout}
        ),
        structs.replace(BARE, operator=OperatorKind.TRANSFORM, options={"time_mode": TimeMode.PROCESSING_TIME.value}),
    ],
    "never": [
        structs.replace(BARE, output_mode="complete"),
        structs.replace(BARE, operator=OperatorKind.LIMIT),
        structs.replace(BARE, operator=OperatorKind.TOP),
        structs.replace(BARE, operator=OperatorKind.PARTITIONS),
        structs.replace(BARE, operator=OperatorKind.JOIN, options={"expiry": [None, None]}),
        structs.replace(BARE, operator=OperatorKind.GROUP_STATE, options={"timeout_conf": GroupStateTimeout.NoTimeout}),
    ],
}


@pytest.mark.parametrize(("when", "schema"), [(when, schema) for when, schemas in TIMED.items() for schema in schemas])
def test_a_batch_without_data_is_run_when_sparks_own_operator_asks_for_one(when: str, schema: StateSchema) -> None:
    assert runs_again(schema) == when


def test_every_kind_of_operator_has_a_name_and_a_lag() -> None:
    for kind in OperatorKind:
        assert operator_name(structs.replace(BARE, operator=kind))
    lagging = structs.replace(BARE, operator=OperatorKind.JOIN, options={"output_lag_us": [None, 1_500_001]})
    assert (output_lag_ms(lagging), output_lag_ms(BARE)) == (1501, 0)
