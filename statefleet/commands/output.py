"""What commands print: tables of 100 columns at most where names leave that much room, or JSON; progress on standard error.

Standard output has what was asked for and nothing else, so that it can be piped; with ``--json`` that is one JSON value.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import math
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from coordinator.model.text import size_text

__all__ = [
    "WIDTH",
    "ago_text",
    "plain",
    "print_json",
    "print_records",
    "print_table",
    "print_text",
    "progress",
    "size_cell",
    "time_text",
]

#: Most columns of the terminal that a table takes, also where it is piped, as long as no name has to be broken for it.
WIDTH = 100
#: Cells of a state's rows that are longer make it a list of records instead of a table.
_WIDEST_CELL = 40
#: A cell that goes to the right: a number, a size, or nothing known.
_NUMBER = re.compile(r"-?[\d,.]+%?( [KMGT]?B)?|-")


def _width() -> int:
    return min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH


# -- values ---------------------------------------------------------------------------------------------------


def size_cell(size: int | None) -> str | None:
    """Bytes as a person reads them; None where they are not known."""
    return None if size is None else size_text(size)


def time_text(when_ms: int | None) -> str | None:
    """A time of day, in the reader's own zone."""
    if when_ms is None:
        return None
    return dt.datetime.fromtimestamp(when_ms / 1000, dt.UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def ago_text(when_ms: int | None, now_ms: float | None = None) -> str | None:
    """How long ago a time was, by this machine's clock."""
    if when_ms is None:
        return None
    seconds = ((time.time() * 1000 if now_ms is None else now_ms) - when_ms) / 1000
    for unit, of_next in (("s", 60), ("min", 60), ("h", 48)):
        if seconds < of_next:
            return f"{max(0, seconds):.0f} {unit} ago"
        seconds /= of_next if unit != "h" else 24
    return f"{seconds:.0f} days ago"


def _figure(value: object) -> str:
    """A figure as a cell."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def _datum(value: object) -> str:
    """A value of a state's row as a cell: as it is, with no separators in numbers."""
    if value is None:
        return "null"
    if isinstance(value, dt.datetime):
        return value.isoformat(sep=" ")
    return value if isinstance(value, str) else str(plain(value))


def plain(value: Any) -> Any:
    """A value as JSON has it: times in ISO 8601, decimals as text, bytes in base64, numbers that JSON lacks as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"{value:f}" if isinstance(value, decimal.Decimal) else str(value)


# -- printing -------------------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """One JSON value."""
    print(json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False))


def print_text(text: str, indent: str = "", *, aside: bool = False) -> None:
    """A sentence, in as many lines as it takes; a path is never broken. What is said aside goes to standard error."""
    options = {"break_on_hyphens": False, "break_long_words": False}
    lines = textwrap.wrap(text, _width(), initial_indent=indent, subsequent_indent=indent, **options)  # type: ignore[arg-type]
    print("\n".join(lines), file=sys.stderr if aside else sys.stdout)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Figures as a table: numbers with their thousands apart, and to the right, as sizes are; ids and versions are given as text."""
    cells = [[_figure(value) for value in row] for row in rows]
    right = {place for place in range(len(columns)) if cells and all(_NUMBER.fullmatch(row[place]) for row in cells)}
    _print_cells(columns, cells, right)


def print_records(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Rows of a state: a table if they are narrow enough, else one after the other, a line for each column."""
    cells = [[_datum(row[name]) for name in columns] for row in rows]
    widths = [max(len(column), *(len(row[place]) for row in cells)) for place, column in enumerate(columns) if cells]
    if sum(widths) + 2 * len(widths) <= _width() and max(widths, default=0) <= _WIDEST_CELL:
        numeric = {
            place
            for place, name in enumerate(columns)
            if rows and all(isinstance(row[name], int | float | decimal.Decimal | None) for row in rows)
        }
        _print_cells(columns, cells, numeric)
        return
    longest = max(map(len, columns))
    for number, row in enumerate(cells, start=1):
        print(f"row {number}")
        for column, cell in zip(columns, row, strict=True):
            room = max(20, _width() - longest - 4)
            lines = [cell[at : at + room] for at in range(0, len(cell), room)] or [""]
            print(f"  {column.ljust(longest)}  {lines[0]}".rstrip())
            for further in lines[1:]:
                print(f"  {' ' * longest}  {further}")


def _print_cells(columns: Sequence[str], cells: Sequence[Sequence[str]], right: set[int]) -> None:
    # Late: it takes as long to import as all else that --help needs.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    widths = _widths([[column, *(row[place] for row in cells)] for place, column in enumerate(columns)], _width())
    for place, column in enumerate(columns):
        table.add_column(
            Text(column), justify="right" if place in right else "left", overflow="fold", width=widths[place]
        )
    for row in cells:
        table.add_row(*map(Text, row))
    console = Console(file=sys.stdout, width=max(_width(), sum(widths) + 2 * len(widths)))
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


def _widths(columns: Sequence[Sequence[str]], limit: int) -> list[int]:
    """Width of each column of cells: the table fits the limit as far as no word is broken, as half a name is of no use."""
    widths = [max(map(len, cells)) for cells in columns]
    least = [max((len(word) for cell in cells for word in cell.split()), default=0) for cells in columns]
    while sum(widths) + 2 * (len(widths) - 1) > limit:
        width, place = max(((widths[at], at) for at in range(len(widths)) if widths[at] > least[at]), default=(0, -1))
        if place < 0:
            break
        widths[place] = width - 1
    return widths


@contextmanager
def progress(text: str, total: int | None, *, is_size: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while something long goes on, if somebody looks at it.

    Yields
    ------
    Callable
        Is told how far it is, of `total`.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if is_size else MofNCompleteColumn()
    console = Console(stderr=True, width=min(WIDTH, shutil.get_terminal_size().columns))
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done: bar.update(task, completed=done)
