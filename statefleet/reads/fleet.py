"""Reading and dropping the states of a fleet from a program without Spark. No actor is started."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from coordinator.ledger.read_views import ReadView, WantedView
from coordinator.model.errors import CorruptStateError, InvalidRequestError, NewerFormatError, SetupError
from coordinator.model.identities import DEFAULT_STORE
from coordinator.model.names import check_state_name
from coordinator.model.schema import OperatorKind, StateSchema
from coordinator.runtime.runtime import Runtime
from coordinator.service.calls import RayActors
from coordinator.service.client import CoordinatorClient
from coordinator.service.deploy import join_cluster, ray_address
from coordinator.service.dropping import DroppedState
from coordinator.storage.uris import normalize_uri, open_object_store
from statefleet.reads.shard_reads import ReadVersion, ShardReads
from statefleet.reads.sources import FleetSource, Source
from statefleet.reads.sql import answer
from statefleet.reads.state import LiveState
from statefleet.reads.stored import StoredSource
from store_actors.operators.operator_names import operator_name
from store_actors.operators.view_columns import ViewColumns

if TYPE_CHECKING:
    from statefleet.sql_server.server import ServedSql

log = logging.getLogger(__name__)

_SCANNERS = 8
_CONSISTENCIES = MappingProxyType(
    {"finished": ReadVersion(), "committed": ReadVersion(), "latest": ReadVersion(is_latest=True)}
)
#: Consistencies with which all shards are read at the same version.
_OF_ONE_VERSION = ("finished", "committed")
#: Columns of Spark's ``state-metadata`` reader, except for the first: a state has a name instead of Spark's number of an operator.
_STATE_METADATA = pa.schema(
    [
        ("stateName", pa.string()),
        ("operatorName", pa.string()),
        ("stateStoreName", pa.string()),
        ("numPartitions", pa.int32()),
        ("minBatchId", pa.int64()),
        ("maxBatchId", pa.int64()),
        ("operatorProperties", pa.string()),
        ("_numColsPrefixKey", pa.int32()),
    ]
)


def attach(
    uri: str, *, address: str = "auto", offline: bool = False, storage_options: Mapping[str, str] | None = None
) -> LiveFleet:
    """Return a fleet's states, to be read from any Ray program or from plain Python on a machine of the cluster.

    Parameters
    ----------
    uri
        URI of the fleet, as given to ``statefleet.connect``.
    address
        The Ray cluster, if this process has not joined it yet; by default the one of this machine.
    offline
        Read the object store in this process, without a fleet and without Ray.
    storage_options
        Options of the object store, if `offline` is true.

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
        options = tuple((storage_options or {}).items())
        return LiveFleet(stored, partial(_attach_once, uri, offline=True, storage_options=options), runtime)
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


def opened_live(uri: str) -> Callable[[], LiveFleet]:
    """Return how other processes open the states of the fleet that this process is connected to."""
    return partial(_attach_once, uri, address=ray_address())


@cache
def _attach_once(uri: str, *, storage_options: tuple[tuple[str, str], ...] = (), **options: Any) -> LiveFleet:
    """Return :func:`attach` of the options, once in a process: tasks run there one after the other."""
    return attach(uri, storage_options=dict(storage_options) or None, **options)


class LiveFleet:
    """The states of a fleet. Made by :func:`attach`."""

    def __init__(
        self,
        source: Source,
        open_fleet: Callable[[], LiveFleet],
        runtime: Runtime,
        coordinator: CoordinatorClient | None = None,
    ) -> None:
        self._source = source
        self._coordinator = coordinator
        self._open_fleet = open_fleet
        self._runtime = runtime
        #: Threads of all scans: each scan fetches a few pieces at a time.
        self._threads = runtime.threads.pool(_SCANNERS, "statefleet-scan")
        self._reads: dict[tuple[str, bool], ShardReads] = {}

    def states(self) -> list[str]:
        """Return the names of all states, also of those that cannot be read: reading one is an error that says why."""
        return self._source.names()

    def state(self, name: str, part: str = "", *, consistency: str = "finished") -> LiveState:
        """Return the state of one operator, as a table.

        Parameters
        ----------
        name
            Name that was given to ``fleet.stateful`` or ``fleet.state_store``.
        part
            ``left`` or ``right`` of a join, a variable of a processor, a keyed store; empty where there is only one.
        consistency
            ``finished``: the newest version whose batch Spark has finished; no failure replaces it. ``committed``: the newest version
            that all shards of the query's operators have, while the batch's sink and Spark's commit log may not be done: if the
            batch fails there, it is repeated, and another program may make the version with other rows. ``latest``: the newest
            version of each shard itself, which a batch that fails may take back.

        Raises
        ------
        InvalidRequestError
            The name is not a valid name of a state, or the consistency is unknown. A state that does not exist is an error when it
            is read.
        """
        check_state_name(name)
        if consistency not in _CONSISTENCIES:
            raise InvalidRequestError(f"consistency is one of {', '.join(_CONSISTENCIES)}", consistency=consistency)
        is_committed = consistency != "finished"
        reads = self._reads.get((name, is_committed))
        if reads is None:
            reads = ShardReads(self._source, name, self._runtime, self._threads, is_committed=is_committed)
            self._reads[name, is_committed] = reads
        return LiveState(reads, self._open_fleet, name, part, _CONSISTENCIES[consistency])

    def state_metadata(self, name: str | None = None, version: int | None = None) -> pa.Table:
        """Return the stores, shards and readable batches of states, as Spark's ``state-metadata`` reader does.

        Of all states, those that cannot be read are left out, and logged.

        Parameters
        ----------
        name
            A state; all by default.
        version
            Version of the state; the newest by default.

        Returns
        -------
        pyarrow.Table
            A row for each store of each state. Batch n - 1 made version n.

        Raises
        ------
        InvalidRequestError
            The state does not exist, or a version is given without a name.
        VersionNotFoundError
            There is no such version, or it is not retained any more.
        """
        if version is not None and name is None:
            raise InvalidRequestError("versions are of one state; name it", version=version)
        rows = list[dict[str, Any]]()
        for state in self.states() if name is None else [name]:
            try:
                view = self._source.view(state, WantedView(version), None)
            except (CorruptStateError, NewerFormatError) as error:
                if name is not None:
                    raise
                log.warning("a state cannot be read, and is left out: %s", error, extra={"state": state})
            else:
                rows += [] if view is None else _metadata_of(view)
        return pa.Table.from_pylist(rows, _STATE_METADATA)

    def sql(self, query: str, *, consistency: str = "finished") -> pa.Table:
        """Return the result of a SQL query (in DuckDB's dialect) over states, all read as of one moment.

        Parameters
        ----------
        query
            SQL text. A state is a table of its name; a part of a state is named with a dot, in quotes: ``"orders.left"``.
        consistency
            ``finished`` or ``committed``, as :meth:`state` takes it.

        Raises
        ------
        InvalidRequestError
            The query is not valid, or names a table that is not a state, with DuckDB's message; or the consistency is unknown.
        """
        _check_of_one_version(consistency)
        return answer(query, partial(self.table, consistency=consistency))

    def table(self, name: str, *, consistency: str = "finished") -> LiveState:
        """Return the state, or the part of one, that a table of :meth:`sql` stands for.

        Raises
        ------
        InvalidRequestError
            The name is not a valid name of a state, or the consistency is unknown.
        """
        _check_of_one_version(consistency)
        # Names of states may contain dots, too.
        is_state = "." not in name or name in self.states()
        return self.state(*([name] if is_state else name.split(".", 1)), consistency=consistency)

    def serve_sql(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 5433,
        token: str | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        rows: int = 100_000,
        seconds: float = 60.0,
        connections: int = 100,
    ) -> ServedSql:
        """Serve the states to clients of PostgreSQL (psql, JDBC, SQLAlchemy, Grafana, ..), from a thread of this process.

        Parameters
        ----------
        host, port
            Where to listen. Beyond the loopback a token and TLS are needed.
        token
            Password of every user, of 16 characters or more; by default ``STATEFLEET_SQL_TOKEN`` of the environment. Without one, every
            user of this machine is let in.
        tls_cert, tls_key
            PEM files of the certificate and its key: then all connections are encrypted.
        rows, seconds
            Rows of a statement's result, and its time, at most.
        connections
            Clients at once at most.

        Returns
        -------
        ServedSql
            It has the ``url``, and ends with ``close()`` or as a context.

        Raises
        ------
        InvalidRequestError
            The token is too short; or it or TLS is missing; or the files are no certificate and key.
        SetupError
            Nothing can be served there, or DuckDB is not installed.

        Examples
        --------
        >>> with fleet.serve_sql(port=0) as served:  # doctest: +SKIP
        ...     psycopg.connect(served.url, user="reader")
        """
        # Imported here: nobody else needs a server.
        from statefleet.sql_server.backend import Limits
        from statefleet.sql_server.server import serve

        limits = Limits(rows, seconds, connections)
        return serve(self, host=host, port=port, token=token, tls_cert=tls_cert, tls_key=tls_key, limits=limits)

    def drop(self, name: str, *, dry_run: bool = False, is_over: bool = False) -> DroppedState:
        """Delete a state while the fleet runs: its name, its memory and its files are free again.

        Another state of the name may begin at once. A drop that was interrupted leaves nothing that is read as a state, and another
        call completes it. Each operator of a query has its own state; the result names those that remain. The files that a parent
        retained for a dropped branch are free again, too.

        Parameters
        ----------
        name
            Name of the state.
        dry_run
            Only return what would be deleted.
        is_over
            The query's program is gone without having reported its end: a run of it that still goes on is refused from then on.

        Raises
        ------
        InvalidRequestError
            The state does not exist, it has branches, or a query that uses it runs; or the object store is read without a fleet.
        """
        check_state_name(name)
        if self._coordinator is None:
            raise InvalidRequestError(
                "a state is dropped by its fleet, and offline only the object store is read; nothing was dropped; use "
                "statefleet.attach(uri) or `statefleet drop` where the fleet runs",
                state=name,
            )
        return self._coordinator.drop(name, dry_run=dry_run, is_over=is_over)


def _check_of_one_version(consistency: str) -> None:
    if consistency not in _OF_ONE_VERSION:
        raise InvalidRequestError(
            f"SQL reads a version that all shards have: its consistency is {' or '.join(_OF_ONE_VERSION)}",
            consistency=consistency,
        )


def _metadata_of(view: ReadView) -> Iterator[dict[str, Any]]:
    """Yield a row of :data:`_STATE_METADATA` for each store of a state."""
    metadata = view.metadata
    schema = metadata.schema
    prefixes = {} if schema is None else _prefixes(schema)
    for store in view.stores:
        yield {
            "stateName": metadata.state_name,
            # The store of a program has no operator.
            "operatorName": "stateStore" if schema is None else operator_name(schema),
            "stateStoreName": store,
            "numPartitions": metadata.num_shards,
            # Version 0 is empty, and no batch made it.
            "minBatchId": max(view.oldest, 1) - 1 if view.version else None,
            "maxBatchId": view.version - 1 if view.version else None,
            "operatorProperties": json.dumps(_properties(view, schema), sort_keys=True),
            "_numColsPrefixKey": prefixes.get(store, 0),
        }


def _prefixes(schema: StateSchema) -> dict[str, int]:
    """Return, by store, the number of key columns before those that the operator adds to the user's key; 0 where it adds none."""
    view_columns = (ViewColumns.of(schema, part) for part in ViewColumns.parts_of(schema) or ("",))
    keys = {of_part.store.name: of_part.store.keys for of_part in view_columns if of_part.store is not None}
    count = len(schema.input_keys)
    return {
        store: count if len(columns) > count else 0 for store, columns in (keys or {DEFAULT_STORE: schema.keys}).items()
    }


def _properties(view: ReadView, schema: StateSchema | None) -> dict[str, Any]:
    properties: dict[str, Any] = {"outputMode": view.metadata.output_mode, "queryId": view.metadata.query_id}
    if schema is not None and schema.operator is OperatorKind.TRANSFORM:
        variables = [part.split(".", 1) for part in ViewColumns.parts_of(schema) if part != DEFAULT_STORE]
        properties["timeMode"] = schema.options.get("time_mode")
        properties["stateVariables"] = [
            {"stateName": name, "stateVariableType": f"{kind.capitalize()}State"} for kind, name in variables
        ]
    return properties
