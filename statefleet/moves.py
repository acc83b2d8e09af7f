"""The commands that move shards: ``move``, ``drain`` and ``rebalance``; and the one that makes others of them, ``rescale``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from coordinator.errors import InvalidRequestError, StateStoreError
from coordinator.text import format_table, size_text

if TYPE_CHECKING:
    from coordinator.client import CoordinatorClient
    from coordinator.placing import PlannedMove
    from store_actors.moving import MoveOutcome

__all__ = ["MovesFailedError", "drain", "move", "rebalance", "rescale"]


class MovesFailedError(StateStoreError):
    """Some shards stay where they are; the others were moved."""


def move(coordinator: CoordinatorClient, options: argparse.Namespace) -> str:
    """Bring one shard to a node."""
    coordinator.check_shard(options.state, options.shard)
    moves = coordinator.plan_move(options.state, options.shard, _node_id(options.node))
    return _told(coordinator, moves, options, "the shard is there already")


def drain(coordinator: CoordinatorClient, options: argparse.Namespace) -> str:
    """Take all shards off a node, and have none placed there; or let them be placed there again."""
    node_id = _node_id(options.node)
    if options.undo:
        if not options.dry_run:
            coordinator.undrain(node_id)
        return json.dumps([]) if options.json else f"shards may be placed on {node_id[:12]} again; see `rebalance`"
    coordinator.load_all_states()
    moves = coordinator.drain(node_id, dry_run=options.dry_run)
    return _told(coordinator, moves, options, "no shard is on the node")


def rebalance(coordinator: CoordinatorClient, options: argparse.Namespace) -> str:
    """Spread shards evenly over the nodes that have executors."""
    states = coordinator.load_all_states()
    chosen = [name for name in states if options.name in (None, name)]
    if not chosen:
        raise InvalidRequestError("the fleet has no such state", name=options.name, states=states)
    return _told(coordinator, coordinator.plan_rebalance(chosen), options, "shards are spread evenly")


def rescale(coordinator: CoordinatorClient, options: argparse.Namespace) -> str:
    """Give a state other shards while its query runs."""
    plan = coordinator.rescale(options.state, options.shards, dry_run=options.dry_run)
    if options.json:
        return json.dumps(asdict(plan), indent=2)
    if plan.new_shards == plan.num_shards:
        return f"{plan.state_name} has {plan.num_shards} shards already"
    rows = [(shard, ", ".join(map(str, sources))) for shard, sources in enumerate(plan.sources)]
    what = "nothing was changed" if options.dry_run else "one of the next batches has them; no file is rewritten"
    return f"{format_table(('new shard', 'made of'), rows)}\n{plan.num_shards} to {plan.new_shards} shards: {what}"


def _node_id(asked: str) -> str:
    """Id of the living Ray node that somebody names by its id, the beginning of it, its address or its host's name."""
    import ray

    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    found = [
        node["NodeID"]
        for node in nodes
        if asked in (node["NodeManagerAddress"], node["NodeManagerHostname"])
        or (len(asked) >= 4 and node["NodeID"].startswith(asked))
    ]
    if len(found) != 1:
        raise InvalidRequestError(
            "this names no living Ray node"
            if not found
            else "this names several Ray nodes; give the beginning of an id",
            node=asked,
            nodes=", ".join(f"{node['NodeID'][:12]} {node['NodeManagerAddress']}" for node in nodes),
        )
    node_id: str = found[0]
    return node_id


def _told(
    coordinator: CoordinatorClient, moves: Sequence[PlannedMove], options: argparse.Namespace, nothing: str
) -> str:
    from coordinator.calls import RayActors
    from store_actors.moving import MoveOutcome, carry_out

    done = carry_out(RayActors(), coordinator, () if options.dry_run else moves)
    outcomes = [MoveOutcome(one, None) for one in moves] if options.dry_run else list(done)
    told = (
        json.dumps([asdict(one) for one in outcomes], indent=2) if options.json else _table(outcomes, options.dry_run)
    )
    failed = [one for one in outcomes if one.error]
    if failed:
        raise MovesFailedError(
            f"{len(failed)} of {len(outcomes)} shards stay where they are, and their batches go on; repeat the command\n{told}"
        )
    return told if outcomes or options.json else nothing


def _table(outcomes: Sequence[MoveOutcome], dry_run: bool) -> str:
    columns = ("state", "shard", "from", "to", "why")
    rows: list[tuple[object, ...]] = []
    for one in outcomes:
        what = one.move
        row = (what.state_name, what.shard, what.giver.node_id[:12], what.taker.node_id[:12], what.reason)
        rows.append(row if dry_run else (*row, *_taken(one)))
    if dry_run:
        return format_table(columns, rows) + "\n(nothing was moved)"
    text = format_table((*columns, "from memory", "took"), rows)
    return text + "\nthe new store actors have them once the batch at hand, or else the next one, is at its end"


def _taken(outcome: MoveOutcome) -> tuple[str, str]:
    if outcome.error:
        return "-", outcome.error
    if outcome.preparation is None or outcome.preparation.version == 0:
        return "nothing: it is loaded from its files", "-"
    return size_text(outcome.preparation.moved_bytes), f"{outcome.preparation.duration_ms} ms"
