"""Dropping states: their names, memory and files are free again, while the fleet runs. No Ray.

A state's log stays. A record in it says that the state was dropped (:class:`~coordinator.ledger.records.Dropped`), and from there
on it is the log of a state that has not begun: runs, owners and coordinators that were asleep meet the record, and are refused.
Only then are files deleted, those that were listed before: later files may belong to another state of that name. The metadata file is
deleted last, so that a drop that was cut off is found and finished: by another call, by a query that begins another state of the
name, or by cleaning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.ledger.branches import owners_of
from coordinator.ledger.records import BranchEnded, Dropped, Record
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.open_states import OpenStates
from coordinator.model.errors import CorruptStateError, InvalidRequestError
from coordinator.model.identities import PYTHON_QUERY_ID
from coordinator.model.names import check_state_name
from coordinator.storage.protocol import ObjectInfo, ObjectStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DroppedState:
    """The versions and files of a state that were dropped, or would be."""

    state_name: str
    versions: int
    #: ``files``, ``file_bytes``: Number of files in its folder without those of its log, and their bytes.
    files: int
    file_bytes: int
    #: Names of the other states of its query, which stay.
    others: tuple[str, ...]


@dataclass(eq=False)
class Dropping:
    """Drops states of a fleet."""

    _store: ObjectStore
    _states: OpenStates
    _is_active: Callable[[StateLedger], bool]

    async def drop(self, state_name: str, *, dry_run: bool, is_over: bool) -> DroppedState:
        """Drop a state, or only say what would go; see :meth:`~coordinator.service.coordinator.Coordinator.drop`."""
        check_state_name(state_name)
        infos = [
            info
            for info in await asyncio.to_thread(self._store.list, state_name)
            if info.path.split("/")[1] not in ("manifest", "checkpoints", "metadata.json")
        ]
        try:
            writer = await self._states.writer(state_name)
        except CorruptStateError:
            if await self._states.has_metadata(state_name):
                raise
            return await self._drop_remnants(state_name, infos, dry_run=dry_run)
        if writer.metadata is None and not (writer.left_over is not None or infos):
            raise InvalidRequestError(
                "there is no such state; nothing was changed; `statefleet status` lists those that there are",
                state=state_name,
            )
        metadata = writer.metadata or writer.left_over
        branches = await self._branches(writer)

        def decide(ledger: StateLedger) -> tuple[list[Record], tuple[int, str, set[str]]]:
            if live_branches := sorted(branches | (ledger.branches.keys() - ledger.born)):
                raise InvalidRequestError(
                    "the state has branches, which need its files; nothing was changed; drop those first",
                    state=state_name,
                    branches=", ".join(live_branches),
                )
            if self._is_active(ledger) and ledger.query_id != PYTHON_QUERY_ID and not is_over:
                raise InvalidRequestError(
                    "a query that uses the state runs, as far as is known; nothing was changed; stop it (query.stop() in its program, "
                    "or on Spark's page), or, if its program is gone, say so (is_over=True, `--over`): a run that goes on nevertheless "
                    "is refused from then on",
                    state=state_name,
                    query_id=ledger.query_id,
                    run_id=ledger.run_id,
                )
            newest = {entry.version for shard in ledger.assigned() for entry in ledger.entries(shard)}
            needs = owners_of(ledger) if ledger.origin is not None else set()
            records: list[Record] = [Dropped(None if metadata is None else metadata.to_json())]
            return [] if dry_run else records, (len(newest), ledger.query_id, needs)

        versions, query_id, needs = await writer.decide(decide)
        is_of_python = query_id in ("", PYTHON_QUERY_ID)
        of_query = () if is_of_python else await self._states.of_query(query_id)
        siblings = sorted(
            sibling.metadata.state_name
            for sibling in of_query
            if sibling.metadata is not None and sibling is not writer
        )
        dropped = DroppedState(state_name, versions, len(infos), sum(info.size for info in infos), tuple(siblings))
        if dry_run:
            return dropped
        await asyncio.to_thread(self._store.delete_all, [info.path for info in infos])
        await writer.remove_metadata()
        for parent in sorted(needs - {state_name}):
            owner = await self._states.writer(parent)
            if owner.metadata is not None:
                await owner.decide(
                    lambda ledger: ([BranchEnded(state_name)] if state_name in ledger.branches else [], None)
                )
        await writer.write_down()
        log.info("a state was dropped: %d versions, %d files", versions, len(infos), extra={"state": state_name})
        return dropped

    async def _drop_remnants(self, state_name: str, infos: list[ObjectInfo], *, dry_run: bool) -> DroppedState:
        """Drop a state whose folder was deleted while a query went on writing into it."""
        dropped = DroppedState(state_name, 0, len(infos), sum(info.size for info in infos), ())
        if not dry_run and await self._states.end_remnants(state_name):
            await asyncio.to_thread(self._store.delete_all, [info.path for info in infos])
            await (await self._states.writer(state_name)).write_down()
            log.info("what was left of a state was dropped: %d files", len(infos), extra={"state": state_name})
        return dropped

    async def finish(self, state_name: str, writer: LedgerWriter) -> None:
        """Finish a drop that was cut off: remove the metadata file, once the other files are cleaned away."""
        if writer.left_over is None:
            return
        infos = await asyncio.to_thread(self._store.list, state_name)
        if all(info.path.split("/")[1] in ("manifest", "checkpoints", "metadata.json") for info in infos):
            await writer.remove_metadata()

    async def _branches(self, writer: LedgerWriter) -> set[str]:
        noted = await writer.read(lambda ledger: sorted(ledger.branches))
        opened = [(name, await self._states.writer(name)) for name in noted]
        return {name for name, branch in opened if branch.metadata is not None}
