"""The ``statefleet`` command: what a fleet holds, and ending it.

Ray takes long to import, so what needs it is imported by the commands that do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from coordinator.errors import InvalidRequestError, SetupError, StateStoreError
from coordinator.text import format_table, size_text
from statefleet import moves

if TYPE_CHECKING:
    from coordinator.client import CoordinatorClient

__all__ = ["main"]

#: What a store actor with a memory limit tells of its memory.
_MEMORY = ("resident_bytes", "memory_limit", "spilled_bytes")


def _find(options: argparse.Namespace) -> CoordinatorClient:
    """The running coordinator of the URI asked for."""
    from coordinator.client import CoordinatorClient
    from coordinator.deploy import join_cluster
    from coordinator.storage.uris import normalize_uri

    uri = normalize_uri(options.uri)
    join_cluster(options.address)
    coordinator = CoordinatorClient.find(uri)
    if coordinator is None:
        raise SetupError(
            "no fleet of this URI runs on this Ray cluster; statefleet.connect(uri) in a job starts it", uri=uri
        )
    return coordinator


def _status(options: argparse.Namespace) -> str:
    coordinator = _find(options)
    coordinator.load_all_states()
    status = coordinator.status()
    if options.json:
        return json.dumps(status, indent=2)
    actors = [
        (
            a["actor_name"],
            a["host"],
            a["pid"],
            *(None if a[name] is None else size_text(a[name]) for name in _MEMORY),
            "alive" if a["alive"] else "lost",
        )
        for a in status["store_actors"]
    ]
    queries = [
        (
            q["name"],
            q["version"],
            q["num_shards"],
            q["state_rows"],
            size_text(q["state_bytes"]),
            q["output_mode"],
            q["active"],
        )
        for q in status["queries"]
    ]
    return "\n".join(
        [
            f"fleet {status['fleet_id']} at {status['uri']}",
            "",
            format_table(("store actor", "host", "pid", "memory", "of", "spilled", "state"), actors),
            "",
            format_table(("state", "version", "shards", "rows", "memory", "mode", "active"), queries),
        ]
    )


def _shards(options: argparse.Namespace) -> str:
    coordinator = _find(options)
    coordinator.load_all_states()
    queries = [q for q in coordinator.status()["queries"] if options.name in (None, q["name"])]
    rows = [{"state": query["name"], **shard} for query in queries for shard in query["shards"]]
    if options.json:
        return json.dumps(rows, indent=2)
    columns = ("state", "partition_id", "actor_name", "executor", "version", "epoch", "state_rows", "rows_in")
    return format_table(columns, [tuple(row[column] for column in columns) for row in rows])


def _metrics(options: argparse.Namespace) -> str:
    from coordinator.calls import RayActors
    from store_actors.deploy import store_metrics

    return json.dumps(store_metrics(RayActors(), _find(options).status()), indent=2)


def _dashboard(options: argparse.Namespace) -> str:
    return _find(options).dashboard_url()


def _gc(options: argparse.Namespace) -> str:
    coordinator = _find(options)
    states = coordinator.load_all_states()
    chosen = [name for name in states if options.name in (None, name)]
    if not chosen:
        raise InvalidRequestError("the fleet has no such state", name=options.name, states=states)
    cleaned = {name: coordinator.clean(name, dry_run=options.dry_run) for name in chosen}
    if options.json:
        return json.dumps(cleaned, indent=2)
    files = [
        (file["path"], size_text(file["bytes"]), file["age_s"]) for one in cleaned.values() for file in one["files"]
    ]
    floors = [(name, *floor) for name, one in cleaned.items() for floor in one["floors"]]
    verb = "would be" if options.dry_run else "were"
    return "\n".join(
        [
            f"{len(floors)} shards whose oldest version {verb} raised",
            *([format_table(("state", "partition", "store", "oldest version"), floors)] if floors else []),
            f"{len(files)} files that {verb} deleted, {size_text(sum(f['bytes'] for o in cleaned.values() for f in o['files']))}",
            *([format_table(("file", "size", "age in s"), files)] if files else []),
        ]
    )


def _move(options: argparse.Namespace) -> str:
    return moves.move(_find(options), options)


def _drain(options: argparse.Namespace) -> str:
    return moves.drain(_find(options), options)


def _rebalance(options: argparse.Namespace) -> str:
    return moves.rebalance(_find(options), options)


def _rescale(options: argparse.Namespace) -> str:
    return moves.rescale(_find(options), options)


def _stop(options: argparse.Namespace) -> str:
    from coordinator.calls import RayActors
    from store_actors.deploy import end_fleet

    end_fleet(RayActors(), _find(options))
    return "the fleet's actors have ended; every committed version stays in the object store"


_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], str], str]] = {
    "status": (_status, "store actors and states"),
    "shards": (_shards, "where each shard is, with its version, epoch and rows"),
    "metrics": (_metrics, "counters of each store actor, as JSON"),
    "dashboard": (_dashboard, "address of the location dashboard"),
    "gc": (_gc, "let old versions go and delete files that nobody needs, now"),
    "move": (_move, "bring a shard to a node while its query runs"),
    "drain": (_drain, "take all shards off a node, and have none placed there"),
    "rebalance": (_rebalance, "spread shards evenly over the nodes that have executors"),
    "rescale": (_rescale, "give a state other shards while its query runs"),
    "stop": (_stop, "end the fleet's actors; state stays in the object store"),
}


_MOVING = ("move", "drain", "rebalance", "rescale")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="statefleet", description="Look at a fleet, or end it.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("uri", help="the fleet's URI, as given to statefleet.connect")
        command.add_argument("--address", default="auto", help="Ray cluster (default: the one running on this machine)")
        if name in ("move", "rescale"):
            command.add_argument("state", help="name of the state")
        if name == "rescale":
            command.add_argument(
                "--shards", type=int, required=True, help="how many; a multiple or a divisor of the present number"
            )
        if name == "move":
            command.add_argument("shard", type=int, help="number of the shard")
        if name in ("move", "drain"):
            command.add_argument("node", help="a Ray node: its address, or its id or the beginning of that")
        if name == "drain":
            command.add_argument("--undo", action="store_true", help="let shards be placed there again")
        if name in ("status", "shards", "gc", *_MOVING):
            command.add_argument("--json", action="store_true", help="print JSON")
        if name in ("gc", *_MOVING):
            command.add_argument("--dry-run", action="store_true", help="only show what would be done")
        if name in ("shards", "gc", "rebalance"):
            command.add_argument("--name", help="only this state")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, or 1 with the error on standard error."""
    options = _parser().parse_args(argv)
    try:
        print(_COMMANDS[options.command][0](options))
    except StateStoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
