"""Tables and times of day as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def clock_text(when_ms: int) -> str:
    """Return a time of day, in UTC."""
    minutes, seconds = divmod(when_ms // 1000 % 86_400, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02} UTC"


def format_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows as aligned text; numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [
        max(len(column), *(len(row[i]) for row in cells)) if cells else len(column) for i, column in enumerate(columns)
    ]
    numeric = [all(isinstance(row[i], int | float) or row[i] is None for row in rows) for i in range(len(columns))]

    def line(values: Sequence[str]) -> str:
        aligned = [
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(values, widths, numeric, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *(line(row) for row in cells)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
