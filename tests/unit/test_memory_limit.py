"""A store actor's process with a memory limit: what it uses, what it refuses, and its state after a refusal."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pytest

from coordinator.model.errors import InvalidRequestError, MemoryLimitError
from coordinator.model.identities import StateStoreId
from coordinator.model.maintenance import Maintenance
from coordinator.model.memory_options import MemoryOptions
from coordinator.storage.options import StorageOptions
from store_actors.actor.store_actor import StoreActor
from store_actors.engine.memory import Memory
from store_actors.messages.requests import ShardInput
from store_actors.serving.keyed_stores import KeyedStores
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from store_actors.serving.restoring import StoreMemory
from store_actors.spilling import memory_keeper
from store_actors.spilling.limited_memory import LimitedMemory, WorkBudget
from store_actors.spilling.memory_keeper import MemoryKeeper
from store_actors.spilling.spill_folder import checked_folder
from tests.unit.aggregation_fleet import SCHEMA, AggregationFleet, rows
from tests.unit.keyed_fleet import KeyedFleet
from tests.unit.spilled import tiny_region

Result = TypeVar("Result")
MIB = 1 << 20
#: Includes the memory that Python and the engine need themselves.
LIMIT = 416 * MIB


@pytest.mark.parametrize(
    ("text", "size"), [(4096, 4096), ("2GiB", 2 << 30), ("500 MB", 500_000_000), ("1.5KiB", 1536), ("77", 77)]
)
def test_a_limit_is_bytes_or_text_with_a_unit(text: int | str, size: int) -> None:
    assert MemoryOptions.of(text, None).limit == size


@pytest.mark.parametrize("size", [0, -1, "", "2 gigs", "GiB", "-2GiB", 2.5, True])
def test_what_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(InvalidRequestError, match="a memory limit is"):
        MemoryOptions.of(size, None)


def test_a_spill_folder_needs_a_limit() -> None:
    assert MemoryOptions.of(None, None) == MemoryOptions()
    with pytest.raises(InvalidRequestError, match="give memory_limit"):
        MemoryOptions.of(None, "/var/spill")


def test_a_folder_in_memory_or_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    assert checked_folder(str(tmp_path / "made")) == str(tmp_path / "made")
    (tmp_path / "file").write_text("")
    with pytest.raises(MemoryLimitError, match="cannot be written"):
        checked_folder(str(tmp_path / "file"))
    if Path("/dev/shm").is_dir():
        with pytest.raises(MemoryLimitError, match="lies in memory"):
            checked_folder("/dev/shm")


def test_a_limit_below_what_the_process_takes_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemoryLimitError, match="too small") as caught:
        LimitedMemory(64 * MIB, str(tmp_path))
    memory = LimitedMemory(caught.value.context["least"] + 16 * MIB, str(tmp_path))  # type: ignore[operator]
    assert 0 < memory.read_bytes <= 16 * MIB, "readers get only a part of the memory"


# -- order of work ------------------------------------------------------------------------------------------------------------------


def test_a_request_that_never_fits_is_refused_at_once() -> None:
    budget = WorkBudget(100, 60)
    with (
        pytest.raises(MemoryLimitError, match="make batches smaller") as caught,
        budget.admitted(101, 101, {"state": "clicks", "shard": 3, "version": 8}),
    ):
        raise AssertionError("it was let in")
    assert caught.value.context["shard"] == 3
    with budget.admitted(100, 10**9, {}):
        pass
    assert (budget.waits, budget.refusals) == (0, 1)


def test_requests_wait_for_their_turn_and_are_let_in_in_order() -> None:
    budget, admitted = WorkBudget(100, 60), []
    first = budget.admitted(80, 80, {})
    first.__enter__()

    def work(number: int, size: int) -> None:
        with budget.admitted(size, size, {}):
            admitted.append(number)

    # The second request would fit at once. The first came before it, and would wait forever if small requests passed it.
    threads = [threading.Thread(target=work, args=request) for request in [(1, 90), (2, 10)]]
    for expected, thread in enumerate(threads, start=1):
        thread.start()
        while len(budget._queue) < expected:
            pass
    assert admitted == []
    first.__exit__(None, None, None)
    for thread in threads:
        thread.join()
    assert admitted == [1, 2]
    assert budget.waits == 2


def test_a_request_waits_only_so_long_and_others_go_on_after_it() -> None:
    budget = WorkBudget(100, 0.01)
    with budget.admitted(80, 80, {}):
        with pytest.raises(MemoryLimitError, match="waited 0 s"), budget.admitted(30, 30, {"shard": 1}):
            raise AssertionError("it was let in")
        with budget.admitted(20, 20, {}):
            pass
    with budget.admitted(100, 100, {}):
        pass


class Part:
    """State of `size` bytes in memory, until it is dropped."""

    def __init__(self, process: FakeProcessMemory, size: int) -> None:
        self._process, self.size = process, size
        process.parts.append(self)

    def drop(self) -> None:
        self.size = 0


class FakeProcessMemory:
    """A process's memory as the system reports it: the process's own, and that of the state."""

    def __init__(self) -> None:
        self.own, self.parts = 0, list[Part]()

    def read(self) -> tuple[int, int]:
        return self.own, sum(part.size for part in self.parts)


def test_the_least_recently_used_part_is_dropped_first_and_a_part_in_use_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_keeper, "give_back", lambda: None)
    process = FakeProcessMemory()
    keeper = MemoryKeeper(800, process)
    old, busy, new = (Part(process, 0) for _ in range(3))
    for part in (busy, old, new):
        with keeper.using(part):
            part.size = 200
    with keeper.using(busy):
        assert [old.size, busy.size, new.size] == [200, 200, 200]
        process.own = 150
        keeper.keep()
        assert [old.size, busy.size, new.size] == [0, 200, 200]
        process.own = 450
        keeper.keep()
        assert [old.size, busy.size, new.size] == [0, 200, 0]
        # A part that came back to memory without notice is dropped, too.
        old.size, process.own = 200, 320
        keeper.keep()
        assert [old.size, busy.size, new.size] == [0, 200, 0]
        process.own = 650
        keeper.keep()
        assert [old.size, busy.size, new.size] == [0, 0, 0]


def test_steps_are_small_where_there_is_little_room() -> None:
    process = FakeProcessMemory()
    keeper = MemoryKeeper(1 << 30, process)
    assert keeper.step(100) == 100
    assert 256 < keeper.step(10**9) < 10_000
    process.own = 1 << 30
    assert keeper.step(10**9) == 256
    assert keeper.step(3) == 3


# -- no room -------------------------------------------------------------------------------------------------------------------------


class TinyMemory(StoreMemory):
    """Every array of every partition is a file."""

    def __init__(self, folder: Path) -> None:
        self._region = tiny_region(str(folder))

    def region(self, store_id: StateStoreId) -> Memory:
        return self._region

    def kept(self, store_id: StateStoreId, table: pa.Table) -> pa.Table:
        return self._region.kept_table(table)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of file growths that still succeed, in a list of one number."""
    growths, allocate = [10**9], os.posix_fallocate

    def posix_fallocate(descriptor: int, begin: int, size: int) -> None:
        growths[0] -= 1
        if growths[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)
    return growths


def gone_through(full: list[int], work: Callable[[], Result]) -> tuple[Result, list[MemoryLimitError]]:
    """Allow one more file growth each time, until the work goes through; return its result, and the errors before."""
    errors: list[MemoryLimitError] = []
    for growths in range(1000):
        full[0] = growths
        try:
            return work(), errors
        except MemoryLimitError as error:
            errors.append(error)
        finally:
            full[0] = 10**9
    raise AssertionError("it never went through")


class SpillingFleet(AggregationFleet):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        super().__init__()

    def new_store(self) -> OperatorShards:
        return OperatorShards(Partitions(self.objects, self.coordinator, memory=TinyMemory(self._folder)))


def test_a_disk_that_is_full_at_any_moment_costs_a_batch_and_nothing_else(tmp_path: Path, full: list[int]) -> None:
    """No batch is lost or counted twice at any point of failure."""
    fleet, expected = SpillingFleet(tmp_path), {"a": 0, "b": 0}
    errors: list[MemoryLimitError] = []
    for batch in range(6):
        # New keys in each batch, so that every array has to grow.
        values = "ab" + "".join(chr(0x100 + 40 * batch + number) for number in range(40))
        emitted, before = gone_through(full, lambda batch=batch, values=values: fleet.apply(batch, values))  # type: ignore[misc]
        errors += before
        expected = {name: number + 1 for name, number in expected.items()}
        assert {name: emitted[name] for name in expected} == expected
        assert len(emitted) == 42
    assert len(errors) > 20
    for error in errors:
        assert {"state", "shard", "version", "bytes", "spill_dir", "free_bytes"} <= error.context.keys()
        assert "No space left" in str(error)
        assert "give the spill folder more room" in str(error)
    # Another process reads the same from what was stored.
    fleet.store = fleet.new_store()
    assert fleet.apply(6, "ab") == {"a": 7, "b": 7}


def test_a_spill_folder_that_was_deleted_is_made_again_and_one_that_cannot_be_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "spilled"
    folder.mkdir()
    fleet = SpillingFleet(folder)
    assert fleet.apply(0, "ab") == {"a": 1, "b": 1}
    shutil.rmtree(folder)
    more = "".join(chr(0x100 + number) for number in range(300))
    assert fleet.apply(1, "ab" + more)["a"] == 2
    assert folder.is_dir()
    shutil.rmtree(folder)
    # A file in its place cannot be replaced by a folder.
    folder.write_text("")
    with pytest.raises(MemoryLimitError, match="spill folder"):
        fleet.apply(2, "ab" + more + "".join(chr(0x1000 + number) for number in range(900)))
    folder.unlink()
    assert fleet.apply(2, "ab")["a"] == 3


def test_a_disk_that_is_full_on_the_way_back_to_a_version_costs_a_load(tmp_path: Path, full: list[int]) -> None:
    fleet = SpillingFleet(tmp_path)
    fleet.apply(0, "ab")
    fleet.apply(1, "".join(chr(0x100 + number) for number in range(300)))
    emitted, errors = gone_through(full, lambda: fleet.apply(1, "a", "run-2"))
    assert emitted == {"a": 2}
    assert errors
    assert fleet.apply(2, "ab", "run-2") == {"a": 3, "b": 2}


def test_a_keyed_store_without_disk_space_is_loaded_again(tmp_path: Path, full: list[int]) -> None:
    fleet = KeyedFleet()
    fleet.stores = KeyedStores(Partitions(fleet.objects, fleet.coordinator, fleet.metrics, memory=TinyMemory(tmp_path)))
    fleet.write(0, a=1)
    _, errors = gone_through(full, lambda: fleet.write(1, a=2, b=3))
    assert len(errors) > 3
    assert fleet.read(2) == [{"k": "a", "n": 2}, {"k": "b", "n": 3}]


def test_a_retry_gets_the_retained_rows(tmp_path: Path) -> None:
    fleet = SpillingFleet(tmp_path)
    first = fleet.apply(0, "aab")
    assert fleet.apply(0, "aab") == first == {"a": 2, "b": 1}
    assert fleet.store.metrics.replayed_answers == 1


def test_a_batch_that_needs_more_than_there_is_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    fleet = AggregationFleet()
    memory = LimitedMemory(MemoryKeeper(1 << 40).base * 8 // 7 + 160 * MIB, str(tmp_path))
    fleet.store = OperatorShards(Partitions(fleet.objects, fleet.coordinator, memory=memory))
    assert fleet.apply(0, "ab") == {"a": 1, "b": 1}
    large = pa.array(["x" * 1000]).take(pa.array(np.zeros(100_000, np.int64)))
    with pytest.raises(MemoryLimitError, match="make batches smaller") as caught:
        fleet.store.apply(fleet.request(1), ShardInput.of_raw(SCHEMA, pa.record_batch({"v": large})))
    assert caught.value.context["shard"] == 0
    assert caught.value.context["version"] == 2
    # The shard is in memory as it was, and nothing was read for it.
    assert fleet.store.apply(fleet.request(1), rows("a"))[0].to_pylist() == [{"v": "a", "n": 2}]
    assert fleet.store.metrics.deltas_loaded == 0
    assert memory.budget.refusals == 1


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Session folder of a Ray node, on which store actors are made as if Ray made them."""
    monkeypatch.setattr("ray.get_runtime_context", MagicMock())
    monkeypatch.setattr("store_actors.actor.store_actor.CoordinatorClient.connect", MagicMock())
    session = MagicMock(get_session_dir_path=lambda: str(tmp_path / "session"), node_ip_address="127.0.0.1")
    monkeypatch.setattr("ray._private.worker._global_node", session)
    return tmp_path


def make_store_actor(node: Path, options: MemoryOptions) -> StoreActor:
    maintenance = Maintenance(interval_s=10**6)
    return StoreActor("store", f"file://{node}/fleet", StorageOptions(), maintenance, options)


def test_a_store_actor_that_cannot_keep_its_limit_refuses_all_work(node: Path) -> None:
    unfit = make_store_actor(node, MemoryOptions(64 * MIB))
    for call in (unfit.location, lambda: unfit.apply(MagicMock(), MagicMock()), lambda: unfit.open_read(MagicMock())):
        with pytest.raises(MemoryLimitError, match="too small"):
            call()


def test_a_store_actor_spills_into_its_nodes_session_folder_and_reports_its_memory(node: Path) -> None:
    limit = MemoryKeeper(1 << 40).base * 8 // 7 + 160 * MIB
    limited, unlimited = make_store_actor(node, MemoryOptions(limit)), make_store_actor(node, MemoryOptions())
    assert (node / "session" / "statefleet-spill").is_dir()
    metrics = limited.metrics()
    assert metrics["memory_limit"] == limit
    assert 0 < metrics["resident_bytes"] < limit
    assert metrics["spilled_bytes"] == 0
    assert unlimited.metrics()["memory_limit"] is None
    named = make_store_actor(node, MemoryOptions(limit, str(node / "named")))
    assert (node / "named").is_dir()
    assert named.metrics()["memory_limit"] == limit
    limited._report_memory()
    limited._coordinator.report_memory.assert_called_once()  # type: ignore[attr-defined]


# -- a process -----------------------------------------------------------------------------------------------------------------------


def ran(action: str, folder: Path, times: int) -> tuple[dict[str, int], str]:
    """Run a process of its own, and return its figures and the lines that it printed before."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.unit.spilling_process", action, str(folder), str(LIMIT), str(times)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    *before, last = ended.stdout.splitlines()
    return {name: int(value) for name, value in (part.split("=") for part in last.split())}, "\n".join(before)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux reports the peak memory of a process")
def test_eight_times_the_limit_is_held_changed_and_stored_below_it(tmp_path: Path) -> None:
    figures, _ = ran("fill", tmp_path, 8)
    assert figures["state"] >= 8 * LIMIT
    assert figures["peak"] <= LIMIT
    assert figures["spilled"] >= 7 * LIMIT
    assert not list((tmp_path / "spill").iterdir())


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux reports the peak memory of a process")
def test_more_than_the_limit_is_loaded_below_it(tmp_path: Path) -> None:
    # The process itself takes most of the limit.
    ran("fill", tmp_path, 1)
    figures, _ = ran("load", tmp_path, 1)
    assert figures["state"] >= LIMIT
    assert figures["peak"] <= LIMIT


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_process_without_room_refuses_and_goes_on_with_more(tmp_path: Path) -> None:
    figures, before = ran("full", tmp_path, 1)
    assert before.startswith("refused: a shard's state does not fit its store actor's spill folder")
    assert "File too large" in before
    assert figures["peak"] <= LIMIT


def test_memory_is_measured_also_where_there_is_no_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    present = memory_keeper.resident_bytes()
    monkeypatch.setattr(memory_keeper, "_STATUS", tmp_path / "no-proc")
    assert present > 1 << 20
    assert memory_keeper.resident_bytes() > 0
