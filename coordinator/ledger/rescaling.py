"""The number of shards of a batch: a state is rescaled when a run begins with another number, or a user asks for one. Pure.

The number of shards is decided, and in the log, before the batch is planned. A run that begins takes the number that its program asks
for. Its later batches have the same number, unless a caller asks for another one meanwhile. A state can only be rescaled if every shard
has the version that the batch reads. If one does not, the batch is planned for the shards that are there, and its tasks report what is
wrong.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from msgspec import structs

from coordinator.ledger.compatibility import routing_keys, unroutable
from coordinator.ledger.records import Record, RescaleAsked, Rescaled
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.errors import InvalidRequestError, StateStoreError
from coordinator.model.identities import TaskIdentity
from coordinator.model.state_metadata import StateMetadata

#: Most shards of a state, as tasks number them.
MAX_SHARDS = 1 << 15


@dataclass(frozen=True, slots=True)
class RescalePlan:
    """The effect of a rescale on a state."""

    state_name: str
    num_shards: int
    new_shards: int
    #: For each new shard the old shards that have its rows.
    sources: tuple[tuple[int, ...], ...]


def first_layout(created: StateMetadata) -> ShardLayout:
    """Return the layout that a state was created with."""
    return ShardLayout(created.num_shards)


def decide_shards(
    ledger: StateLedger, created: StateMetadata, task: TaskIdentity, requested: int | None
) -> tuple[list[Record], ShardLayout]:
    """Return the layout of a batch that is about to be planned, and the records that have to be in the log for that.

    Parameters
    ----------
    requested
        How many shards the program of a run asks for when it begins; None if it takes the present number.
    """
    first = first_layout(created)
    present = ledger.layouts.in_force(task.run_id, task.batch_id) or first
    num_shards = _requested(ledger, task, requested)
    keys = routing_keys(created)
    if num_shards in (None, present.num_shards) or not keys or not _is_ready(ledger, task, present):
        return [], present
    assert num_shards is not None
    layout = ShardLayout(
        num_shards,
        ledger.layouts.next_partition(first),
        task.batch_id,
        task.run_id,
        present.first_partition,
        present.num_shards,
        keys,
    )
    return [Rescaled(*structs.astuple(layout))], layout


def _requested(ledger: StateLedger, task: TaskIdentity, requested: int | None) -> int | None:
    if ledger.requested_rescale is not None and ledger.requested_rescale.run_id == task.run_id:
        return ledger.requested_rescale.num_shards
    has_begun = task.run_id == ledger.run_id or any(layout.run_id == task.run_id for layout in ledger.layouts.made)
    return None if has_begun else requested


def _is_ready(ledger: StateLedger, task: TaskIdentity, present: ShardLayout) -> bool:
    """Return whether every shard has the version that the batch reads, and nothing keeps the run from going on from it."""
    try:
        ledger.check_query(task)
        ledger.check_not_of_the_past(task)
        ledger.check_whole(task, present)
        # Of the first batch, too: what it builds on may not have been truncated.
        return all(ledger.base_version(partition, task.batch_id) == task.batch_id for partition in present.partitions)
    except StateStoreError:
        # Its tasks are refused with the same error.
        return False


def decide_rescale_request(
    ledger: StateLedger, created: StateMetadata, num_shards: int, *, is_active: bool, dry_run: bool
) -> tuple[list[Record], RescalePlan]:
    """Have the present run rescaled with one of its next batches; returns the effect and what has to be in the log.

    Raises
    ------
    InvalidRequestError
        The state cannot be rescaled, no run of its query is active, or the number is not allowed.
    """
    present = ledger.layouts.in_force(ledger.run_id, sys.maxsize) or first_layout(created)
    facts = {"state": created.state_name, "shards": present.num_shards, "asked": num_shards}
    if not 1 <= num_shards <= MAX_SHARDS:
        raise InvalidRequestError(f"a number of shards is from 1 to {MAX_SHARDS}; nothing was changed", **facts)
    if not routing_keys(created):
        raise InvalidRequestError(unroutable(created), **facts)
    larger, smaller = max(num_shards, present.num_shards), min(num_shards, present.num_shards)
    if larger % smaller:
        raise InvalidRequestError(
            "a state is rescaled by a factor while its query runs, so that each shard is either split or put together with others; "
            "nothing was changed; ask for a multiple or a divisor of the present number, or stop the query and start it with shards=",
            **facts,
        )
    if not is_active:
        raise InvalidRequestError(
            "no run of the state's query goes on; nothing was changed; give fleet.stateful(..., shards=) when you start it",
            **facts,
        )
    target = ShardLayout(num_shards, 0, 0, "", 0, present.num_shards)
    sources = tuple(tuple(target.parents(shard)) for shard in target.partitions)
    plan = RescalePlan(created.state_name, present.num_shards, num_shards, sources)
    request = RescaleAsked(ledger.run_id, num_shards)
    is_new = ledger.requested_rescale != request and (
        num_shards != present.num_shards or ledger.requested_rescale is not None
    )
    return ([request] if is_new and not dry_run else []), plan
