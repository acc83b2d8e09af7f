"""Queries that DuckDB runs: a thread at a time, ended when their client wants it, with as many rows as a client may have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pyarrow as pa

from statefleet.reads.sql import Cancellation, RunningQuery
from statefleet.sql_server.look_ups import encoders
from statefleet.sql_server.messages import data_row
from statefleet.sql_server.values import Encoder, type_of

#: Opens a query that may be cancelled.
Opened = Callable[[Cancellation], AbstractContextManager[RunningQuery]]


class TooMuchError(Exception):
    """A result has more rows than a client may have."""


class EndedError(Exception):
    """A query was ended before it was through."""


class Execution:
    """A query that runs, with `most_rows` of a result at most. Only one of its methods is awaited at a time; it may be cancelled
    meanwhile.
    """

    def __init__(self, threads: Executor, opened: Opened, most_rows: int) -> None:
        self._threads = threads
        self._opened = opened
        self._most_rows = most_rows
        self._cancellation = Cancellation()
        self._stack = ExitStack()
        self._query: RunningQuery | None = None
        self._piece: pa.RecordBatch | None = None
        self._rows = 0
        self._reason = ""
        self._over: list[Callable[[Execution], Any]] = []

    @property
    def schema(self) -> pa.Schema:
        """The columns of the result, once it has begun."""
        assert self._query is not None, "it has begun"
        return self._query.schema

    def add_done_callback(self, call: Callable[[Execution], Any]) -> None:
        """Have something called when the query is closed."""
        self._over.append(call)

    def cancel(self, reason: str = "the statement was cancelled, as its client wanted") -> None:
        """End the query: who awaits it gets an EndedError."""
        self._reason = self._reason or reason
        self._cancellation.cancel()

    async def begin(self) -> None:
        """Begin the query."""
        await self._in_thread(self._begin)

    def _begin(self) -> None:
        self._query = self._stack.enter_context(self._opened(self._cancellation))

    async def rows(self, formats: list[int], most: int | None) -> tuple[int, bytes] | None:
        """Return some further rows, as many as `most` at most: their number and their messages. None after the last ones."""
        rows: tuple[int, bytes] | None = await self._in_thread(lambda: self._some(formats, most))
        return rows

    def _some(self, formats: list[int], most: int | None) -> tuple[int, bytes] | None:
        assert self._query is not None, "it has begun"
        piece = self._piece
        while piece is None or not piece.num_rows:
            piece = self._query.next_piece()
            if piece is None:
                return None
        count = piece.num_rows if most is None else min(most, piece.num_rows)
        self._piece = piece.slice(count)
        self._rows += count
        if self._rows > self._most_rows:
            raise TooMuchError(
                f"the result has more than {self._most_rows:,} rows; add a LIMIT, ask for an aggregate, or start the server with more "
                "--rows; statefleet export and scan() read whole states"
            )
        return count, _messages(piece.slice(0, count), encoders([type_of(of.type) for of in piece.schema], formats))

    async def close(self) -> None:
        """End the query, and free what it has."""
        self._cancellation.cancel()
        await asyncio.get_running_loop().run_in_executor(self._threads, self._stack.close)
        for call in self._over:
            call(self)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except Exception as error:
            if self._cancellation.is_cancelled:
                raise EndedError(self._reason or "the query was ended") from error
            raise


def _messages(rows: pa.RecordBatch, encode: list[Encoder]) -> bytes:
    columns = [
        [None if value is None else encoder(value) for value in column.to_pylist()]
        for column, encoder in zip(rows.columns, encode, strict=True)
    ]
    return b"".join(map(data_row, zip(*columns, strict=True))) if columns else b""
