"""Reads of the shards of one state at one version, from the store actors that have them, and retries when those change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa
from msgspec import structs

from coordinator.ledger.read_views import ReadView, VersionStats, WantedView
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
from coordinator.runtime.runtime import Pool, Retry, Runtime
from statefleet.reads.sources import Source, StoreActorLostError
from store_actors.messages.key_queries import FoundRows
from store_actors.messages.requests import ReadRequest
from store_actors.serving.hot_key_tracker import HottestKeys

Result = TypeVar("Result")

#: How long a view is used without asking the coordinator, in seconds: a store actor that lost a shard without noticing may be behind
#: for so long.
_FRESH_S = 1.0
#: How long a view is used while another reader asks the coordinator, in seconds.
_REFRESHING_S = 2.0
#: How long a read is retried when store actors are lost, and the first and the longest pause between two tries, in seconds.
_DEADLINE_S = 60.0
_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class ReadVersion:
    """The version that is read."""

    #: Number of the version; None for the newest one.
    version: int | None = None
    #: Whether each shard is read at its own newest version, which other shards may not have yet.
    is_latest: bool = False
    #: Lineage of the version when it was read before; empty if it was not. If another attempt has made the version since, reading it
    #: is an error.
    lineage: str = ""
    #: See :class:`~coordinator.ledger.read_views.WantedView`.
    first_partition: int | None = None

    @classmethod
    def to(cls, view: ReadView) -> ReadVersion:
        """Return the version of a view, on the shards of that view."""
        return cls(view.version, False, view.lineage, view.id.first_partition)


@dataclass(frozen=True, slots=True)
class KeyPlan:
    """A query by keys, as a view of the state has it."""

    store_name: str
    #: Columns of the rows: an encoded :class:`~store_actors.messages.requests.ReadProjection`.
    projection: bytes
    keys: Mapping[int, pa.Table]


PlanOf = TypeVar("PlanOf", bound=KeyPlan)


class ShardReads:
    """Reads of the shards of one state."""

    def __init__(
        self, source: Source, name: str, runtime: Runtime, threads: Pool, *, is_committed: bool = False
    ) -> None:
        self._source = source
        self.is_committed = is_committed
        self.runtime, self.threads = runtime, threads
        self._clock = runtime.clock
        self._name = name
        #: The newest view, and when the coordinator was asked for it.
        self._newest: ReadView | None = None
        self._seen_s = float("-inf")
        self._asking = runtime.threads.lock()

    # -- views ----------------------------------------------------------------------------------------------------

    def view(self, read_version: ReadVersion = ReadVersion()) -> ReadView:
        """Return the current view of a version, or of the newest one.

        Raises
        ------
        VersionNotFoundError
            There is no such version, or it is not retained any more.
        VersionReplacedError
            Another attempt has made the version since it was read.
        """
        view_request = WantedView(read_version.version, self.is_committed, read_version.first_partition)
        if read_version.version is not None:
            view = self._source.view(self._name, view_request, None)
            assert view is not None
            if read_version.lineage not in ("", view.lineage):
                raise VersionReplacedError(
                    "the version was made again since it was read, as its batch was repeated, and its rows may be others; nothing was "
                    "changed; what was read of it does not count: read the newest version again, and changes from there on",
                    state=self._name,
                    version=read_version.version,
                )
            return view
        cached = self._newest
        now_s = self._clock.elapsed_s()
        newer = self._source.view(self._name, view_request, None if cached is None else cached.id)
        newest = newer or cached
        assert newest is not None
        # Answers may arrive in another order than the requests.
        if now_s >= self._seen_s:
            self._newest, self._seen_s = newest, now_s
        return newest

    def version_stats(self, count: int) -> tuple[VersionStats, ...]:
        """Return the statistics of the newest `count` versions, newest first, from the log."""
        return self._source.version_stats(self._name, count, is_committed=self.is_committed)

    def cached_view(self, read_version: ReadVersion) -> ReadView:
        """Return a view that is current, or was a moment ago."""
        return self._begin(read_version)[0]

    def _begin(self, read_version: ReadVersion) -> tuple[ReadView, bool]:
        """Return a view to read by, and whether it is current."""
        if read_version.version is not None:
            return self.view(read_version), True
        cached, age_s = self._newest, self._clock.elapsed_s() - self._seen_s
        if cached is None or age_s >= _REFRESHING_S:
            return self.view(), True
        # One of many readers asks the coordinator, and the others do not wait for it.
        if age_s < _FRESH_S or not self._asking.acquire(blocking=False):
            return cached, False
        try:
            return self.view(), True
        finally:
            self._asking.release()

    # -- reading --------------------------------------------------------------------------------------------------

    def find(
        self, read_version: ReadVersion, plan: Callable[[ReadView], PlanOf], is_patient: bool = True
    ) -> tuple[ReadView, PlanOf, dict[int, FoundRows]]:
        """Return the view and the plan that were read by, and the rows of the keys by shard: all of one version, unless the latest.

        Where every shard that was read has nothing newer than the version, that proves that the view is current, and the coordinator is
        not asked. If a store actor was lost, a patient reader tries again for a while. `plan` plans the query by a view; it is called
        again for each further view.
        """

        def look(view: ReadView) -> tuple[tuple[PlanOf, dict[int, FoundRows]], dict[int, int]] | None:
            key_plan = plan(view)
            found = self._found(view, read_version, key_plan)
            return None if found is None else ((key_plan, found), {shard: rows.newest for shard, rows in found.items()})

        view, (key_plan, results) = self._read(read_version, look, _DEADLINE_S if is_patient else 0.0)
        return view, key_plan, results

    def scan(
        self,
        view: ReadView,
        read_version: ReadVersion,
        store_name: str,
        projection: bytes,
        shard: int,
        limit: int | None,
        since: int | None = None,
        snapshot: int | None = None,
    ) -> Iterator[pa.Table]:
        """Yield all rows of a shard, or the changes since a version, a piece at a time; from a snapshot if one is named.

        Raises
        ------
        InvalidRequestError
            There is no such snapshot.
        StoreUnavailableError
            A store actor was lost, or another attempt has made the version, after some rows had been yielded; or this process was
            halted for more than a minute.
        """
        of_version = read_version if snapshot is None else ReadVersion()
        request = self._request(view, shard, of_version, store_name, projection)
        request, has_yielded = structs.replace(request, since=since, snapshot=snapshot), False
        retry = self._retry(_DEADLINE_S)
        while True:
            try:
                pieces = self._source.scan(view.location(shard), request, limit)
                if pieces is None:
                    raise _superseded(view)
                for piece in pieces:
                    has_yielded = True
                    yield piece
            except OperationOutOfOrderError as error:
                raise StoreUnavailableError(
                    "this process was not heard of for a minute, as it or its machine was halted, so the store actor has given up the "
                    "rows that were read; nothing was changed; read again",
                    state=self._name,
                    version=view.version,
                ) from error
            except StoreActorLostError as error:
                if has_yielded:
                    raise _lost(view, error) from error
                self._pause(view, retry, error)
                # On the same shards: the partition of the request is one of them.
                view = self.view(ReadVersion.to(view))
            else:
                return

    def describe(self, read_version: ReadVersion, store_name: str, projection: bytes) -> StateSchema | None:
        """Return the columns of a store whose schema only its user knows; None if no partition has the store."""

        def look(view: ReadView) -> tuple[StateSchema | None, dict[int, int]] | None:
            for shard in view.written:
                request = self._request(view, shard, read_version, store_name, projection)
                try:
                    schema = self._source.describe(view.location(shard), request)
                except VersionNotFoundError:  # a partition need not have every store
                    continue
                return None if schema is None else (schema, {})
            return None, {}

        return self._read(read_version, look)[1]

    def hottest_keys(self, shard: int, most: int) -> HottestKeys:
        """Return the keys of a shard that were accessed most often lately.

        Raises
        ------
        InvalidRequestError
            There is no such shard.
        """

        def look(view: ReadView) -> tuple[HottestKeys, dict[int, int]]:
            if not 0 <= shard < len(view.versions):
                raise InvalidRequestError("the state has no such shard", shard=shard, shards=len(view.versions))
            store_id = StateStoreId(view.root, 0, view.partitions[shard])
            return self._source.hottest_keys(view.location(shard), store_id, most), {}

        return self._read(ReadVersion(), look)[1]

    def _read(
        self,
        read_version: ReadVersion,
        look: Callable[[ReadView], tuple[Result, Mapping[int, int]] | None],
        within_s: float = _DEADLINE_S,
    ) -> tuple[ReadView, Result]:
        """Return the result of reading by a view that is current, or proves to be, and that view.

        `look` reads by a view; it returns the result, and the newest version that memory has of each shard that was read; None if the
        view is superseded.
        """
        retry = self._retry(within_s)
        view, is_now = self._begin(read_version)
        while True:
            try:
                looked = look(view)
                if looked is not None and (is_now or self._is_newest(view, looked[1], read_version)):
                    return view, looked[0]
                error: Exception = _superseded(view)
            except StoreActorLostError as lost_error:
                error = lost_error
            if is_now:
                self._pause(view, retry, error)
            view, is_now = self.view(read_version), True

    def _is_newest(self, view: ReadView, newest: Mapping[int, int], read_version: ReadVersion) -> bool:
        """Return whether a view is still the newest: as the newest versions in memory prove, else as the coordinator says."""
        if newest:
            if read_version.is_latest and min(newest.values()) >= 0:
                return True
            if all(version == view.versions[shard] for shard, version in newest.items()):
                return True
        return self.view() is view

    def _found(self, view: ReadView, read_version: ReadVersion, plan: KeyPlan) -> dict[int, FoundRows] | None:
        """Return the rows of each shard, from one concurrent call to each store actor; None if the view is superseded."""
        store_name, projection, keys = plan.store_name, plan.projection, plan.keys
        grouped: dict[ActorLocation | None, list[int]] = {}
        for shard in keys:
            grouped.setdefault(view.location(shard), []).append(shard)
        calls = []
        for where, shards in grouped.items():
            requests = [self._request(view, shard, read_version, store_name, projection) for shard in shards]
            calls.append((shards, self._source.find(where, requests, [keys[shard] for shard in shards])))
        by_shard: dict[int, FoundRows] = {}
        for shards, results in calls:
            for shard, result in zip(shards, results(), strict=True):
                if isinstance(result, StateStoreError):
                    raise result
                if result is None:
                    return None
                by_shard[shard] = result
        return by_shard

    def _request(
        self, view: ReadView, shard: int, read_version: ReadVersion, store_name: str, projection: bytes
    ) -> ReadRequest:
        store_id = StateStoreId(view.root, 0, view.partitions[shard], store_name)
        return ReadRequest(store_id, view.versions[shard], view.attempts[shard], projection, read_version.is_latest)

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


def _superseded(view: ReadView) -> StoreUnavailableError:
    return StoreUnavailableError(
        "the version was made again while it was read, as its batch was repeated; nothing was changed; read again",
        state=view.metadata.state_name,
        version=view.version,
    )
