"""What browsers look up: columns of a state, rows of a key at several versions, some rows; as JSON data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from coordinator.model.errors import InvalidRequestError, VersionNotFoundError
from coordinator.runtime.runtime import Clock
from statefleet.dashboard.values import column_json, row_json, typed_value
from statefleet.reads.fleet import LiveFleet
from statefleet.reads.state import LiveState

__all__ = ["LookUps"]

#: Rows of a key, or of a state, that are shown.
_ROWS = 100
#: Versions that a key is looked up at, at most, and after how many seconds no further one is begun: old ones may have to be loaded.
_VERSIONS = 20
_HISTORY_S = 10.0
#: Keys of a shard that are shown as its hottest, and what part of all each has at least.
_HOTTEST = 5
_HOT = 0.01


class LookUps:
    """Answers of one thread; nothing is changed by any of them.

    Parameters
    ----------
    open_fleet
        Opens the fleet's states; called at the first look-up.
    """

    def __init__(self, open_fleet: Callable[[], LiveFleet], clock: Clock) -> None:
        self._open_fleet = open_fleet
        self._clock = clock
        self._fleet: LiveFleet | None = None

    def describe(self, state_name: str, part: str) -> dict[str, Any]:
        """Parts, columns and versions of a state; of one with several parts, none of which is named, only these."""
        state = self._state(state_name, part)
        parts = state.parts
        if parts and not part:
            return {"parts": list(parts), "columns": [], "keys": [], "oldest": None, "newest": None}
        versions = state.versions()
        return {
            "parts": list(parts),
            "columns": [column_json(field) for field in state.schema],
            "keys": list(state.keys),
            "oldest": versions.start,
            "newest": versions.stop - 1,
        }

    def rows(self, state_name: str, part: str, limit: int) -> dict[str, Any]:
        """Some rows of the newest version, in no particular order."""
        state = self._state(state_name, part)
        found = state.scan(limit=min(max(1, limit), _ROWS))
        return {"version": found.version, "rows": [row_json(row) for row in found.to_arrow().to_pylist()]}

    def look_up(self, state_name: str, part: str, key: Mapping[str, Any], versions: int) -> dict[str, Any]:
        """Rows of a key at the newest version, and at so many before it.

        Parameters
        ----------
        key
            A value for each key column, as text or as JSON has it.

        Returns
        -------
        dict
            ``versions``, newest first: each a ``version``, its ``rows`` (none if the key is not there), and whether there are more rows
            (``more``). ``complete`` is false where the time was up before all were read.
        """
        state = self._state(state_name, part)
        asked = _typed(key, state.schema, state.keys)
        readable = state.versions()
        newest = readable.stop - 1
        wanted = range(newest, max(readable.start, newest - min(max(1, versions), _VERSIONS) + 1) - 1, -1)
        deadline_s = self._clock.elapsed_s() + _HISTORY_S
        found: list[dict[str, Any]] = []
        for version in wanted:
            if found and self._clock.elapsed_s() > deadline_s:
                break
            try:
                rows = self._rows_at(state, version, asked)
            except VersionNotFoundError:
                break  # it was let go of meanwhile
            shown = [row_json(row) for row in rows[:_ROWS]]
            found.append({"version": version, "rows": shown, "more": len(rows) > _ROWS})
        return {"versions": found, "complete": len(found) == len(wanted)}

    def hottest(self, state_name: str, shard: int) -> dict[str, Any]:
        """Keys that batches (``batches``) and readers (``look_ups``) met most often on a shard: each a ``key`` and its ``share``."""
        told: dict[str, list[dict[str, Any]]] = {"batches": [], "look_ups": []}
        parts = self._state(state_name, "").parts
        for row in self._state(state_name, parts[0] if parts else "").hottest_keys(shard, _HOTTEST).to_pylist():
            met_by, share = row.pop("_met_by"), row.pop("_share")
            if share >= _HOT:
                told[met_by].append({"key": row_json(row), "share": share})
        return told

    @staticmethod
    def _rows_at(state: LiveState, version: int, key: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
        return state.at(version).get_all(key)

    def _state(self, state_name: str, part: str) -> LiveState:
        if self._fleet is None:
            self._fleet = self._open_fleet()
        return self._fleet.state(state_name, part)


def _typed(key: Mapping[str, Any], schema: pa.Schema, names: Sequence[str]) -> dict[str, Any]:
    if set(key) != set(names):
        raise InvalidRequestError(
            "a key has a value for each key column; nothing was looked up", keys=", ".join(names), got=", ".join(key)
        )
    return {name: typed_value(key[name], schema.field(name).type, name) for name in names}
