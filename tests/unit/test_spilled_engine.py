"""Every kind of shard against its model, with all arrays in files that are dropped from memory at any point."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from store_actors.engine.memory import HEAP
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.spilling.mapped_files import mapping_of
from tests.unit.aggregate_machine import AggregateMachine
from tests.unit.aggregation_fleet import SCHEMA
from tests.unit.deduplicate_machine import DeduplicateMachine
from tests.unit.join_machine import JoinMachine
from tests.unit.keyed_machine import KeyedMachine
from tests.unit.list_machine import ListMachine
from tests.unit.session_machine import SessionMachine
from tests.unit.spilled import everything_spilled, tiny_region
from tests.unit.top_machine import TopMachine

MACHINES = [
    AggregateMachine, KeyedMachine, ListMachine, JoinMachine, SessionMachine, TopMachine, DeduplicateMachine
]  # fmt: skip


def open_files(folder: Path) -> int:
    """Return how many files of a folder are open; other threads' sockets and files are not counted."""
    gc.collect()
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder}/")
    return count


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_every_kind_of_shard_is_the_same_when_it_is_spilled(
    machine: type[RuleBasedStateMachine], tmp_path: Path
) -> None:
    with everything_spilled(str(tmp_path)):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=10, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
    assert not list(tmp_path.iterdir()), "files have no names, so that none is left behind"
    # Exceptions that Hypothesis keeps may hold a table or two.
    assert open_files(tmp_path) < 60


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
