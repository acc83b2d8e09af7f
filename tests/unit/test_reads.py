"""Reads of a process beside its batches: from memory while it has the version, else from files; with real threads."""

from __future__ import annotations

import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from coordinator.ledger.read_views import WantedView, committed, read_view
from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import CorruptStateError, InvalidRequestError
from coordinator.model.identities import DEFAULT_STORE, StateStoreId
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import Runtime
from statefleet.reads.scans import column_is
from store_actors.messages.key_queries import FoundRows
from store_actors.messages.requests import ReadProjection, ReadRequest, ShardInput
from store_actors.serving.hot_key_tracker import HotKeyTracker
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.reads import Reads
from tests.unit.aggregation_fleet import AggregationFleet

SCHEMA = StateSchema(
    keys=(Field("v", "string"),),
    inputs=(Field("x", "int64"),),
    accumulators=(
        Accumulator(AccumulatorKind.COUNT_ROWS, (), (Field("n", "int64", False),), "count(1)"),
        Accumulator(AccumulatorKind.SUM_INT, ("x",), (Field("total", "int64"),), "sum(x)"),
    ),
    expiry_key=None,
    delay_ms=None,
    output_mode="update",
)
CREATED = StateMetadata("s", "query", 1, "update", SCHEMA)
KEYS = [f"key-{number}" for number in range(500)]
FORM = pickle.dumps(ReadProjection(SCHEMA))


def rows_of(batch: int) -> ShardInput:
    """Return every key once, with the number of the batch."""
    columns = {"v": pa.array(KEYS, pa.string()), "x": pa.array([batch] * len(KEYS), pa.int64())}
    return ShardInput.of_raw(SCHEMA, pa.record_batch(columns))


class ReadingProcess:
    """Shards of one process, and the reads of them."""

    def __init__(self, fleet: AggregationFleet | None = None) -> None:
        self.fleet = fleet or AggregationFleet()
        self.fleet.store = self.fleet.new_store()
        partitions = self.fleet.store.partitions
        runtime = Runtime()
        hot_keys = HotKeyTracker(runtime.threads.lock())
        self.reads = Reads(
            partitions.stored, partitions.cache, self.fleet.coordinator, runtime, StoreMetrics(), hot_keys
        )

    def apply(self, batch: int, run: str = "run-1") -> None:
        self.fleet.store.apply(self.fleet.request(batch, run, SCHEMA), rows_of(batch))

    def request(self, version: int | None = None, **options: Any) -> ReadRequest:
        """Return the request of a reader that has just asked the coordinator for a version."""

        def look(ledger: Any) -> Any:
            return read_view(ledger, CREATED, committed(ledger, CREATED), WantedView(version))

        view = self.fleet.coordinator.read(look)
        store_id = StateStoreId(view.root, 0, 0, DEFAULT_STORE)
        return ReadRequest(store_id, view.versions[0], view.attempts[0], FORM, **options)

    def find(self, request: ReadRequest, keys: list[str | None]) -> FoundRows | None:
        return self.reads.find(request, pa.table({"v": pa.array(keys, pa.string())}))

    def scan(self, request: ReadRequest, limit: int | None = None) -> pa.Table | None:
        scan_id = self.reads.scan(request, limit)
        if scan_id is None:
            return None
        pieces = []
        while (piece := self.reads.next_rows(scan_id)) is not None:
            pieces.append(piece)
        return pa.concat_tables(pieces)


def totals(version: int) -> dict[str, tuple[int, int]]:
    return {key: (version, sum(range(version))) for key in KEYS}


def totals_of(rows: pa.Table) -> dict[str, tuple[int, int]]:
    return {row["v"]: (row["n"], row["total"]) for row in rows.to_pylist()}


def test_versions_are_read_from_memory_and_then_from_files() -> None:
    process = ReadingProcess()
    for batch in range(6):
        process.apply(batch)
    for version in range(1, 7):
        request = process.request(version)
        assert totals_of(process.scan(request)) == totals(version)
        result = process.find(request, ["key-7", None, "no", "key-7"])
        assert result is not None
        assert (result.version, result.newest, list(result.places)) == (version, 6, [0, 3])
        empty = process.find(request, [])
        assert empty is not None
        assert (empty.rows.num_rows, empty.rows.schema) == (0, result.rows.schema)
    # Memory has the newest and two more; each of the others was loaded once.
    assert process.fleet.store.metrics.deltas_loaded == 1 + 2 + 3
    assert process.scan(process.request(), 7).num_rows == 7
    restarted = ReadingProcess(process.fleet)
    assert totals_of(restarted.scan(restarted.request())) == totals(6)
    result = restarted.find(restarted.request(), ["key-1"])
    assert result is not None
    assert result.newest == -1


def test_a_version_that_was_made_again_is_not_read_as_the_previous_one() -> None:
    process = ReadingProcess()
    for batch in range(3):
        process.apply(batch)
    previous = process.request()
    process.apply(2, "run-2")
    assert process.find(previous, ["key-1"]) is None
    assert process.scan(previous) is None
    assert totals_of(process.scan(process.request())) == totals(3)


def test_the_latest_version_is_read_before_it_is_committed_everywhere() -> None:
    process = ReadingProcess()
    process.apply(0)
    request = process.request(is_latest=True)
    process.apply(1)
    result = process.find(request, ["key-1"])
    assert result is not None
    assert (result.version, totals_of(result.rows)) == (2, {"key-1": (2, 1)})


def test_abandoned_scans_end(monkeypatch: pytest.MonkeyPatch) -> None:
    process = ReadingProcess()
    process.apply(0)
    scan_id = process.reads.scan(process.request(), None)
    assert scan_id is not None
    elapsed = process.reads._scans._elapsed_s
    monkeypatch.setattr(process.reads._scans, "_elapsed_s", lambda: elapsed() + 3600)
    process.reads.maintain()
    with pytest.raises(Exception, match="not available any more"):
        process.reads.next_rows(scan_id)


def test_reads_of_old_versions_take_no_more_memory_than_readers_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = ReadingProcess()
    for batch in range(12):
        process.apply(batch)
    reads = process.reads
    assert totals_of(process.scan(process.request(1))) == totals(1)
    (size,) = (view.nbytes for view in reads._loaded.values())
    assert size > 32 * len(KEYS)
    reads._most_bytes = 3 * size
    loads, most_at_once = list[int](), 0
    load = process.fleet.store.partitions.stored.view

    def counted(*args: Any) -> Any:
        nonlocal most_at_once
        loads.append(args[1])
        most_at_once = max(most_at_once, len(loads))
        try:
            return load(*args)
        finally:
            loads.remove(args[1])

    monkeypatch.setattr(process.fleet.store.partitions.stored, "view", counted)
    for version in (*range(2, 10), 3, 4):
        assert totals_of(process.scan(process.request(version))) == totals(version)
        assert sum(view.nbytes for view in reads._loaded.values()) <= 3 * size
        assert len(reads._loaded) >= min(2, version)
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(lambda version: totals_of(process.scan(process.request(version))), range(1, 7)))
    assert results == [totals(version) for version in range(1, 7)]
    assert sum(view.nbytes for view in reads._loaded.values()) <= 3 * size
    assert most_at_once == 1, "large versions are loaded one after the other"
    # A version larger than all memory of readers is read all the same, and kept until the next one is.
    reads._most_bytes = size // 2
    for version in (7, 8, 8):
        assert totals_of(process.scan(process.request(version))) == totals(version)
        assert [key[1] for key in reads._loaded] == [version]


def test_readers_beside_batches_never_see_parts_of_one() -> None:
    """Batches touch every row, in kernels that let other threads run."""
    process = ReadingProcess()
    process.apply(0)
    stop, problems, reads = threading.Event(), list[str](), [0, 0]

    def read(which: int) -> None:
        try:
            while not stop.is_set():
                request = process.request()
                if which:
                    scanned = process.scan(request)
                    version, rows = request.version, None if scanned is None else totals_of(scanned)
                else:
                    result = process.find(request, [*KEYS[:3], *KEYS[-3:]])
                    version, rows = (0, None) if result is None else (result.version, totals_of(result.rows))
                expected = totals(version)
                if rows is not None and any(expected[key] != row for key, row in rows.items()):
                    problems.append(f"{version}: {list(rows.items())[:3]}")
                if rows is not None and which and len(rows) != len(KEYS):
                    problems.append(f"{version}: {len(rows)} rows")
                reads[which] += 1
        except Exception as error:  # noqa: BLE001 - asserted below
            problems.append(repr(error))

    readers = [threading.Thread(target=read, args=(which,)) for which in (0, 0, 1, 1)]
    for reader in readers:
        reader.start()
    for batch in range(1, 60):
        process.apply(batch)
    stop.set()
    for reader in readers:
        reader.join(60)
    assert not problems, problems[:3]
    assert min(reads) > 5


def test_a_version_is_read_by_way_of_a_named_snapshot_and_of_no_other_file() -> None:
    process = ReadingProcess()
    for batch in range(5):
        process.apply(batch)
        if batch in (1, 3):
            process.fleet.store.partitions.maintain(1)
    objects = process.fleet.objects
    older, newer = (info.path for info in objects.list("s/0") if info.path.endswith(".snapshot"))
    for snapshot in (0, 2, 4):
        assert totals_of(process.scan(process.request(snapshot=snapshot))) == totals(5)
    with pytest.raises(InvalidRequestError, match="snapshots=`0, 2, 4`"):
        process.scan(process.request(snapshot=3))
    with pytest.raises(InvalidRequestError, match="snapshots=`0, 2`"):
        process.scan(process.request(3, snapshot=4))
    # Damage of the named path is an error, even where memory or another file has the rows.
    first_delta = process.fleet.deltas()[0]
    for path, failing, working in ((older, 2, (0, 4)), (newer, 4, (0, 2)), (first_delta, 0, (2, 4))):
        whole = objects.get(path)
        objects.delete(path)
        with pytest.raises(CorruptStateError, match="missing"):
            process.scan(process.request(snapshot=failing))
        for snapshot in working:
            assert totals_of(process.scan(process.request(snapshot=snapshot))) == totals(5)
        assert totals_of(process.scan(process.request())) == totals(5)
        objects.put(path, whole)


def test_a_filter_of_a_key_compares_as_keys_are_compared() -> None:
    rows = pa.table(
        {
            "window": [{"start": 1, "end": 2}, {"start": 1, "end": 3}, None, {"start": None, "end": 2}],
            "x": [1.5, math.nan, None, -0.0],
            "list": [[1], [2], None, [3]],
        }
    )

    def places(name: str, value: Any) -> list[int]:
        numbered = rows.append_column("place", pa.array(range(rows.num_rows)))
        return numbered.filter(column_is(rows.schema.field(name), value))["place"].to_pylist()  # type: ignore[no-any-return]

    for name in ("window", "x"):
        for place, value in enumerate(rows[name].to_pylist()):
            assert places(name, value) == [place]
    assert places("x", 0.0) == [3]
    assert places("list", None) == [2]
    with pytest.raises(InvalidRequestError, match=r"rows are not scanned by lists.*column=`list`"):
        places("list", [1])
