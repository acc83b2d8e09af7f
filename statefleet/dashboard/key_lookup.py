"""The look-up of a key for the page: the columns of a state, and the rows of one key, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from statefleet.reads.json_values import cell_text, key_of

if TYPE_CHECKING:
    from statefleet.reads.fleet import LiveFleet

#: Most rows of a key, and characters of a value, that are returned.
_ROWS = 100
_TEXT = 4000


def look_up(fleet: LiveFleet, state_name: str, part: str, key: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the columns of a state, and the rows of a key at the newest version.

    Parameters
    ----------
    part
        Part of the state; empty takes the first one.
    key
        A value for each key column, as text or as JSON has it; None for the columns alone.

    Returns
    -------
    dict
        ``parts`` of the state, and the ``part`` that is read; ``columns``, each with ``name``, ``type`` and ``is_key``. With a key
        also ``version``, ``shard`` (None if several shards may have it), ``rows``, each a list of texts, and ``more``, whether there
        are further rows.

    Raises
    ------
    InvalidRequestError
        There is no such state or part, or the key does not fit its columns.
    """
    state = fleet.state(state_name, part)
    parts = state.parts
    if parts and not part:
        part = parts[0]
        state = fleet.state(state_name, part)
    columns = [
        {"name": field.name, "type": str(field.type), "is_key": field.name in state.keys} for field in state.schema
    ]
    described = {"parts": list(parts), "part": part, "columns": columns}
    if key is None:
        return described
    found = state.find(key_of(state, key))
    rows = [[_shortened(cell_text(value)) for value in row.values()] for row in found.rows[:_ROWS]]
    return {
        **described,
        "version": found.version,
        "shard": found.shard,
        "rows": rows,
        "more": len(found.rows) > _ROWS,
    }


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}… ({len(text)} characters)"
