"""Durability seen from outside: listed files, damaged files, and the rows of append mode over retry and restart."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec import structs

from coordinator.log.cleaner import Cleaner
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.errors import CorruptStateError, StorageUnavailableError
from coordinator.model.maintenance import Maintenance
from coordinator.model.schema import Field
from coordinator.model.watermarks import Watermarks
from coordinator.storage.local import LocalObjectStore
from coordinator.storage.memory import MemoryObjectStore
from store_actors.messages.requests import ShardInput
from tests.clocks import LaterClock
from tests.unit.aggregation_fleet import SCHEMA, AggregationFleet
from tests.unit.ledger_harness import open_writer


async def no_deletions(state_name: str) -> None:
    """Notice no deleted folder."""


def test_files_that_killed_writers_left_are_no_objects_and_are_deleted_once_they_are_old(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path)
    clock = LaterClock()
    for path in ("s/0/0/.tmp-killed", "s/manifest/.tmp-killed", "s/0/0/.tmp-alive", "other/0/0/.tmp-killed"):
        store.put(path.replace(".tmp", "object"), b"1")
        (tmp_path / path).write_bytes(b"x")
        if path.endswith("killed"):
            os.utime(tmp_path / path, (clock.now_s() - 61, clock.now_s() - 61))

    async def cleaned() -> list[str]:
        writer = LedgerWriter(ManifestLog(store, "s", "coordinator"))
        cleaner = Cleaner(store, Maintenance(grace_s=60), clock, no_branches, no_deletions)
        clock.later_s = 100
        return [file["path"] for file in (await cleaner.clean(writer, "s", dry_run=False))["files"]]

    objects = store.list("")
    assert not any(".tmp" in info.path for info in objects)
    (tmp_path / "s/manifest/object-killed").unlink()  # it is no record
    assert sorted(asyncio.run(cleaned())) == ["s/0/0/.tmp-killed", "s/manifest/.tmp-killed"]
    assert sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob(".tmp-*")) == [
        "other/0/0/.tmp-killed",
        "s/0/0/.tmp-alive",
    ]
    assert len(store.list("s/0")) == 2


async def no_branches(state_name: str) -> LedgerWriter:
    raise AssertionError(f"nobody has branched {state_name}")


class DoubtfulObjectStore(LocalObjectStore):
    """A store that may report that a readable object is not durable."""

    doubts = False

    def ensure_durable(self, path: str) -> None:
        if self.doubts:
            raise StorageUnavailableError("simulated: a sync failed")
        super().ensure_durable(path)


def test_no_record_is_deleted_for_a_checkpoint_that_may_not_survive_a_power_loss(tmp_path: Path) -> None:
    store, clock = DoubtfulObjectStore(tmp_path), LaterClock()
    log = ManifestLog(store, "s", "coordinator", checkpoint_interval=2)
    ledger = log.load()
    for _ in range(6):
        log.append([])
        if log.is_checkpoint_due:
            log.write_checkpoint(log.plan_checkpoint(ledger))
    records = [info.path for info in store.list("s/manifest")]
    for path in tmp_path.rglob("*.json"):
        os.utime(path, (clock.now_s() - 61, clock.now_s() - 61))

    async def clean() -> None:
        writer = LedgerWriter(ManifestLog(store, "s", "coordinator"))
        await writer.open()
        cleaner = Cleaner(store, Maintenance(grace_s=60), clock, no_branches, no_deletions)
        clock.later_s = 100
        store.doubts = True
        with pytest.raises(StorageUnavailableError, match="a sync failed"):
            await cleaner.clean(writer, "s", dry_run=False)
        assert {info.path for info in store.list("s/manifest")} >= set(records)
        store.doubts = False
        assert len((await cleaner.clean(writer, "s", dry_run=False))["files"]) >= 4

    asyncio.run(clean())


class SleepsBeforeNaming:
    """The calls of a writer that slept before it named its file, until the file was deleted as a leftover."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def link(self, src: Path, dst: Path) -> None:
        src.unlink()
        os.link(src, dst)

    def replace(self, src: Path, dst: Path) -> None:
        src.unlink()
        src.replace(dst)


@pytest.mark.parametrize("put", ["put", "put_if_absent"])
def test_a_writer_whose_file_was_deleted_as_a_leftover_fails_and_leaves_nothing(tmp_path: Path, put: str) -> None:
    store = LocalObjectStore(tmp_path, SleepsBeforeNaming())
    with pytest.raises(StorageUnavailableError, match="what was committed is untouched"):
        getattr(store, put)("s/0/0/1-a.delta", b"1")
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


@pytest.mark.parametrize("path", ["manifest/00000000000000000001.json", "checkpoints/00000000000000000064.json"])
def test_a_record_or_checkpoint_that_is_no_json_is_named(path: str) -> None:
    store = MemoryObjectStore()
    store.put(f"clicks/{path}", b"{")
    with pytest.raises(CorruptStateError, match=path):
        asyncio.run(open_writer(store))


def test_append_mode_emits_closed_groups_once_and_the_same_to_retry_replay_and_after_a_restart() -> None:
    schema = structs.replace(SCHEMA, keys=(Field("v", "timestamp"),), expiry_key="v", delay_ms=0, output_mode="append")
    fleet = AggregationFleet()

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
