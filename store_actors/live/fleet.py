"""A fleet's states for whoever only reads: no actor is started, and nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from coordinator.calls import RayActors
from coordinator.client import CoordinatorClient
from coordinator.deploy import join_cluster
from coordinator.errors import InvalidRequestError, SetupError
from coordinator.names import check_state_name
from coordinator.storage.uris import normalize_uri, open_object_store
from coordinator.surroundings import Surroundings
from store_actors.live.shard_reads import Pinned, ShardReads
from store_actors.live.sources import FleetSource, Source
from store_actors.live.state import LiveState
from store_actors.live.stored import StoredSource

__all__ = ["LiveFleet", "attach"]

_CONSISTENCIES = MappingProxyType({"committed": Pinned(), "latest": Pinned(is_latest=True)})


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
    normalized, surroundings = normalize_uri(uri), Surroundings()
    if offline:
        return LiveFleet(StoredSource(open_object_store(normalized, storage_options), surroundings), surroundings)
    join_cluster(address)
    actors = RayActors()
    coordinator = CoordinatorClient.find(normalized, actors=actors, surroundings=surroundings)
    if coordinator is None:
        raise SetupError(
            "no fleet of this URI runs on this Ray cluster; start a query that uses it, or read what is stored with "
            "statefleet.attach(uri, offline=True)",
            uri=normalized,
        )
    return LiveFleet(FleetSource(coordinator, actors, surroundings.clock), surroundings)


class LiveFleet:
    """The states of a fleet. Made by :func:`attach`.

    Parameters
    ----------
    source
        Where they are read.
    """

    def __init__(self, source: Source, surroundings: Surroundings) -> None:
        self._source = source
        self._clock = surroundings.clock
        self._reads: dict[str, ShardReads] = {}

    def states(self) -> list[str]:
        """Names of all states."""
        return self._source.names()

    def state(self, name: str, part: str = "", *, consistency: str = "committed") -> LiveState:
        """The state of one operator, as a table.

        Parameters
        ----------
        name
            As given to ``fleet.stateful`` or ``fleet.state_store``.
        part
            ``left`` or ``right`` of a join, a variable of a processor, a keyed store; none where there is only one.
        consistency
            ``committed``: the newest version that all shards of the query's operators have. ``latest``: of each shard the newest
            that it has itself, which a batch that fails may take back.

        Raises
        ------
        InvalidRequestError
            The name cannot be a state's, or the consistency is neither. Whether there is such a state shows when it is read.
        """
        check_state_name(name)
        if consistency not in _CONSISTENCIES:
            raise InvalidRequestError(f"consistency is one of {', '.join(_CONSISTENCIES)}", consistency=consistency)
        if name not in self._reads:
            self._reads[name] = ShardReads(self._source, name, self._clock)
        return LiveState(self._reads[name], name, part, _CONSISTENCIES[consistency])
