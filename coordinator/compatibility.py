"""Whether a query fits an existing state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.errors import StateMismatchError
from coordinator.model import StateMetadata

__all__ = ["check_metadata"]


def check_metadata(existing: StateMetadata, asked: StateMetadata) -> None:
    """Refuse a query that does not fit the state.

    Raises
    ------
    StateMismatchError
        Schema, number of shards or output mode differ; both are shown.
    """
    facts = {"state": existing.state_name}
    if existing.num_shards != asked.num_shards:
        raise StateMismatchError(
            "the number of shards is fixed for the life of a state; ask for the existing number (or leave it out), or use "
            "another name",
            existing=existing.num_shards,
            asked=asked.num_shards,
            **facts,
        )
    if existing.output_mode != asked.output_mode:
        raise StateMismatchError(
            "the state was made in another output mode; use that, or another name",
            existing=existing.output_mode,
            asked=asked.output_mode,
            **facts,
        )
    for part in ("keys", "accumulators", "inputs", "expiry_key", "delay_ms"):
        if existing.schema.get(part) != asked.schema.get(part) and _state_part(existing, part) != _state_part(
            asked, part
        ):
            raise StateMismatchError(
                f"the query's {part} differ from those of the existing state, whose rows it could not read; nothing was "
                "changed; restore the query, or use another name for the new one",
                existing=_brief(existing.schema.get(part)),
                asked=_brief(asked.schema.get(part)),
                **facts,
            )


def _state_part(metadata: StateMetadata, part: str) -> Any:
    """What of a schema's part must stay: state fields and kinds, not how the query computes its inputs or its delay."""
    if part in ("inputs", "delay_ms"):
        return None
    if part == "accumulators":
        return [(item["kind"], [_typed(field) for field in item["state"]]) for item in metadata.schema.get(part, [])]
    if part == "keys":
        return [_typed(field) for field in metadata.schema.get(part, [])]
    return metadata.schema.get(part)


def _typed(field: Mapping[str, Any]) -> tuple[Any, Any]:
    return field["name"], field["type"]


def _brief(part: Any) -> Any:
    """A schema part as a person reads it: ``name type`` for fields, ``kind(inputs)`` for accumulators."""
    if not isinstance(part, list | tuple):
        return part
    return ", ".join(
        f"{item['name']} {item['type']}"
        if "type" in item
        else f"{item['kind']}({', '.join(item['inputs'])}) {' '.join(field['type'] for field in item['state'])}"
        for item in part
    )
