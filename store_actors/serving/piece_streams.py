"""Rows that a caller takes a piece at a time, over several calls. No Ray."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from coordinator.model.errors import OperationOutOfOrderError
from coordinator.runtime.runtime import Lock

__all__ = ["PieceStreams"]

Piece = TypeVar("Piece")

#: Seconds without a call after which a caller counts as dead: what is kept for it takes memory.
_IDLE_S = 60.0


@dataclass(slots=True)
class _Open(Generic[Piece]):
    pieces: Generator[Piece]
    used_s: float


class PieceStreams(Generic[Piece]):
    """Generators by id. Thread-safe.

    Parameters
    ----------
    guard
        Lock of the list itself.
    new_id, elapsed_s
        Makes ids; a clock that only elapses, in seconds.
    """

    def __init__(self, guard: Lock, new_id: Callable[[], str], elapsed_s: Callable[[], float]) -> None:
        self._guard = guard
        self._new_id = new_id
        self._elapsed_s = elapsed_s
        self._open: dict[str, _Open[Piece]] = {}

    def add(self, pieces: Generator[Piece]) -> str:
        """Keep a stream of pieces; return the id to ask for them by."""
        pulled_id = self._new_id()
        with self._guard:
            self._open[pulled_id] = _Open(pieces, self._elapsed_s())
        return pulled_id

    def next_piece(self, pulled_id: str) -> Piece | None:
        """The next piece; None after the last.

        Raises
        ------
        OperationOutOfOrderError
            The caller was not heard of for long, or the process has restarted.
        """
        with self._guard:
            stream = self._open.get(pulled_id)
            if stream is None:
                raise OperationOutOfOrderError(
                    "the rows that were offered are not given any more: their taker was not heard of for a minute; nothing was lost; "
                    "ask anew"
                )
            stream.used_s = self._elapsed_s()
        piece = next(stream.pieces, None)
        if piece is None:
            self.close(pulled_id)
        return piece

    def keep(self, pulled_ids: Iterable[str]) -> None:
        """Keep streams open whose callers are alive, and take more later."""
        now_s = self._elapsed_s()
        with self._guard:
            for pulled_id in pulled_ids:
                if (stream := self._open.get(pulled_id)) is not None:
                    stream.used_s = now_s

    def close_idle(self) -> None:
        """Close what is not taken any more."""
        horizon = self._elapsed_s() - _IDLE_S
        with self._guard:
            idle = [pulled_id for pulled_id, stream in self._open.items() if stream.used_s < horizon]
        for pulled_id in idle:
            self.close(pulled_id)

    def close(self, pulled_id: str) -> None:
        """Close a stream; closing twice is harmless."""
        with self._guard:
            stream = self._open.pop(pulled_id, None)
        if stream is not None:
            stream.pieces.close()
