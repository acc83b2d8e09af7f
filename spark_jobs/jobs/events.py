"""The built-in event source: deterministic, without a server, and as irregular as real events (out of order, some late, nulls)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from spark_jobs.jobs.stream_files import write_file

#: Spark schema of the events.
EVENT_DDL = "ts TIMESTAMP, user BIGINT, page STRING, amount DOUBLE"

_PAGES = ("home", "search", "product", "cart", "checkout", "help")
_START_US = 1_735_689_600_000_000  # 2025-01-01 00:00 UTC
_FILE_SECONDS = 60
_MAX_DELAY_S = 90
_LATE_SHARE = 0.002
_LATE_S = 3600


def make_events(number: int, rows: int) -> pa.Table:
    """Return the events of file `number`: one minute of event time, with delays up to 90 s and a few rows an hour late.

    The table depends on `number` and `rows` only, on every machine.
    """
    random = np.random.default_rng(number)
    delay_s = random.uniform(0, _MAX_DELAY_S, rows)
    delay_s[random.random(rows) < _LATE_SHARE] += _LATE_S
    arrival_s = (number + np.sort(random.random(rows))) * _FILE_SECONDS
    ts = _START_US + ((arrival_s - delay_s) * 1_000_000).astype(np.int64)
    # A few users make most of the events.
    user = (random.pareto(1.2, rows) * 50).astype(np.int64) % 100_000
    page = pa.DictionaryArray.from_arrays(pa.array(random.integers(0, len(_PAGES), rows)), list(_PAGES))
    amount = np.round(random.exponential(20, rows), 2)
    return pa.table(
        {
            "ts": pa.array(ts, pa.timestamp("us", tz="UTC")),
            "user": pa.array(user),
            "page": page.cast(pa.string()),
            "amount": pa.array(amount, mask=random.random(rows) < 0.01),
        }
    )


def write_events(folder: Path, files: range, rows: int) -> None:
    """Write the files of these numbers that do not exist yet, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in files:
        file = folder / f"events-{number:06d}.parquet"
        if not file.exists():
            write_file(make_events(number, rows), file)
