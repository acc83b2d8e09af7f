"""The metadata of a state, which never change: its metadata file."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, structs, to_builtins

from coordinator.model.schema import StateSchema
from coordinator.model.stored_json import FORMAT, always_written, from_json


class StateMetadata(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The metadata of a state, which never change; ``<state>/metadata.json``, written once with put-if-absent.

    ``schema`` is None of a state whose stores are a program's own. The schema of the file is the first one, as is ``num_shards``: later
    ones are in the log (``SCHEMA_CHANGED``, ``RESCALED``).
    """

    state_name: str
    query_id: str
    num_shards: int
    output_mode: str
    schema: StateSchema | None = always_written(None)
    #: Format of the file (:mod:`coordinator.model.stored_json`).
    format_version: int = always_written(FORMAT)
    #: Id that no other state has, also none of the same name; empty until the file is written.
    state_id: str = ""
    #: Ids of the states of this name that are no more, whose records the log may still have.
    former_ids: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateMetadata) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple[Any, ...]:
        """Return what two states of one operator have alike: not the fields of the file."""
        return self.state_name, self.query_id, self.num_shards, self.output_mode, self.schema

    def in_output_mode(self, schema: StateSchema) -> StateMetadata:
        """Return the metadata of an operator with the output mode of a schema."""
        if self.output_mode == schema.output_mode:
            return self
        # Not the operator's schema itself: only the metadata have the view for readers.
        assert self.schema is not None
        mode = schema.output_mode
        described = structs.replace(
            self.schema, output_mode=mode, expiry_key=schema.expiry_key, delay_ms=schema.delay_ms
        )
        return structs.replace(self, output_mode=mode, schema=described)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        data: dict[str, Any] = to_builtins(self)
        return data if self.schema is not None else {**data, "schema": {}}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StateMetadata:
        """Return the metadata of a file; errors as of :func:`~coordinator.model.stored_json.from_json`."""
        return from_json({**data, "schema": data.get("schema") or None}, cls)
