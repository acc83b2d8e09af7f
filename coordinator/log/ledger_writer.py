"""The writer of one state's ledger: decides by it, and makes decisions durable in the manifest log before it answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from coordinator.ledger.checkpoints import CheckpointPlan
from coordinator.ledger.records import Record
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.manifest_log import ManifestLog, Needed
from coordinator.model.errors import (
    CorruptStateError,
    LogConflictError,
    StateReplacedError,
    StateStoreError,
    StorageUnavailableError,
)
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import Clock
from coordinator.storage.protocol import ObjectInfo

log = logging.getLogger(__name__)

#: Lost races for the log's next sequence number before a group of decisions fails.
_DECIDE_ATTEMPTS = 20
#: Seconds for which a look at the log is new enough for answers that may be slightly old.
RECENT_S = 1.0
#: How long a batched decision waits for others: as a part of what an append takes, and at most, in seconds.
_MOST_OF_AN_APPEND = 0.1
_LONGEST_WAIT_S = 0.01

Result = TypeVar("Result")
Decide = Callable[[StateLedger], tuple[list[Record], Result]]


@dataclass(frozen=True, slots=True)
class _Note:
    """A fact that answers are given by before it is in the log, and the future of the caller that waits until it is."""

    records: Callable[[StateLedger], list[Record]]
    written: asyncio.Future[None]


@dataclass(slots=True)
class _Group:
    """Decisions that are made together, and go out in one append."""

    decisions: list[tuple[Decide[Any], asyncio.Future[Any]]] = field(default_factory=list)
    #: Whether it is appended even if it has no records.
    is_fence: bool = False
    #: Seconds for which the last look at the log is new enough for answers without records: the least that a caller allows,
    #: and at most :data:`RECENT_S`.
    max_age_s: float = RECENT_S


class LedgerWriter:
    """Decides by one state's ledger and makes decisions durable before it answers; one task at a time, in groups.

    While an append is on its way, further decisions queue and go out together in the next one, so a batch costs a few appends however
    many shards it has. Answers that need no append are given only after a look that no other coordinator has appended, so a coordinator
    that was replaced without noticing gives no stale answer. Only reads that allow an age go without that look.

    Parameters
    ----------
    max_age_s
        Once a ledger was not compared with the log for so long, sequence numbers of the log that it takes for free may have been used
        and cleaned away since. The log is asked whether they were, and read again if so.
    """

    def __init__(self, manifest_log: ManifestLog, *, max_age_s: float = 1800.0, clock: Clock | None = None) -> None:
        self._log = manifest_log
        self._max_age_s = max_age_s
        self._clock = clock or Clock()
        self._compared_s = self._clock.elapsed_s()
        #: When the ledger was last equal to the log.
        self._current_s = self._compared_s
        #: When the log's last record was last seen to be there.
        self._seen_s = self._compared_s
        #: Set once the state's folder is another one than the ledger is of: the state is to be opened again.
        self.replaced: StateReplacedError | None = None
        #: Runs that worked with a state that was in this one's folder before: their commits are refused.
        self.barred: frozenset[str] = frozenset()
        self._ledger: StateLedger | None = None
        #: The state's metadata; None if there is no such state.
        self.metadata: StateMetadata | None = None
        #: Metadata of a dropped state of this name, whose file is yet to be removed.
        self.left_over: StateMetadata | None = None
        #: How many states of this name were dropped, by the ledger.
        self._ledger_drops: int | None = None
        self._creating = asyncio.Lock()
        self._queue = _Group()
        #: Batched decisions since the queue was last drained.
        self._num_batched = 0
        #: Whether further batched decisions came while the last group with one was answered.
        self._is_crowded = False
        #: Seconds that the last append took.
        self._append_s = 0.0
        #: A number that grows whenever the ledger may have changed.
        self.changes = 0
        self._draining: asyncio.Task[None] | None = None
        #: Facts that are yet to be written.
        self._notes: list[_Note] = []
        #: How many of them the ledger has, and their records.
        self._num_folded, self._unwritten = 0, list[Record]()
        #: Whether notes are written now, without waiting for other records.
        self._must_write = False
        self._checkpointing: asyncio.Task[None] | None = None
        #: Whether the next append is followed by a checkpoint, due or not.
        self._wants_checkpoint = False

    @property
    def ledger(self) -> StateLedger | None:
        """The ledger as last loaded. It may be ahead of the log while an append is on its way: for display only."""
        return self._ledger

    async def open(self) -> None:
        """Load metadata and ledger."""
        self.metadata = await asyncio.to_thread(self._log.load_metadata)
        await self._load()

    def _settle_metadata(self, ledger: StateLedger) -> None:
        """Take the log's metadata, if it has any; metadata of a file whose state the log says was dropped are left over."""
        if ledger.begun_metadata is not None:
            self.metadata, self.left_over = StateMetadata.from_json(dict(ledger.begun_metadata)), None
            return
        stored, dropped = self.metadata or self.left_over, ledger.dropped_metadata or {}
        is_dropped = ledger.is_dropped and stored is not None and stored.state_id == dropped.get("state_id", "")
        self.metadata, self.left_over = (None, stored) if is_dropped else (stored, None)

    async def _load(self) -> StateLedger:
        now_s = self._clock.elapsed_s()
        try:
            ledger = await asyncio.to_thread(self._log.load)
        except CorruptStateError:
            # Meanwhile it may have become the log of another state of that name.
            self.metadata = await asyncio.to_thread(self._log.load_metadata)
            ledger = await asyncio.to_thread(self._log.load)
        if self._ledger_drops not in (None, ledger.drops):
            # Another coordinator dropped the state, and there may be another one of its name.
            self.metadata = await asyncio.to_thread(self._log.load_metadata)
        is_lost = self.metadata is None and ledger.begun_metadata is not None
        self._settle_metadata(ledger)
        if is_lost and self.metadata is not None:
            await asyncio.to_thread(self._log.restore_metadata, self.metadata)
        ledger.retired |= self.barred - {""}
        self._ledger, self._compared_s, self._current_s = ledger, now_s, now_s
        self._ledger_drops = ledger.drops
        self._num_folded, self._unwritten = 0, []
        self.changes += 1
        return ledger

    async def create_metadata(self, metadata: StateMetadata) -> StateMetadata:
        """Return the state's metadata, which is created from `metadata` if there is none."""
        async with self._creating:
            # All tasks of a first batch come at once: one request to the object store does for all.
            if self.metadata is None:
                # By the log: the ledger in memory is dropped whenever an append fails.
                dropped = await self.read(lambda ledger: ledger.dropped_metadata, max_age_s=RECENT_S)
            if self.metadata is None:
                self.metadata = await asyncio.to_thread(self._log.create_metadata, metadata, dropped)
                self.left_over = None
        return self.metadata

    async def remove_metadata(self) -> None:
        """Remove the metadata file of a dropped state; that of another state of its name stays."""
        async with self._creating:
            ledger = await self.read(lambda ledger: ledger)
            if ledger.is_dropped:
                await asyncio.to_thread(self._log.remove_metadata, ledger.dropped_metadata)
                self.metadata = self.left_over = None

    @property
    def is_idle(self) -> bool:
        """Whether no caller waits for it, and nothing is being written."""
        tasks = (self._draining, self._checkpointing)
        return not (
            self._queue.decisions
            or self._notes
            or self._creating.locked()
            or any(task and not task.done() for task in tasks)
        )

    async def is_deleted(self) -> bool:
        """Return whether the state's metadata, or all of its folder, was deleted while its ledger was in memory."""
        return self.metadata is not None and await asyncio.to_thread(self._log.load_metadata) is None

    async def write_down(self) -> None:
        """Write two checkpoints of the ledger, so that all of the log before them can be cleaned away."""
        for _ in range(2):
            # Begun with the append: once that has returned, the ledger may have decisions that are yet to be written.
            self._wants_checkpoint = True
            await self.fence(lambda _: ([], None))
            if self._checkpointing is not None:
                await self._checkpointing

    async def read(self, look: Callable[[StateLedger], Result], *, max_age_s: float = 0.0) -> Result:
        """Return what `look` returns of the ledger as the log has it; raises what `look` raises.

        Parameters
        ----------
        look
            May be called several times. It changes nothing.
        max_age_s
            Seconds for which the last look at the log is new enough; more than :data:`RECENT_S` counts as that. Without it, the object
            store is asked whether another coordinator has written since.
        """
        return await self._enqueue(lambda ledger: ([], look(ledger)), max_age_s=max_age_s)

    async def decide(self, decide: Decide[Result], *, is_batched: bool = False) -> Result:
        """Return the result of a decision once its records are durable; raises what `decide` raises.

        Parameters
        ----------
        decide
            From the ledger to records and a result. It may be called several times: it is repeated when another coordinator's records
            came in between.
        is_batched
            Whether others like it may come at about the same time. Where they did the last time, it waits a moment for them: a small
            part of what an append takes.
        """
        self._num_batched += is_batched
        return await self._enqueue(decide)

    async def fence(self, decide: Decide[Result]) -> Result:
        """Decide, and append even without records (:meth:`decide`): afterwards no earlier decision can land in the log."""
        self._queue.is_fence = True
        return await self._enqueue(decide)

    async def _enqueue(self, decide: Decide[Result], *, max_age_s: float = 0.0) -> Result:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queue.max_age_s = min(self._queue.max_age_s, max_age_s)
        self._queue.decisions.append((decide, future))
        self._begin_draining()
        return await future

    async def note(self, records: Callable[[StateLedger], list[Record]], within_s: float) -> None:
        """Write a fact with the records of other decisions, or by itself if there are none for a while; returns once it is in the log.

        Answers are given by it at once, so it must be true whether or not it is written. `records` must not raise.

        Parameters
        ----------
        records
            From the ledger to the fact's records; none if the log has it already.
        within_s
            Seconds for which it waits for other records.

        Raises
        ------
        StateStoreError
            The log could not be written.
        """
        note = _Note(records, asyncio.get_running_loop().create_future())
        self._notes.append(note)
        if within_s > 0:
            await asyncio.wait([note.written], timeout=within_s)
        if not note.written.done():
            self._must_write = True
            self._begin_draining()
        await note.written

    def _begin_draining(self) -> None:
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        num_batched, self._num_batched = self._num_batched, 0
        if num_batched and self._is_crowded:
            # They would otherwise wait for this append, and then for theirs.
            await asyncio.sleep(min(_MOST_OF_AN_APPEND * self._append_s, _LONGEST_WAIT_S))
        await self._answer_all()
        if num_batched:
            self._is_crowded = self._num_batched > 0
        self._num_batched = 0

    async def _answer_all(self) -> None:
        while self._queue.decisions or self._must_write:
            group, self._queue = self._queue, _Group()
            must_write, self._must_write = self._must_write, False
            try:
                outcomes = await self._decide_group(group, must_write)
            except Exception as error:  # noqa: BLE001 - every waiting caller gets it
                if isinstance(error, StateReplacedError) and self._ledger is not None:
                    self.replaced, self.barred = error, self.barred | {self._ledger.run_id}
                self._ledger = None
                outcomes = [error] * len(group.decisions)
                if must_write:
                    self._fail_notes(error)
            for (_, future), outcome in zip(group.decisions, outcomes, strict=True):
                if future.cancelled():
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome[0])

    async def _decide_group(self, group: _Group, must_write: bool) -> list[tuple[Any] | Exception]:
        for _ in range(_DECIDE_ATTEMPTS):
            if self.replaced is not None:
                raise self.replaced
            ledger = self._ledger
            if ledger is None or (self._is_old() and not await self._compared()):
                ledger = await self._load()
            self._take_notes(ledger)
            records, outcomes = self._decide_all(ledger, group)
            self.changes += bool(records)
            num_notes = self._num_folded
            if records or group.is_fence or must_write or not self._unwritten:
                records = [*self._unwritten, *records]
            else:
                num_notes = 0
            if await self._settle(records, ledger, group):
                self._notes_are_written(num_notes)
                if ledger.drops != self._ledger_drops:
                    self._ledger_drops = ledger.drops
                    self._settle_metadata(ledger)
                return outcomes
            self._ledger = None
        raise StorageUnavailableError(
            "another coordinator keeps appending first, or the object store does not list what it holds; whether the last attempt was "
            "counted is found out when it is repeated; committed versions are safe",
            attempts=_DECIDE_ATTEMPTS,
        )

    def _take_notes(self, ledger: StateLedger) -> None:
        for note in self._notes[self._num_folded :]:
            records = note.records(ledger)
            for record in records:
                ledger.fold(record)
            self._unwritten += records
            self._num_folded += 1

    def _notes_are_written(self, count: int) -> None:
        """Complete the calls of the first `count` notes: the log has them."""
        if count:
            written, self._notes = self._notes[:count], self._notes[count:]
            self._num_folded, self._unwritten = self._num_folded - count, []
            for note in written:
                if not note.written.done():
                    note.written.set_result(None)

    def _fail_notes(self, error: Exception) -> None:
        """Fail the calls of all notes, which could not be written. They are true all the same, and go out with the next
        records.
        """
        for note in self._notes:
            if not note.written.done():
                note.written.set_exception(error)

    async def _settle(self, records: list[Record], ledger: StateLedger, group: _Group) -> bool:
        """Append a group's records, or see that its answers are current; returns False if they were decided by an old ledger."""
        now_s = self._clock.elapsed_s()
        if not records and not group.is_fence:
            if now_s - self._current_s < group.max_age_s:
                return True
            is_current = await self._is_newest(now_s)
        else:
            try:
                await asyncio.to_thread(self._log.append, records)
                is_current = True
            except LogConflictError as conflict:
                log.warning(
                    "reloading a manifest log that another coordinator wrote to: %s", conflict, extra=_fields(ledger)
                )
                is_current = False
            self._append_s, self._seen_s = self._clock.elapsed_s() - now_s, now_s
        if is_current and self._is_old():
            # Too slow, in reading the log or just now: the sequence number that was free may be one that was cleaned away.
            is_current = await self._compared()
        else:
            self._compared_s = now_s
        if is_current:
            self._current_s = now_s
        if is_current and (records or group.is_fence) and (self._wants_checkpoint or self._log.is_checkpoint_due):
            self._begin_checkpoint(ledger)
        return is_current

    async def _is_newest(self, now_s: float) -> bool:
        """Return whether no other coordinator has appended; now and then also whether the log is still the one that the ledger is
        of.
        """
        is_whole_look = now_s - self._seen_s >= RECENT_S
        try:
            is_current = await asyncio.to_thread(self._log.look, is_whole=is_whole_look)
        except LogConflictError:
            return False
        if is_whole_look:
            self._seen_s = now_s
        return is_current

    def _begin_checkpoint(self, ledger: StateLedger) -> None:
        """Write a checkpoint of the ledger beside the answers, unless one is being written: then when the next one is due."""
        if self._checkpointing is None or self._checkpointing.done():
            self._wants_checkpoint = False
            self._checkpointing = asyncio.create_task(
                self._checkpoint(self._log.plan_checkpoint(ledger), _fields(ledger))
            )

    async def _checkpoint(self, plan: CheckpointPlan, fields: dict[str, object]) -> None:
        try:
            await asyncio.to_thread(self._log.write_checkpoint, plan)
        except Exception:  # no caller waits for it, and the log is whole without it
            log.exception("no checkpoint of the manifest log this time; loading will read more", extra=fields)

    async def needed(self, infos: Sequence[ObjectInfo]) -> Needed:
        """Return which files of the log are needed; see :meth:`~coordinator.log.manifest_log.ManifestLog.needed`."""
        return await asyncio.to_thread(self._log.needed, infos)

    def _is_old(self) -> bool:
        return self._clock.elapsed_s() - self._compared_s > self._max_age_s

    async def _compared(self) -> bool:
        """Return whether nothing of the log after the ledger can have been cleaned away."""
        now_s = self._clock.elapsed_s()
        if await asyncio.to_thread(self._log.was_passed):
            return False
        self._compared_s = now_s
        return True

    @staticmethod
    def _decide_all(ledger: StateLedger, group: _Group) -> tuple[list[Record], list[tuple[Any] | Exception]]:
        records: list[Record] = []
        outcomes: list[tuple[Any] | Exception] = []
        for decide, _ in group.decisions:
            try:
                new, result = decide(ledger)
            except StateStoreError as error:
                outcomes.append(error)
                continue
            except Exception as error:
                # A decision changes nothing before it is made, so the others go on.
                log.exception(
                    "a decision failed by an error that is not foreseen; its caller gets it, nothing was changed",
                    extra=_fields(ledger),
                )
                outcomes.append(error)
                continue
            for record in new:
                ledger.fold(record)
            records += new
            outcomes.append((result,))
        return records, outcomes


def _fields(ledger: StateLedger) -> dict[str, object]:
    return {"state": ledger.state_name, "query": ledger.query_id, "run": ledger.run_id, "epoch": ledger.epoch}
