"""What Spark's ``state-metadata`` reader tells of a checkpoint, of the states of a fleet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from coordinator.ledger.read_views import ReadView
from coordinator.model.identities import DEFAULT_STORE
from coordinator.model.schema import OperatorKind, StateSchema
from store_actors.operators.operator_names import operator_name
from store_actors.operators.view_columns import ViewColumns

__all__ = ["STATE_METADATA", "metadata_of"]

#: Spark's columns, but for the first: a state has a name in place of Spark's number of an operator.
STATE_METADATA = pa.schema(
    [
        ("stateName", pa.string()),
        ("operatorName", pa.string()),
        ("stateStoreName", pa.string()),
        ("numPartitions", pa.int32()),
        ("minBatchId", pa.int64()),
        ("maxBatchId", pa.int64()),
        ("operatorProperties", pa.string()),
        ("_numColsPrefixKey", pa.int32()),
    ]
)


def metadata_of(view: ReadView) -> Iterator[dict[str, Any]]:
    """A row for each store of a state, by :data:`STATE_METADATA`."""
    told = view.metadata
    schema = told.schema
    prefixes = {} if schema is None else _prefixes(schema)
    for store in view.stores:
        yield {
            "stateName": told.state_name,
            # A program's own store has no operator.
            "operatorName": "stateStore" if schema is None else operator_name(schema),
            "stateStoreName": store,
            "numPartitions": told.num_shards,
            # Version 0 is empty: no batch made it.
            "minBatchId": max(view.oldest, 1) - 1 if view.version else None,
            "maxBatchId": view.version - 1 if view.version else None,
            "operatorProperties": json.dumps(_properties(view, schema), sort_keys=True),
            "_numColsPrefixKey": prefixes.get(store, 0),
        }


def _prefixes(schema: StateSchema) -> dict[str, int]:
    """By store, how many key columns come before those that the operator adds to a key of the user; 0 where it adds none."""
    shown = (ViewColumns.of(schema, part) for part in ViewColumns.parts_of(schema) or ("",))
    keys = {one.store.name: one.store.keys for one in shown if one.store is not None} or {DEFAULT_STORE: schema.keys}
    own = len(schema.input_keys)
    return {store: own if len(columns) > own else 0 for store, columns in keys.items()}


def _properties(view: ReadView, schema: StateSchema | None) -> dict[str, Any]:
    told: dict[str, Any] = {"outputMode": view.metadata.output_mode, "queryId": view.metadata.query_id}
    if schema is not None and schema.operator is OperatorKind.TRANSFORM:
        variables = [part.split(".", 1) for part in ViewColumns.parts_of(schema) if part != DEFAULT_STORE]
        told["timeMode"] = schema.options.get("time_mode")
        told["stateVariables"] = [
            {"stateName": name, "stateVariableType": f"{kind.capitalize()}State"} for kind, name in variables
        ]
    return told
