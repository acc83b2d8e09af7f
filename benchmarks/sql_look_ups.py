"""Point look-ups through ``serve-sql`` by a client of PostgreSQL, beside ``get`` of this package, on the same running state.

``python -m benchmarks.sql_look_ups``; ``--keys``, ``--clients``, ``--seconds`` and ``--rounds`` choose.

A query keeps counts and sums of all keys in a fleet on this machine. The server is a process of its own
(``statefleet serve-sql``), and its client is pgbench, which comes with PostgreSQL and is in C: each of its connections looks up a
random key by a prepared statement, and waits for the row before the next one. Beside it, as many threads of a process of Python call
``get``; pgbench asks the same without what makes a look-up of it, so that DuckDB answers; and pgbench looks up keys while the query has
a batch a second. The sides take turns, round by round, in one run; reported are medians of the rounds. What processes of the server's
side used of the cores is measured too: look-ups a core are those of a second over the cores that the server and the store actor were
busy on. What 8 cores would give is 8 times that, and no measurement.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from pyspark.sql import functions as F

from benchmarks.harness import Variant, add_files, in_turn, report_json, session, write_rows
from statefleet.fleet import connect
from statefleet.reads.fleet import attach

#: Makes look-ups for some seconds, and returns the milliseconds of each.
Side = Callable[[float], Any]
#: Sides by name, each with the processes that serve it.
Sides = dict[str, tuple[Side, list[psutil.Process]]]

_NAME = "counts"
#: What RisingWave says of itself: look-ups a second, mean milliseconds, and cores.
RISINGWAVE = {"per_second": 25_814, "mean_ms": 4.96, "cores": 8}
_SCRIPTS = {
    "sql": "\\set k random(0, {last})\nselect n, total from counts where k = :k;\n",
    # The same rows: an expression is not recognised as a look-up.
    "sql by DuckDB": "\\set k random(0, {last})\nselect n, total from counts where k + 0 = :k;\n",
}


@contextmanager
def serving(uri: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run the command; return its address and its process."""
    command = [sys.executable, "-m", "statefleet.cli", "serve-sql", uri, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[0], psutil.Process(server.pid)
        server.terminate()


def by_pgbench(url: str, script: Path, options: argparse.Namespace, folder: Path, clients: int, seconds: float) -> Any:
    """Return the milliseconds of each look-up."""
    log = folder / "latencies"
    for old in folder.glob(f"{log.name}.*"):
        old.unlink()
    host, port = url.removeprefix("postgresql://").partition("/")[0].split(":")
    command = [options.pgbench, "-f", script, f"--log-prefix={log}", "-h", host, "-p", port]
    command += f"-n -M prepared -c {clients} -j 1 -T {int(seconds)} -l -U reader statefleet".split()
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(ran.stderr)
    lines = [line.split() for file in folder.glob(f"{log.name}.*") for line in file.read_text().splitlines()]
    return np.array([int(line[2]) / 1000 for line in lines])


def by_get(uri: str, keys: int, threads: int, seconds: float) -> Any:
    """Return the milliseconds of each ``get`` of as many threads."""
    state = attach(uri).state(_NAME)
    ends = time.perf_counter() + seconds

    def took_ms(number: int) -> Iterator[float]:
        for key in np.random.default_rng(number).integers(0, keys, 100_000).tolist():
            began = time.perf_counter()
            if began > ends:
                return
            assert state.get({"k": key}, columns=["n", "total"]) is not None
            yield (time.perf_counter() - began) * 1000

    with ThreadPoolExecutor(threads) as pool:
        return np.concatenate(list(pool.map(lambda number: list(took_ms(number)), range(threads))))


def busy_s(processes: Sequence[psutil.Process]) -> float:
    """Return the seconds of a core that processes have used."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def store_actors() -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "StoreActor" in " ".join(process.info["cmdline"] or ())
    ]


def measured(side: Side, seconds: float, served_by: Sequence[psutil.Process]) -> dict[str, float]:
    """Return the figures of a side's round."""
    before, began = busy_s(served_by), time.perf_counter()
    took_ms = side(seconds)
    elapsed = time.perf_counter() - began
    busy = busy_s(served_by) - before
    return {
        "per_second": len(took_ms) / seconds,
        "mean_ms": float(np.mean(took_ms)),
        "p50_ms": float(np.quantile(took_ms, 0.5)),
        "p99_ms": float(np.quantile(took_ms, 0.99)),
        "busy_cores": busy / elapsed,
        "per_core": len(took_ms) / max(busy, 1e-9),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sql_look_ups", description=__doc__.partition("\n")[0])
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64], help="connections, or threads of get")
    parser.add_argument("--seconds", type=float, default=5, help="of a round")
    parser.add_argument("--batch-rows", type=int, default=10_000, help="of the batches beside look-ups, one a second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--executor-memory", default="1g")
    parser.add_argument("--pgbench", default=shutil.which("pgbench"), help="by default that of PATH")
    add_files(parser)
    options = parser.parse_args(arguments)
    if options.pgbench is None:
        parser.error(
            "pgbench is not on PATH; install PostgreSQL's client (Debian: postgresql-contrib), or name it by --pgbench"
        )
    figures = dict[str, Any]()
    with session("statefleet-sql-look-ups", options) as (spark, root):
        fleet = connect(f"file://{root}/fleet")
        numbers = itertools.count()

        def files(rows: int) -> Path:
            """Write another file of keys."""
            keys = (
                np.arange(options.keys)
                if rows == options.keys
                else np.random.default_rng().integers(0, options.keys, rows)
            )
            return write_rows(root / f"rows-{next(numbers)}.parquet", pa.table({"k": keys, "x": keys % 1000}))

        source = spark.readStream.schema("k long, x long").parquet(str(Variant.input_folder(root, _NAME)))
        counts = fleet.stateful(source, name=_NAME, shards=options.shards).groupBy("k")
        variant = Variant.start(_NAME, root, counts.agg(F.count("*").alias("n"), F.sum("x").alias("total")), "update")
        variant.run(files(options.keys))
        with serving(fleet.uri) as (url, server):
            scripts = {name: root / f"{name.replace(' ', '-')}.sql" for name in _SCRIPTS}
            for name, text in _SCRIPTS.items():
                scripts[name].write_text(text.format(last=options.keys - 1))

            def batch() -> None:
                variant.run(files(options.batch_rows))

            actors = store_actors()
            of_get, of_sql = [psutil.Process(os.getpid()), *actors], [server, *actors]
            for clients in options.clients:
                by_sql = {
                    name: partial(by_pgbench, url, script, options, root, clients) for name, script in scripts.items()
                }
                sides: Sides = {
                    "get": (partial(by_get, fleet.uri, options.keys, clients), of_get),
                    "sql": (by_sql["sql"], of_sql),
                    "sql beside batches": (partial(_beside, batch, by_sql["sql"]), of_sql),
                }
                if clients == min(options.clients):
                    sides["sql by DuckDB"] = (by_sql["sql by DuckDB"], of_sql)
                figures[str(clients)] = _of_clients(clients, sides, options)
        variant.query.stop()
        fleet.shutdown()
    print(json.dumps(figures, indent=2))
    report_json(options, keys=options.keys, clients=figures, risingwave=RISINGWAVE)


def _beside(batch: Callable[[], Any], side: Side, seconds: float) -> Any:
    """Return what a side gives while there is a batch a second."""
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(side, seconds)
        while not wait([looking], 1).done:
            batch()
        return looking.result()


def _of_clients(clients: int, sides: Sides, options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of each side's rounds, and the ratio of look-ups by SQL and by ``get``."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for side, _ in sides.values():
        side(2)
    for number in range(options.rounds):
        for name in in_turn(list(sides), number):
            side, served_by = sides[name]
            rounds[name].append(measured(side, options.seconds, served_by))
            figures = ", ".join(f"{key} {value:,.2f}" for key, value in rounds[name][-1].items())
            print(f"  {clients} clients, round {number}, {name}: {figures}", flush=True)
    medians: dict[str, Any] = {
        name: {key: statistics.median(figures[key] for figures in of_side) for key in of_side[0]}
        for name, of_side in rounds.items()
    }
    ratios = [sql["per_second"] / got["per_second"] for sql, got in zip(rounds["sql"], rounds["get"], strict=True)]
    per_core = medians["sql"]["per_core"]
    return {
        **medians,
        "sql / get": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
        "8 cores, computed": {"per_second": 8 * per_core, "of RisingWave": 8 * per_core / RISINGWAVE["per_second"]},
    }


if __name__ == "__main__":
    main()
