"""Versions of the states of a fleet: which there are, where they are read, and branches that begin with one. No Ray.

A branch is made by the steps of :mod:`coordinator.ledger.branches`, in their order.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from coordinator.ledger.branches import Branch, decide_beginning, described, first_record, owners, taken
from coordinator.ledger.read_views import (
    ReadView,
    VersionStats,
    ViewId,
    WantedView,
    cut_of,
    newest_readable,
    read_view,
    version_stats,
)
from coordinator.ledger.records import BranchBorn, Branched, BranchMade, Record
from coordinator.ledger.rescaling import first_layout
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.ledger_writer import RECENT_S, LedgerWriter
from coordinator.log.open_states import OpenStates
from coordinator.model.errors import CorruptStateError, InvalidRequestError, NewerFormatError, StateReplacedError
from coordinator.model.identities import PYTHON_QUERY_ID, StateStoreId, TaskIdentity
from coordinator.model.leases import ShardLocation
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import Clock, now_ms

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Branching:
    """Makes branches of the states of a fleet."""

    _writer_of: Callable[[str], Awaitable[LedgerWriter]]
    _clock: Clock

    async def existing(self, parent: str, version: int | None, name: str) -> Branch | None:
        """Return the branch of that name, if it began with the version of the parent (any version if none is given); None without one.

        Raises
        ------
        InvalidRequestError
            There is another state of that name.
        """
        writer = await self._writer_of(name)
        created = writer.metadata
        if created is None:
            return None

        def look(ledger: StateLedger) -> Branch:
            if ledger.origin is None or ledger.origin[0] != parent or version not in (None, ledger.origin[1]):
                raise taken(ledger, parent, version)
            return described(ledger, created)

        return await writer.read(look)

    async def make(self, parent: StateMetadata, version: int, name: str) -> Branch:
        """Create a state that begins with a version of another one.

        Raises
        ------
        VersionNotFoundError
            Not every shard has the version, or it is not retained any more.
        InvalidRequestError
            There is another state of that name, or making it took too long.
        """
        branch, owner = await self._writer_of(name), await self._writer_of(parent.state_name)

        def first(ledger: StateLedger) -> Branched:
            return first_record(ledger, parent, name, version)

        record = await owner.read(first)
        drops = await branch.read(lambda ledger: ledger.drops)
        made_at_ms = now_ms(self._clock)
        await self._note(owners(record), BranchMade(name, parent.state_name, version, made_at_ms))
        # Read again: from here on cleaning keeps the files that the branch needs.
        begun = await owner.read(first)

        def begin(ledger: StateLedger) -> tuple[list[Record], None]:
            return decide_beginning(ledger, begun, drops), None

        await branch.decide(begin)
        wanted_metadata = structs.replace(parent, state_name=name, query_id=str(begun.ledger["query_id"]))
        if await branch.create_metadata(wanted_metadata) != wanted_metadata:
            # Metadata of a query that has not committed anything: the log has the branch.
            raise taken(StateLedger(name), parent.state_name, version)
        result = await self.existing(parent.state_name, version, name)
        assert result is not None
        for state_name in sorted(owners(begun)):
            await (await self._writer_of(state_name)).decide(lambda _: ([BranchBorn(name)], None))
        return result

    async def _note(self, names: Iterable[str], branch: BranchMade) -> None:
        """Write to the logs of the states whose files a branch needs that it is being made."""
        writers = [await self._writer_of(state_name) for state_name in sorted(names)]
        if missing := [writer for writer in writers if writer.metadata is None]:
            raise InvalidRequestError(
                "files that the branch needs belong to a state that is not there any more; nothing was made; restore its folder",
                state=branch.name,
                missing=len(missing),
            )
        await asyncio.gather(*(writer.decide(lambda _: ([branch], None)) for writer in writers))


@dataclass(eq=False)
class Versions:
    """Versions of the states of a fleet."""

    _states: OpenStates
    _writer_of: Callable[[str], Awaitable[LedgerWriter]]
    _branching: Branching
    #: Whether the states that existed when this coordinator started are open; later ones are opened when they are created.
    _all_are_open: bool = False

    async def read_view(self, state_name: str, request: WantedView, cached: ViewId | None = None) -> ReadView | None:
        """Return what a reader needs to read a version of a state, by the log as it was at most :data:`RECENT_S` ago.

        Parameters
        ----------
        request
            The newest version by default: one cut across the shards of all operators of its query, whose batch Spark has finished.

        Returns
        -------
        ReadView or None
            None if the caller's view is still the right one.

        Raises
        ------
        InvalidRequestError
            There is no such state.
        VersionNotFoundError
            There is no such version, or it is not retained any more.
        """
        writer = await self._writer_of(state_name)
        created = writer.metadata
        if created is None:
            raise InvalidRequestError(
                "there is no such state; nothing was changed; `statefleet status` lists those that there are",
                state=state_name,
            )
        sibling_versions = await self._newest_beside(writer, request.is_committed) if request.version is None else []

        def view(ledger: StateLedger) -> ReadView | None:
            cut = cut_of(newest_readable(ledger, created, is_committed=request.is_committed), sibling_versions)
            return read_view(ledger, created, cut, request, cached)

        return await writer.read(view, max_age_s=RECENT_S)

    async def batch_finished(self, state_names: Sequence[str], run_id: str, batch_id: int, within_s: float) -> None:
        """Let readers see a batch of a run: Spark's commit log has it.

        Returns once the states' logs say so: with their next records, or after a while without any.

        Parameters
        ----------
        within_s
            Seconds without records after which it is written by itself.
        """
        writers = [await self._writer_of(name) for name in state_names]
        notes = [writer.note(lambda ledger: ledger.decide_finished(run_id, batch_id), within_s) for writer in writers]
        await asyncio.gather(*notes)

    async def end_epoch(self, task: TaskIdentity, partitions: range, end: str) -> None:
        """Have an epoch of a continuous query count, which all shards have committed; see :meth:`StateLedger.decide_epoch`."""
        layout = ShardLayout(len(partitions), partitions.start)
        writer = await self._writer_of(task.state_name)
        await writer.decide(lambda ledger: (ledger.decide_epoch(task, layout, end), None))

    async def newest_epoch(self, state_name: str) -> tuple[int, str] | None:
        """Return the newest epoch that counts, and the end that Spark's logs are to have for it; None without any."""
        return await (await self._writer_of(state_name)).read(lambda ledger: ledger.epoch_end)

    async def list_versions(self, state_name: str, count: int, is_committed: bool = False) -> tuple[VersionStats, ...]:
        """Return statistics of the newest versions of a state that can be read, newest first, `count` at most.

        Raises errors as :meth:`read_view`.
        """
        view = await self.read_view(state_name, WantedView(None, is_committed))
        assert view is not None
        newest = view
        writer = await self._writer_of(state_name)
        created = writer.metadata
        assert created is not None

        return await writer.read(
            lambda ledger: version_stats(ledger, created, newest.oldest, newest.version, count), max_age_s=RECENT_S
        )

    async def _newest_beside(self, writer: LedgerWriter, is_committed: bool) -> list[int]:
        """Return the newest readable version of each other state of a state's query."""
        if not self._all_are_open:
            await self._states.open_all()
            self._all_are_open = True
        query_id = "" if writer.ledger is None else writer.ledger.query_id
        if query_id in ("", PYTHON_QUERY_ID):
            return []

        async def newest(sibling: LedgerWriter, created: StateMetadata) -> Iterable[int]:
            def look(ledger: StateLedger) -> int:
                return newest_readable(ledger, created, is_committed=is_committed)

            try:
                return (await sibling.read(look, max_age_s=RECENT_S),)
            except (CorruptStateError, NewerFormatError, StateReplacedError) as error:
                # It has no version to read, and keeps none of the other state from being read.
                log.warning("a state cannot be read: %s", error, extra={"state": created.state_name})
                return ()

        beside = [
            newest(sibling, created)
            for sibling in await self._states.of_query(query_id)
            if sibling is not writer and (created := sibling.metadata) is not None
        ]
        return [version for versions in await asyncio.gather(*beside) for version in versions]

    async def locate(self, state_name: str, shard: int, version: int | None = None) -> ShardLocation:
        """Return where a shard is, and its newest committed version.

        Parameters
        ----------
        version
            The shard is one of those that the state had at this version; at the newest version by default.
        """
        writer = await self._writer_of(state_name)
        created = writer.metadata

        def look(ledger: StateLedger) -> ShardLocation:
            partition_id = shard
            if created is not None:
                limit = sys.maxsize if version is None else version
                layout = ledger.layouts.with_version(first_layout(created), limit)
                partition_id = layout.first_partition + shard
            store_id = StateStoreId(ledger.root, 0, partition_id)
            newest = ledger.base_version(partition_id, sys.maxsize)
            return ShardLocation(store_id, newest, ledger.holder(partition_id))

        return await writer.read(look)

    async def branch(self, state_name: str, name: str, version: int | None) -> Branch:
        """Return a state that begins with a version of another one, and shares its files: a new one, or the existing one.

        Raises errors as :meth:`read_view` and :meth:`Branching.make`.

        Parameters
        ----------
        version
            A version whose batch Spark has finished; the newest of all operators of the query by default. Partitions of a state that
            Python programs own have versions of their own: there it is the newest of each, and none can be asked for.
        """
        branch = await self._branching.existing(state_name, version, name)
        if branch is not None:
            return branch
        view = await self.read_view(state_name, WantedView(version))
        assert view is not None
        parent = (await self._writer_of(state_name)).metadata
        assert parent is not None
        if version is not None and parent.query_id == PYTHON_QUERY_ID:
            raise InvalidRequestError(
                "partitions of this state go on each by itself, so a branch begins with the newest version of each; nothing was "
                "changed; ask for no version",
                state=state_name,
                version=version,
            )
        return await self._branching.make(parent, view.version, name)
