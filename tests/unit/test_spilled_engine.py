"""Arrays in files that are dropped from memory at any point; `test_shard_machines.py` has every kind of shard with them."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pyarrow as pa

from store_actors.engine.memory import HEAP
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.spilling.region import mapping_of
from tests.unit.aggregation_fleet import SCHEMA
from tests.unit.spilled import open_files, tiny_region


def test_arrays_in_files_survive_being_dropped_while_they_change(tmp_path: Path) -> None:
    region = tiny_region(str(tmp_path))
    shard, plain = AggregateShard(SCHEMA, 7, region), AggregateShard(SCHEMA, 7)
    is_over = threading.Event()

    def spill() -> None:
        while not is_over.is_set():
            region.drop()

    spiller = threading.Thread(target=spill)
    spiller.start()
    try:
        random = np.random.default_rng(5)
        for version in range(1, 30):
            values = pa.array([f"{number:05}" for number in random.integers(0, 5000, 3000)])
            for each in (shard, plain):
                each.apply(ShardInput.of_raw(SCHEMA, pa.record_batch({"v": values})), 0, version)
                each.commit()
    finally:
        is_over.set()
        spiller.join()
    assert mapping_of(shard.table.rows) is not None
    assert sorted(map(str, shard.snapshot().to_pylist())) == sorted(map(str, plain.snapshot().to_pylist()))
    assert shard.rollback(28)
    assert plain.rollback(28)
    assert sorted(map(str, shard.snapshot().to_pylist())) == sorted(map(str, plain.snapshot().to_pylist()))


def test_a_larger_array_has_the_old_values_and_nothing_is_copied(tmp_path: Path) -> None:
    region = tiny_region(str(tmp_path))
    for memory in (HEAP, region):
        array = memory.zeros((5, 3), np.uint64)
        array[:] = np.arange(15).reshape(5, 3)
        larger = memory.larger(array, 4, 5000)
        assert larger.shape == (5000, 3)
        assert larger[:4].tolist() == array[:4].tolist() == np.arange(12).reshape(4, 3).tolist()
        copy = memory.copied(larger)
        copy[0, 0] = 99
        assert larger[0, 0] == 0
        assert memory.kept(copy)[0].tolist() == [99, 1, 2]
    first, second = mapping_of(array), mapping_of(larger)
    assert first is not None
    assert second is not None
    assert first.file is second.file, "it grew in place"


def test_files_are_removed_with_their_arrays(tmp_path: Path) -> None:
    region = tiny_region(str(tmp_path))
    arrays = [region.zeros(1000, np.int64) for _ in range(50)]
    assert open_files(tmp_path) == 50
    assert region.nbytes == 50 * 8192
    views = [array.reshape(10, 100)[3:] for array in arrays]
    del arrays
    assert open_files(tmp_path) == 50, "a view of each array remains"
    del views
    assert open_files(tmp_path) == 0
    assert region.nbytes == 0
