"""Rows that are folded by accumulators, at once or combined first."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import strategies as st

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.type_names import string_to_type
from store_actors.engine.results import results_of
from store_actors.engine.table import GroupTable

Rows = list[tuple[Any, ...]]


def schema_of_all(types: list[str], *accumulators: Accumulator) -> StateSchema:
    """Return the schema of one group with several accumulators, over inputs `v0`, `v1` and so on."""
    inputs = tuple(Field(f"v{number}", name) for number, name in enumerate(types))
    return StateSchema((), inputs, accumulators, None, None, "update")


def schema_of(
    kind: AccumulatorKind,
    types: list[str],
    state: list[Field],
    result: list[Field] | None = None,
    options: dict[str, Any] | None = None,
) -> StateSchema:
    names = tuple(f"v{number}" for number in range(len(types)))
    return schema_of_all(
        types, Accumulator(kind, names, tuple(state), result=tuple(result or ()), options=options or {})
    )


def raw(schema: StateSchema, rows: Rows) -> pa.Table:
    columns = list(zip(*rows, strict=True)) if rows else [[] for _ in schema.inputs]
    kinds = [string_to_type(field.type) for field in schema.inputs]
    return pa.table([pa.array(c, k) for c, k in zip(columns, kinds, strict=True)], schema=schema.raw_schema())


def run(schema: StateSchema, parts: list[Rows], *, merge: bool) -> dict[str, Any]:
    """Return the only row of a table that was fed all parts; with `merge` each part is first combined by a separate table."""
    final = GroupTable(schema)
    for part in parts:
        (batch,) = raw(schema, part).to_batches()
        if merge:
            combined = GroupTable(schema)
            combined.accumulate(combined.encode(batch), 1)
            (batch,) = combined.decode(combined.rows[combined.live()]).to_batches()
        final.accumulate(final.encode(batch, partial=merge), 1)
    (row,) = results_of(final.decode(final.rows[final.live()]), schema).to_pylist()
    return row


def parts_of(*values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Rows]]:
    row = st.tuples(*(st.one_of(st.none(), value) for value in values))
    return st.lists(st.lists(row, min_size=1, max_size=8), min_size=1, max_size=3)


merge_or_not = pytest.mark.parametrize("merge", [False, True])
