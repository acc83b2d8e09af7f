"""The coordinator as other processes call it: its own methods, with their types."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from ray.exceptions import RayActorError

from coordinator.model.errors import (
    CredentialsNeededError,
    InvalidRequestError,
    SetupError,
    StateStoreError,
    StoreUnavailableError,
)
from coordinator.model.maintenance import Maintenance
from coordinator.runtime.runtime import Retry, Runtime
from coordinator.service.calls import RayActors, unwrapped
from coordinator.service.coordinator import Coordinator
from coordinator.service.deploy import coordinator_name, deploy_coordinator
from coordinator.storage.options import Secrets, StorageOptions

#: How long a call waits for a coordinator that is restarting, in seconds.
_DEADLINE_S = 60.0

Given = ParamSpec("Given")
Result = TypeVar("Result")


def _method(
    method: Callable[Concatenate[Coordinator, Given], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[CoordinatorClient, Given], Result]:
    """Return the client's side of one of the coordinator's methods: the same arguments, and the awaited result."""

    @wraps(method)
    def call(self: CoordinatorClient, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        result: Result = self._call(method.__name__, *args, **kwargs)
        return result

    return call


def _message(
    method: Callable[Concatenate[Coordinator, Given], Coroutine[Any, Any, Any]],
) -> Callable[Concatenate[CoordinatorClient, Given], None]:
    """Return the client's side of a method that is not waited for: the message is sent once, and its failure goes unnoticed."""

    @wraps(method)
    def send(self: CoordinatorClient, /, *args: Given.args, **kwargs: Given.kwargs) -> None:
        getattr(self._handle, method.__name__).remote(*args, **kwargs)

    return send


class CoordinatorClient:
    """The coordinator of a fleet, also after it restarted, and that of a fleet which was shut down and connected to again.

    Every method raises what the coordinator's method of that name raises, and StoreUnavailableError if the coordinator does not
    come back in time. Made by :meth:`connect` or :meth:`find`.
    """

    def __init__(self, uri: str, handle: Any, actors: RayActors, runtime: Runtime) -> None:
        self._uri = uri
        self._handle = handle
        self._actors = actors
        self._runtime = runtime
        self._secrets: Secrets | None = None

    @classmethod
    def find(
        cls, uri: str, *, actors: RayActors | None = None, runtime: Runtime | None = None
    ) -> CoordinatorClient | None:
        """Return a client of the coordinator of a normalised URI on this Ray cluster; None if the fleet isn't up."""
        actors = actors or RayActors()
        handle = actors.find(coordinator_name(uri))
        return None if handle is None else cls(uri, handle, actors, runtime or Runtime())

    @classmethod
    def connect(
        cls,
        uri: str,
        storage_options: StorageOptions,
        maintenance: Maintenance,
        *,
        secrets: Secrets | None = None,
        actors: RayActors | None = None,
        runtime: Runtime | None = None,
    ) -> CoordinatorClient:
        """Return a client of the fleet's coordinator, which is started (with these options) and proven to work if it isn't there.

        Parameters
        ----------
        secrets
            Values of the options that are withheld, where they are known: handed over to the coordinator, and again if it has
            forgotten them.

        Raises
        ------
        StorageUnavailableError
            The object store can't be used.
        CredentialsNeededError
            The coordinator isn't there, and this process cannot hand it the credentials that it needs.
        """
        client = cls.find(uri, actors=actors, runtime=runtime)
        if client is not None:
            client._forward_credentials(secrets)
            return client
        if storage_options.withheld and secrets is None:
            raise CredentialsNeededError(
                "the fleet's coordinator is not there, and only a driver can start it, with the object store's credentials; what "
                "was committed is untouched; call statefleet.connect with the same storage_options again, then restart the query",
                uri=uri,
                options=", ".join(storage_options.withheld),
            )
        handle = deploy_coordinator(uri, storage_options, maintenance)
        client = cls(uri, handle, actors or RayActors(), runtime or Runtime())
        try:
            client._forward_credentials(secrets)
            client._call("open")
        except StateStoreError:
            # A coordinator that can't reach its store would be found, and trusted, by the next caller.
            client.shut_down()
            raise
        return client

    def _forward_credentials(self, secrets: Secrets | None) -> None:
        if secrets is not None:
            self._call("use_credentials", secrets)
            self._secrets = secrets

    def shut_down(self) -> None:
        """End the coordinator for good."""
        self._actors.kill(self._handle, restart=False)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call_once(method, args, kwargs)
        except CredentialsNeededError:
            if self._secrets is None:
                raise
            # It restarted when no other process of the fleet was left that it could ask.
            self._call_once("use_credentials", (self._secrets,), {})
            return self._call_once(method, args, kwargs)

    def _call_once(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the coordinator, repeating while it restarts (all its methods may be repeated)."""
        retry = Retry(self._runtime.clock, _DEADLINE_S, first_pause_s=0.02, longest_pause_s=1.0)
        while True:
            handle = self._handle
            try:
                return unwrapped(self._actors, handle, _called(handle, method, args, kwargs))
            except RayActorError as error:
                if retry.is_over:
                    raise StoreUnavailableError(
                        "the coordinator did not come back in time; committed versions are safe in the object store; see "
                        "`ray list actors` and its log, then repeat",
                        method=method,
                        cause=error,
                    ) from error
                retry.pause()
                # A fleet that was shut down gets no other coordinator before a driver connects.
                self._handle = self._actors.find(coordinator_name(self._uri)) or self._handle

    # -- the object store -----------------------------------------------------------------------------------------

    def storage_options(self) -> StorageOptions:
        """Return the options that the fleet was started with, without credentials."""
        options: StorageOptions = self._call("storage_options")
        return options

    def forwarded_credentials(self) -> Secrets | None:
        """Return the credentials that the coordinator, or else a store actor, has; None if no process has them any more."""
        secrets: Secrets | None = self._call("forwarded_credentials")
        return secrets

    look_into = _method(Coordinator.look_into)

    # -- states and leases ----------------------------------------------------------------------------------------

    describe_state = _method(Coordinator.describe_state)
    check_state = _method(Coordinator.check_state)
    check_start = _method(Coordinator.check_start)
    attach_and_lease_all = _method(Coordinator.attach_and_lease_all)
    commit_partitions = _method(Coordinator.commit_partitions)
    begin_batch = _method(Coordinator.begin_batch)
    newest_run = _method(Coordinator.newest_run)
    batch_result = _method(Coordinator.batch_result)
    batch_finished = _method(Coordinator.batch_finished)
    end_epoch = _method(Coordinator.end_epoch)
    newest_epoch = _method(Coordinator.newest_epoch)
    rescale = _method(Coordinator.rescale)
    branch = _method(Coordinator.branch)
    drop = _method(Coordinator.drop)

    # -- placement ------------------------------------------------------------------------------------------------

    place_shards = _method(Coordinator.place_shards)
    explain_placement = _method(Coordinator.explain_placement)
    plan_move = _method(Coordinator.plan_move)
    plan_rebalance = _method(Coordinator.plan_rebalance)
    drain = _method(Coordinator.drain)
    undrain = _method(Coordinator.undrain)
    move_prepared = _method(Coordinator.move_prepared)
    move_failed = _method(Coordinator.move_failed)

    def check_shard(self, state_name: str, shard: int) -> None:
        """Refuse the number of a shard that the state does not have.

        Raises
        ------
        InvalidRequestError
            There is no such state, or it has no such shard.
        """
        described = self.describe_state(state_name)
        num_shards = 0 if described is None else described.num_shards
        if not 0 <= shard < num_shards:
            raise InvalidRequestError(
                "there is no such shard; fleet.status() and `statefleet shards` list states and their shards",
                state=state_name,
                shard=shard,
                shards=num_shards,
            )

    # -- reading --------------------------------------------------------------------------------------------------

    load_plans = _method(Coordinator.load_plans)
    locate = _method(Coordinator.locate)
    read_view = _method(Coordinator.read_view)
    list_versions = _method(Coordinator.list_versions)

    # -- store actors and drivers ---------------------------------------------------------------------------------

    reassigned = _method(Coordinator.reassigned)
    add_snapshot = _method(Coordinator.add_snapshot)
    open_instance = _method(Coordinator.open_instance)
    report_store_actor = _method(Coordinator.report_store_actor)
    report_memory = _method(Coordinator.report_memory)
    report_store_actor_lost = _method(Coordinator.report_store_actor_lost)
    report_driver = _message(Coordinator.report_driver)
    deactivate_instances = _message(Coordinator.deactivate_instances)

    # -- users ----------------------------------------------------------------------------------------------------

    load_all_states = _method(Coordinator.load_all_states)
    status = _method(Coordinator.status)
    status_details = _method(Coordinator.status_details)
    clean = _method(Coordinator.clean)


def _called(handle: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the reference of a call. Ray compares the call with the actor's class as it was started."""
    try:
        return getattr(handle, method).remote(*args, **kwargs)
    except (AttributeError, TypeError) as error:
        raise SetupError(
            "the fleet was started by another release of Statefleet than this one, and the two cannot talk; nothing was changed; use "
            "the release that started it, or stop its queries and run `statefleet stop` with that one, and start the queries with this",
            method=method,
            cause=error,
        ) from error
