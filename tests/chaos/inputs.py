"""The inputs of chaos tests: files of numbers, and how often each number is in them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def write_inputs(folder: Path, files: int, *, rows: int, distinct: int) -> Counter[int]:
    """Write the input files of a driver; returns how often each value is in them.

    Parameters
    ----------
    folder
        The driver's folder; the files come into ``in``.
    files
        How many.
    rows
        Of each file.
    distinct
        Values are below it; a prime, so that files differ.
    """
    (folder / "in").mkdir()
    counted: Counter[int] = Counter()
    for number in range(files):
        values = [(row * 31 + number * 7) % distinct for row in range(rows)]
        counted.update(values)
        pq.write_table(pa.table({"v": pa.array(values, pa.int64())}), folder / "in" / f"{number:03d}.parquet")
    return counted
