"""Streams of pieces that a remote caller reads piece by piece, over several calls. No Ray."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from coordinator.model.errors import OperationOutOfOrderError
from coordinator.runtime.runtime import Lock

Piece = TypeVar("Piece")

#: Seconds without a call after which a caller is taken for dead and its stream is closed, as streams take memory.
_IDLE_S = 60.0


@dataclass(slots=True)
class _Stream(Generic[Piece]):
    pieces: Generator[Piece]
    used_s: float


class PieceStreams(Generic[Piece]):
    """Open streams by id. Thread-safe.

    Parameters
    ----------
    guard
        Lock of the table of streams.
    new_id, elapsed_s
        Makes ids; returns the seconds since a fixed moment.
    """

    def __init__(self, guard: Lock, new_id: Callable[[], str], elapsed_s: Callable[[], float]) -> None:
        self._guard = guard
        self._new_id = new_id
        self._elapsed_s = elapsed_s
        self._streams: dict[str, _Stream[Piece]] = {}

    def add(self, pieces: Generator[Piece]) -> str:
        """Keep a stream of pieces; return its id."""
        stream_id = self._new_id()
        with self._guard:
            self._streams[stream_id] = _Stream(pieces, self._elapsed_s())
        return stream_id

    def next_piece(self, stream_id: str) -> Piece | None:
        """Return the next piece; None after the last.

        Raises
        ------
        OperationOutOfOrderError
            The caller made no call for ``_IDLE_S``, or the process has restarted.
        """
        with self._guard:
            stream = self._streams.get(stream_id)
            if stream is None:
                raise OperationOutOfOrderError(
                    "the offered rows are not available any more: no call came for them for a minute; nothing was lost; "
                    "ask again"
                )
            stream.used_s = self._elapsed_s()
        piece = next(stream.pieces, None)
        if piece is None:
            self.close(stream_id)
        return piece

    def keep(self, stream_ids: Iterable[str]) -> None:
        """Keep streams open whose callers are alive and will read on later."""
        now_s = self._elapsed_s()
        with self._guard:
            for stream_id in stream_ids:
                if (stream := self._streams.get(stream_id)) is not None:
                    stream.used_s = now_s

    def close_idle(self) -> None:
        """Close streams without a call for ``_IDLE_S``."""
        horizon = self._elapsed_s() - _IDLE_S
        with self._guard:
            idle = [stream_id for stream_id, stream in self._streams.items() if stream.used_s < horizon]
        for stream_id in idle:
            self.close(stream_id)

    def close(self, stream_id: str) -> None:
        """Close a stream, which may be closed already."""
        with self._guard:
            stream = self._streams.pop(stream_id, None)
        if stream is not None:
            stream.pieces.close()
