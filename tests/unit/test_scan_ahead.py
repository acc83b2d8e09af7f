"""Pieces of the next shards that a scan fetches: in order, begun again after a long wait, and ended with the scan."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa
import pytest

from statefleet.reads.rows import _ahead

SHARDS, PIECES = 6, 3


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
            for piece in range(PIECES):
                if shard == self.fails_at and piece == 0:
                    raise ValueError("simulated: the piece is lost")
                yield pa.table({"at": [PIECES * shard + piece]})
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
    assert values == list(range(SHARDS * PIECES))
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
    values = [next(rows).column("at").to_pylist() for _ in range(2 * PIECES)]
    assert values == [[at] for at in range(2 * PIECES)]
    with pytest.raises(ValueError, match="the piece is lost"):
        next(rows)
    assert sorted(shards.begun) == sorted(shards.ended)
