"""The speed of writing a shard as a snapshot and of loading it again, index included; no Ray and no Spark.

``python -m benchmarks.loading --json result.json``

One shard of int64 keys with two int64 values, stored at ``--uri`` (a temporary folder by default) as one snapshot and some deltas.
A plain read of the same files is timed beside it: the ratio shows how much slower loading is than the storage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.schemas import COUNT_AND_SUM
from coordinator.model.commits import CommitEntry, SnapshotEntry, StoredFile
from coordinator.model.identities import StateStoreId
from coordinator.model.load_plans import LoadPlan
from coordinator.runtime.runtime import Runtime
from coordinator.storage.protocol import ObjectStore
from coordinator.storage.uris import open_object_store
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.serving.files import delta_path, encode_delta, encode_snapshot, identity_in_state, snapshot_path
from store_actors.serving.loading import Loader
from store_actors.serving.metrics import StoreMetrics


def _write(objects: ObjectStore, rows: int, deltas: int) -> tuple[LoadPlan, int, float]:
    """Write a snapshot of `rows` groups and `deltas` deltas of a tenth each; return (plan, bytes, seconds that the snapshot took)."""
    store_id = StateStoreId(f"{objects.uri}/bench", 0, 0)
    random = np.random.default_rng(rows)
    shard = AggregateShard(COUNT_AND_SUM)
    entries: list[CommitEntry] = []
    for version in range(1, deltas + 2):
        keys = random.permutation(rows) if version == 1 else random.integers(0, rows, rows // 10)
        batch = pa.record_batch({"k": keys.astype(np.int64), "v": keys.astype(np.int64)})
        change = shard.apply(ShardInput.of_raw(COUNT_AND_SUM, batch), 0, version)
        shard.commit()
        if version == 1:
            started = time.perf_counter()
            tables = (table for read_block in shard.frozen() for table in read_block())
            files = []
            for piece in encode_snapshot(tables, 1, 0, COUNT_AND_SUM, shard.room(), identity_in_state(store_id, "aa")):
                files.append(
                    StoredFile(snapshot_path(store_id, 1, "aa", piece.number), len(piece.data), piece.checksum)
                )
                objects.put(files[-1].file, piece.data)
            snapshot_s = time.perf_counter() - started
            first = files[0]
            snapshot = SnapshotEntry(
                0, 1, "aa", first.file, first.file_bytes, first.checksum, len(shard), 0, 0, further=tuple(files[1:])
            )
            size = sum(stored.file_bytes for stored in files)
        else:
            data, checksum = encode_delta(change, COUNT_AND_SUM, identity_in_state(store_id, "aa"))
            file = delta_path(store_id, version, "aa")
            objects.put(file, data)
            size += len(data)
            entries.append(
                CommitEntry(0, version, version - 1, 1, "r", "aa", file, len(data), checksum, change.delta.num_rows,
                            change.rows_updated, 0, len(shard), shard.nbytes, rows, 0, 0, 0)
            )  # fmt: skip
    return LoadPlan((snapshot,), tuple(entries), 1), size, snapshot_s


def _median_s(action: Callable[[], Any], times: int) -> float:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--uri", help="object store to use (default: a temporary folder)")
    parser.add_argument("--rows", type=int, default=2_000_000, help="groups of the shard (%(default)s)")
    parser.add_argument("--deltas", type=int, default=5, help="deltas after the snapshot (%(default)s)")
    parser.add_argument("--times", type=int, default=5, help="repetitions (%(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the figures."""
    options = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="statefleet-bench-") as folder:
        objects = open_object_store(options.uri or f"file://{folder}")
        plan, size, snapshot_s = _write(objects, options.rows, options.deltas)
        rows = options.rows + sum(entry.delta_rows for entry in plan.deltas)
        files = [*plan.snapshots[0].files, *(entry.file for entry in plan.deltas)]
        read_s = _median_s(lambda: [objects.get(file) for file in files], options.times)
        load_s = _median_s(
            lambda: Loader(objects, StoreMetrics(), Runtime()).load(lambda: AggregateShard(COUNT_AND_SUM), plan),
            options.times,
        )
        for file in files:
            objects.delete(file)
    result = {
        "rows": rows,
        "bytes": size,
        "snapshot_rows_per_s": options.rows / snapshot_s,
        "load_rows_per_s": rows / load_s,
        "load_mb_per_s": size / load_s / 1e6,
        "read_mb_per_s": size / read_s / 1e6,
        "load / read": load_s / read_s,
    }
    print(f"{options.rows:,} groups, one snapshot and {options.deltas} deltas: {rows:,} rows in {size / 1e6:.1f} MB")
    print(f"  snapshot   {result['snapshot_rows_per_s'] / 1e6:6.2f} M rows/s written")
    print(
        f"  load       {result['load_rows_per_s'] / 1e6:6.2f} M rows/s, {result['load_mb_per_s']:8.1f} MB/s, index included"
    )
    print(
        f"  plain read {'':>6}           {result['read_mb_per_s']:8.1f} MB/s; load / read {result['load / read']:.1f}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
