"""The difference between two views of a fleet, so that browsers are sent only that. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

__all__ = ["Row", "Tables", "difference"]

Row: TypeAlias = dict[str, Any]
#: Rows by table and id.
Tables: TypeAlias = Mapping[str, Mapping[str, Row]]


def difference(before: Tables, after: Tables) -> dict[str, dict[str, Any]]:
    """Return the changes from `before` to `after`.

    Returns
    -------
    dict
        Changes of each table that has any: ``set`` has the changed fields of new and changed rows, by id; ``gone`` the ids of
        rows that were removed. No field is ever removed from a row.
    """
    changes: dict[str, dict[str, Any]] = {}
    for table, rows in after.items():
        previous = before.get(table, {})
        changed = {}
        for key, row in rows.items():
            old = previous.get(key)
            if old is row:
                continue
            fields = (
                row if old is None else {name: value for name, value in row.items() if old.get(name, _NOTHING) != value}
            )
            if fields or old is None:
                changed[key] = fields
        removed = [key for key in previous if key not in rows]
        if changed or removed:
            changes[table] = {"set": changed, "gone": removed}
    return changes


_NOTHING = object()
