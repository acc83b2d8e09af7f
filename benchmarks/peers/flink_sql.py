"""A query of Flink SQL, with its RocksDB state and a checkpoint a second: all that runs this module is the package apache-flink."""

from __future__ import annotations

import sys

from pyflink.table import EnvironmentSettings, TableEnvironment

from benchmarks.shared import PARTITIONS

_QUERIES = {
    "count": "SELECT k, COUNT(*) AS n, MAX(due) AS due FROM events GROUP BY k",
    # As numbers and without a watermark: a window of SQL's gives its counts only once it is over.
    "window": """SELECT k, COUNT(*) AS n, MAX(due) AS due
        FROM (SELECT due / 10000000 * 100000000 + k AS k, due FROM events) GROUP BY k""",
    "deduplicate": """SELECT k, CAST(1 AS BIGINT) AS n, due FROM (
        SELECT *, ROW_NUMBER() OVER (PARTITION BY k ORDER BY arrived ASC) AS place FROM events) WHERE place = 1""",
}
_SETTINGS = {
    "parallelism.default": str(PARTITIONS),
    "state.backend.type": "rocksdb",
    "execution.checkpointing.interval": "1 s",
    "execution.checkpointing.incremental": "true",
    # As long as a task of ours gathers events; Flink's default is 100 ms.
    "execution.buffer-timeout.interval": "5 ms",
}


def main(workload: str, address: str, source: str, sink: str, folder: str) -> None:
    """Run a query until the process is ended."""
    tables = TableEnvironment.create(EnvironmentSettings.in_streaming_mode())
    for key, value in {**_SETTINGS, "execution.checkpointing.dir": f"file://{folder}"}.items():
        tables.get_config().set(key, value)
    server = f"'properties.bootstrap.servers' = '{address}'"
    tables.execute_sql(
        f"""CREATE TABLE events (k BIGINT, due BIGINT, arrived AS PROCTIME()) WITH ('connector' = 'kafka', 'topic' = '{source}',
        {server}, 'scan.startup.mode' = 'earliest-offset', 'format' = 'json')"""
    )
    columns = "k BIGINT, n BIGINT, due BIGINT"
    if workload == "deduplicate":
        # Nothing is updated.
        connector = "'connector' = 'kafka', 'format' = 'json'"
    else:
        columns += ", PRIMARY KEY (k) NOT ENFORCED"
        connector = "'connector' = 'upsert-kafka', 'key.format' = 'json', 'value.format' = 'json'"
    tables.execute_sql(
        f"CREATE TABLE results ({columns}) WITH ({connector}, 'topic' = '{sink}', {server}, 'properties.linger.ms' = '0')"
    )
    tables.execute_sql(f"INSERT INTO results {_QUERIES[workload]}").wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
