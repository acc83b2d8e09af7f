"""Events a second of Nexmark's stateful queries on the fleet, and on Spark's own state stores where plain Spark can run them.

``python -m benchmarks.nexmark.throughput --json result.json``

All variants of a query live in one Spark session, read the same files and run one after another, in an order that rotates from round
to round, so slow drifts of the machine hit all alike. What counts is the median time of a micro-batch after the first ones; an event
is one of any of the three streams. Event time is a part of the workload: the rate of the events is printed with the figures.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.harness import (
    FLEET,
    SPARK_STORES,
    Target,
    add_options,
    cores,
    in_turn,
    own_operators,
    print_ratios,
    ratios_of,
    report_json,
    session,
    some_of,
    summary,
    use_side,
)
from benchmarks.nexmark.files import read_stream, write_events
from benchmarks.nexmark.generator import Nexmark
from benchmarks.nexmark.queries import QUERIES
from benchmarks.nexmark.query import FleetOperators, Operators, Query
from statefleet.fleet import Fleet, connect

VARIANTS = (FLEET, *SPARK_STORES)


def variants_of(query: Query, chosen: Sequence[str]) -> list[str]:
    """Return the sides that can run the query."""
    return [name for name in chosen if name == FLEET or query.plain_spark]


def _run(
    spark: SparkSession, query: Query, ops: Operators, variant: str, shards: int, events: Path, checkpoint: Path
) -> list[float]:
    """Run a query over all events; return the seconds of its micro-batches, as Spark measured them."""
    use_side(spark, variant, shards)
    writer = query.build(ops, read_stream(spark, events)).writeStream.outputMode(query.mode).format("noop")
    running = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    running.awaitTermination()
    by_batch = {progress["batchId"]: progress for progress in running.recentProgress if progress["numInputRows"] > 0}
    return [by_batch[batch]["durationMs"]["triggerExecution"] / 1000 for batch in sorted(by_batch)]


@dataclass(frozen=True)
class Runs:
    """How queries are run.

    Attributes
    ----------
    events, batch_events, rate
        Events of each run and of each of its micro-batches; events a second of event time.
    rounds
        Runs of each query on each variant.
    warmup
        First batches of a run that do not count: they compile and connect.
    """

    variants: Sequence[str] = (FLEET, *SPARK_STORES)
    shards: int = 4
    events: int = 1_000_000
    batch_events: int = 100_000
    rate: int = 10_000
    rounds: int = 1
    warmup: int = 2

    def write(self, folder: Path) -> None:
        """Write the events."""
        write_events(folder, Nexmark(rate=self.rate), self.events, self.batch_events)


def measure(
    spark: SparkSession, fleet: Fleet, query: Query, runs: Runs, root: Path, report: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Run a query on all variants that can run it; return the figures of each.

    Parameters
    ----------
    root
        Folder with the events in ``events`` (:meth:`Runs.write`).
    report
        Takes a line of text after each run.
    """
    names = variants_of(query, runs.variants)
    batch_s: dict[str, list[float]] = {name: [] for name in names}
    for number in range(runs.rounds):
        for name in in_turn(names, number):
            label = f"{query.name}-{name}-{number}"
            ops = FleetOperators(fleet, label, runs.shards) if name.startswith(FLEET) else own_operators
            seconds = _run(spark, query, ops, name, runs.shards, root / "events", root / label)
            # The last batch may have fewer events.
            batch_s[name] += seconds[runs.warmup : runs.events // runs.batch_events]
            report(f"  {label}: {' '.join(f'{batch_s:.2f}' for batch_s in seconds)} s")
            shutil.rmtree(root / label, ignore_errors=True)
    results = {name: summary(seconds) for name, seconds in batch_s.items()}
    return {name: {**row, "events_per_s": runs.batch_events / row["median_s"]} for name, row in results.items()}


def _report(results: dict[str, dict[str, dict[str, Any]]], ratios: list[dict[str, Any]], facts: str) -> None:
    print(f"\n{facts}\n\nquery  variant       events/s   median (min .. max) seconds a batch")
    for query, variants in results.items():
        for name, row in variants.items():
            print(
                f"{query:<5}  {name:<10}  {row['events_per_s']:>10,.0f}   {row['median_s']:6.2f}  "
                f"({row['min_s']:.2f} .. {row['max_s']:.2f})"
            )
    print_ratios(ratios, "query")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.nexmark.throughput", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--queries", type=some_of("query", QUERIES), default=list(QUERIES), help="such as q5,q11 (default: all)"
    )
    parser.add_argument("--events", type=int, default=1_000_000, help="events of each run (%(default)s)")
    parser.add_argument("--batch-events", type=int, default=100_000, help="events a micro-batch (%(default)s)")
    parser.add_argument("--rate", type=int, default=10_000, help="events a second of event time (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each query on each variant (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="first batches of a run that do not count (%(default)s)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add_options(parser, executor_memory="4g")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.events // options.batch_events <= options.warmup:
        parser.error(
            "no whole micro-batch would be measured; ask for more --events, or fewer --batch-events or --warmup"
        )
    options.queries = [name for name in options.queries if variants_of(QUERIES[name], options.variants)]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return the exit code."""
    options = _parse(argv)
    facts = (
        f"{options.events:,} events at {options.rate:,} events/s of event time, {options.batch_events:,} a micro-batch, "
        f"{options.shards} partitions; {cores()} cores shared by all: one Spark executor with {cores()} task slots, the fleet's "
        "actors reserve no core; one query runs at a time, every variant reads the same files and commits durably each batch."
    )
    with session("statefleet-nexmark", options) as (spark, root):
        fleet = connect(f"file://{root}/fleet")
        runs = Runs(**{item.name: getattr(options, item.name) for item in fields(Runs)})
        runs.write(root / "events")
        run = functools.partial(measure, spark, fleet, root=root, report=functools.partial(print, flush=True))
        print("warm-up, which does not count: the JVMs compile what is Spark's own", flush=True)
        run(replace(QUERIES[options.queries[0]], name="warm-up"), replace(runs, rounds=1))
        results = {}
        for name in options.queries:
            print(name, flush=True)
            results[name] = run(QUERIES[name], runs)
        fleet.shutdown()
    targets = [Target(name, FLEET) for name in SPARK_STORES]
    ratios = [row for name, result in results.items() for row in ratios_of(result, targets, query=name)]
    _report(results, ratios, facts)
    sizes = {key: getattr(options, key) for key in ("events", "batch_events", "rate", "rounds", "shards")}
    report_json(options, **sizes, facts=facts, results=results, ratios=ratios)
    return 0


if __name__ == "__main__":
    sys.exit(main())
