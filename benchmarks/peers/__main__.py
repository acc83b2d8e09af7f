"""Counts and sums by an integer key: Statefleet beside another release of Spark, and beside Flink, each in a process of its own.

``python -m benchmarks.peers --spark PYTHON --flink PYTHON``: the Pythons of environments with PySpark and with PyFlink, made by
``python -m venv folder && folder/bin/pip install pyspark==4.3.0``, say. They need a Java, found as this project's own sessions find
theirs.

The fleet, the plain shuffle and both stores of the other Spark get the same files, in turn, batch by batch. Flink has no batches. It
makes its rows by itself; its time is the difference of a job that makes many rows and one that makes as many as fill its state.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.harness import (
    FLEET,
    ONE_BATCH,
    PLAIN,
    SMALL_SPLITS,
    SPARK_STORES,
    Target,
    Variant,
    add_options,
    cores,
    print_ratios,
    ratios_of,
    report_json,
    session,
    settings_of,
    summary,
)
from benchmarks.operators import Plan, Results, compare
from benchmarks.workloads import Counts
from spark_jobs.session.java import choose_java_home

_HERE = Path(__file__).parent
#: Pairs of jobs of Flink: one that fills its state, and one that goes on.
_PAIRS = 3


class _OtherQuery:
    """The query on another Spark, in a process of its own, as far as :class:`~benchmarks.harness.Variant` uses a query.

    Parameters
    ----------
    command
        Runs ``spark_counts.py``.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_environment(),
        )
        #: Release of its Spark.
        self.release = self._answer()
        self.recentProgress: list[dict[str, Any]] = []

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise _ended(self._command, self._process.wait())
        return answer

    def processAllAvailable(self) -> None:
        """Wait until all input is processed."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        self.recentProgress = json.loads(self._answer())

    def stop(self) -> None:
        """End the process."""
        self._process.communicate()


def _ended(command: Sequence[str], code: int) -> SystemExit:
    return SystemExit(f"{command[0]} ended with {code}; run {command[1]} by hand")


def _start(store: str, options: argparse.Namespace, root: Path) -> Variant:
    """Start the query on a store of the other Spark."""
    settings = {
        "spark.driver.memory": options.executor_memory,
        **ONE_BATCH,
        **SMALL_SPLITS,
        **settings_of(store, options.shards),
    }
    source = Variant.input_folder(root, store)
    query = _OtherQuery(
        [options.spark, str(_HERE / "spark_counts.py"), str(source), str(root / store), json.dumps(settings)]
    )
    return Variant(f"spark {query.release} {store}", source, cast(StreamingQuery, query))


def _environment() -> dict[str, str]:
    # Not this project's modules, nor its Spark.
    own = {"PYTHONPATH", "SPARK_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"}
    return {
        **{name: value for name, value in os.environ.items() if name not in own},
        "JAVA_HOME": str(choose_java_home(os.environ)),
    }


def _in_batches(options: argparse.Namespace) -> Results:
    """Return the figures of the fleet, of the plain shuffle, and of the stores of another Spark, if there is one."""
    plan = Plan((FLEET, PLAIN), options.shards, options.warmup, options.batches)
    others = [partial(_start, store, options) for store in SPARK_STORES] if options.spark else []
    with session("statefleet-peers", options, SMALL_SPLITS) as (spark, root):
        return compare(spark, Counts(options.rows, options.state), plan, root / "counts", others=others)


def _flink(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return Flink's name, and its seconds for as many rows as a batch has, of each pair of jobs."""
    fill, batches = 2 * options.state, 10
    sizes = [fill, fill + batches * options.rows] * _PAIRS
    seconds = []
    with tempfile.TemporaryDirectory(prefix="statefleet-bench-", dir=options.folder) as folder:
        numbers = (options.state, cores(), options.checkpoint_s, *sizes)
        command = [options.flink, str(_HERE / "flink_counts.py"), folder, *map(str, numbers)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**_environment(), "_JAVA_OPTIONS": f"-Xmx{options.executor_memory}"},
        )
        assert process.stdout is not None
        name = f"flink {process.stdout.readline().strip()} heap"
        for rows, line in zip(sizes, process.stdout, strict=False):
            seconds.append(float(line))
            print(f"{name}: {rows:,} rows in {seconds[-1]:.1f} s", flush=True)
        if process.wait() or len(seconds) < len(sizes):
            raise _ended(command, process.returncode)
    return name, summary([(seconds[at + 1] - seconds[at]) / batches for at in range(0, len(sizes), 2)])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--spark", help="Python of an environment with another PySpark")
    parser.add_argument("--flink", help="Python of an environment with PyFlink")
    parser.add_argument(
        "--checkpoint-s", type=int, default=10, help="seconds between Flink's checkpoints (%(default)s)"
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows a batch (%(default)s)")
    parser.add_argument("--state", type=int, default=5_000_000, help="keys (%(default)s)")
    parser.add_argument("--batches", type=int, default=5, help="measured batches of each side (%(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="batches before them that do not count (%(default)s)")
    add_options(parser, executor_memory="6g")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    options = _parse(argv)
    results = _in_batches(options)
    if options.flink:
        name, figures = _flink(options)
        results[name] = figures
    targets = [Target(name, FLEET) for name in results if name not in (FLEET, PLAIN)]
    ratios = ratios_of(results, [Target(FLEET, PLAIN), *targets], operator="counts")
    print_ratios(ratios, "operator")
    report_json(options, results=results, ratios=ratios)
    return 0


if __name__ == "__main__":
    sys.exit(main())
