"""How many shards a batch has: a state is rescaled when a run begins with another number, or is asked to while it goes on. Pure.

The number of a batch is decided, and in the log, before the batch is planned. A run that begins decides by what its program asks for;
its later batches have the same number, unless somebody asks for another one meanwhile. Decided is only what can be: the version that
the batch reads must be on every shard. Where it is not, the batch is planned for the shards that are there, and its tasks say what is
wrong.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from coordinator.ledger.compatibility import routing_keys, unroutable
from coordinator.ledger.records import Record, RescaleAsked, Rescaled
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.errors import InvalidRequestError, StateStoreError
from coordinator.model.identities import TaskIdentity
from coordinator.model.state_metadata import StateMetadata

__all__ = [
    "MAX_SHARDS",
    "BatchShards",
    "RescalePlan",
    "decide_rescale_request",
    "decide_shards",
    "first_layout",
]

#: As tasks number them.
MAX_SHARDS = 1 << 15


@dataclass(frozen=True, slots=True)
class BatchShards:
    """The shards of a batch: shard `t` is partition ``first_partition + t``."""

    first_partition: int
    num_shards: int

    @property
    def partitions(self) -> range:
        """Their partition ids."""
        return range(self.first_partition, self.first_partition + self.num_shards)

    @classmethod
    def of(cls, layout: ShardLayout) -> BatchShards:
        return cls(layout.first_partition, layout.num_shards)


@dataclass(frozen=True, slots=True)
class RescalePlan:
    """What a rescale makes of a state.

    Attributes
    ----------
    num_shards, new_shards
        Before and after.
    sources
        For each new shard the old ones that have its rows.
    """

    state_name: str
    num_shards: int
    new_shards: int
    sources: tuple[tuple[int, ...], ...]


def first_layout(created: StateMetadata) -> ShardLayout:
    """The shards that a state was made with."""
    return ShardLayout(created.num_shards)


def decide_shards(
    ledger: StateLedger, created: StateMetadata, task: TaskIdentity, asked: int | None
) -> tuple[list[Record], ShardLayout]:
    """The shards of a batch that is about to be planned, and what has to be in the log for that.

    Parameters
    ----------
    task
        Any of the batch's.
    asked
        How many the program of a run asks for when it begins; None if it takes what is there.
    """
    first = first_layout(created)
    present = ledger.layouts.in_force(first, task.run_id, task.batch_id)
    wanted = _wanted(ledger, task, asked)
    keys = routing_keys(created)
    if wanted in (None, present.num_shards) or not keys or not _is_ready(ledger, task, present):
        return [], present
    assert wanted is not None
    made = ShardLayout(
        wanted,
        ledger.layouts.next_partition(first),
        task.batch_id,
        task.run_id,
        present.first_partition,
        present.num_shards,
        keys,
    )
    return [Rescaled(made)], made


def _wanted(ledger: StateLedger, task: TaskIdentity, asked: int | None) -> int | None:
    if ledger.asked is not None and ledger.asked.run_id == task.run_id:
        return ledger.asked.num_shards
    has_begun = task.run_id == ledger.run_id or any(one.run_id == task.run_id for one in ledger.layouts.made)
    return None if has_begun else asked


def _is_ready(ledger: StateLedger, task: TaskIdentity, present: ShardLayout) -> bool:
    """Whether every shard has the version that the batch reads, and nothing keeps the run from going on from it."""
    try:
        ledger.check_query(task)
        ledger.check_not_of_the_past(task)
        ledger.check_whole(task, present)
        # Of the first batch, too: nothing that it builds on may have been let go of.
        return all(ledger.base_version(one, task.batch_id) == task.batch_id for one in present.partitions)
    except StateStoreError:
        # Its tasks are told, each in words of its own.
        return False


def decide_rescale_request(
    ledger: StateLedger, created: StateMetadata, num_shards: int, *, is_active: bool, dry_run: bool
) -> tuple[list[Record], RescalePlan]:
    """Have the run that goes on rescaled with one of its next batches.

    Raises
    ------
    InvalidRequestError
        The state cannot be rescaled, no run of its query goes on, or the number is none.
    """
    present = ledger.layouts.in_force(first_layout(created), ledger.run_id, sys.maxsize)
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
    asked = RescaleAsked(ledger.run_id, num_shards)
    is_new = ledger.asked != asked and (num_shards != present.num_shards or ledger.asked is not None)
    return ([asked] if is_new and not dry_run else []), plan
