"""A process with a memory limit and several times as much state: ``python -m tests.unit.spilling_process ACTION FOLDER LIMIT TIMES``.

``fill`` makes groups until their rows are TIMES the limit, changes groups of all ages, and writes a snapshot. ``load`` changes groups
in a process that has to load the state first. Both check every changed group, and print the peak memory of the process. ``full``
has no space in its spill folder at first, and continues once it has.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import MemoryLimitError
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.type_names import words_type
from coordinator.storage.local import LocalObjectStore
from store_actors.messages.requests import ApplyRequest, ShardInput
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from store_actors.spilling.limited_memory import LimitedMemory
from tests.unit.aggregation_fleet import LocalCoordinator
from tests.unit.snapshot_memory import memory

#: 4 KiB a group, so that much state needs few groups.
WORDS = 512
BITS = Accumulator(
    AccumulatorKind.BITMAP,
    ("bit",),
    (Field("bits", words_type(WORDS), False),),
    result=(Field("bits", "binary", False),),
)
SCHEMA = StateSchema(
    keys=(Field("k", "int64"),),
    inputs=(Field("bit", "int64"),),
    accumulators=(BITS,),
    expiry_key=None,
    delay_ms=None,
    output_mode="update",
)
SHARDS, BATCH = 2, 1500


class SpillingProcess:
    """Store and coordinator, over files."""

    def __init__(self, folder: Path, limit: int) -> None:
        objects = LocalObjectStore(folder / "objects")
        self._coordinator = LocalCoordinator(objects)  # type: ignore[arg-type]
        self.memory = LimitedMemory(limit, str(folder / "spill"))
        self.store = OperatorShards(Partitions(objects, self._coordinator, memory=self.memory))

    def apply(self, batch: int, shard: int, keys: np.ndarray, bit: int) -> pa.Table:
        task = TaskIdentity("s", "query", "run", batch, shard, 0, "executor")
        grant = self._coordinator.lease(task, "a")
        request = ApplyRequest(task, grant.lease, grant.base_version, SCHEMA, grant.watermarks)
        rows = pa.record_batch({"k": keys, "bit": np.full(len(keys), bit)})
        return self.store.apply(request, ShardInput.of_raw(SCHEMA, rows))[0]

    def fill(self, groups: int, first: int = 0) -> int:
        """Make groups with one bit each, from batch `first` on, and return the next batch."""
        for batch in range(first, groups // BATCH):
            for shard in range(SHARDS):
                self.apply(batch, shard, np.arange(batch * BATCH, (batch + 1) * BATCH), 1)
        return groups // BATCH

    def change(self, batch: int, groups: int, bit: int) -> None:
        """Set a further bit of groups of all ages; each must still have the bits that it had."""
        for shard in range(SHARDS):
            keys = np.random.default_rng(batch + shard).choice(groups, BATCH, replace=False)
            emitted = self.apply(batch, shard, keys, bit)
            assert sorted(emitted.column("k").to_pylist()) == sorted(keys.tolist())
            bits = np.frombuffer(b"".join(emitted.column("bits").to_pylist()), np.uint8).reshape(BATCH, 8 * WORDS)
            # Some groups also have the bit of an earlier change.
            assert np.isin(bits[:, 0], [1 << 1 | 1 << bit, 1 << 1 | 1 << 2 | 1 << bit]).all()
            assert not bits[:, 1:].any()


def main(action: str, folder: Path, limit: int, times: int) -> None:
    process = SpillingProcess(folder, limit)
    groups = -(-times * limit // (8 * WORDS * SHARDS * BATCH)) * BATCH
    if action == "fill":
        batch = process.fill(groups)
        process.change(batch, groups, 2)
        process.store.partitions.maintain(1)
        assert process.store.metrics.snapshots_written == SHARDS
    elif action == "load":
        process.change(groups // BATCH + 1, groups, 3)
        assert process.store.metrics.snapshots_loaded == SHARDS
    else:
        for shard in range(SHARDS):
            process.apply(0, shard, np.arange(BATCH), 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 23, resource.RLIM_INFINITY))
        try:
            process.fill(groups, first=1)
        except MemoryLimitError as error:
            print(f"refused: {error}")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        process.fill(groups, first=1)
        process.change(groups // BATCH, groups, 2)
    use = process.memory.use()
    rows = sum(rows for _, _, rows in process.store.loaded())
    print(f"peak={memory('VmHWM')} state={rows * 8 * WORDS} spilled={use.spilled_bytes} resident={use.resident_bytes}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
