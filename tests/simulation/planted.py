"""Bugs to plant: each takes one safeguard of the protocol away. A simulation that finds none of them proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from coordinator.ledger.history import StateHistory
from coordinator.ledger.ledger_state import LedgerState
from coordinator.ledger.records import Committed
from coordinator.ledger.shard_layouts import ShardLayout, ShardLayouts
from coordinator.ledger.state_ledger import AcceptedCommits, StateLedger
from coordinator.log.log_end import LogEnd
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.commits import CommitEntry, PartitionCommit
from coordinator.model.errors import CommitUnknownError, FencedError, LogConflictError, StateStoreError
from coordinator.model.load_plans import LoadPlan, LoadPlans
from coordinator.service import versions
from coordinator.service.coordinator import Coordinator
from statefleet.reads.shard_reads import ReadVersion, ShardReads
from store_actors.actor.store_actor import StoreProcess
from store_actors.engine.table_view import VersionView
from store_actors.messages.requests import ReplicatedCommit
from store_actors.serving import reads
from store_actors.serving.commits import Commits
from store_actors.serving.loading import MemoryRows, Split
from store_actors.serving.partition import Lineage, SyncAction
from store_actors.serving.partitions import Transfers
from store_actors.serving.restoring import Restorer, _as_snapshot
from tests.simulation.clock import ProcessClock
from tests.simulation.spark import Driver

Original = Callable[..., Any]


def _conflicts_ignored(append: Original, log: ManifestLog, records: Any) -> None:
    try:
        append(log, records)
    except LogConflictError:
        log.seq += 1


def _runs_outlive_their_state(drop: Original, ledger: LedgerState, record: Any) -> None:
    drop(ledger, record)
    ledger.retired.clear()


def _any_version_there(committed: Original, history: StateHistory, partition_id: int, version: int) -> tuple[int, str]:
    newest, attempt_id = committed(history, partition_id, version)
    return (newest, attempt_id) if attempt_id else (version, "")


def owners_not_fenced(decide_commits: Original, ledger: StateLedger, entries: Sequence[CommitEntry]) -> Any:
    try:
        return decide_commits(ledger, entries)
    except FencedError:
        return [Committed(entry) for entry in entries], tuple(entries)


def _lineage_not_verified(_: Original, lineage: Lineage, base: int, counted: str, earlier: Any = None) -> SyncAction:
    if not lineage.is_loaded or base > lineage.version:
        return SyncAction.RELOAD
    return SyncAction.KEEP if base == lineage.version else SyncAction.ROLLBACK


def _any_copy_gone_on_from(
    sync_action: Original, lineage: Lineage, base: int, counted: str, earlier: Any = None
) -> SyncAction:
    if lineage.is_loaded and lineage.version < base:
        return SyncAction.CATCH_UP
    return sync_action(lineage, base, counted)  # type: ignore[no-any-return]


def _commits_since_left_out(
    _: Original, restorer: Any, partition: Any, store_id: Any, base: int, loading: LoadPlans
) -> None:
    loader = copy(restorer._loader)
    loader.read = lambda entry, piece=None: restorer._loader.read(entry, piece).slice(0, 0)
    deltas = partition.catch_up(loading, base, loader)
    partition.lineage.caught_up(base, loading.attempt_id, deltas)


def _followed_over_gaps(replicate: Original, transfers: Any, commit: ReplicatedCommit) -> bool:
    partition, first = transfers._cache.of(commit.store_id), commit.entries[0]
    with partition.lock:
        lineage = partition.lineage
        if lineage.is_loaded and lineage.version < first.version:
            lineage.version, lineage.attempts = first.base_version, {first.base_version: commit.base_attempt}
    return replicate(transfers, commit)  # type: ignore[no-any-return]


def _silence_taken_for_success(put: Original, log: Any, path: str, data: bytes, record_id: str) -> None:
    try:
        if log._store.put_if_absent(path, data):
            return
    except CommitUnknownError:
        return
    put(log, path, data, record_id)


def _schemas_of_failed_runs_kept(load_plan: Original, ledger: StateHistory, shard: Any, version: int) -> LoadPlan:
    return structs.replace(load_plan(ledger, shard, version), schemas=tuple(ledger._schemas))


def _newest_taken_for_oldest(_: Original, ledger: StateHistory) -> int:
    return max((chain[-1].version for chain in ledger._chains.values() if chain), default=0)


async def _two_clocks_compared(
    _: Original, actor: Any, state_name: str, keeper: Any, commit: PartitionCommit
) -> AcceptedCommits:
    """Only the coordinator's time of day and the store actor's say whether a commit is too old."""

    def decide(ledger: StateLedger) -> Any:
        ledger.discarded = {}
        records, counted = ledger.decide_commits(commit.entries)
        for entry in commit.entries if records else ():
            if actor._clock.now_s() * 1000 - entry.committed_at_ms > actor._maintenance.grace_s * 500:
                raise CommitUnknownError("the commit took too long", file=entry.file)
        return records, AcceptedCommits(counted)

    return await keeper.decide(decide)  # type: ignore[no-any-return]


def _records_one_by_one(append: Original, log: Any, records: Any) -> None:
    for record in records:
        append(log, [record])


def _newest_not_rolled_back(_: Original, lineage: Lineage, base: int) -> None:
    lineage.version = base


def _epoch_not_looked_at(_: Original, lineage: Lineage, epoch: int, run_id: str, base: int) -> bool:
    return lineage.is_loaded and lineage.version == base


def _only_the_newest_shards_referenced(_: Original, ledger: StateHistory) -> set[str]:
    tip = max((layout.first_partition for layout in ledger.layouts.made if ledger.layouts.counts(layout)), default=0)
    files = {entry.file for (partition, _), chain in ledger._chains.items() if partition >= tip for entry in chain}
    snapshots = (
        snapshot for (partition, _), of_shard in ledger._snapshots.items() if partition >= tip for snapshot in of_shard
    )
    return files | {file for snapshot in snapshots for file in snapshot.files}


def _any_memory_will_do(
    _: Original, restorer: Any, state: Any, store_name: str, definition: Any, parent: Any, version: int
) -> Any:
    partition = restorer._cache.find(structs.replace(state, partition_id=parent.partition_id))
    if partition is None or not partition.lineage.is_loaded or partition.writer is not None:
        return None
    ((store, rows),) = partition.frozen_stores()
    schema = partition.formats[store_name].schema
    return MemoryRows(store.watermark_ms, _as_snapshot(partition.lock, schema, rows))


def _shards_not_waited_for(_: Original, ledger: Any, created: Any, is_committed: bool) -> int:
    return max(map(ledger.newest_version, range(created.num_shards)))


def _newest_of_each_shard(planned: Original, request: Any, newest: tuple[int, str]) -> Any:
    return planned(structs.replace(request, is_latest=True), newest)


def _spark_not_waited_for(newest_readable: Original, ledger: Any, created: Any, is_committed: bool) -> Any:
    return newest_readable(ledger, created, is_committed=True)


#: Kinds of schedules (arguments of :class:`tests.simulation.world.World`) in which bugs are sought.
HARSH = {"harsh": True, "keyed": False}
STOPPED = {"harsh": True, "keyed": False, "stops": True}
KEYED = {"harsh": True, "keyed": True}
MOVED = {"keyed": False, "moves": True}
RESCALED = {"keyed": False, "rescales": True}
READ = {"keyed": False, "reads": True}
READ_RESCALED = {"keyed": False, "reads": True, "rescales": True, "moves": True}
DROPPED = {"drops": True}


@dataclass(frozen=True)
class Bug:
    """A safeguard that is taken away: an attribute of a class or module, and where it is found.

    Attributes
    ----------
    instead
        What is called in its place: with what it was, and with its arguments.
    first
        Seed at which the search begins, so that it is short as long as little changes.
    """

    owner: Any
    attribute: str
    instead: Callable[..., Any]
    schedules: Mapping[str, bool] = field(default_factory=lambda: HARSH)
    first: int = 0


BUGS: dict[str, Bug] = {
    "conflicts of the log are ignored": Bug(LogEnd, "append", _conflicts_ignored),
    "replaced owners may commit": Bug(StateLedger, "decide_commits", owners_not_fenced),
    "memory is used without a look at its lineage": Bug(Lineage, "sync_action", _lineage_not_verified, first=39),
    "memory is used under another epoch": Bug(Lineage, "is_hot", _epoch_not_looked_at, first=107),
    "a put without an answer is taken for done": Bug(LogEnd, "_put", _silence_taken_for_success),
    "runs that were replaced may come back": Bug(StateLedger, "check_query", lambda _, ledger, task: None, first=1),
    "a coordinator answers from an old memory": Bug(LogEnd, "is_newest", lambda _, log: True, first=5),
    # A delta is deleted only when its commit was refused; here: after any failure.
    "files of failed commits are deleted": Bug(
        Commits, "_is_refusal", lambda _, error: isinstance(error, StateStoreError), first=130
    ),
    "what cleaning deletes may be counted later": Bug(
        StateLedger, "decide_discard", lambda _, ledger, files: [], STOPPED
    ),
    "the age of a commit is told by two clocks": Bug(Coordinator, "_commit", _two_clocks_compared, first=93),
    "ages are measured by a clock that stands still while the machine sleeps": Bug(
        ProcessClock, "elapsed_s", lambda _, clock: clock.awake_s(), first=107
    ),
    "a copy is gone on from whatever its history": Bug(Lineage, "sync_action", _any_copy_gone_on_from, MOVED, first=76),
    "a standby applies a commit to whatever it has": Bug(Transfers, "replicate", _followed_over_gaps, MOVED, first=48),
    "commits since a copy are left out": Bug(Restorer, "_catch_up", _commits_since_left_out, MOVED),
    "a schema counts without a commit in it": Bug(StateHistory, "_load_plan", _schemas_of_failed_runs_kept, first=3),
    "a checkpoint of the ledger forgets schemas": Bug(
        LedgerState,
        "folded",
        lambda folded, ledger, records: {**folded(ledger, records), "schemas": []},
        first=3,
    ),
    "parts of a checkpoint go while some of their records count": Bug(
        StateHistory, "oldest_retained", _newest_taken_for_oldest, first=10
    ),
    "parts that a checkpoint names are cleaned away": Bug(
        ManifestLog, "needed", lambda needed, log, infos: replace(needed(log, infos), parts=()), first=10
    ),
    "records of parts are read in another order than the log's": Bug(
        ManifestLog, "_records_of", lambda records_of, log, parts: iter(list(records_of(log, parts))[::-1]), first=6
    ),
    "what came of a task's shards is told in another order": Bug(
        StoreProcess, "apply", lambda apply, process, requests, rows: apply(process, requests, rows)[::-1]
    ),
    "shards that no action asked for are left out of their batch": Bug(
        Driver, "_complete", lambda _, driver, run_id, batch, left_out: True
    ),
    # What the first of the two leaves out, the second would refuse.
    "batches count by halves": Bug(StateLedger, "check_whole", lambda _, ledger, task, num_shards: None),
    "records that belong together are appended one by one": Bug(LogEnd, "append", _records_one_by_one, KEYED),
    "keyed stores in memory are used without a look at their lineage": Bug(
        Lineage, "sync_action", _lineage_not_verified, KEYED, first=449
    ),
    "a snapshot of what was rolled back to is taken for the newest version": Bug(
        Lineage, "rolled_back", _newest_not_rolled_back, KEYED, first=8
    ),
    "keyed stores in memory are used under another epoch": Bug(
        Lineage, "is_hot", _epoch_not_looked_at, KEYED, first=193
    ),
    "a shard takes over rows that are another one's": Bug(Split, "rows", lambda _, split, table, file: table, RESCALED),
    "files of the shards that others were made of are deleted": Bug(
        StateHistory, "referenced_files", _only_the_newest_shards_referenced, RESCALED, first=80
    ),
    "a shard is made of one of those that have its rows": Bug(
        ShardLayout, "parents", lambda parents, layout, partition_id: parents(layout, partition_id)[:1], RESCALED
    ),
    "a shard is made of whatever memory has of another": Bug(Restorer, "rows_in_memory", _any_memory_will_do, RESCALED),
    "new shards count with their first commit": Bug(
        ShardLayouts,
        "count",
        lambda count, layouts, partition_id, has_commits: count(layouts, partition_id, lambda _: True),
        RESCALED,
    ),
    "a reader is given the newest version of each shard": Bug(reads, "_version_to_read", _newest_of_each_shard, READ),
    "a reader believes whatever it knew": Bug(
        ShardReads, "_is_newest", lambda _, reads, view, cached, pinned: True, READ, first=124
    ),
    "a reader sees the change that is being made": Bug(VersionView, "_catch_up", lambda _, view: None, READ),
    "a version is read before all shards have it": Bug(versions, "newest_readable", _shards_not_waited_for, READ),
    "a version is read before Spark has finished its batch": Bug(
        versions, "newest_readable", _spark_not_waited_for, READ
    ),
    "a scan is read by other shards than it was made of": Bug(
        ReadVersion, "to", lambda to, view: replace(to(view), first_partition=None), READ_RESCALED, first=2
    ),
    "runs of a dropped state may go on": Bug(LedgerState, "_drop", _runs_outlive_their_state, DROPPED, first=11),
    "versions of a dropped state are read as empty ones": Bug(
        StateHistory, "committed", _any_version_there, DROPPED, first=77
    ),
}
#: Bugs that are only one together with another.
WITH = {
    "batches count by halves": "shards that no action asked for are left out of their batch",
    # A place of the log that was freed is not appended to, as what it followed is gone, too.
    "ages are measured by a clock that stands still while the machine sleeps": "the end of the log is not looked at",
}
#: What alone breaks nothing, as something else would see to it.
HARMLESS = {
    "the end of the log is not looked at": Bug(LogEnd, "_has_last_record", lambda _, log: True),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Run with one of the bugs."""
    with planted_of(name, {**BUGS, **HARMLESS}, WITH):
        yield


@contextmanager
def planted_of(name: str, bugs: Mapping[str, Bug], together: Mapping[str, str]) -> Iterator[None]:
    """Run with one of some bugs, and with that which it is only one together with."""
    with ExitStack() as stack:
        if name in together:
            stack.enter_context(planted_of(together[name], bugs, together))
        bug = bugs[name]
        former, original = vars(bug.owner)[bug.attribute], getattr(bug.owner, bug.attribute)

        def spoiled(*args: Any, **kwargs: Any) -> Any:
            return bug.instead(original, *args, **kwargs)

        is_of_no_instance = isinstance(former, (classmethod, staticmethod))
        stack.callback(setattr, bug.owner, bug.attribute, former)
        setattr(bug.owner, bug.attribute, staticmethod(spoiled) if is_of_no_instance else spoiled)
        yield
