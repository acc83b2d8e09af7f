"""Output of commands: tables of at most 100 columns, unless a name is longer, or JSON; progress goes to standard error.

Standard output has only the result of the command, so that it can be piped; with ``--json`` that is one JSON value.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from humanize import naturalsize, naturaltime

from statefleet.reads.json_values import cell_text, plain

#: Maximum width of a table, also where it is piped, unless a name would have to be broken.
WIDTH = 100
#: Width of a cell beyond which the rows of a state are printed as a list of records instead of a table.
_WIDEST_CELL = 40
#: A cell that is aligned to the right: a number, a size, or an unknown value.
_NUMBER = re.compile(r"-?[\d,.]+%?( (Bytes?|[kMGT]B))?|-")


def _width() -> int:
    return min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH


# -- values ---------------------------------------------------------------------------------------------------


def size_cell(size: int | None) -> str | None:
    """Return a number of bytes as text; None where it is unknown."""
    return None if size is None else naturalsize(size)


def time_text(when_ms: int | None) -> str | None:
    """Return a time as text, in the time zone of this machine."""
    if when_ms is None:
        return None
    return dt.datetime.fromtimestamp(when_ms / 1000, dt.UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def ago_text(when_ms: int | None) -> str | None:
    """Return how long ago a time was, by this machine's clock."""
    return None if when_ms is None else naturaltime(max(0, time.time() - when_ms / 1000))


def _stat(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


# -- printing -------------------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """Print one JSON value."""
    print(json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False))


def print_text(text: str, indent: str = "", *, aside: bool = False) -> None:
    """Print a sentence, wrapped between words and never within a path; to standard error if it is `aside`."""
    options = {"break_on_hyphens": False, "break_long_words": False}
    lines = textwrap.wrap(text, _width(), initial_indent=indent, subsequent_indent=indent, **options)  # type: ignore[arg-type]
    print("\n".join(lines), file=sys.stderr if aside else sys.stdout)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table of statistics. Numbers and sizes are aligned to the right, with separators; ids and versions are passed as text."""
    cells = [[_stat(value) for value in row] for row in rows]
    right = {index for index in range(len(columns)) if cells and all(_NUMBER.fullmatch(row[index]) for row in cells)}
    _print_cells(columns, cells, right)


def print_records(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Print rows of a state: as a table if they are narrow enough, else one after the other, with a line for each column."""
    cells = [[cell_text(row[name]) for name in columns] for row in rows]
    widths = [max(len(column), *(len(row[index]) for row in cells)) for index, column in enumerate(columns) if cells]
    if sum(widths) + 2 * len(widths) <= _width() and max(widths, default=0) <= _WIDEST_CELL:
        numeric = {
            index
            for index, name in enumerate(columns)
            if rows and all(isinstance(row[name], int | float | decimal.Decimal | None) for row in rows)
        }
        _print_cells(columns, cells, numeric)
        return
    longest = max(map(len, columns))
    for number, row in enumerate(cells, start=1):
        print(f"row {number}")
        for column, cell in zip(columns, row, strict=True):
            width = max(20, _width() - longest - 4)
            lines = [cell[begin : begin + width] for begin in range(0, len(cell), width)] or [""]
            print(f"  {column.ljust(longest)}  {lines[0]}".rstrip())
            for further in lines[1:]:
                print(f"  {' ' * longest}  {further}")


def _print_cells(columns: Sequence[str], cells: Sequence[Sequence[str]], right: set[int]) -> None:
    # Imported here: it takes as long to import as everything else that --help needs.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    widths = _widths([[column, *(row[index] for row in cells)] for index, column in enumerate(columns)], _width())
    for index, column in enumerate(columns):
        table.add_column(
            Text(column), justify="right" if index in right else "left", overflow="fold", width=widths[index]
        )
    for row in cells:
        table.add_row(*map(Text, row))
    console = Console(file=sys.stdout, width=max(_width(), sum(widths) + 2 * len(widths)))
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


def _widths(columns: Sequence[Sequence[str]], limit: int) -> list[int]:
    """Return the width of each column of cells, such that the table fits the limit as far as no word has to be broken."""
    widths = [max(map(len, cells)) for cells in columns]
    least = [max((len(word) for cell in cells for word in cell.split()), default=0) for cells in columns]
    while sum(widths) + 2 * (len(widths) - 1) > limit:
        wider = ((width, index) for index, width in enumerate(widths) if width > least[index])
        width, index = max(wider, default=(0, -1))
        if index < 0:
            break
        widths[index] = width - 1
    return widths


@contextmanager
def progress(text: str, total: int | None, *, is_size: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error during a long operation, if that is a terminal; what it yields takes the progress, out of
    `total`.
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
