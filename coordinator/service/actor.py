"""The coordinator as a Ray actor, and the object store's credentials, which drivers or store actors forward to it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
import ray.util
from ray.exceptions import RayError

from coordinator.model.errors import InvalidRequestError
from coordinator.model.maintenance import Maintenance
from coordinator.model.names import store_actors_prefix
from coordinator.runtime.logs import log_to_stderr
from coordinator.runtime.runtime import Clock, freeze_imports
from coordinator.service.coordinator import Coordinator
from coordinator.service.metric_export import keep_exporting
from coordinator.service.tracing import keep_tracing, open_traces
from coordinator.storage.actor_store import ForwardedCredentialsStore, StorageStats
from coordinator.storage.options import Secrets, StorageOptions
from coordinator.storage.uris import open_store_in_actor

log = logging.getLogger(__name__)

#: Seconds that a store actor may take to answer whether it has the credentials.
_PEER_S = 5.0


class CoordinatorActor(Coordinator):
    """The coordinator as Ray starts it, and restarts it whenever it dies."""

    def __init__(self, uri: str, storage_options: StorageOptions, maintenance: Maintenance, namespace: str) -> None:
        log_to_stderr(uri, "coordinator")
        self._traces = open_traces(uri)
        freeze_imports()
        self._uri = uri
        self._storage_options = storage_options
        self._namespace = namespace
        stats = StorageStats()
        self._objects = open_store_in_actor(uri, storage_options, self._ask_store_actors, stats, Clock())
        super().__init__(uri, self._objects, maintenance, ray.get_runtime_context().get_node_id(), stats=stats)
        log.info("coordinator of %s started", uri, extra={"node": self._node_id})

    def _begin(self) -> None:
        super()._begin()
        self._exporting = asyncio.create_task(keep_exporting(self._uri, self.samples))
        if self._traces is not None:
            self._tracing = asyncio.create_task(keep_tracing(self._traces, self._metrics.next_traced))

    async def storage_options(self) -> StorageOptions:
        """Return the options that the fleet was started with, without credentials."""
        return self._storage_options

    async def use_credentials(self, secrets: Secrets) -> None:
        """Take forwarded credentials of the object store, which are kept in memory only.

        Raises
        ------
        StorageUnavailableError
            The store does not accept them; the previous ones stay in use.
        InvalidRequestError
            The fleet was started without any, so its processes use those of their environment.
        """
        if not isinstance(self._objects, ForwardedCredentialsStore):
            raise InvalidRequestError(
                "this fleet was started without credentials in storage_options and uses those in the environment of its processes; "
                "nothing was changed; connect without them, or call shutdown() of the fleet first",
                uri=self._uri,
            )
        await asyncio.to_thread(self._objects.use_credentials, secrets)

    async def forwarded_credentials(self) -> Secrets | None:
        """Return the credentials that this process, or else a store actor, has; None if no process has them any more."""
        if not isinstance(self._objects, ForwardedCredentialsStore):
            return None
        return self._objects.secrets or await asyncio.to_thread(self._ask_store_actors)

    def _ask_store_actors(self) -> Secrets | None:
        prefix = store_actors_prefix(self._uri)
        named: Any = ray.util.list_named_actors(all_namespaces=True)
        for actor in named:
            if actor["namespace"] != self._namespace or not actor["name"].startswith(prefix):
                continue
            try:
                handle: Any = ray.get_actor(actor["name"], namespace=self._namespace)
                secrets: Secrets | None = ray.get(handle.forwarded_credentials.remote(), timeout=_PEER_S)
            except (RayError, ValueError) as error:  # ValueError is how Ray says that it is gone by now
                fields = {"actor": actor["name"]}
                log.info("a store actor cannot say whether it has the credentials: %s", error, extra=fields)
                continue
            if secrets is not None:
                return secrets
        return None
