"""The keeper of one state's ledger: decides by it, and makes decisions durable in the manifest log before it answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from coordinator.runtime.runtime import Clock, MachineClock
from coordinator.storage.protocol import ObjectInfo

__all__ = ["Decide", "LedgerWriter"]

log = logging.getLogger(__name__)

#: Lost races for the log's next place before a group of decisions fails.
_DECIDE_ATTEMPTS = 20
#: For how long a look at the log counts for answers that may be as of a moment ago.
_RECENT_S = 1.0
#: How long one of many waits for the others: as a part of what an append takes, and in seconds.
_MOST_OF_AN_APPEND = 0.1
_LONGEST_MOMENT_S = 0.01

Result = TypeVar("Result")
Decide = Callable[[StateLedger], tuple[list[Record], Result]]


@dataclass(frozen=True, slots=True)
class _Note:
    """A fact that answers know of before it is in the log; and who waits until it is."""

    records: Callable[[StateLedger], list[Record]]
    written: asyncio.Future[None]


class LedgerWriter:
    """Decides by one state's ledger and makes decisions durable before answering; one task at a time, in groups.

    While an append is on its way, further decisions queue and go out together in the next one, so a batch costs a few
    appends however many shards it has. Answers that need no append are given only after a look that nobody else has
    appended, so a coordinator that was replaced without noticing tells nothing out of date. Only answers that may be as
    of a moment ago go without that look.

    Parameters
    ----------
    manifest_log
        The state's log.
    max_age_s
        When a ledger was not compared with the log for so long, places of the log that it takes for free may have been used and
        cleaned away since: the log is asked whether they were, and read anew if so.
    clock
        By which that age is measured.
    """

    def __init__(self, manifest_log: ManifestLog, *, max_age_s: float = 1800.0, clock: Clock | None = None) -> None:
        self._log = manifest_log
        self._max_age_s = max_age_s
        self._clock = clock or MachineClock()
        self._compared_s = self._clock.elapsed_s()
        #: When the ledger was what the log had; and when its last record was seen to be there.
        self._newest_s = self._seen_s = self._compared_s
        #: Set once the state's folder is another one than the ledger is of: the state is to be opened anew.
        self.replaced: StateReplacedError | None = None
        #: Runs that worked with a state that was in this one's place: what memory has of that says nothing of this one.
        self.barred: frozenset[str] = frozenset()
        self._ledger: StateLedger | None = None
        self.metadata: StateMetadata | None = None
        #: Metadata of a state that is no more, which are yet to be removed; and how many of its name are no more, by the ledger.
        self.left_over: StateMetadata | None = None
        self._ledger_drops: int | None = None
        self._creating = asyncio.Lock()
        self._queue: list[tuple[Decide[Any], asyncio.Future[Any]]] = []
        #: Whether the next group is appended even if it has no records.
        self._fence = False
        #: Whether a group that has no records is answered only once the log was looked at.
        self._must_look = False
        #: Ones of many that came since the queue was begun with; whether any did, the last time that it began with one of many; how
        #: long an append took.
        self._came, self._is_crowded, self._append_s = 0, False, 0.0
        #: Goes up whenever the ledger may have become another one.
        self.changes = 0
        self._draining: asyncio.Task[None] | None = None
        #: Facts that are yet to be written; how many of them the ledger has, and by which records; whether not to wait for others'.
        self._notes: list[_Note] = []
        self._taken, self._unwritten = 0, list[Record]()
        self._must_write = False
        self._checkpointing: asyncio.Task[None] | None = None
        #: Whether the next append is followed by a checkpoint, due or not.
        self._wants_checkpoint = False

    @property
    def ledger(self) -> StateLedger | None:
        """The ledger as last loaded; may run ahead of the log while an append is on its way. For display only."""
        return self._ledger

    async def open(self) -> None:
        """Load metadata and ledger."""
        self.metadata = await asyncio.to_thread(self._log.load_metadata)
        await self._load()

    def _settle_metadata(self, ledger: StateLedger) -> None:
        """Take metadata of a state that the log says is no more for what is left over of it; the log's own before those of a file."""
        if ledger.begun_metadata is not None:
            self.metadata, self.left_over = StateMetadata.from_json(dict(ledger.begun_metadata)), None
            return
        found, dropped = self.metadata or self.left_over, ledger.dropped_metadata or {}
        is_gone = ledger.is_dropped and found is not None and found.state_id == dropped.get("state_id", "")
        self.metadata, self.left_over = (None, found) if is_gone else (found, None)

    async def _load(self) -> StateLedger:
        now_s = self._clock.elapsed_s()
        try:
            ledger = await asyncio.to_thread(self._log.load)
        except CorruptStateError:
            # By now it may be the log of another state of that name.
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
        self._ledger, self._compared_s, self._newest_s = ledger, now_s, now_s
        self._ledger_drops = ledger.drops
        self._taken, self._unwritten = 0, []
        self.changes += 1
        return ledger

    async def create_metadata(self, metadata: StateMetadata) -> StateMetadata:
        """The state's metadata, made from `metadata` if there is none."""
        async with self._creating:
            # All tasks of a first batch come at once: one of them asks the object store.
            if self.metadata is None:
                # By the log: the ledger in memory is let go of whenever an append fails.
                dropped = await self.submit(lambda ledger: ([], ledger.dropped_metadata), is_recent=True)
            if self.metadata is None:
                self.metadata = await asyncio.to_thread(self._log.create_metadata, metadata, dropped)
                self.left_over = None
        return self.metadata

    async def remove_metadata(self) -> None:
        """Remove the metadata of a state that was dropped; those of another one of its name stay."""
        async with self._creating:
            ledger = await self.submit(lambda ledger: ([], ledger))
            if ledger.is_dropped:
                await asyncio.to_thread(self._log.remove_metadata, ledger.dropped_metadata)
                self.metadata = self.left_over = None

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for it, and nothing is being written."""
        tasks = (self._draining, self._checkpointing)
        return not (
            self._queue or self._notes or self._creating.locked() or any(task and not task.done() for task in tasks)
        )

    async def is_deleted(self) -> bool:
        """Whether somebody deleted the state's metadata, or all of its folder, while its ledger was here."""
        return self.metadata is not None and await asyncio.to_thread(self._log.load_metadata) is None

    async def write_down(self) -> None:
        """Write two checkpoints of the ledger as it is, so that all of the log before them can be cleaned away."""
        for _ in range(2):
            # Begun with the append: by the time that this is told, the ledger may have decisions that are yet to be written.
            self._wants_checkpoint = True
            await self.submit(lambda _: ([], None), fence=True)
            if self._checkpointing is not None:
                await self._checkpointing

    async def submit(
        self, decide: Decide[Result], *, fence: bool = False, is_recent: bool = False, is_one_of_many: bool = False
    ) -> Result:
        """Result of a decision once its records are durable; whatever `decide` raises otherwise.

        `decide` may run several times: it is repeated when another coordinator's records came in between.

        Parameters
        ----------
        decide
            From the ledger to records and an answer.
        fence
            Append even if there are no records: afterwards nothing can land in the log that was decided before.
        is_recent
            Whether an answer without records may be as of a moment ago, by the log as it was last read or written: then nobody asks
            the object store whether another coordinator has written since.
        is_one_of_many
            Whether others like it may come at about the same time: where they did the last time, it waits a moment for them, a small
            part of what an append takes.
        """
        self._fence = self._fence or fence
        self._must_look = self._must_look or not is_recent
        self._came += is_one_of_many
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queue.append((decide, future))
        self._begin_draining()
        return await future

    async def note(self, records: Callable[[StateLedger], list[Record]], within_s: float) -> None:
        """Have a fact written with the records of others, or by itself if there are none for a while; returns once it is in the log.

        Answers know of it at once, so it must be true whether or not it is written. It must not raise.

        Parameters
        ----------
        records
            From the ledger to the fact's records; none if the log says it by now.
        within_s
            Seconds that it waits for others.

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
        came, self._came = self._came, 0
        if came and self._is_crowded:
            # They would else wait for this append, and then for theirs.
            await asyncio.sleep(min(_MOST_OF_AN_APPEND * self._append_s, _LONGEST_MOMENT_S))
        await self._answer_all()
        if came:
            self._is_crowded = self._came > 0
        self._came = 0

    async def _answer_all(self) -> None:
        while self._queue or self._must_write:
            group, self._queue = self._queue, []
            must_write, self._must_write = self._must_write, False
            fence, self._fence = self._fence, False
            must_look, self._must_look = self._must_look, False
            try:
                outcomes = await self._decide_group([decide for decide, _ in group], fence, must_look, must_write)
            except Exception as error:  # noqa: BLE001 - every waiting caller gets it
                if isinstance(error, StateReplacedError) and self._ledger is not None:
                    self.replaced, self.barred = error, self.barred | {self._ledger.run_id}
                self._ledger = None
                outcomes = [error] * len(group)
                if must_write:
                    self._fail_notes(error)
            for (_, future), outcome in zip(group, outcomes, strict=True):
                if future.cancelled():
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome[0])

    async def _decide_group(
        self, group: list[Decide[Any]], fence: bool, must_look: bool, must_write: bool
    ) -> list[tuple[Any] | Exception]:
        for _ in range(_DECIDE_ATTEMPTS):
            if self.replaced is not None:
                raise self.replaced
            ledger = self._ledger
            if ledger is None or (self._is_old() and not await self._compared()):
                ledger = await self._load()
            self._take_notes(ledger)
            records, outcomes = self._decide_all(ledger, group)
            self.changes += bool(records)
            taken = self._taken
            if records or fence or must_write or not self._unwritten:
                records = [*self._unwritten, *records]
            else:
                taken = 0
            if await self._settle(records, ledger, fence, must_look):
                self._notes_are_written(taken)
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
        for note in self._notes[self._taken :]:
            records = note.records(ledger)
            for record in records:
                ledger.fold(record)
            self._unwritten += records
            self._taken += 1

    def _notes_are_written(self, count: int) -> None:
        """The log has the first so many notes."""
        if count:
            written, self._notes = self._notes[:count], self._notes[count:]
            self._taken, self._unwritten = self._taken - count, []
            for note in written:
                if not note.written.done():
                    note.written.set_result(None)

    def _fail_notes(self, error: Exception) -> None:
        """Notes could not be written. They are true all the same, so answers know of them, and the next records take them along."""
        for note in self._notes:
            if not note.written.done():
                note.written.set_exception(error)

    async def _settle(self, records: list[Record], ledger: StateLedger, fence: bool, must_look: bool) -> bool:
        """Make a group's answers true; False if they were decided by an old ledger."""
        now_s = self._clock.elapsed_s()
        if not records and not fence:
            if not must_look and now_s - self._newest_s < _RECENT_S:
                return True
            current = await self._is_newest(now_s)
        else:
            try:
                await asyncio.to_thread(self._log.append, records)
                current = True
            except LogConflictError as conflict:
                log.warning(
                    "reloading a manifest log that another coordinator wrote to: %s", conflict, extra=_fields(ledger)
                )
                current = False
            self._append_s, self._seen_s = self._clock.elapsed_s() - now_s, now_s
        if current and self._is_old():
            # Too slow, in reading the log or just now: the place that was free may be one that was cleaned away.
            current = await self._compared()
        else:
            self._compared_s = now_s
        if current:
            self._newest_s = now_s
        if current and (records or fence) and (self._wants_checkpoint or self._log.is_checkpoint_due):
            self._begin_checkpoint(ledger)
        return current

    async def _is_newest(self, now_s: float) -> bool:
        """Whether nobody has appended since; now and then also whether the log is still the one that the ledger is of."""
        is_whole_look = now_s - self._seen_s >= _RECENT_S
        try:
            current = await asyncio.to_thread(self._log.look, is_whole=is_whole_look)
        except LogConflictError:
            return False
        if is_whole_look:
            self._seen_s = now_s
        return current

    def _begin_checkpoint(self, ledger: StateLedger) -> None:
        """Have the ledger written down as it is now, beside the answers; the next time it is due if that is still going on."""
        if self._checkpointing is None or self._checkpointing.done():
            self._wants_checkpoint = False
            self._checkpointing = asyncio.create_task(
                self._checkpoint(self._log.plan_checkpoint(ledger), _fields(ledger))
            )

    async def _checkpoint(self, plan: CheckpointPlan, fields: dict[str, object]) -> None:
        try:
            await asyncio.to_thread(self._log.write_checkpoint, plan)
        except Exception:  # nobody waits for it, and the log does without
            log.exception("no checkpoint of the manifest log this time; loading will read more", extra=fields)

    async def needed(self, infos: Sequence[ObjectInfo]) -> Needed:
        """See :meth:`ManifestLog.needed <coordinator.log.manifest_log.ManifestLog.needed>`."""
        return await asyncio.to_thread(self._log.needed, infos)

    def _is_old(self) -> bool:
        return self._clock.elapsed_s() - self._compared_s > self._max_age_s

    async def _compared(self) -> bool:
        """Whether the ledger is still one to go on from: nothing of the log after it can have been cleaned away."""
        now_s = self._clock.elapsed_s()
        if await asyncio.to_thread(self._log.was_passed):
            return False
        self._compared_s = now_s
        return True

    @staticmethod
    def _decide_all(ledger: StateLedger, group: list[Decide[Any]]) -> tuple[list[Record], list[tuple[Any] | Exception]]:
        records: list[Record] = []
        outcomes: list[tuple[Any] | Exception] = []
        for decide in group:
            try:
                new, result = decide(ledger)
            except StateStoreError as error:
                outcomes.append(error)
                continue
            except Exception as error:
                # A decision changes nothing before it is made, so the others' go on.
                log.exception(
                    "a decision failed by an error that is not foreseen; its caller is told, nothing was changed",
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
    """Fields of a log line about a state."""
    return {"state": ledger.state_name, "query": ledger.query_id, "run": ledger.run_id, "epoch": ledger.epoch}
