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
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    FLEET,
    PLAIN,
    POLLING,
    SMALL_SPLITS,
    SPARK_STORES,
    Target,
    Variant,
    add_options,
    cores,
    in_turn,
    print_ratios,
    ratios_of,
    report_json,
    session,
    summary,
    use_side,
    write_rows,
)
from benchmarks.nexmark.query import FleetOperators
from benchmarks.workloads import Counts
from spark_jobs.fleet import connect
from spark_jobs.session.java import choose_java_home

_HERE = Path(__file__).parent
#: Pairs of jobs of Flink: one that fills its state, and one that goes on.
_PAIRS = 3


@dataclass
class _OtherSpark:
    """The query on a store of another Spark, in a process of its own.

    Attributes
    ----------
    name
        Release and store, once the process runs.
    batch_s
        Seconds of the measured batches.
    """

    python: str
    store: str
    folder: Path
    shards: int
    memory: str
    name: str = ""
    batch_s: list[float] = field(default_factory=list)

    def __enter__(self) -> _OtherSpark:
        settings = {
            "spark.driver.memory": self.memory,
            "spark.sql.streaming.noDataMicroBatches.enabled": "false",
            POLLING: "100ms",
            **SMALL_SPLITS,
            **SPARK_STORES[self.store],
        }
        command = [
            self.python,
            str(_HERE / "spark_counts.py"),
            str(self.folder),
            str(self.shards),
            json.dumps(settings),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_environment(),
        )
        self.name = f"spark {self._answer()} {self.store}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise SystemExit(
                f"{self.python} ended with {self._process.wait()}; run {_HERE / 'spark_counts.py'} by hand"
            )
        return answer

    def run(self, file: Path) -> float:
        """Give the query another file, and return the seconds of its batch."""
        assert self._process.stdin is not None
        print(file, file=self._process.stdin, flush=True)
        return float(self._answer())

    def measure(self, file: Path) -> None:
        """Run a measured batch."""
        self.batch_s.append(self.run(file))


def _environment() -> dict[str, str]:
    # Not this project's modules, nor its Spark.
    own = {"PYTHONPATH", "SPARK_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"}
    return {
        **{name: value for name, value in os.environ.items() if name not in own},
        "JAVA_HOME": str(choose_java_home(os.environ)),
    }


def _in_batches(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the figures of the fleet, of the plain shuffle, and of the stores of another Spark, if there is one."""
    workload = Counts(options.rows, options.state)
    with session("statefleet-peers", options, SMALL_SPLITS) as (spark, root), ExitStack() as processes:
        fleet = connect(f"file://{root}/fleet")
        processes.callback(fleet.shutdown)
        sides: list[Variant | _OtherSpark] = []
        for name in (FLEET, PLAIN):
            use_side(spark, name, options.shards)
            source = spark.readStream.schema(workload.columns).option("maxFilesPerTrigger", 1)
            frame = source.parquet(str(Variant.input_folder(root, name)))
            ops = FleetOperators(fleet, name, options.shards)
            result = workload.plain(frame, options.shards) if name == PLAIN else workload.query(ops, frame, name)
            sides.append(Variant.start(name, root, result, workload.mode))
        for store in SPARK_STORES if options.spark else ():
            other = _OtherSpark(options.spark, store, root / store, options.shards, options.executor_memory)
            sides.append(processes.enter_context(other))
        for number, rows in enumerate(workload.filling()):
            file = write_rows(root / f"fill-{number}.parquet", rows)
            print(f"fill {number}: ", *(f"{side.name} {side.run(file):.2f} s" for side in sides), flush=True)
        for number in range(-options.warmup, options.batches):
            file = write_rows(root / f"batch-{number}.parquet", workload.batch(number + options.warmup))
            for side in in_turn(sides, number + options.warmup):
                side.run(file) if number < 0 else side.measure(file)
            if number >= 0:
                print(f"batch {number}: ", *(f"{side.name} {side.batch_s[-1]:.2f} s" for side in sides), flush=True)
        return {side.name: summary(side.batch_s) for side in sides}


def _flink(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return Flink's name, and its seconds for as many rows as a batch has, of each pair of jobs."""
    fill, batches = 2 * options.state, 10
    sizes = [fill, fill + batches * options.rows] * _PAIRS
    seconds = []
    with tempfile.TemporaryDirectory(prefix="statefleet-bench-", dir=options.folder) as folder:
        numbers = (options.state, cores(), options.checkpoint_s, *sizes)
        process = subprocess.Popen(
            [options.flink, str(_HERE / "flink_counts.py"), folder, *map(str, numbers)],
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
            raise SystemExit(
                f"{options.flink} ended with {process.returncode}; run {_HERE / 'flink_counts.py'} by hand"
            )
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
