"""Parquet files in the folder of a stream."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def write_file(rows: pa.Table, file: Path, modified_s: int | None = None) -> None:
    """Write a Parquet file into the folder of a stream, atomically; an existing one is replaced.

    A stream takes files in the order of their modification times, of which a fast disk gives several the same: `modified_s` sets it.
    """
    temporary = file.with_name(f".{file.name}")  # Spark reads no file whose name begins with a dot
    pq.write_table(rows, temporary)
    if modified_s is not None:
        os.utime(temporary, (modified_s, modified_s))
    temporary.replace(file)
