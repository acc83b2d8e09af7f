"""How the dashboard is deployed on Ray: every option with its reason."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.exceptions import RayActorError

from coordinator.model.errors import SetupError
from coordinator.model.names import dashboard_name
from coordinator.runtime.runtime import MachineClock
from coordinator.service.calls import Actors, unwrapped
from coordinator.service.deploy import options_on_head
from statefleet.dashboard.options import DashboardOptions

__all__ = ["dashboard_url"]

log = logging.getLogger(__name__)

#: How often it is tried while one ends or starts anew, and the pause between, in seconds.
_ATTEMPTS = 10
_PAUSE_S = 0.5


def dashboard_url(actors: Actors, uri: str, asked: DashboardOptions | None = None) -> str:
    """Address of the dashboard of a normalised URI's fleet, which is started if it isn't there.

    Parameters
    ----------
    asked
        Where it is served; None leaves it where it is. One that is served elsewhere is ended, and started there.

    Raises
    ------
    SetupError, InvalidRequestError
        Nothing can be served there, or the token is not valid.
    """
    for attempt in range(_ATTEMPTS):
        try:
            handle = actors.find(dashboard_name(uri))
            if handle is not None and asked is not None and unwrapped(actors, handle, handle.options.remote()) != asked:
                actors.kill(handle, restart=False)
                handle = None
            if handle is None:
                handle = _deploy(uri, asked or DashboardOptions())
            url: str = unwrapped(actors, handle, handle.url.remote())
        except RayActorError as error:
            # One that is ending had its name still, or it starts anew.
            log.info("the dashboard is asked again (%d): %s", attempt + 1, error)
            MachineClock().sleep(_PAUSE_S)
            last = error
        else:
            return url
    raise SetupError(
        "the dashboard does not start; the fleet goes on without; see its log (`ray list actors`), then ask again",
        uri=uri,
        cause=last,
    ) from last


def _deploy(uri: str, options: DashboardOptions) -> Any:
    """Handle of a dashboard, started with these options if there is none. Ray keeps its arguments: they hold no token."""
    # Late: it brings what only the actor needs.
    from statefleet.dashboard.actor import DashboardActor

    # Beside the coordinator: one address for as long as there is a fleet.
    actor = ray.remote(DashboardActor).options(**options_on_head(dashboard_name(uri)), max_concurrency=4)
    return actor.remote(uri, options)
