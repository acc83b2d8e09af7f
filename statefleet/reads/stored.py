"""State that this process reads from the object store, without a running fleet and without writing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

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
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.errors import CorruptStateError, InvalidRequestError, NewerFormatError, StateStoreError
from coordinator.model.identities import PYTHON_QUERY_ID, ActorLocation, StateStoreId
from coordinator.model.load_plans import LoadPlans
from coordinator.model.names import is_state_name
from coordinator.model.schema import StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import Runtime
from coordinator.storage.protocol import ObjectStore
from store_actors.messages.key_queries import KeyResult
from store_actors.messages.requests import ReadRequest
from store_actors.serving.hot_key_tracker import HotKeyTracker, HottestKeys
from store_actors.serving.loading import Loader
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.reads import Reads, StoredRows
from store_actors.serving.restoring import StoreMemory

log = logging.getLogger(__name__)


class StoredSource:
    """The object store as a source; see :class:`~statefleet.reads.sources.Source`."""

    def __init__(self, objects: ObjectStore, runtime: Runtime) -> None:
        self._objects = objects
        self._lock = runtime.threads.lock()
        self._logs: dict[str, ManifestLog] = {}
        #: Metadata of the states that exist, as long as their logs are the same.
        self._known: dict[str, StateMetadata] = {}
        self._ledgers: dict[str, StateLedger] = {}
        metrics = StoreMetrics()
        stored = StoredRows(Loader(objects, metrics, runtime), runtime, StoreMemory())
        self._reads = Reads(stored, None, self, runtime, metrics, HotKeyTracker(runtime.threads.lock()))

    def names(self) -> list[str]:
        """Return the names of all states; one that cannot be read is among them, and is logged: it is an error when it is read."""
        return [name for name in self._objects.folders() if is_state_name(name) and self._exists(name)]

    def _exists(self, name: str) -> bool:
        try:
            return self._metadata(name) is not None
        except (CorruptStateError, NewerFormatError) as error:
            log.warning("a state cannot be read: %s", error, extra={"state": name})
            return True

    def view(self, name: str, view_request: WantedView, cached: ViewId | None) -> ReadView | None:
        ledger, created = self._ledger(name), self._created(name)
        if ledger.is_dropped:
            raise InvalidRequestError(
                "the state was dropped, and there is no such state any more; nothing was changed", state=name
            )
        siblings = self._siblings(name, ledger.query_id) if view_request.version is None else ()
        newest, *sibling_versions = (
            newest_readable(*state, is_committed=view_request.is_committed) for state in ((ledger, created), *siblings)
        )
        return read_view(ledger, created, cut_of(newest, sibling_versions), view_request, cached)

    def version_stats(self, name: str, count: int, *, is_committed: bool) -> tuple[VersionStats, ...]:
        newest = self.view(name, WantedView(None, is_committed), None)
        assert newest is not None
        return version_stats(self._ledger(name), self._created(name), newest.oldest, newest.version, count)

    def _created(self, name: str) -> StateMetadata:
        """Return the metadata of a state.

        Raises
        ------
        InvalidRequestError
            The state does not exist.
        """
        created = self._metadata(name)
        if created is None:
            raise InvalidRequestError("there is no such state in the object store; nothing was changed", state=name)
        return created

    def _metadata(self, name: str) -> StateMetadata | None:
        if name not in self._known:
            created = self._log(name).load_metadata()
            if created is None:
                return None
            self._known[name] = created
        return self._known[name]

    def _siblings(self, name: str, query_id: str) -> Iterator[tuple[StateLedger, StateMetadata]]:
        """Yield the ledger and the metadata of the other states of a state's query, as far as they can be read."""
        for sibling in self.names() if query_id not in ("", PYTHON_QUERY_ID) else ():
            try:
                if sibling != name and (ledger := self._ledger(sibling)).query_id == query_id:
                    yield ledger, self._created(sibling)
            except (CorruptStateError, NewerFormatError) as error:
                log.warning("a state cannot be read: %s", error, extra={"state": sibling})

    def load_plans(self, state_name: str, partition_id: int, version: int, store_names: Sequence[str]) -> LoadPlans:
        """Return the files that make a version of some of a partition's stores."""
        return self._ledger(state_name).load_plans(partition_id, version, store_names)

    def find(
        self, where: ActorLocation | None, requests: Sequence[ReadRequest], keys: Sequence[pa.Table]
    ) -> Callable[[], Sequence[KeyResult]]:
        def result(request: ReadRequest, of_shard: pa.Table) -> KeyResult:
            try:
                return self._reads.find(request, of_shard)
            except StateStoreError as error:
                return error

        return lambda: [result(request, of_shard) for request, of_shard in zip(requests, keys, strict=True)]

    def scan(self, where: ActorLocation | None, request: ReadRequest, limit: int | None) -> Iterator[pa.Table] | None:
        scan_id = self._reads.scan(request, limit)
        return None if scan_id is None else self._pieces(scan_id)

    def _pieces(self, scan_id: str) -> Iterator[pa.Table]:
        try:
            while (piece := self._reads.next_rows(scan_id)) is not None:
                yield piece
        finally:
            self._reads.end_scan(scan_id)

    def describe(self, where: ActorLocation | None, request: ReadRequest) -> StateSchema | None:
        return self._reads.describe(request)

    def hottest_keys(self, where: ActorLocation | None, store_id: StateStoreId, most: int) -> HottestKeys:
        return HottestKeys(None, None)  # no process counts accesses

    def _log(self, name: str) -> ManifestLog:
        if name not in self._logs:
            self._logs[name] = ManifestLog(self._objects, name, "")
        return self._logs[name]

    def _ledger(self, name: str) -> StateLedger:
        # A log that several threads loaded at once would have the sequence number of one load and the ledger of another.
        with self._lock:
            if name not in self._ledgers or not self._log(name).is_current():
                # It may be another state of that name by now: one that was created again, or restored from a backup.
                self._logs.pop(name, None)
                created = self._log(name).load_metadata()
                self._known.pop(name, None)
                if created is not None:
                    self._known[name] = created
                self._ledgers[name] = self._log(name).load()
            return self._ledgers[name]
