"""The states whose ledgers a coordinator has in memory, each opened when it is first asked for."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.errors import CorruptStateError, NewerFormatError
from coordinator.model.names import check_state_name, is_state_name
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import Runtime
from coordinator.storage.protocol import ObjectStore

log = logging.getLogger(__name__)

#: Files of logs that are read at once.
_READERS = 32
#: Seconds for which a ledger stays after a call asked for it: such calls are over by then.
_IN_USE_S = 300.0


@dataclass(frozen=True, slots=True)
class RestingState:
    """A state whose ledger was unloaded, and the part of it that stays in memory."""

    query_id: str
    #: :func:`~coordinator.telemetry.status.query_status` of it with details, as JSON, which takes a fraction of the objects' memory.
    encoded: bytes

    def details(self) -> dict[str, Any]:
        """Return its details, as they were when its ledger was unloaded."""
        details: dict[str, Any] = json.loads(self.encoded)
        return details


class OpenStates:
    """Writers of ledgers, by the names of their states."""

    def __init__(
        self,
        store: ObjectStore,
        writer_id: str,
        runtime: Runtime,
        *,
        checkpoint_interval: int,
        part_records: int,
        max_age_s: float,
    ) -> None:
        self._store = store
        self._writer_id = writer_id
        self._runtime = runtime
        self._checkpoint_interval = checkpoint_interval
        self._part_records = part_records
        self._max_age_s = max_age_s
        self._readers = runtime.threads.pool(_READERS, "statefleet-log")
        self._clock = runtime.clock
        self._writers: dict[str, LedgerWriter] = {}
        #: When each writer was asked for last, in seconds of the clock.
        self._asked_s: dict[str, float] = {}
        #: How often each state's ledger was opened.
        self.openings: Counter[str] = Counter()
        #: States whose ledgers were unloaded, until they are asked for.
        self.resting: dict[str, RestingState] = {}
        #: By state, runs that worked with a state that was in its folder before; see :attr:`LedgerWriter.barred`.
        self._barred: dict[str, frozenset[str]] = {}
        #: States that could not be opened the last time that all were, each with the error.
        self.unreadable: dict[str, str] = {}
        #: One a state: tasks of other states do not wait for one that is slow to read, or broken.
        self._opening: dict[str, asyncio.Lock] = {}

    async def writer(self, state_name: str) -> LedgerWriter:
        """Return the writer of a state's ledger; the state need not exist yet."""
        # Also if the caller has checked it: the folder of a name such as "" is that of all states, and cleaning would delete them.
        check_state_name(state_name)
        self._asked_s[state_name] = self._clock.elapsed_s()
        writer = self._present(state_name)
        if writer is None:
            async with self._opening.setdefault(state_name, asyncio.Lock()):
                writer = self._present(state_name)
                if writer is None:
                    writer = self._writers[state_name] = await self._opened(state_name)
                    self.resting.pop(state_name, None)
            # Callers that still wait have the lock itself, and later ones find the writer.
            self._opening.pop(state_name, None)
        return writer

    def _present(self, state_name: str) -> LedgerWriter | None:
        """Return the writer of a state, unless another state is in its folder by now."""
        writer = self._writers.get(state_name)
        if writer is not None and writer.replaced is not None:
            log.warning(
                "a state's folder was put back, replaced or deleted under the fleet: what memory has of it is dropped, and what is "
                "there now is read",
                extra={"state": state_name},
            )
            self._barred[state_name] = writer.barred
            del self._writers[state_name]
            return None
        return writer

    async def notice_deleted(self, state_name: str) -> None:
        """Drop a state from memory if its folder was deleted: its name is free, and nothing more is written for it."""
        writer = self._writers.get(state_name)
        if state_name in self.resting and not await self.has_metadata(state_name):
            self.resting.pop(state_name, None)
        if writer is not None and await writer.is_deleted() and self._writers.pop(state_name, None) is not None:
            log.warning(
                "the folder of a state was deleted while its ledger was open: what memory has of it is dropped; its name is free, "
                "unless a query wrote into the folder since; `statefleet drop` ends a state while the fleet runs",
                extra={"state": state_name},
            )

    def rest(self, state_name: str, details: Mapping[str, Any] | None) -> bool:
        """Unload a state's ledger, which is read again when it is asked for; returns False if it is in use.

        Parameters
        ----------
        details
            Its details meanwhile; None for a name that no state has.
        """
        writer = self._writers.get(state_name)
        unused_s = self._clock.elapsed_s() - self._asked_s.get(state_name, 0.0)
        if writer is None or not writer.is_idle or unused_s < _IN_USE_S:
            return False
        del self._writers[state_name]
        self._asked_s.pop(state_name, None)
        if details is not None:
            encoded = json.dumps(details).encode()
            self.resting[state_name] = RestingState(details["query_id"], encoded)
        return True

    async def of_query(self, query_id: str) -> list[LedgerWriter]:
        """Return the writers of the states of a query, as far as they are known and can be read; resting ones are opened."""
        for name in [name for name, state in self.resting.items() if state.query_id == query_id]:
            try:
                await self.writer(name)
            except (CorruptStateError, NewerFormatError) as error:
                log.warning("a state cannot be read: %s", error, extra={"state": name})
        return [
            writer
            for writer in self._writers.values()
            if writer.metadata is not None and writer.ledger is not None and writer.ledger.query_id == query_id
        ]

    async def end_remnants(self, state_name: str) -> bool:
        """End a state of whose folder only a part of the log is there; False if there is more, or nothing."""
        return await asyncio.to_thread(self._log_of(state_name).end_remnants)

    async def _opened(self, state_name: str) -> LedgerWriter:
        self.openings[state_name] += 1
        writer = LedgerWriter(self._log_of(state_name), max_age_s=self._max_age_s, clock=self._clock)
        writer.barred = self._barred.get(state_name, writer.barred)
        damage: CorruptStateError | None = None
        try:
            await writer.open()
        except CorruptStateError as error:
            damage = error
        ledger = writer.ledger
        has_commits = ledger is not None and not ledger.is_dropped and any(map(ledger.entries, ledger.assigned()))
        if (damage is not None or has_commits) and writer.metadata is None and not await self.has_metadata(state_name):
            raise CorruptStateError(
                "the state's metadata.json is missing, while its log is there: it was lost, or somebody deleted the folder while "
                "a query went on writing; nothing was read of it and nothing was changed; restore the folder from a backup of the "
                "object store, or have what is left deleted and the name freed by `statefleet drop`",
                state=state_name,
            ) from damage
        if damage is not None:
            raise damage
        return writer

    def _log_of(self, state_name: str) -> ManifestLog:
        return ManifestLog(
            self._store,
            state_name,
            self._writer_id,
            new_id=self._runtime.new_id,
            checkpoint_interval=self._checkpoint_interval,
            part_records=self._part_records,
            readers=self._readers,
        )

    def writers(self) -> list[tuple[str, LedgerWriter]]:
        """Return names and writers of the states that are open now."""
        return list(self._writers.items())

    def ledgers(self) -> Iterator[StateLedger]:
        """Yield the ledgers of the states that are open, as last loaded."""
        return (writer.ledger for writer in self._writers.values() if writer.ledger is not None)

    def described(self) -> Iterator[tuple[StateLedger, StateMetadata]]:
        """Yield the ledgers of the open states that exist, each with the state's metadata, as they are when their turn comes."""
        for _, writer in self.writers():
            if writer.ledger is not None and writer.metadata is not None:
                yield writer.ledger, writer.metadata

    async def open_all(self) -> list[str]:
        """Open every state but the resting ones, whose details are known; returns the names of all.

        A state that cannot be read does not keep the others from being opened: see :attr:`unreadable`.
        """
        folders = list(filter(is_state_name, await asyncio.to_thread(self._store.folders)))
        # A state is known by its metadata; its folder is not listed.
        are_states = await asyncio.gather(*map(self.has_metadata, folders))
        names = [name for name, is_state in zip(folders, are_states, strict=True) if is_state]
        without = [name for name, is_state in zip(folders, are_states, strict=True) if not is_state]
        self.resting = {name: state for name, state in self.resting.items() if name in names}
        # Left by a copy that was cut off, or by a query that wrote into a deleted folder.
        logs = [name for name in without if await asyncio.to_thread(self._store.list, f"{name}/manifest")]
        to_open = [name for name in (*names, *logs) if name not in self.resting]
        outcomes = await asyncio.gather(*map(self.writer, to_open), return_exceptions=True)
        self.unreadable = {}
        for name, outcome in zip(to_open, outcomes, strict=True):
            if isinstance(outcome, CorruptStateError | NewerFormatError):
                self.unreadable[name] = str(outcome)
                log.warning("a state cannot be read: %s", outcome, extra={"state": name})
            elif isinstance(outcome, BaseException):
                raise outcome
        return names

    async def has_metadata(self, name: str) -> bool:
        """Return whether a folder is a state's."""
        try:
            await asyncio.to_thread(self._store.get, f"{name}/metadata.json")
        except FileNotFoundError:
            return False
        return True
