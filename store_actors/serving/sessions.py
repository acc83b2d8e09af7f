"""What callers have open in a process, by id: sessions on keyed stores, and streams of pieces of rows. No Ray."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import pyarrow as pa

from coordinator.model.errors import FencedError, OperationOutOfOrderError
from coordinator.model.identities import TaskIdentity
from coordinator.runtime.runtime import Lock
from store_actors.keyed.read_handle import ReadHandle
from store_actors.keyed.update_handle import UpdateHandle
from store_actors.messages.requests import OpenRequest
from store_actors.serving.partition import Partition

#: Seconds without a call after which a session is taken for abandoned.
IDLE_S = 600.0
#: Seconds without a call after which a caller is taken for dead and its stream is closed, as streams take memory.
_STREAM_IDLE_S = 60.0
Piece = TypeVar("Piece")


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a session: enough to answer further calls, without any of its rows."""

    reason: str
    #: Whether a newer owner or attempt ended it.
    fenced: bool
    committed: int | None
    state: str
    partition_id: int
    base_version: int

    def error(self) -> FencedError | OperationOutOfOrderError:
        """Return the error of a further call on the session."""
        kind = FencedError if self.fenced else OperationOutOfOrderError
        return kind(
            f"the handle has ended: {self.reason}; nothing was changed; open a new one",
            state=self.state,
            partition=self.partition_id,
            version=self.base_version,
        )


@dataclass(slots=True)
class Session:
    """A handle on all named stores of a partition, at one version."""

    request: OpenRequest
    partition: Partition
    handles: dict[str, UpdateHandle] | dict[str, ReadHandle]
    #: When it was last called, in seconds of a clock that only elapses.
    used_s: float
    ended: Ended | None = None
    on_end: Callable[[Ended], None] | None = None
    scans: dict[str, Iterator[pa.RecordBatch]] = field(default_factory=dict)
    #: A future of the commit of the version that it sealed last; None before.
    sealed: Any = None

    @property
    def task(self) -> TaskIdentity:
        """The task that opened it."""
        return self.request.task

    @property
    def updates(self) -> dict[str, UpdateHandle]:
        """Its handles, of a session that updates."""
        return {name: handle for name, handle in self.handles.items() if isinstance(handle, UpdateHandle)}

    def wait_for_sealed(self) -> None:
        """Wait until the version that was sealed last is committed; raises why it is not. The caller has no lock."""
        if self.sealed is not None:
            self.sealed.result()

    def goes_on(self, handles: dict[str, UpdateHandle], request: OpenRequest) -> None:
        """Have the handles of the next version, as the present one is sealed."""
        self.handles, self.request = handles, request
        self.scans.clear()

    def end(self, reason: str, *, fenced: bool = False) -> None:
        """Abort its updates or release its reads; the partition has no writer any more if this was it."""
        handles = self.handles
        self.leave(reason, fenced=fenced)
        try:
            with self.partition.changing:
                for handle in handles.values():
                    if isinstance(handle, UpdateHandle):
                        handle.abort()
                    else:
                        handle.release()
        except BaseException:
            # Half put back, or still being written: no memory to go on from.
            self.partition.forget()
            raise
        if self.sealed is not None and not self.sealed.done():
            # Memory is at a version of which it is not known whether it counts.
            self.partition.forget()

    def leave(self, reason: str, *, fenced: bool = False, committed: int | None = None) -> None:
        """Do :meth:`end` where the stores themselves are gone, or were committed. Nothing of the stores is held on to."""
        task = self.task
        self.ended = Ended(reason, fenced, committed, task.state_name, task.partition_id, self.request.base_version)
        self.handles = {}
        self.scans.clear()
        if self.partition.writer is self:
            self.partition.writer = None
        if self.on_end is not None:
            self.on_end(self.ended)


class Sessions:
    """Sessions by id. Thread-safe. Each call takes the same time however many there are."""

    def __init__(self, guard: Lock, new_id: Callable[[], str], elapsed_s: Callable[[], float]) -> None:
        self._guard = guard
        self._new_id = new_id
        self._elapsed_s = elapsed_s
        #: Those that update. One that is left alone stays: its user's code may take that long, and who needs the partition takes over.
        self._writing: dict[str, Session] = {}
        #: Those that read and those that ended, each with its last use, the longest ago first.
        self._others: OrderedDict[str, tuple[float, Session | Ended]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._writing) + len(self._others)

    def add(self, session: Session) -> str:
        """Keep a session that was just opened; return its id. Sessions that read or ended, and were not used for long, are dropped."""
        session_id = self._new_id()
        session.on_end = partial(self._ended, session_id)
        with self._guard:
            horizon = self._elapsed_s() - IDLE_S
            while self._others and next(iter(self._others.values()))[0] < horizon:
                self._others.popitem(last=False)
            if session.partition.writer is session:
                self._writing[session_id] = session
            else:
                self._others[session_id] = (session.used_s, session)
        return session_id

    def find(self, session_id: str) -> Session | Ended | None:
        """Return a session, which is used now, or how it ended; None if it is not known, any more or at all."""
        with self._guard:
            session: Session | Ended | None = self._writing.get(session_id)
            now_s = self._elapsed_s()
            if session is None and session_id in self._others:
                session = self._others[session_id][1]
                self._remember(session_id, session, now_s)
            if isinstance(session, Session):
                session.used_s = now_s
            return session

    def _ended(self, session_id: str, how: Ended) -> None:
        with self._guard:
            self._writing.pop(session_id, None)
            self._remember(session_id, how, self._elapsed_s())

    def _remember(self, session_id: str, session: Session | Ended, now_s: float) -> None:
        self._others[session_id] = (now_s, session)
        self._others.move_to_end(session_id)


@dataclass(slots=True)
class _Stream(Generic[Piece]):
    pieces: Generator[Piece]
    used_s: float


class PieceStreams(Generic[Piece]):
    """Open streams by id. Thread-safe."""

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
            The caller made no call for ``_STREAM_IDLE_S``, or the process has restarted.
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
        """Close streams without a call for ``_STREAM_IDLE_S``."""
        horizon = self._elapsed_s() - _STREAM_IDLE_S
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
