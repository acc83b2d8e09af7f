"""Which versions the states of a fleet have, where they are read, and what begins with one of them. No Ray."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from coordinator.ledger.branches import Branch
from coordinator.ledger.read_views import ReadView, ViewId, WantedView, cut_of, newest_readable, read_view
from coordinator.ledger.rescaling import first_layout
from coordinator.ledger.state_ledger import StateLedger
from coordinator.ledger.version_stats import VersionStats, version_stats
from coordinator.log.ledger_writer import RECENT_S, LedgerWriter
from coordinator.log.open_states import OpenStates
from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import PYTHON_QUERY_ID, StateStoreId
from coordinator.model.leases import ShardLocation
from coordinator.model.state_metadata import StateMetadata
from coordinator.service.branching import Branching

__all__ = ["Versions"]


class Versions:
    """Versions of the states of a fleet.

    Parameters
    ----------
    states
        Those that are open.
    keeper
        Gives the keeper of a state's ledger.
    branching
        Makes branches.
    """

    def __init__(
        self, states: OpenStates, writer: Callable[[str], Awaitable[LedgerWriter]], branching: Branching
    ) -> None:
        self._states = states
        self._writer_of = writer
        self._branching = branching
        #: Whether the states that were there when this coordinator began are open; those that are made later are, anyway.
        self._all_are_open = False

    async def read_view(self, state_name: str, asked: WantedView, known: ViewId | None = None) -> ReadView | None:
        """How a version of a state is read, by the log as it was a moment ago at most.

        Parameters
        ----------
        asked
            The newest version by default: one cut across the shards of all operators of its query, whose batch Spark has finished.
        known
            Of a view that the caller has.

        Returns
        -------
        ReadView or None
            None if that one is still what it would be given.

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
        others = await self._newest_beside(writer, asked.is_committed) if asked.version is None else []

        def view(ledger: StateLedger) -> ReadView | None:
            cut = cut_of(newest_readable(ledger, created, is_committed=asked.is_committed), others)
            return read_view(ledger, created, cut, asked, known)

        return await writer.read(view, max_age_s=RECENT_S)

    async def batch_finished(self, state_names: Sequence[str], run_id: str, batch_id: int, within_s: float) -> None:
        """Spark's commit log has a batch of a run, which worked on these states: readers see it from now on.

        Returns once the states' logs say so, which they do with their next records, or after a while without any.

        Parameters
        ----------
        within_s
            That while, in seconds.
        """
        writers = [await self._writer_of(name) for name in state_names]
        notes = [writer.note(lambda ledger: ledger.decide_finished(run_id, batch_id), within_s) for writer in writers]
        await asyncio.gather(*notes)

    async def list_newest(self, state_name: str, count: int, is_committed: bool) -> tuple[VersionStats, ...]:
        """What the log tells of the newest versions of a state that can be read, newest first; `count` of them at most.

        Parameters
        ----------
        is_committed
            See :class:`~coordinator.ledger.read_views.WantedView`.

        Raises
        ------
        InvalidRequestError
            There is no such state.
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
        """See :func:`~coordinator.ledger.read_views.newest_readable`; of each other state of a state's query."""
        if not self._all_are_open:
            await self.load_all_states()
            self._all_are_open = True
        query_id = "" if writer.ledger is None else writer.ledger.query_id
        if query_id in ("", PYTHON_QUERY_ID):
            return []

        def look(created: StateMetadata, ledger: StateLedger) -> int:
            return newest_readable(ledger, created, is_committed=is_committed)

        beside = [
            (other, created)
            for other in await self._states.of_query(query_id)
            if other is not writer and (created := other.metadata) is not None
        ]
        return await asyncio.gather(
            *(other.read(partial(look, created), max_age_s=RECENT_S) for other, created in beside)
        )

    async def locate(self, state_name: str, shard: int, version: int | None = None) -> ShardLocation:
        """Where a shard is, and its newest counted version.

        Parameters
        ----------
        version
            Shards are those that the state had at this version; at the newest by default.
        """
        writer = await self._writer_of(state_name)
        created = writer.metadata

        def look(ledger: StateLedger) -> ShardLocation:
            partition_id = shard
            if created is not None:
                wanted = sys.maxsize if version is None else version
                layout = ledger.layouts.with_version(first_layout(created), wanted)
                partition_id = layout.first_partition + shard
            store_id = StateStoreId(ledger.root, 0, partition_id)
            newest = ledger.base_version(partition_id, sys.maxsize)
            return ShardLocation(store_id, newest, ledger.holder(partition_id))

        return await writer.read(look)

    async def branch(self, state_name: str, name: str, version: int | None) -> Branch:
        """A state that begins with a version of another one, and shares its files: a new one, or the one that is there.

        Parameters
        ----------
        state_name
            The other one.
        name
            Of the branch.
        version
            One whose batch Spark has finished; the newest of all operators of the query by default. Of a state that Python programs
            own, whose partitions go on each by itself, it is the newest of each, and none can be asked for.

        Raises
        ------
        InvalidRequestError
            There is no such state, or another one has the name.
        VersionNotFoundError
            Not every shard has the version, or it is not retained any more.
        """
        found = await self._branching.existing(state_name, version, name)
        if found is not None:
            return found
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

    async def load_all_states(self) -> list[str]:
        """See :meth:`OpenStates.open_all <coordinator.log.open_states.OpenStates.open_all>`."""
        return await self._states.open_all()
