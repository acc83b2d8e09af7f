"""Commands that move shards (``move``, ``drain``, ``rebalance``), change their number (``rescale``), or branch a state (``branch``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from humanize import naturalsize
from msgspec import to_builtins

from coordinator.model.errors import InvalidRequestError, StateStoreError
from statefleet.commands.options import Address, AsJson, DryRun, Name, State, Uri, Version, find, readable_states
from statefleet.commands.output import print_json, print_table, print_text, progress

if TYPE_CHECKING:
    from coordinator.placement.lease_plans import PlannedMove
    from coordinator.service.client import CoordinatorClient
    from store_actors.actor.deploy import MoveOutcome


Node = Annotated[
    str, typer.Argument(metavar="NODE", help="a Ray node: its address, or its id or the beginning of that")
]


class MovesFailedError(StateStoreError):
    """Some shards stay where they are; the others were moved."""


def move(
    uri: Uri,
    state: State,
    shard: Annotated[int, typer.Argument(metavar="SHARD", help="number of the shard")],
    node: Node,
    address: Address = "auto",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Bring a shard to a node while its query runs."""
    coordinator = find(uri, address)
    coordinator.check_shard(state, shard)
    moves = coordinator.plan_move(state, shard, _node_id(node))
    _carry_out(coordinator, moves, "the shard is there already", dry_run=dry_run, as_json=as_json)


def drain(
    uri: Uri,
    node: Node,
    undo: Annotated[bool, typer.Option("--undo", help="let shards be placed there again")] = False,
    address: Address = "auto",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Take all shards off a node; none go there."""
    coordinator = find(uri, address)
    node_id = _node_id(node)
    if undo:
        if not dry_run:
            coordinator.undrain(node_id)
        if as_json:
            print_json([])
        else:
            print_text(f"shards may be placed on {node_id[:12]} again; see `rebalance`")
        return
    coordinator.load_all_states()
    moves = coordinator.drain(node_id, dry_run=dry_run)
    _carry_out(coordinator, moves, "no shard is on the node", dry_run=dry_run, as_json=as_json)


def rebalance(
    uri: Uri, name: Name = None, address: Address = "auto", dry_run: DryRun = False, as_json: AsJson = False
) -> None:
    """Spread shards evenly over the nodes."""
    coordinator = find(uri, address)
    moves = coordinator.plan_rebalance(readable_states(coordinator, name))
    _carry_out(coordinator, moves, "shards are spread evenly", dry_run=dry_run, as_json=as_json)


def rescale(
    uri: Uri,
    state: State,
    shards: Annotated[int, typer.Option("--shards", help="how many; a multiple or a divisor of the present number")],
    address: Address = "auto",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Give a state other shards while its query runs."""
    plan = find(uri, address).rescale(state, shards, dry_run=dry_run)
    if as_json:
        print_json(asdict(plan))
        return
    if plan.new_shards == plan.num_shards:
        print_text(f"{plan.state_name} has {plan.num_shards} shards already")
        return
    print_table(
        ("new shard", "made of"),
        [(str(shard), ", ".join(map(str, sources))) for shard, sources in enumerate(plan.sources)],
    )
    result = "nothing was changed" if dry_run else "one of the next batches has them; no file is rewritten"
    print_text(f"{plan.num_shards} to {plan.new_shards} shards: {result}")


def branch(
    uri: Uri,
    state: State,
    as_: Annotated[str, typer.Option("--as", metavar="NAME", help="name of the branch")],
    version: Version = None,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Begin a state with a version of another.

    It is for another query to go on from. No row is copied, and the other state is left as it is.
    """
    created = find(uri, address).branch(state, as_, version)
    if as_json:
        print_json(asdict(created))
        return
    print_text(
        f"{created.state_name} begins with version {created.version} of {created.parent}: {created.shared_files} files "
        f"({naturalsize(created.shared_bytes)}) are shared, none was copied"
    )
    if not created.query_id:
        print_text(
            f"a query goes on from it whose checkpoint begins with batch {created.version}: see fleet.branch(..., checkpoint=)"
        )


def _node_id(name: str) -> str:
    """Return the id of the living Ray node that is named by its id, the beginning of that, its address or its host's name."""
    import ray

    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    node_ids = [
        node["NodeID"]
        for node in nodes
        if name in (node["NodeManagerAddress"], node["NodeManagerHostname"])
        or (len(name) >= 4 and node["NodeID"].startswith(name))
    ]
    if len(node_ids) != 1:
        raise InvalidRequestError(
            "this names no living Ray node"
            if not node_ids
            else "this names several Ray nodes; give the beginning of an id",
            node=name,
            nodes=", ".join(f"{node['NodeID'][:12]} {node['NodeManagerAddress']}" for node in nodes),
        )
    return str(node_ids[0])


def _carry_out(
    coordinator: CoordinatorClient, moves: Sequence[PlannedMove], nothing: str, *, dry_run: bool, as_json: bool
) -> None:
    """Carry out planned moves, or only print them.

    Raises
    ------
    MovesFailedError
        Some shards stay where they are. The outcome of each move is printed first.
    """
    from coordinator.service.calls import RayActors
    from store_actors.actor.deploy import MoveOutcome, carry_out

    if dry_run:
        outcomes = [MoveOutcome(planned, None) for planned in moves]
    else:
        outcomes = []
        with progress("moving shards", len(moves)) as show:
            for outcome in carry_out(RayActors(), coordinator, moves):
                outcomes.append(outcome)
                show(len(outcomes))
    if as_json:
        print_json([outcome_json(outcome) for outcome in outcomes])
    elif outcomes:
        _print_outcomes(outcomes, dry_run)
    else:
        print_text(nothing)
    failed = [outcome for outcome in outcomes if outcome.error]
    if failed:
        raise MovesFailedError(
            f"{len(failed)} of {len(outcomes)} shards stay where they are, and their batches go on; repeat the command",
            cause=failed[0].error,
        )


def outcome_json(outcome: MoveOutcome) -> dict[str, Any]:
    """Return what ``--json`` prints of a move, whose keys are a promise: ``giver``, ``taker`` and ``preparation``."""
    fields = to_builtins(outcome)
    names = {"source": "giver", "target": "taker"}
    move = {names.get(name, name): value for name, value in fields["move"].items()}
    return {"move": move, "preparation": fields["copy_result"], "error": fields["error"]}


def _print_outcomes(outcomes: Sequence[MoveOutcome], dry_run: bool) -> None:
    columns = ("state", "shard", "from", "to", "why")
    rows: list[tuple[object, ...]] = []
    for outcome in outcomes:
        planned = outcome.move
        row = (planned.state_name, str(planned.shard), planned.source.host, planned.target.host, planned.reason)
        rows.append(row if dry_run else (*row, *_copied(outcome)))
    print_table(columns if dry_run else (*columns, "from memory", "took"), rows)
    print_text(
        "(nothing was moved)"
        if dry_run
        else "the new store actors have them once the batch at hand, or else the next one, is at its end"
    )


def _copied(outcome: MoveOutcome) -> tuple[str, str]:
    """Return the cells of a move: what was copied from memory, and how long that took."""
    if outcome.error:
        return "-", outcome.error
    if outcome.copy_result is None or outcome.copy_result.version == 0:
        return "nothing: it is loaded from its files", "-"
    return naturalsize(outcome.copy_result.moved_bytes), f"{outcome.copy_result.duration_ms} ms"
