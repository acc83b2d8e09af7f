"""The table of Spark's ``state-metadata`` reader, for the states of a fleet."""

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

#: Spark's columns, except for the first: a state has a name instead of Spark's number of an operator.
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
    """Yield a row of :data:`STATE_METADATA` for each store of a state."""
    metadata = view.metadata
    schema = metadata.schema
    prefixes = {} if schema is None else _prefixes(schema)
    for store in view.stores:
        yield {
            "stateName": metadata.state_name,
            # The store of a program has no operator.
            "operatorName": "stateStore" if schema is None else operator_name(schema),
            "stateStoreName": store,
            "numPartitions": metadata.num_shards,
            # Version 0 is empty, and no batch made it.
            "minBatchId": max(view.oldest, 1) - 1 if view.version else None,
            "maxBatchId": view.version - 1 if view.version else None,
            "operatorProperties": json.dumps(_properties(view, schema), sort_keys=True),
            "_numColsPrefixKey": prefixes.get(store, 0),
        }


def _prefixes(schema: StateSchema) -> dict[str, int]:
    """Return, by store, the number of key columns before those that the operator adds to the user's key; 0 where it adds none."""
    view_columns = (ViewColumns.of(schema, part) for part in ViewColumns.parts_of(schema) or ("",))
    keys = {of_part.store.name: of_part.store.keys for of_part in view_columns if of_part.store is not None}
    count = len(schema.input_keys)
    return {
        store: count if len(columns) > count else 0 for store, columns in (keys or {DEFAULT_STORE: schema.keys}).items()
    }


def _properties(view: ReadView, schema: StateSchema | None) -> dict[str, Any]:
    properties: dict[str, Any] = {"outputMode": view.metadata.output_mode, "queryId": view.metadata.query_id}
    if schema is not None and schema.operator is OperatorKind.TRANSFORM:
        variables = [part.split(".", 1) for part in ViewColumns.parts_of(schema) if part != DEFAULT_STORE]
        properties["timeMode"] = schema.options.get("time_mode")
        properties["stateVariables"] = [
            {"stateName": name, "stateVariableType": f"{kind.capitalize()}State"} for kind, name in variables
        ]
    return properties
