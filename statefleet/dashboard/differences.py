"""What changed between two pictures of a fleet, so that browsers are sent that only. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

__all__ = ["Row", "Tables", "apply_difference", "difference"]

Row: TypeAlias = dict[str, Any]
#: Rows by table and id.
Tables: TypeAlias = Mapping[str, Mapping[str, Row]]


def difference(before: Tables, after: Tables) -> dict[str, dict[str, Any]]:
    """What makes `after` of `before`.

    Returns
    -------
    dict
        By table, where anything changed: ``set`` has the fields of new and changed rows that are other ones now, by id; ``gone`` the
        ids of rows that are no more. Fields are never taken out of a row.
    """
    found: dict[str, dict[str, Any]] = {}
    for table, rows in after.items():
        former = before.get(table, {})
        changed = {}
        for key, row in rows.items():
            old = former.get(key)
            if old is row:
                continue
            fields = row if old is None else {name: one for name, one in row.items() if old.get(name, _NOTHING) != one}
            if fields or old is None:
                changed[key] = fields
        gone = [key for key in former if key not in rows]
        if changed or gone:
            found[table] = {"set": changed, "gone": gone}
    return found


def apply_difference(before: Tables, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Row]]:
    """The picture after a difference, as a browser makes it."""
    after = {table: dict(rows) for table, rows in before.items()}
    for table, change in changes.items():
        rows = after.setdefault(table, {})
        for key in change["gone"]:
            del rows[key]
        for key, fields in change["set"].items():
            rows[key] = {**rows.get(key, {}), **fields}
    return after


_NOTHING = object()
