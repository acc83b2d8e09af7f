"""Commands that show a running fleet: ``status``, ``queries``, ``shards``, ``metrics``, ``dashboard``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from coordinator.model.names import store_actor_id, store_actor_text
from statefleet.commands.options import Address, AsJson, Name, Uri, chosen_states, find
from statefleet.commands.output import (
    ago_text,
    print_json,
    print_table,
    print_text,
    size_cell,
    time_text,
)

#: Number of store actors up to which each has its own column of counters.
_ACTOR_COLUMNS = 3
#: Number of the newest slow batches that are printed with the status.
_SLOW_SHOWN = 3


def status(uri: Uri, address: Address = "auto", as_json: AsJson = False) -> None:
    """Store actors and states, and why batches were slow."""
    coordinator = find(uri, address)
    coordinator.load_all_states()
    report = coordinator.status()
    if as_json:
        print_json(report)
        return
    print_text(f"fleet {report['fleet_id']} at {report['uri']}")
    print()
    print_table(
        ("store actor", "id", "pid", "memory", "of", "spilled", "state"),
        [_actor_row(report, actor) for actor in report["store_actors"]],
    )
    print()
    print_table(
        ("state", "version", "shards", "rows", "memory", "mode", "active", "last commit"),
        [
            (
                state["name"],
                str(state["version"]),
                state["num_shards"],
                state["state_rows"],
                size_cell(state["state_bytes"]),
                state["output_mode"],
                state["active"],
                ago_text(state["last_commit_ms"]),
            )
            for state in report["queries"]
        ],
    )
    _print_notes(f"{state['name']} cannot be read: {state['error']}" for state in report.get("unreadable", []))
    _print_executors(report["executors"])
    running = [state["running_batch"] for state in report["queries"]]
    _print_notes(f"now: {batch['text']}" for batch in running if batch is not None and batch["is_overdue"])
    slow = [batch for state in report["queries"] for batch in state["slow_batches"]]
    slow.sort(key=lambda batch: -batch["at_ms"])
    _print_notes(f"{ago_text(batch['at_ms'])}: {batch['text']}" for batch in slow[:_SLOW_SHOWN])


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print()
        print_text(note)


def _print_executors(executors: list[dict[str, Any]]) -> None:
    if not executors:
        return
    print()
    print_table(
        ("executor", "on", "state", "why"),
        [
            (
                executor["executor_id"],
                executor["host"],
                "alive"
                if executor["alive"]
                else f"{'ended' if executor['is_expected'] else 'lost'} {ago_text(executor['lost_at_ms'])}",
                executor["reason"] or None,
            )
            for executor in executors
        ],
    )


def _actor_text(report: dict[str, Any], actor_name: str | None) -> str | None:
    """Return a store actor of a shard as users see it. It may be gone since an earlier coordinator."""
    if actor_name is None:
        return None
    hosts = {actor["actor_name"]: actor["host"] for actor in report["store_actors"]}
    return store_actor_text(actor_name, hosts.get(actor_name))


def _actor_row(report: dict[str, Any], actor: dict[str, Any]) -> tuple[object, ...]:
    sizes = (size_cell(actor[name]) for name in ("resident_bytes", "memory_limit", "spilled_bytes"))
    name = actor["actor_name"]
    return (
        _actor_text(report, name),
        store_actor_id(name),
        str(actor["pid"]),
        *sizes,
        "alive" if actor["alive"] else "lost",
    )


def queries(uri: Uri, name: Name = None, address: Address = "auto", as_json: AsJson = False) -> None:
    """Queries: states, watermarks, rates."""
    coordinator = find(uri, address)
    chosen = chosen_states(coordinator.load_all_states(), name) if name else None
    chosen_queries = [query for query in coordinator.status()["queries"] if chosen is None or query["name"] in chosen]
    if as_json:
        print_json([{key: value for key, value in query.items() if key != "shards"} for query in chosen_queries])
        return
    rows = [
        (
            query["query_id"][:8] or None,
            query["name"],
            "continuously" if query["active"] and query["is_continuous"] else query["active"],
            None if query["batch_id"] is None else str(query["batch_id"]),
            time_text(query["watermark_ms"]),
            query["rows_per_second"],
            query["rows_late"],
            None if query["locality"] is None else f"{query['locality']:.0%}",
            ago_text(query["last_commit_ms"]),
        )
        for query in sorted(chosen_queries, key=lambda query: (query["query_id"], query["name"]))
    ]
    print_table(("query", "state", "active", "batch", "watermark", "rows/s", "rows late", "local", "last commit"), rows)


def shards(uri: Uri, name: Name = None, address: Address = "auto", as_json: AsJson = False) -> None:
    """Where each shard is, its version and rows."""
    coordinator = find(uri, address)
    coordinator.load_all_states()
    report = coordinator.status()
    rows = [
        {"state": query["name"], **shard}
        for query in report["queries"]
        if name in (None, query["name"])
        for shard in query["shards"]
    ]
    if as_json:
        print_json(rows)
        return
    print_table(
        ("state", "shard", "store actor", "executor", "version", "epoch", "rows", "memory", "rows in", "last commit"),
        [
            (
                row["state"],
                str(row["partition_id"]),
                _actor_text(report, row["actor_name"]),
                row["executor"],
                str(row["version"]),
                None if row["epoch"] is None else str(row["epoch"]),
                row["state_rows"],
                size_cell(row["state_bytes"]),
                row["rows_in"],
                ago_text(row["last_commit_ms"]),
            )
            for row in rows
        ],
    )


def metrics(uri: Uri, address: Address = "auto", as_json: AsJson = False) -> None:
    """Counters of each store actor since it started."""
    from coordinator.service.calls import RayActors
    from store_actors.actor.deploy import store_metrics

    report = find(uri, address).status()
    counters = store_metrics(RayActors(), report)
    if as_json:
        print_json(counters)
        return
    names = list(counters) if len(counters) <= _ACTOR_COLUMNS else []
    every = list(dict.fromkeys(counter for of_actor in counters.values() for counter in of_actor))
    rows = []
    for counter in every:
        values = [of_actor.get(counter) for of_actor in counters.values()]
        of_each = [counters[name].get(counter) for name in names]
        rows.append((counter, *(_counter(counter, value) for value in (_sum(values), *of_each))))
    print_table(("counter", f"all {len(counters)}", *(_actor_text(report, name) or name for name in names)), rows)


def _sum(values: list[Any]) -> Any:
    """Return the sum over all store actors; None where the counter is not a number."""
    numbers = [value for value in values if isinstance(value, int | float)]
    return sum(numbers) if numbers else None


def _counter(name: str, value: Any) -> object:
    return size_cell(value) if name.endswith("_bytes") or name.startswith("bytes_") else value


def dashboard(
    uri: Uri,
    host: Annotated[
        str | None, typer.Option(help="Address of the head to serve it on (by default where it is, else the loopback).")
    ] = None,
    port: Annotated[int | None, typer.Option(help="By default one that follows from the URI.")] = None,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Address of the location dashboard.

    It is on the loopback of the head: forward its port (ssh -L) to see it from elsewhere.
    """
    from coordinator.service.calls import RayActors
    from coordinator.storage.uris import normalize_uri
    from statefleet.dashboard.deploy import dashboard_url
    from statefleet.dashboard.options import DashboardOptions

    options = DashboardOptions.of(host, port)
    find(uri, address)  # the fleet has to run
    url = dashboard_url(RayActors(), normalize_uri(uri), options)
    if as_json:
        print_json({"url": url})
    else:
        print(url)
