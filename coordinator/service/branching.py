"""Making branches of states: the steps of :mod:`coordinator.ledger.branches`, in their order. No Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from msgspec import structs

from coordinator.ledger.branches import (
    Branch,
    decide_beginning,
    described,
    first_record,
    owners,
    taken,
)
from coordinator.ledger.records import BranchBorn, Branched, BranchMade, Record
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.model.errors import InvalidRequestError
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import Clock, now_ms


class Branching:
    """Makes branches of the states of a fleet."""

    def __init__(self, writer: Callable[[str], Awaitable[LedgerWriter]], clock: Clock) -> None:
        self._writer_of = writer
        self._clock = clock

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
