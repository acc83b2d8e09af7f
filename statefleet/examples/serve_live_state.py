"""Live state over HTTP, by Ray Serve: the rows of a key, with their query, shard and version.

Where the fleet runs, with ``pip install '.[serve]'`` in the project's folder::

    serve run statefleet.examples.serve_live_state:app uri=s3://bucket/prefix
    curl 'http://127.0.0.1:8000/clicks?user=ann'

answers ``{"rows": [{"user": "ann", "n": 3}], "state": "clicks", "query": "5f0c..", "shard": 2, "version": 41}``. A key with
values other than texts and numbers is posted as JSON (``-d '{"user": null}'``). A part of a state follows its name:
``/orders/left``.

=====  =================================================================================================
200    the rows of the key
400    the key lacks a column, has another one, or a value is of another type
404    there is no such state, or no row of the key: told with the shard and version where there is none
503    the fleet does not run, or does not answer in time
=====  =================================================================================================

Serve answers every client that reaches its port: put a proxy that knows your users in front of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Imported first: it names the packages that are missing.
from ray import serve  # isort: skip
from starlette.requests import Request
from starlette.responses import JSONResponse

from coordinator.model.errors import (
    InvalidRequestError,
    SetupError,
    StateStoreError,
    StorageUnavailableError,
    StoreUnavailableError,
)
from statefleet.reads.fleet import LiveFleet, attach
from statefleet.reads.json_values import key_of, plain
from statefleet.reads.state import LiveState

#: Number of concurrent queries in a replica.
_LOOK_UPS = 16
#: How long a query may take, in seconds. A fleet whose coordinator or store actor is replaced answers after a few.
_DEADLINE_S = 10.0


class LiveStateService:
    """The deployment of Serve.

    Parameters
    ----------
    uri
        The fleet, as given to ``statefleet.connect``.
    deadline_s
        How long a query may take, in seconds.
    """

    def __init__(self, uri: str, deadline_s: float = _DEADLINE_S) -> None:
        self._uri = uri
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(_LOOK_UPS, "statefleet-look-up")
        #: The running fleet and its states, shared so that concurrent queries are sent in one call.
        self._opened: tuple[LiveFleet, dict[tuple[str, str], LiveState]] | None = None

    async def __call__(self, request: Request) -> JSONResponse:
        """Return the response to a request."""
        path = request.url.path.removeprefix(request.scope.get("root_path", "")).strip("/")
        state, _, part = path.partition("/")
        loop = asyncio.get_running_loop()
        try:
            key = await _key(request)
            # In a thread, since a query waits for a store actor.
            query = loop.run_in_executor(self._threads, self._look_up, state, part, key)
            status, body = await asyncio.wait_for(query, self._deadline_s)
        except InvalidRequestError as error:
            status, body = 400, {"error": str(error)}
        except TimeoutError:
            status, body = 503, {"error": "the fleet does not answer in time; nothing was changed; ask again"}
        return JSONResponse(plain(body), status)

    def _look_up(self, state: str, part: str, key: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and body of the response."""
        try:
            return self._answer(state, part, key)
        except (SetupError, StorageUnavailableError, StoreUnavailableError) as error:
            # The next query attaches to the fleet that runs then.
            self._opened = None
            return 503, {"error": str(error)}
        except StateStoreError as error:
            return 500, {"error": str(error)}

    def _answer(self, state: str, part: str, key: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            read = self._state(state, part)
            found_key = read.find(key_of(read, key))
        except InvalidRequestError as error:
            return 400 if state in self._open()[0].states() else 404, {"error": str(error)}
        stamp = {
            "state": found_key.state,
            "query": found_key.query_id,
            "shard": found_key.shard,
            "version": found_key.version,
        }
        if not found_key.rows:
            return 404, {"error": "there is no row of this key", **stamp}
        return 200, {"rows": found_key.rows, **stamp}

    def _state(self, name: str, part: str) -> LiveState:
        fleet, states = self._open()
        state = states.get((name, part))
        if state is None:
            state = fleet.state(name, part)
            # Only states that exist are kept, since a client may ask for any name.
            if state.keys:
                state = states.setdefault((name, part), state)
        return state

    def _open(self) -> tuple[LiveFleet, dict[tuple[str, str], LiveState]]:
        opened = self._opened
        if opened is None:
            opened = self._opened = attach(self._uri), {}
        return opened


async def _key(request: Request) -> Mapping[str, Any]:
    """Return the key of a request.

    Raises
    ------
    InvalidRequestError
        The body is not a JSON object.
    """
    if request.method != "POST":
        return dict(request.query_params)
    try:
        key = json.loads(await request.body())
    except ValueError as error:
        raise InvalidRequestError("a key is posted as a JSON object; nothing was looked up", cause=error) from error
    if not isinstance(key, dict):
        raise InvalidRequestError("a key is posted as a JSON object; nothing was looked up", got=type(key).__name__)
    return key


def app(arguments: Mapping[str, str]) -> serve.Application:
    """Return the application that ``serve run`` starts, with ``uri=`` among its arguments."""
    if "uri" not in arguments:
        raise InvalidRequestError("say whose state is served: serve run .. uri=s3://bucket/prefix", got=dict(arguments))
    # It waits for store actors nearly all the time, so it reserves no core.
    options = {"num_cpus": 0}
    deployment = serve.deployment(max_ongoing_requests=_LOOK_UPS, ray_actor_options=options)(LiveStateService)
    return deployment.bind(arguments["uri"])
