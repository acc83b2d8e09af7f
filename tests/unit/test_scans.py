"""Scans: pieces of the next shards are fetched in order, and a slow reader gets all rows as long as its process runs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from coordinator.model.errors import StoreUnavailableError
from coordinator.model.identities import ActorLocation
from coordinator.runtime.runtime import Runtime, Threads
from statefleet.reads.rows import _ahead
from statefleet.reads.shard_reads import ReadVersion, ShardReads
from statefleet.reads.sources import FleetSource
from store_actors.serving.sessions import PieceStreams
from tests.clocks import LaterClock

SHARDS, PER_SHARD = 6, 3


class Shards:
    """Shards that record when their pieces are begun and ended."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.fails_at: int | None = None

    def pieces(self, shard: int) -> Generator[pa.Table]:
        self.begun.append(shard)
        try:
            for piece in range(PER_SHARD):
                if shard == self.fails_at and piece == 0:
                    raise ValueError("simulated: the piece is lost")
                yield pa.table({"at": [PER_SHARD * shard + piece]})
        finally:
            self.ended.append(shard)

    def ahead(self, threads: ThreadPoolExecutor) -> Generator[pa.Table]:
        return _ahead([partial(self.pieces, shard) for shard in range(SHARDS)], threads, lambda: self.now_s)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.parametrize("piece_s", [0.0, 9.0, 100.0])
def test_pieces_come_once_and_in_order_however_slowly_they_are_taken(
    threads: ThreadPoolExecutor, piece_s: float
) -> None:
    shards, values = Shards(), []
    for table in shards.ahead(threads):
        values += table.column("at").to_pylist()
        shards.now_s += piece_s
    assert values == list(range(SHARDS * PER_SHARD))
    # Where a shard takes longer than store actors wait, the shards that waited are begun again in their turn.
    assert (len(shards.begun) > SHARDS) == (piece_s > 0)
    assert sorted(shards.begun) == sorted(shards.ended)


def test_a_scan_that_is_closed_ends_the_pieces_that_it_has_begun(threads: ThreadPoolExecutor) -> None:
    shards = Shards()
    rows = shards.ahead(threads)
    next(rows)
    rows.close()
    assert 1 < len(shards.begun) < SHARDS
    assert sorted(shards.begun) == sorted(shards.ended)


def test_an_error_comes_in_its_turn_and_ends_the_others(threads: ThreadPoolExecutor) -> None:
    shards = Shards()
    shards.fails_at = 2
    rows = shards.ahead(threads)
    values = [next(rows).column("at").to_pylist() for _ in range(2 * PER_SHARD)]
    assert values == [[at] for at in range(2 * PER_SHARD)]
    with pytest.raises(ValueError, match="the piece is lost"):
        next(rows)
    assert sorted(shards.begun) == sorted(shards.ended)


PIECES = [pa.table({"n": [number]}) for number in range(5)]


class NoThreads(Threads):
    """Threads that are not started: the test calls what they would run."""

    def start(self, target: Any, name: str) -> None:
        assert name == "statefleet-takers"


class ScanningActor:
    """The rows of one shard, as a store actor returns them: an error is a result."""

    def __init__(self, clock: LaterClock) -> None:
        self.streams: PieceStreams[pa.Table] = PieceStreams(Threads().lock(), lambda: "scan", clock.elapsed_s)

    def scan_rows(self, request: Any, limit: int | None) -> tuple[str, pa.Table | None]:
        scan_id = self.streams.add(piece for piece in PIECES)
        return scan_id, self.streams.next_piece(scan_id)

    def next_rows(self, scan_id: str) -> Any:
        try:
            return self.streams.next_piece(scan_id)
        except Exception as error:  # noqa: BLE001 - as the actor does
            return error

    def keep_scans(self, scan_ids: list[str]) -> None:
        self.streams.keep(scan_ids)

    def end_scan(self, scan_id: str) -> None:
        self.streams.close(scan_id)

    def __getattribute__(self, name: str) -> Any:
        attribute = object.__getattribute__(self, name)
        return SimpleNamespace(remote=attribute) if callable(attribute) and not name.startswith("_") else attribute


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

    def waits(self, *, is_running: bool) -> None:
        """Let a minute and a half pass in which the reader takes nothing."""
        for _ in range(6):
            self.clock.later_s += 15.0
            if is_running:
                self.source.keep_scans()
            self.actor.streams.close_idle()


def test_a_reader_that_is_slower_than_a_minute_gets_all_rows() -> None:
    readers = Readers()
    values = []
    for piece in readers.pieces:
        values += piece["n"].to_pylist()
        readers.waits(is_running=True)
    assert values == [0, 1, 2, 3, 4]
    assert not readers.actor.streams._streams
    assert not readers.source._open_scans


def test_an_abandoned_scan_is_ended() -> None:
    readers = Readers()
    next(readers.pieces)
    readers.pieces.close()  # type: ignore[attr-defined]
    readers.source.keep_scans()
    assert not readers.actor.streams._streams
    assert not readers.source._open_scans


def test_a_halted_process_gets_an_error_and_no_row_comes_twice_or_is_missing() -> None:
    readers = Readers()
    assert next(readers.pieces)["n"].to_pylist() == [0]
    readers.waits(is_running=False)
    assert next(readers.pieces)["n"].to_pylist() == [1], "it was on its way"
    with pytest.raises(StoreUnavailableError, match="not heard of for a minute"):
        next(readers.pieces)
