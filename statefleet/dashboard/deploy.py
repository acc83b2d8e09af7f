"""Deployment of the dashboard actor on Ray, with the reason of every option."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.exceptions import RayActorError

from coordinator.model.errors import SetupError
from coordinator.model.names import dashboard_name
from coordinator.runtime.extras import import_extra
from coordinator.runtime.runtime import Clock, Retry
from coordinator.service.calls import START_S, RayActors, unwrapped
from coordinator.service.deploy import options_on_head
from statefleet.dashboard.options import DashboardOptions

log = logging.getLogger(__name__)


def dashboard_url(actors: RayActors, uri: str, options: DashboardOptions | None = None) -> str:
    """Return the address of the dashboard of a normalised URI's fleet; the dashboard is started if there is none.

    Without options, host and port, a running dashboard is left where it is; else one that is served elsewhere is ended, and started
    again. Raises SetupError or InvalidRequestError if nothing can be served there, or the token is not valid.
    """
    retry = Retry(Clock(), START_S, first_pause_s=0.1, longest_pause_s=1.0)
    while True:
        try:
            handle = actors.find(dashboard_name(uri))
            if (
                handle is not None
                and options is not None
                and unwrapped(actors, handle, handle.options.remote()) != options
            ):
                actors.kill(handle, restart=False)
                handle = None
            if handle is None:
                handle = _deploy(uri, options or DashboardOptions())
            url: str = unwrapped(actors, handle, handle.url.remote())
        except RayActorError as error:
            # A dashboard that is ending still had its name, or the actor restarts.
            log.info("the dashboard is asked again: %s", error)
            if retry.is_over:
                raise SetupError(
                    "the dashboard does not start; the fleet goes on without; see its log (`ray list actors`), then ask again",
                    uri=uri,
                    cause=error,
                ) from error
            retry.pause()
        else:
            return url


def _deploy(uri: str, options: DashboardOptions) -> Any:
    """Return the handle of a dashboard, started with these options if there is none. Ray keeps its arguments, so they have no token."""
    # Imported here: only the actor needs its imports.
    dashboard_actor = import_extra("statefleet.dashboard.actor")
    # On the coordinator's node, so that the address stays the same as long as the fleet runs.
    actor = ray.remote(dashboard_actor.DashboardActor).options(
        **options_on_head(dashboard_name(uri)), max_concurrency=4
    )
    return actor.remote(uri, options)
