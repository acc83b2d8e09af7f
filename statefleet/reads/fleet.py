"""A fleet's states for whoever has no Spark: they are read, and ended. No actor is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from coordinator.ledger.read_views import WantedView
from coordinator.model.errors import InvalidRequestError, SetupError
from coordinator.model.names import check_state_name
from coordinator.runtime.runtime import Runtime
from coordinator.service.calls import RayActors
from coordinator.service.client import CoordinatorClient
from coordinator.service.deploy import join_cluster, ray_address
from coordinator.service.dropping import DroppedState
from coordinator.storage.uris import normalize_uri, open_object_store
from statefleet.reads.metadata import STATE_METADATA, metadata_of
from statefleet.reads.portable import Opened
from statefleet.reads.shard_reads import ReadVersion, ShardReads
from statefleet.reads.sources import FleetSource, Source
from statefleet.reads.sql import answer
from statefleet.reads.state import LiveState
from statefleet.reads.stored import StoredSource

__all__ = ["LiveFleet", "attach"]

_SCANNERS = 8
_CONSISTENCIES = MappingProxyType(
    {"finished": ReadVersion(), "committed": ReadVersion(), "latest": ReadVersion(is_latest=True)}
)
#: Those by which all shards are read at the same version.
_OF_ONE_VERSION = ("finished", "committed")


def attach(
    uri: str, *, address: str = "auto", offline: bool = False, storage_options: Mapping[str, str] | None = None
) -> LiveFleet:
    """A fleet's states, to be read from any Ray program or from plain Python on a machine of the cluster.

    Parameters
    ----------
    uri
        As given to ``statefleet.connect``.
    address
        The Ray cluster, if this process is not on it yet; by default the one of this machine.
    offline
        Read from the object store, in this process: no fleet, and no Ray, needs to be there.
    storage_options
        How the object store is opened, where `offline` is asked for.

    Raises
    ------
    InvalidRequestError
        The URI's scheme is not supported.
    SetupError
        There is no Ray cluster at the address, or no fleet of this URI on it.
    """
    normalized, runtime = normalize_uri(uri), Runtime()
    if offline:
        stored = StoredSource(open_object_store(normalized, storage_options), runtime)
        told = {"uri": uri, "offline": True, "storage_options": storage_options}
        return LiveFleet(stored, Opened(_attached, told), runtime)
    join_cluster(address)
    actors = RayActors()
    coordinator = CoordinatorClient.find(normalized, actors=actors, runtime=runtime)
    if coordinator is None:
        raise SetupError(
            "no fleet of this URI runs on this Ray cluster; start a query that uses it, or read what is stored with "
            "statefleet.attach(uri, offline=True)",
            uri=normalized,
            cluster=ray_address(),
        )
    source = FleetSource.connected(coordinator, actors, runtime)
    return LiveFleet(source, opened_live(normalized), runtime, coordinator)


def opened_live(uri: str) -> Opened:
    """How other processes come to the states of the fleet that this process is connected to."""
    return Opened(_attached, {"uri": uri, "address": ray_address()})


def _attached(storage_options: Mapping[str, str] | None = None, **options: Any) -> LiveFleet:
    """:func:`attach`, once in a process for the same options: tasks follow each other there."""
    return _attach_once(tuple(sorted((storage_options or {}).items())), **options)


@cache
def _attach_once(storage_options: tuple[tuple[str, str], ...], **options: Any) -> LiveFleet:
    return attach(storage_options=dict(storage_options) or None, **options)


class LiveFleet:
    """The states of a fleet. Made by :func:`attach`.

    Parameters
    ----------
    source
        Where they are read.
    opened
        How other processes come to them.
    coordinator
        Of a fleet that runs.
    """

    def __init__(
        self,
        source: Source,
        opened: Opened,
        runtime: Runtime,
        coordinator: CoordinatorClient | None = None,
    ) -> None:
        self._source = source
        self._coordinator = coordinator
        self._opened = opened
        self._surroundings = runtime
        #: Of all scans together: each has a few pieces under way.
        self._threads = runtime.threads.pool(_SCANNERS, "statefleet-scan")
        self._reads: dict[tuple[str, bool], ShardReads] = {}

    def states(self) -> list[str]:
        """Names of all states."""
        return self._source.names()

    def state(self, name: str, part: str = "", *, consistency: str = "finished") -> LiveState:
        """The state of one operator, as a table.

        Parameters
        ----------
        name
            As given to ``fleet.stateful`` or ``fleet.state_store``.
        part
            ``left`` or ``right`` of a join, a variable of a processor, a keyed store; none where there is only one.
        consistency
            ``finished``: the newest version whose batch Spark has finished; it is never replaced. ``committed``: the newest that all
            shards of the query's operators have, while the batch's sink and Spark's commit log may not be done with it: if the batch
            fails there, it is repeated, and another program may make the version with other rows. ``latest``: of each shard the
            newest that it has itself, which a batch that fails may take back.

        Raises
        ------
        InvalidRequestError
            The name cannot be a state's, or the consistency is none of these. Whether there is such a state shows when it is read.
        """
        check_state_name(name)
        if consistency not in _CONSISTENCIES:
            raise InvalidRequestError(f"consistency is one of {', '.join(_CONSISTENCIES)}", consistency=consistency)
        is_committed = consistency != "finished"
        reads = self._reads.get((name, is_committed))
        if reads is None:
            reads = ShardReads(self._source, name, self._surroundings, self._threads, is_committed=is_committed)
            self._reads[name, is_committed] = reads
        return LiveState(reads, self._opened, name, part, _CONSISTENCIES[consistency])

    def state_metadata(self, name: str | None = None, version: int | None = None) -> pa.Table:
        """What stores there are, how many shards, and which batches can be read: as Spark's ``state-metadata`` reader tells it.

        Parameters
        ----------
        name
            A state; all by default.
        version
            As of this version of the state; the newest by default.

        Returns
        -------
        pyarrow.Table
            A row for each store of each state. Version n is what batch n - 1 left.

        Raises
        ------
        InvalidRequestError
            There is no such state, or a version is given without a name.
        VersionNotFoundError
            There is no such version (any more).
        """
        if version is not None and name is None:
            raise InvalidRequestError("versions are of one state; name it", version=version)
        views = (
            self._source.view(one, WantedView(version), None) for one in ([name] if name is not None else self.states())
        )
        rows = [row for view in views if view is not None for row in metadata_of(view)]
        return pa.Table.from_pylist(rows, STATE_METADATA)

    def sql(self, query: str, *, consistency: str = "finished") -> pa.Table:
        """Answer of a query of SQL (DuckDB's) over states, all of them as they were at one moment.

        Parameters
        ----------
        query
            A state is a table of its name; a part of one is named with a dot, in quotes: ``"orders.left"``.
        consistency
            ``finished`` or ``committed``, as :meth:`state` takes it.

        Raises
        ------
        InvalidRequestError
            The query is not valid, or names no state's table; says what DuckDB says. Or the consistency is none of these.
        """
        if consistency not in _OF_ONE_VERSION:
            raise InvalidRequestError(
                f"SQL reads a version that all shards have: its consistency is {' or '.join(_OF_ONE_VERSION)}",
                consistency=consistency,
            )
        return answer(query, _States(self.states, partial(self.state, consistency=consistency)))

    def drop(self, name: str, *, dry_run: bool = False, is_over: bool = False) -> DroppedState:
        """End a state for good while the fleet goes on: its name, its memory and its files are free again.

        Another state of the name may begin at once. What was cut off in the middle is never read as a state, and is done by another
        call.
        Each operator of a query has a state of its own; those that stay are named by what is returned. A branch's parent gets back
        what it kept for it.

        Parameters
        ----------
        name
            The state.
        dry_run
            Only say what would go.
        is_over
            The query's program is gone, and nobody said that it ended: a run of it that goes on nevertheless is refused from then on.

        Raises
        ------
        InvalidRequestError
            There is no such state, it has branches, or a query that uses it runs. Or the object store is read without a fleet.
        """
        check_state_name(name)
        if self._coordinator is None:
            raise InvalidRequestError(
                "a state is dropped by its fleet, and offline only the object store is read; nothing was dropped; use "
                "statefleet.attach(uri) or `statefleet drop` where the fleet runs",
                state=name,
            )
        return self._coordinator.drop(name, dry_run=dry_run, is_over=is_over)


@dataclass(frozen=True, slots=True)
class _States:
    """A fleet's states with a consistency."""

    states: Callable[[], list[str]]
    state: Callable[..., LiveState]
