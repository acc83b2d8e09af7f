"""What is fixed for the life of a state: its metadata file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["StateMetadata"]


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """What is fixed for the life of a state; ``<state>/metadata.json``, written once with put-if-absent.

    ``schema`` is the JSON form of ``coordinator.model.schema.StateSchema``; the coordinator only compares it. That of the file is
    the first one, as is ``num_shards``: later ones are in the log (``SCHEMA_CHANGED``, ``RESCALED``).
    """

    state_name: str
    query_id: str
    num_shards: int
    output_mode: str
    schema: dict[str, Any] = field(default_factory=dict)
    #: Of the file (:mod:`coordinator.model.file_format`), and what no other state has, whatever its name. States of format 1 have
    #: no id.
    format_version: int = field(default=1, compare=False)
    state_id: str = field(default="", compare=False)
    #: Ids of the states of this name that are no more, whose records the log may still have.
    former_ids: tuple[str, ...] = field(default=(), compare=False)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        if not self.state_id:
            del data["state_id"]
        if not self.former_ids:
            del data["former_ids"]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StateMetadata:
        return cls(**{**data, "former_ids": tuple(data.get("former_ids", ()))})
