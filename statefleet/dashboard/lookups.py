"""Queries of browsers: columns of a state, rows of a key at several versions, some rows; as JSON data."""

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

#: Maximum number of rows of a key, or of a state, that are returned.
_ROWS = 100
#: Maximum number of versions of a key, and the seconds after which no further version is read, since old ones may have to be loaded.
_VERSIONS = 20
_HISTORY_S = 10.0
#: Number of the hottest keys of a shard that are returned, and the smallest share of all accesses that such a key has.
_HOTTEST = 5
_HOT = 0.01


class LookUps:
    """Queries of one thread, which change nothing.

    Parameters
    ----------
    open_fleet
        Opens the fleet's states; called at the first query.
    """

    def __init__(self, open_fleet: Callable[[], LiveFleet], clock: Clock) -> None:
        self._open_fleet = open_fleet
        self._clock = clock
        self._fleet: LiveFleet | None = None

    def describe(self, state_name: str, part: str) -> dict[str, Any]:
        """Return the parts, columns and versions of a state; only the parts, if it has several and none is named."""
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
        """Return some rows of the newest version, in no particular order."""
        state = self._state(state_name, part)
        rows = state.scan(limit=min(max(1, limit), _ROWS))
        return {"version": rows.version, "rows": [row_json(row) for row in rows.to_arrow().to_pylist()]}

    def look_up(self, state_name: str, part: str, key: Mapping[str, Any], versions: int) -> dict[str, Any]:
        """Return the rows of a key at the newest versions.

        Parameters
        ----------
        key
            A value for each key column, as text or as JSON has it.
        versions
            Number of versions.

        Returns
        -------
        dict
            ``versions``, newest first: each with ``version``, ``rows`` (empty if the key has none), and ``more``, whether there are
            further rows. ``complete`` is false if the time was over before all versions were read.
        """
        state = self._state(state_name, part)
        typed_key = _typed(key, state.schema, state.keys)
        readable = state.versions()
        newest = readable.stop - 1
        numbers = range(newest, max(readable.start, newest - min(max(1, versions), _VERSIONS) + 1) - 1, -1)
        deadline_s = self._clock.elapsed_s() + _HISTORY_S
        history: list[dict[str, Any]] = []
        for version in numbers:
            if history and self._clock.elapsed_s() > deadline_s:
                break
            try:
                rows = self._rows_at(state, version, typed_key)
            except VersionNotFoundError:
                break  # it is not retained any more
            first = [row_json(row) for row in rows[:_ROWS]]
            history.append({"version": version, "rows": first, "more": len(rows) > _ROWS})
        return {"versions": history, "complete": len(history) == len(numbers)}

    def hottest(self, state_name: str, shard: int) -> dict[str, Any]:
        """Return the keys of a shard that batches (``batches``) and readers (``look_ups``) accessed most: ``key`` and ``share``."""
        hottest: dict[str, list[dict[str, Any]]] = {"batches": [], "look_ups": []}
        parts = self._state(state_name, "").parts
        for row in self._state(state_name, parts[0] if parts else "").hottest_keys(shard, _HOTTEST).to_pylist():
            met_by, share = row.pop("_met_by"), row.pop("_share")
            if share >= _HOT:
                hottest[met_by].append({"key": row_json(row), "share": share})
        return hottest

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
