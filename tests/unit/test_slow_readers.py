"""Whoever takes rows slowly is given all of them, as long as the process lives; of one that was halted the store actor lets go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from coordinator.model.errors import StoreUnavailableError
from coordinator.model.identities import ActorLocation
from coordinator.runtime.runtime import MachineThreads, Runtime
from statefleet.reads.shard_reads import ReadVersion, ShardReads
from statefleet.reads.sources import FleetSource
from store_actors.serving.piece_streams import PieceStreams
from tests.clocks import LaterClock

PIECES = [pa.table({"n": [number]}) for number in range(5)]


class NoThreads(MachineThreads):
    """What would go on beside everything else is called by the test."""

    def start(self, target: Any, name: str) -> None:
        assert name == "statefleet-takers"


class ScanningActor:
    """The rows of one shard, as a store actor gives them: an error is a result."""

    def __init__(self, clock: LaterClock) -> None:
        self.pulled: PieceStreams[pa.Table] = PieceStreams(MachineThreads().lock(), lambda: "scan", clock.elapsed_s)

    def scan_rows(self, request: Any, limit: int | None) -> tuple[str, pa.Table | None]:
        scan_id = self.pulled.add(piece for piece in PIECES)
        return scan_id, self.pulled.next_piece(scan_id)

    def next_rows(self, scan_id: str) -> Any:
        try:
            return self.pulled.next_piece(scan_id)
        except Exception as error:  # noqa: BLE001 - as the actor does
            return error

    def keep_scans(self, scan_ids: list[str]) -> None:
        self.pulled.keep(scan_ids)

    def end_scan(self, scan_id: str) -> None:
        self.pulled.close(scan_id)

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        return SimpleNamespace(remote=found) if callable(found) and not name.startswith("_") else found


class Readers:
    """A reader of one shard, and the store actor that has it."""

    def __init__(self) -> None:
        self.clock = LaterClock()
        self.actor = ScanningActor(self.clock)
        actors: Any = SimpleNamespace(find=lambda name: self.actor, get=lambda result, timeout_s: result)
        runtime = Runtime(clock=self.clock, threads=NoThreads())
        self.source = FleetSource(SimpleNamespace(), actors, runtime)  # type: ignore[arg-type]
        reads = ShardReads(self.source, "clicks", runtime, runtime.threads.pool(1, "scan"))
        view: Any = SimpleNamespace(
            root="file:///fleet/clicks", partitions=range(1), versions=(3,), attempts=("a",), version=3,
            location=lambda shard: ActorLocation("store", "life", "node", "host", 1),
            metadata=SimpleNamespace(state_name="clicks"),
        )  # fmt: skip
        self.pieces = reads.scan(view, ReadVersion(), "default", b"", 0, None)

    def waits(self, *, lives: bool) -> None:
        """A minute and a half goes by, in which the reader takes nothing."""
        for _ in range(6):
            self.clock.later_s += 15.0
            if lives:
                self.source.keep_scans()
            self.actor.pulled.close_idle()


def test_a_reader_that_is_slower_than_a_minute_is_given_all_rows() -> None:
    readers = Readers()
    found = []
    for piece in readers.pieces:
        found += piece["n"].to_pylist()
        readers.waits(lives=True)
    assert found == [0, 1, 2, 3, 4]
    assert not readers.actor.pulled._open
    assert not readers.source._open_scans


def test_rows_that_nobody_takes_any_more_are_let_go_of() -> None:
    readers = Readers()
    next(readers.pieces)
    readers.pieces.close()  # type: ignore[attr-defined]
    readers.source.keep_scans()
    assert not readers.actor.pulled._open
    assert not readers.source._open_scans


def test_a_process_that_was_halted_is_told_so_and_no_row_is_given_twice_or_left_out() -> None:
    readers = Readers()
    assert next(readers.pieces)["n"].to_pylist() == [0]
    readers.waits(lives=False)
    assert next(readers.pieces)["n"].to_pylist() == [1], "it was on its way"
    with pytest.raises(StoreUnavailableError, match="not heard of for a minute"):
        next(readers.pieces)
