"""Durable things seen from outside: what is listed, what is damaged, what append mode emits over retry and restart."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from coordinator.errors import CorruptStateError
from coordinator.storage.local import LocalObjectStore
from coordinator.storage.memory import MemoryObjectStore
from coordinator.watermarks import Watermarks
from store_actors.messages import ShardInput
from store_actors.schema import Field
from tests.unit.test_coordinator import opened
from tests.unit.test_operator_shards import SCHEMA, Fleet


def test_temporary_files_are_not_listed(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path)
    store.put("a/b", b"1")
    (tmp_path / "a" / ".tmp-left-by-a-crash").write_bytes(b"x")
    assert [info.path for info in store.list("")] == ["a/b"]


@pytest.mark.parametrize("path", ["manifest/00000000000000000001.json", "checkpoints/00000000000000000064.json"])
def test_a_record_or_checkpoint_that_is_no_json_is_named(path: str) -> None:
    store = MemoryObjectStore()
    store.put(f"clicks/{path}", b"{")
    with pytest.raises(CorruptStateError, match=path):
        asyncio.run(opened(store))


def test_append_mode_emits_closed_groups_once_and_the_same_to_retry_replay_and_after_a_restart() -> None:
    schema = replace(SCHEMA, keys=(Field("v", "timestamp"),), expiry_key="v", delay_ms=0, output_mode="append")
    fleet = Fleet()

    def batch(number: int, seconds: list[int], watermark_ms: int, run: str = "run-1") -> tuple[dict[int, int], int]:
        request = replace(fleet.request(number, run, schema), watermarks=Watermarks(watermark_ms))
        values = pa.array([second * 1_000_000 for second in seconds], pa.timestamp("us", tz="UTC"))
        output, entry = fleet.store.apply(request, ShardInput.of_raw(schema, pa.record_batch({"v": values})))
        return {int(row["v"].timestamp()): row["n"] for row in output.to_pylist()}, entry.rows_late

    assert batch(0, [10, 10, 20], 5_000) == ({}, 0)
    for run in ("run-1", "run-1", "run-2"):
        assert batch(1, [20, 30], 15_000, run) == ({10: 2}, 0)
    fleet.store = fleet.new_store()
    assert batch(2, [10, 30], 40_000, "run-2") == ({20: 2, 30: 2}, 1)
    assert fleet.store.metrics.deltas_loaded == 2
