"""The metadata of a state, which never change: its metadata file."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.model.file_format import FORMAT
from coordinator.model.identities import FastPickle
from coordinator.model.schema import StateSchema

__all__ = ["StateMetadata"]


@dataclass(frozen=True, slots=True)
class StateMetadata(FastPickle):
    """The metadata of a state, which never change; ``<state>/metadata.json``, written once with put-if-absent.

    ``schema`` is None of a state whose stores are a program's own. The schema of the file is the first one, as is ``num_shards``: later
    ones are in the log (``SCHEMA_CHANGED``, ``RESCALED``).
    """

    state_name: str
    query_id: str
    num_shards: int
    output_mode: str
    schema: StateSchema | None = None
    #: Format of the file (:mod:`coordinator.model.file_format`).
    format_version: int = field(default=FORMAT, compare=False)
    #: Id that no other state has, also none of the same name; empty until the file is written.
    state_id: str = field(default="", compare=False)
    #: Ids of the states of this name that are no more, whose records the log may still have.
    former_ids: tuple[str, ...] = field(default=(), compare=False)

    def in_output_mode(self, schema: StateSchema) -> StateMetadata:
        """Return the metadata of an operator with the output mode of a schema."""
        if self.output_mode == schema.output_mode:
            return self
        # Not the operator's schema itself: only the metadata have the view for readers.
        assert self.schema is not None
        mode = schema.output_mode
        described = replace(self.schema, output_mode=mode, expiry_key=schema.expiry_key, delay_ms=schema.delay_ms)
        return replace(self, output_mode=mode, schema=described)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["schema"] = {} if self.schema is None else self.schema.to_json()
        if not self.state_id:
            del data["state_id"]
        if not self.former_ids:
            del data["former_ids"]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StateMetadata:
        """Return the metadata of a file; errors as of :meth:`StateSchema.from_json`."""
        schema = StateSchema.from_json(data["schema"]) if data.get("schema") else None
        return cls(**{**data, "schema": schema, "former_ids": tuple(data.get("former_ids", ()))})
