"""Reads of the shards of one state at one version: who has them, and what is done when that changed meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import pyarrow as pa

from coordinator.ledger.read_views import ReadView, WantedView
from coordinator.ledger.version_stats import VersionStats
from coordinator.model.errors import (
    InvalidRequestError,
    OperationOutOfOrderError,
    StateStoreError,
    StoreUnavailableError,
    VersionNotFoundError,
    VersionReplacedError,
)
from coordinator.model.identities import ActorLocation, StateStoreId
from coordinator.model.schema import StateSchema
from coordinator.runtime.retry import Retry
from coordinator.runtime.runtime import Pool, Runtime
from statefleet.reads.sources import Lost, Source
from store_actors.key_queries import FoundRows
from store_actors.messages import ReadRequest
from store_actors.serving.hot_key_tracker import HottestKeys

__all__ = ["ReadVersion", "Plan", "ShardReads"]

Result = TypeVar("Result")
#: By a view, the store to look in, what is wanted of each row (an encoded :class:`~store_actors.messages.ReadProjection`), and the
#: keys to look for in each shard.
Plan = Callable[[ReadView], tuple[str, bytes, Mapping[int, pa.Table]]]

#: How long the place of a shard is believed without a question, in seconds: a store actor that lost a shard without noticing may be
#: behind for so long.
_BELIEVED_S = 1.0
#: How long while another reader asks.
_ASKED_S = 2.0
#: How long it is tried when store actors are lost, in seconds; and the pause between, at first.
_DEADLINE_S = 60.0
_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class ReadVersion:
    """Which version is read.

    Attributes
    ----------
    version
        None for the newest one.
    is_latest
        Whether each shard is read at the newest version that it has, for which others may not be ready.
    lineage
        Of the version as it was read before; empty if it was not: if another attempt has made it since, that is an error.
    first_partition
        See :class:`~coordinator.ledger.read_views.WantedView`.
    """

    version: int | None = None
    is_latest: bool = False
    lineage: str = ""
    first_partition: int | None = None

    @classmethod
    def to(cls, view: ReadView) -> ReadVersion:
        """What a view is of, by its shards."""
        return cls(view.version, False, view.lineage, view.id.first_partition)


class ShardReads:
    """The way to the shards of one state.

    Parameters
    ----------
    source
        Where they are read.
    name
        The state.
    surroundings
        By which readers wait, and share things.
    threads
        Where they fetch what comes next.
    is_committed
        See :class:`~coordinator.ledger.read_views.WantedView`.
    """

    def __init__(
        self, source: Source, name: str, runtime: Runtime, threads: Pool, *, is_committed: bool = False
    ) -> None:
        self._source = source
        self.is_committed = is_committed
        self.runtime, self.threads = runtime, threads
        self._clock = runtime.clock
        self._name = name
        #: The newest view, and when it was known to be.
        self._newest: ReadView | None = None
        self._seen_s = float("-inf")
        self._asking = runtime.threads.lock()

    # -- views ----------------------------------------------------------------------------------------------------

    def view(self, pinned: ReadVersion = ReadVersion()) -> ReadView:
        """The view of a version, or the newest one, as it is now.

        Raises
        ------
        VersionNotFoundError
            There is no such version, or it is not retained any more.
        VersionReplacedError
            The version was made anew since it was read.
        """
        asked = WantedView(pinned.version, self.is_committed, pinned.first_partition)
        if pinned.version is not None:
            view = self._source.view(self._name, asked, None)
            assert view is not None
            if pinned.lineage not in ("", view.lineage):
                raise VersionReplacedError(
                    "the version was made anew since it was read, as its batch was repeated, and its rows may be others; nothing was "
                    "changed; what was read of it does not count: read the newest version anew, and changes from there on",
                    state=self._name,
                    version=pinned.version,
                )
            return view
        known = self._newest
        now_s = self._clock.elapsed_s()
        found = self._source.view(self._name, asked, None if known is None else known.id)
        newest = found or known
        assert newest is not None
        # Answers may come in another order than they were asked for.
        if now_s >= self._seen_s:
            self._newest, self._seen_s = newest, now_s
        return newest

    def figures(self, count: int) -> tuple[VersionStats, ...]:
        """What the log tells of so many of the newest versions, newest first."""
        return self._source.figures(self._name, count, is_committed=self.is_committed)

    def believed(self, pinned: ReadVersion) -> ReadView:
        """A view of now, or of a moment ago."""
        return self._begin(pinned)[0]

    def _begin(self, pinned: ReadVersion) -> tuple[ReadView, bool]:
        """A view to read by, and whether it is as of now."""
        if pinned.version is not None:
            return self.view(pinned), True
        known, age_s = self._newest, self._clock.elapsed_s() - self._seen_s
        if known is None or age_s >= _ASKED_S:
            return self.view(), True
        # One of many readers asks anew, and the others need not wait for it.
        if age_s < _BELIEVED_S or not self._asking.acquire(blocking=False):
            return known, False
        try:
            return self.view(), True
        finally:
            self._asking.release()

    # -- reading --------------------------------------------------------------------------------------------------

    def find(self, pinned: ReadVersion, plan: Plan, is_patient: bool = True) -> tuple[ReadView, dict[int, FoundRows]]:
        """Rows of some keys, by shard: all of one version, unless the latest ones are asked for.

        A shard that has nothing newer than the version proves that it is the newest: then nobody else is asked. Where a store actor
        was lost it is tried again for a while, if the reader is patient.
        """

        def look(view: ReadView) -> dict[int, FoundRows] | None:
            return self._found(view, pinned, plan)

        return self._read(pinned, look, _DEADLINE_S if is_patient else 0.0)

    def scan(
        self,
        view: ReadView,
        pinned: ReadVersion,
        store_name: str,
        form: bytes,
        shard: int,
        limit: int | None,
        since: int | None = None,
        snapshot: int | None = None,
    ) -> Iterator[pa.Table]:
        """All rows of a shard, or what changed since a version, a piece at a time; by way of a snapshot if one is named.

        Raises
        ------
        InvalidRequestError
            There is no such snapshot.
        StoreUnavailableError
            A store actor was lost, or the version was made anew, when some rows had been given out; or this process was halted for
            more than a minute.
        """
        asked = self._request(view, shard, pinned if snapshot is None else ReadVersion(), store_name, form)
        request, given = replace(asked, since=since, snapshot=snapshot), False
        retry = self._retry(_DEADLINE_S)
        while True:
            try:
                pieces = self._source.scan(view.location(shard), request, limit)
                if pieces is None:
                    raise _superseded(view)
                for piece in pieces:
                    given = True
                    yield piece
            except OperationOutOfOrderError as error:
                raise _forgotten(view) from error
            except Lost as error:
                if given:
                    raise _lost(view, error) from error
                self._pause(view, retry, error)
                # By the same shards: the number is one of theirs.
                view = self.view(ReadVersion.to(view))
            else:
                return

    def describe(self, pinned: ReadVersion, store_name: str, form: bytes) -> StateSchema | None:
        """Columns of a store that only its user knows; None if no partition has it."""

        def look(view: ReadView) -> tuple[StateSchema | None] | None:
            for shard in view.written:
                request = self._request(view, shard, pinned, store_name, form)
                try:
                    found = self._source.describe(view.location(shard), request)
                except VersionNotFoundError:  # a partition need not have every store
                    continue
                return None if found is None else (found,)
            return (None,)

        return self._read(pinned, look)[1][0]

    def hottest_keys(self, shard: int, most: int) -> HottestKeys:
        """Keys of a shard that were met most often lately.

        Raises
        ------
        InvalidRequestError
            There is no such shard.
        """

        def look(view: ReadView) -> HottestKeys:
            if not 0 <= shard < len(view.versions):
                raise InvalidRequestError("the state has no such shard", shard=shard, shards=len(view.versions))
            store_id = StateStoreId(view.root, 0, view.partitions[shard])
            return self._source.hottest_keys(view.location(shard), store_id, most)

        return self._read(ReadVersion(), look)[1]

    def _read(
        self, pinned: ReadVersion, look: Callable[[ReadView], Result | None], within_s: float = _DEADLINE_S
    ) -> tuple[ReadView, Result]:
        """What is found by a view of now, or by one that proves to be; None asks for another one."""
        retry = self._retry(within_s)
        view, is_now = self._begin(pinned)
        while True:
            try:
                found = look(view)
                if found is not None and (is_now or self._is_newest(view, found, pinned)):
                    return view, found
                error: Exception = _superseded(view)
            except Lost as lost:
                error = lost
            if is_now:
                self._pause(view, retry, error)
            view, is_now = self.view(pinned), True

    def _is_newest(self, view: ReadView, found: object, pinned: ReadVersion) -> bool:
        """Whether a view is still the newest: as all that was found in memory proves, else by a question."""
        if isinstance(found, dict) and found:
            newest = {shard: one.newest for shard, one in found.items()}
            if pinned.is_latest and min(newest.values()) >= 0:
                return True
            if all(version == view.versions[shard] for shard, version in newest.items()):
                return True
        return self.view() is view

    def _found(self, view: ReadView, pinned: ReadVersion, plan: Plan) -> dict[int, FoundRows] | None:
        """Outcomes of a view, with a call to each store actor concerned, all under way at once; None if some are of no use."""
        store_name, form, keys = plan(view)
        grouped: dict[ActorLocation | None, list[int]] = {}
        for shard in keys:
            grouped.setdefault(view.location(shard), []).append(shard)
        waiting = []
        for where, shards in grouped.items():
            requests = [self._request(view, shard, pinned, store_name, form) for shard in shards]
            waiting.append((shards, self._source.find(where, requests, [keys[shard] for shard in shards])))
        found: dict[int, FoundRows] = {}
        for shards, outcomes in waiting:
            for shard, outcome in zip(shards, outcomes(), strict=True):
                if isinstance(outcome, StateStoreError):
                    raise outcome
                if outcome is None:
                    return None
                found[shard] = outcome
        return found

    def _request(self, view: ReadView, shard: int, pinned: ReadVersion, store_name: str, form: bytes) -> ReadRequest:
        store_id = StateStoreId(view.root, 0, view.partitions[shard], store_name)
        return ReadRequest(store_id, view.versions[shard], view.attempts[shard], form, pinned.is_latest)

    def _retry(self, within_s: float) -> Retry:
        return Retry(self._clock, within_s, first_pause_s=_PAUSE_S, longest_pause_s=_LONGEST_PAUSE_S)

    @staticmethod
    def _pause(view: ReadView, retry: Retry, error: Exception) -> None:
        """Wait before the next attempt; raises StoreUnavailableError once there is to be none."""
        if retry.is_over:
            raise _lost(view, error) from error
        retry.pause()


def _lost(view: ReadView, error: Exception) -> StoreUnavailableError:
    return StoreUnavailableError(
        "a store actor that has shards of the state was lost while they were read; nothing was changed; read again: the shards are "
        "given to others, or loaded from storage",
        state=view.metadata.state_name,
        version=view.version,
        cause=error,
    )


def _forgotten(view: ReadView) -> StoreUnavailableError:
    return StoreUnavailableError(
        "this process was not heard of for a minute, as it or its machine was halted, so the store actor has given up the rows that "
        "were read; nothing was changed; read again",
        state=view.metadata.state_name,
        version=view.version,
    )


def _superseded(view: ReadView) -> StoreUnavailableError:
    return StoreUnavailableError(
        "the version was made anew while it was read, as its batch was repeated; nothing was changed; read again",
        state=view.metadata.state_name,
        version=view.version,
    )
