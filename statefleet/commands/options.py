"""Arguments and options that commands share, and the fleet that they name."""

from __future__ import annotations

import threading
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.model.errors import InvalidRequestError, SetupError, StateStoreError
from statefleet.commands.output import print_text

if TYPE_CHECKING:
    from coordinator.service.client import CoordinatorClient
    from statefleet.reads.fleet import LiveFleet


#: How long completing a state's name may take, in seconds.
_COMPLETION_S = 1.5


def _state_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of states at the URI that begin with the text; none if the object store is slow."""
    names: list[str] = []

    def look() -> None:
        from coordinator.model.names import is_state_name
        from coordinator.storage.uris import open_object_store

        try:
            folders = open_object_store(ctx.params["uri"]).folders()
        except (KeyError, OSError, TypeError, StateStoreError):
            return
        names.extend(name for name in folders if is_state_name(name) and name.startswith(incomplete))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(_COMPLETION_S)
    return list(names)


class Consistency(StrEnum):
    """Consistency of a read, as ``LiveFleet.state`` takes it."""

    FINISHED = "finished"
    COMMITTED = "committed"
    LATEST = "latest"


Uri = Annotated[str, typer.Argument(metavar="URI", help="the fleet's URI, as given to statefleet.connect")]
State = Annotated[str, typer.Argument(metavar="STATE", help="name of the state", autocompletion=_state_names)]
Address = Annotated[str, typer.Option(metavar="HOST:PORT", help="Ray cluster; auto: the one running on this machine")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, and nothing else, on standard output")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="only show what would be done")]
Name = Annotated[
    str | None, typer.Option("--name", metavar="STATE", help="only this state", autocompletion=_state_names)
]
Offline = Annotated[bool, typer.Option("--offline", help="read the object store alone: no fleet and no Ray is needed")]
Part = Annotated[str, typer.Option(metavar="PART", help="left or right of a join, a state variable, a keyed store")]
Version = Annotated[int | None, typer.Option(help="a retained version instead of the newest one")]
ReadConsistency = Annotated[
    Consistency,
    typer.Option(
        "--consistency", help="finished: by Spark; committed: by all shards; latest: of each shard the newest"
    ),
]
Columns = Annotated[str | None, typer.Option(metavar="A,B,..", help="only these columns")]


def find(uri: str, address: str) -> CoordinatorClient:
    """Return the running coordinator of a fleet.

    Raises
    ------
    SetupError
        There is no Ray cluster at the address, or no fleet of this URI on it.
    """
    from coordinator.service.client import CoordinatorClient
    from coordinator.service.deploy import join_cluster, ray_address
    from coordinator.storage.uris import normalize_uri

    normalized = normalize_uri(uri)
    join_cluster(address)
    coordinator = CoordinatorClient.find(normalized)
    if coordinator is None:
        raise SetupError(
            "no fleet of this URI runs on this Ray cluster; statefleet.connect(uri) in a job starts it; without one, "
            "`statefleet scan --offline` and the like read what is stored, and `statefleet verify` checks it; if it runs on another "
            "cluster, name that by --address",
            uri=normalized,
            cluster=ray_address(),
        )
    return coordinator


def open_states(uri: str, address: str, *, offline: bool) -> LiveFleet:
    """Return the states of a fleet, to be read."""
    from statefleet.reads.fleet import attach

    return attach(uri, address=address, offline=offline)


def chosen_states(states: list[str], name: str | None) -> list[str]:
    """Return all states, or only the one of a name.

    Raises
    ------
    InvalidRequestError
        There is no such state.
    """
    chosen = [state for state in states if name in (None, state)]
    if not chosen:
        if name is None:
            raise InvalidRequestError("there is no state at this URI; see that it is the one that queries use")
        raise InvalidRequestError("the fleet has no such state", name=name, states=", ".join(states))
    return chosen


def readable_states(coordinator: CoordinatorClient, name: str | None) -> list[str]:
    """Return all states that can be read, after the others were named on the standard error; or only the one of a name.

    Raises
    ------
    InvalidRequestError
        There is no such state.
    """
    chosen = chosen_states(coordinator.load_all_states(), name)
    unreadable = {state["name"]: state["error"] for state in coordinator.status()["unreadable"] if name is None}
    for state, error in unreadable.items():
        print_text(f"{state} cannot be read, and is left out: {error}", aside=True)
    return [state for state in chosen if state not in unreadable]


def column_names(text: str | None) -> list[str] | None:
    """Return the columns of a comma-separated list; None for all."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
