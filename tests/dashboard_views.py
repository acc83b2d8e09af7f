"""Views of the dashboard, as a browser puts them together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statefleet.dashboard.differences import Row, Tables

__all__ = ["apply_difference"]


def apply_difference(before: Tables, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Row]]:
    """Return the view after a difference, as a browser applies it."""
    after = {table: dict(rows) for table, rows in before.items()}
    for table, change in changes.items():
        rows = after.setdefault(table, {})
        for key in change["gone"]:
            del rows[key]
        for key, fields in change["set"].items():
            rows[key] = {**rows.get(key, {}), **fields}
    return after
