"""Types that only Spark 4 has: what is stored as other values, and what is refused, by its type alone."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError
from spark_jobs.functions.grouped_input import struct_type
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.plan.storable import check_compared, collation_of, is_changed, state_field, stored_type

pytestmark = pytest.mark.skipif(not SPARK.PROCESSOR_CLASSES, reason="PySpark 3.5 does not have these types")


def collated(name: str = "UTF8_LCASE") -> Any:
    new_type: Any = T.StringType
    return new_type(name)


def struct(kind: T.DataType) -> T.StructType:
    return T.StructType().add("x", kind)


NESTED = [
    lambda kind: kind,
    struct,
    T.ArrayType,
    lambda kind: T.MapType(T.StringType(), kind),
    lambda kind: T.MapType(kind, T.StringType()),
    lambda kind: struct(T.ArrayType(struct(kind))),
]


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("name", ["UTF8_LCASE", "UNICODE_CI", "UTF8_BINARY_RTRIM"])
def test_collated_strings_are_stored_as_plain_ones_and_never_compared(nested: Any, name: str) -> None:
    kind, plain = nested(collated(name)), nested(T.StringType())
    assert collation_of(kind) == name
    assert collation_of(plain) is None
    assert is_changed(kind, normalised=False)
    assert not is_changed(plain, normalised=False)
    assert stored_type(kind) == stored_type(plain)
    check_compared(plain, "c")
    for refuse in (check_compared, lambda kind, name: state_field(name, kind, nested=True)):
        with pytest.raises(InvalidRequestError, match=f"bytes differ.*collate.*lower.*column=`c`.*{name}"):
            refuse(kind, "c")


def test_the_collation_of_bytes_is_a_plain_string() -> None:
    assert collation_of(collated("UTF8_BINARY")) is None


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("VariantType", "variant_get"), ("GeometryType", "st_asbinary"), ("TimeType", "time_to_micros")],
)
@pytest.mark.parametrize("nested", NESTED[:4])
def test_values_that_the_fleet_does_not_convert_are_refused(name: str, remedy: str, nested: Any) -> None:
    kind = getattr(T, name)(4326) if name == "GeometryType" else getattr(T, name)()
    with pytest.raises(InvalidRequestError, match=f"a fleet's state holds.*{remedy}"):
        state_field("v", nested(kind), nested=True)
    with pytest.raises(InvalidRequestError, match=f"function with state; .*{remedy}"):
        struct_type(struct(nested(kind)), "stateStructType")
