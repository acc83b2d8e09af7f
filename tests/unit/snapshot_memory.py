"""Memory that a process needs to write or load a snapshot: ``python -m tests.unit.snapshot_memory (write | load) FOLDER``.

Prints the state's size, and the peak memory of the process beyond its memory without the state.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.identities import StateStoreId
from coordinator.model.load_plans import LoadPlan
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.runtime.runtime import Runtime
from coordinator.storage.local import LocalObjectStore
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.serving.commits import Commits
from store_actors.serving.loading import Loader
from store_actors.serving.metrics import StoreMetrics

SCHEMA = StateSchema(
    keys=(Field("k", "string"),),
    inputs=(Field("v", "int64"),),
    accumulators=(Accumulator(AccumulatorKind.SUM_INT, ("v",), (Field("a0_sum", "int64"),)),),
    expiry_key=None,
    delay_ms=None,
    output_mode="update",
)
#: 100 MB of keys, of rows and of their index together.
GROUPS, BATCH, LENGTH = 400_000, 50_000, 150
#: Bytes of a file and a table of a snapshot, as a large shard has them.
PIECE_BYTES = 1 << 22


def memory(kind: str) -> int:
    """Return the bytes of memory that the process has (``VmRSS``), or had at most (``VmHWM``)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{kind}:"))
    return 1024 * int(line.split()[1])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def filled(groups: int) -> AggregateShard:
    shard = AggregateShard(SCHEMA)
    for version, begin in enumerate(range(0, groups, BATCH), start=1):
        numbers = np.arange(begin, begin + BATCH)
        keys = pc.utf8_lpad(pa.array(numbers).cast(pa.string()), LENGTH, "0")
        shard.apply(ShardInput.of_raw(SCHEMA, pa.record_batch({"k": keys, "v": numbers})), 0, version)
        shard.commit()
    return shard


class AcceptingCoordinator:
    """Accepts every snapshot."""

    snapshot: SnapshotEntry

    def add_snapshot(self, state_name: str, snapshot: SnapshotEntry) -> bool:
        self.snapshot = snapshot
        return True


def write(shard: AggregateShard, objects: LocalObjectStore, piece_bytes: int = PIECE_BYTES) -> SnapshotEntry:
    coordinator, metrics = AcceptingCoordinator(), StoreMetrics()
    loader = Loader(objects, metrics, Runtime())
    commits = Commits(objects, coordinator, loader, metrics, Runtime(), piece_bytes)  # type: ignore[arg-type]
    entry = CommitEntry(0, shard.version, 0, 1, "run", "a", "f", 0, 0, 0, 0, 0, len(shard), 0, 0, 0, 0, 0)
    tables = (table for make_tables in shard.frozen() for table in make_tables())
    assert commits.write_snapshot(StateStoreId("s", 0, 0), entry, tables, shard.schema, shard.room())
    return coordinator.snapshot


def load(snapshot: SnapshotEntry, objects: LocalObjectStore, schema: StateSchema = SCHEMA) -> AggregateShard:
    loader = Loader(objects, StoreMetrics(), Runtime())
    return loader.load(lambda: AggregateShard(schema), LoadPlan((snapshot,), (), snapshot.version))[0]


def main(action: str, folder: Path) -> None:
    objects, note = LocalObjectStore(folder / "objects"), folder / "snapshot.json"
    # The memory that a process needs once, without any state.
    small = filled(BATCH)
    small.table.snapshot_bytes = PIECE_BYTES
    load(write(small, objects), objects)
    del small
    before = memory("VmRSS")
    if action == "write":
        shard = filled(GROUPS)
        shard.table.snapshot_bytes = PIECE_BYTES
        state = memory("VmRSS") - before
        forget_peak()
        snapshot = write(shard, objects)
        note.write_text(msgspec.json.encode(snapshot).decode())
    else:
        snapshot = msgspec.json.decode(note.read_text(), type=SnapshotEntry)
        forget_peak()
        shard = load(snapshot, objects)
        state = memory("VmRSS") - before
    assert len(shard) == GROUPS
    print(f"state={state} peak={memory('VmHWM') - before} files={len(snapshot.files)} nbytes={shard.nbytes}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
