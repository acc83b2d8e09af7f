"""Durability seen from outside: files that killed writers left, and checkpoints that may not survive a power loss."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.log.cleaner import Cleaner
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.errors import StorageUnavailableError
from coordinator.model.maintenance import Maintenance
from coordinator.storage.local import LocalObjectStore
from tests.clocks import LaterClock


async def no_deletions(state_name: str) -> None:
    """Notice no deleted folder."""


async def no_branches(state_name: str) -> LedgerWriter:
    raise AssertionError(f"nobody has branched {state_name}")


async def cleaning(store: LocalObjectStore, clock: LaterClock) -> Callable[[], Awaitable[list[str]]]:
    """Return the cleaning of a state by a coordinator that started long ago: it returns the deleted files."""
    writer = LedgerWriter(ManifestLog(store, "s", "coordinator"))
    await writer.open()
    cleaner = Cleaner(store, Maintenance(grace_s=60), clock, no_branches, no_deletions)
    clock.later_s = 100

    async def clean() -> list[str]:
        return [file["path"] for file in (await cleaner.clean(writer, "s", dry_run=False))["files"]]

    return clean


async def test_files_that_killed_writers_left_are_no_objects_and_are_deleted_once_they_are_old(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path)
    clock = LaterClock()
    for path in ("s/0/0/.tmp-killed", "s/manifest/.tmp-killed", "s/0/0/.tmp-alive", "other/0/0/.tmp-killed"):
        store.put(path.replace(".tmp", "object"), b"1")
        (tmp_path / path).write_bytes(b"x")
        if path.endswith("killed"):
            os.utime(tmp_path / path, (clock.now_s() - 61, clock.now_s() - 61))

    objects = store.list("")
    assert not any(".tmp" in info.path for info in objects)
    (tmp_path / "s/manifest/object-killed").unlink()  # it is no record
    assert sorted(await (await cleaning(store, clock))()) == ["s/0/0/.tmp-killed", "s/manifest/.tmp-killed"]
    assert sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob(".tmp-*")) == [
        "other/0/0/.tmp-killed",
        "s/0/0/.tmp-alive",
    ]
    assert len(store.list("s/0")) == 2


class DoubtfulObjectStore(LocalObjectStore):
    """A store that may report that a readable object is not durable."""

    doubts = False

    def ensure_durable(self, path: str) -> None:
        if self.doubts:
            raise StorageUnavailableError("simulated: a sync failed")
        super().ensure_durable(path)


async def test_no_record_is_deleted_for_a_checkpoint_that_may_not_survive_a_power_loss(tmp_path: Path) -> None:
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
    clean = await cleaning(store, clock)
    store.doubts = True
    with pytest.raises(StorageUnavailableError, match="a sync failed"):
        await clean()
    assert {info.path for info in store.list("s/manifest")} >= set(records)
    store.doubts = False
    assert len(await clean()) >= 4


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
