"""Counts and sums by key on a Flink of its own; run by ``benchmarks.peers`` with the Python of an environment that has PyFlink.

It imports nothing of this project. The arguments are a folder for checkpoints, numbers of keys, of tasks and of seconds between
checkpoints, and the numbers of rows of the jobs that it runs, one after another. A line is written to standard output for each: the
seconds from its start to its end.

Flink makes its rows itself, at random, and discards results, so that nothing is read or written but checkpoints.
"""

from __future__ import annotations

import sys
import time

import pyflink.version
from pyflink.table import EnvironmentSettings, TableEnvironment

_SOURCE = """CREATE TABLE IF NOT EXISTS source_{rows} (k BIGINT, amount BIGINT) WITH (
    'connector' = 'datagen', 'number-of-rows' = '{rows}', 'rows-per-second' = '1000000000',
    'fields.k.min' = '0', 'fields.k.max' = '{last}', 'fields.amount.min' = '0', 'fields.amount.max' = '{last}'
)"""
_SINK = """CREATE TABLE sink (k BIGINT, n BIGINT, total BIGINT, PRIMARY KEY (k) NOT ENFORCED)
WITH ('connector' = 'blackhole')"""


def main() -> None:
    """Run the jobs."""
    folder, keys, tasks, checkpoint_s, *sizes = sys.argv[1], *map(int, sys.argv[2:])
    settings = {
        "parallelism.default": str(tasks),
        "state.backend.type": "hashmap",
        "execution.checkpointing.dir": f"file://{folder}",
        "execution.checkpointing.interval": f"{checkpoint_s} s",
        # The heap of Flink's own process, in place of the 512 MB for user code that its model of memory gives.
        "taskmanager.memory.task.heap.size": "6g",
        "taskmanager.memory.managed.size": "64m",
        "taskmanager.numberOfTaskSlots": str(tasks),
        # Rows of a key are added up before they meet the state, as Flink's documents advise.
        "table.exec.mini-batch.enabled": "true",
        "table.exec.mini-batch.allow-latency": "1 s",
        "table.exec.mini-batch.size": "100000",
        "table.optimizer.agg-phase-strategy": "ONE_PHASE",
    }
    tables = TableEnvironment.create(EnvironmentSettings.in_streaming_mode())
    for name, value in settings.items():
        tables.get_config().set(name, value)
    tables.execute_sql(_SINK)
    print(pyflink.version.__version__, flush=True)
    for rows in sizes:
        tables.execute_sql(_SOURCE.format(rows=rows, last=keys - 1))
        started = time.monotonic()
        counted = f"SELECT k, COUNT(*), SUM(amount) FROM source_{rows} GROUP BY k"
        tables.execute_sql(f"INSERT INTO sink {counted}").wait()
        print(time.monotonic() - started, flush=True)


if __name__ == "__main__":
    main()
