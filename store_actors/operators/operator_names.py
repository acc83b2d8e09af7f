"""Spark's names of operators, in its progress and in the metadata of a checkpoint's state."""

from __future__ import annotations

from coordinator.model.schema import OperatorKind, StateSchema

#: Spark's own operator of the kind; those that Spark does not have are named as their methods are.
_NAMES = {
    OperatorKind.AGGREGATE: "stateStoreSave",
    OperatorKind.SESSION: "sessionWindowStateStoreSaveExec",
    OperatorKind.DEDUPLICATE: "dedupe",
    OperatorKind.JOIN: "symmetricHashJoin",
    OperatorKind.TOP: "topN",
    OperatorKind.LIMIT: "globalLimit",
    OperatorKind.GROUP_STATE: "applyInPandasWithState",
    OperatorKind.TRANSFORM: "transformWithState",
    OperatorKind.PARTITIONS: "mapPartitionsWithStateStore",
}


def operator_name(schema: StateSchema) -> str:
    """Name of an operator."""
    if schema.operator is OperatorKind.DEDUPLICATE and "late_us" in schema.options:
        return "dedupeWithinWatermark"
    return _NAMES[schema.operator]
