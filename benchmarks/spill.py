"""Batch times of a state of one to eight times its store actor's memory limit; no Ray and no Spark.

``python -m benchmarks.spill --json result.json``

Each side has a process of its own, with four shards of one aggregation (15 sums a group), which it fills to 1, 2, 4 and 8 times the
limit. At each size it gets batches with keys of all groups alike, and batches in which most rows have keys of few groups (Zipf,
1.2), one shard after the other. ``limit`` has the memory limit, ``heap`` none.

State in files may still be in the operating system's page cache, which no limit counts, and which the system gives up for any
process's memory. To measure a machine without spare memory, run this on such a machine, or in a container with little more memory
than the limit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from humanize import naturalsize

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.identities import StateStoreId
from coordinator.model.memory_options import MemoryOptions
from coordinator.model.schema import Accumulator, Field, StateSchema
from store_actors.engine.arrays import Slots
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.serving.restoring import StoreMemory
from store_actors.spilling.limited_memory import LimitedMemory, memory_use
from store_actors.spilling.memory_keeper import ResidentMemory

SUMS = 15
SCHEMA = StateSchema(
    keys=(Field("k", "int64"),),
    inputs=(Field("v", "int64"),),
    accumulators=tuple(
        Accumulator(AccumulatorKind.SUM_INT, ("v",), (Field(f"a{number}_sum", "int64"),)) for number in range(SUMS)
    ),
    expiry_key=None,
    delay_ms=None,
    output_mode="update",
)
SHARDS = 4
#: Bytes of a group: its slots, and its entry in an index that is about half full.
GROUP_BYTES = 8 * (2 + SUMS) + 16
_FILLED_AT_ONCE = 1 << 17


class _Shards:
    def __init__(self, memory: StoreMemory) -> None:
        self._memory = memory
        self._ids = [StateStoreId("bench", 0, shard) for shard in range(SHARDS)]
        self._shards = [AggregateShard(SCHEMA, 1, memory.region(store_id)) for store_id in self._ids]

    def fold(self, shard: int, keys: Slots) -> None:
        """Add 1 to all sums of each key."""
        rows = ShardInput.of_raw(SCHEMA, pa.record_batch({"k": keys, "v": np.ones(len(keys), np.int64)}))
        folded = self._shards[shard]
        version, size = folded.version + 1, rows.raw.nbytes
        with self._memory.working(self._ids[shard], version, 2 * size, 6 * len(keys) * GROUP_BYTES):
            folded.apply(rows, 0, version)
            folded.commit()

    def facts(self) -> dict[str, int]:
        """Return their memory use."""
        use = memory_use(self._memory)
        return {"spilled_bytes": use.spilled_bytes, "state_bytes": sum(shard.nbytes for shard in self._shards)}


_SIDES: dict[str, Callable[[Path, int], StoreMemory]] = {
    "limit": lambda folder, limit: LimitedMemory(limit, str(folder / "spill")),
    "heap": lambda folder, limit: StoreMemory(),
}


def _uniform(random: np.random.Generator, groups: int, rows: int) -> Slots:
    return random.integers(0, groups, rows)


def _skewed(random: np.random.Generator, groups: int, rows: int) -> Slots:
    # Hot groups are of all ages: neighbours by rank are not neighbours by number.
    return (random.zipf(1.2, rows).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) % np.uint64(groups)).astype(
        np.int64
    )


_KEYS = {"uniform": _uniform, "skewed": _skewed}


def _run(name: str, folder: Path, limit: int, sizes: Sequence[int], rows: int, batches: int) -> list[dict[str, Any]]:
    """Measure all sizes of a side, in the process that this is called in."""
    side, random, resident = _Shards(_SIDES[name](folder, limit)), np.random.default_rng(7), ResidentMemory()
    results: list[dict[str, Any]] = []
    filled = 0
    for size in sizes:
        groups = size * limit // GROUP_BYTES // SHARDS
        for begin in range(filled, groups, _FILLED_AT_ONCE):
            for shard in range(SHARDS):
                side.fold(shard, np.arange(begin, min(begin + _FILLED_AT_ONCE, groups)))
        filled = groups
        figures: dict[str, Any] = {"size": size, "groups": groups * SHARDS}
        for kind, keys in _KEYS.items():
            seconds = []
            for _ in range(batches + 1):
                chosen = [keys(random, groups, rows // SHARDS) for _ in range(SHARDS)]
                begun = time.perf_counter()
                for shard, shard_keys in enumerate(chosen):
                    side.fold(shard, shard_keys)
                seconds.append(time.perf_counter() - begun)
            # Without the first batch, which has the memory as filling left it.
            figures[kind] = seconds[1:]
        results.append(
            {
                **figures,
                **side.facts(),
                "resident_bytes": sum(resident.read()),
                "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            }
        )
    return results


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spill", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--limit", default="512MiB", help="memory limit (%(default)s)")
    parser.add_argument("--sizes", default=(1, 2, 4, 8), type=_numbers, help="state by the limit (1,2,4,8)")
    parser.add_argument("--rows", type=int, default=200_000, help="rows a batch (%(default)s)")
    parser.add_argument("--batches", type=int, default=7, help="measured batches of each kind (%(default)s)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--folder", type=Path, help="where to put state, on a disk (default: the temporary folder)")
    return parser.parse_args(argv)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(number) for number in text.split(",")))


def main(argv: Sequence[str] | None = None) -> int:
    """Run all sides and print the medians."""
    options = _parse(argv)
    limit = MemoryOptions.of(options.limit, None).limit
    assert limit is not None, "an option with a default"
    result: dict[str, list[dict[str, Any]]] = {}
    print(f"limit {naturalsize(limit)}, {options.rows:,} rows a batch, {GROUP_BYTES} bytes a group; medians in ms")
    for name in _SIDES:
        context = multiprocessing.get_context("spawn")
        with (
            tempfile.TemporaryDirectory(prefix="statefleet-bench-", dir=options.folder) as folder,
            ProcessPoolExecutor(1, context) as process,
        ):
            results = process.submit(
                _run, name, Path(folder), limit, options.sizes, options.rows, options.batches
            ).result()
        result[name] = results
        for figures in results:
            medians = "  ".join(f"{kind} {1000 * statistics.median(figures[kind]):8.1f}" for kind in _KEYS)
            print(f"  {name:<9} {figures['size']:>2}x  {medians}  highest {naturalsize(figures['peak_bytes'])}")
    if options.json is not None:
        options.json.write_text(json.dumps({"limit": limit, "rows": options.rows, "sides": result}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
