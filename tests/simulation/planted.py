"""Bugs to plant: each takes one safeguard of the protocol away. A simulation that finds none of them proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import store_actors.serving.operator_shards
from coordinator.actor import Coordinator
from coordinator.cleaning_rules import check_age
from coordinator.core import StateLedger
from coordinator.errors import CommitUnknownError, FencedError, StateStoreError
from coordinator.manifest_log import LogConflictError, ManifestLog
from coordinator.model import CommitEntry, RecordKind
from store_actors.serving.keyed_partition import Positioner
from store_actors.serving.operator_shards import Store

__all__ = ["BUGS", "KEYED_BUGS", "planted"]


def _conflicts_ignored(append: Callable[..., None]) -> Callable[..., None]:
    def careless(log: Any, records: Any, ledger: Any) -> None:
        try:
            append(log, records, ledger)
        except LogConflictError:
            log._seq += 1

    return careless


def _owners_not_fenced(decide_commits: Callable[..., Any]) -> Callable[..., Any]:
    def careless(ledger: StateLedger, entries: Sequence[CommitEntry]) -> Any:
        try:
            return decide_commits(ledger, entries)
        except FencedError:
            return [{"kind": RecordKind.COMMITTED, "entry": entry.to_json()} for entry in entries], tuple(entries)

    return careless


def _lineage_not_verified(_: Callable[..., None]) -> Callable[..., None]:
    def careless(store: Any, held: Any, request: Any) -> None:
        if held.shard is not None and not held.shard.rollback(request.base_version):
            held.forget()

    return careless


def _silence_taken_for_success(put: Callable[..., None]) -> Callable[..., None]:
    def careless(log: Any, path: str, data: bytes, record_id: str) -> None:
        try:
            if log._store.put_if_absent(path, data):
                return
        except CommitUnknownError:
            return
        put(log, path, data, record_id)

    return careless


def _past_runs_welcome(_: Callable[..., None]) -> Callable[..., None]:
    return lambda ledger, task: None


def _memory_taken_for_log(_: Callable[..., bool]) -> Callable[..., bool]:
    return lambda log: True


def _files_of_failed_commits_deleted(_: Any) -> Any:
    # The store deletes a delta only when it was told that it does not count; here: after any failure.
    return StateStoreError


def _age_checked_at_the_door(_: Callable[..., Any]) -> Callable[..., Any]:
    async def careless(actor: Any, state_name: str, entries: Sequence[CommitEntry]) -> tuple[CommitEntry, ...]:
        now_ms = int(actor._store.now_s() * 1000)
        for entry in entries:
            check_age(entry.file, entry.committed_at_ms, now_ms, actor._maintenance.grace_s)
        keeper = await actor._keeper(state_name)
        counted: tuple[CommitEntry, ...] = await keeper.submit(lambda ledger: ledger.decide_commits(entries))
        return counted

    return careless


def _records_one_by_one(append: Callable[..., None]) -> Callable[..., None]:
    def careless(log: Any, records: Any, ledger: Any) -> None:
        for record in records:
            append(log, [record], ledger)

    return careless


def _keyed_lineage_not_verified(position: Callable[..., None]) -> Callable[..., None]:
    def careless(positioner: Any, partition: Any, request: Any) -> None:
        plan = positioner._plan(request, request.stores[0])
        partition.attempts[request.base_version] = plan.deltas[-1].attempt_id if plan.deltas else ""
        position(positioner, partition, request)

    return careless


def _newest_not_rolled_back(position: Callable[..., None]) -> Callable[..., None]:
    def careless(positioner: Any, partition: Any, request: Any) -> None:
        newest = dict(partition.newest)
        position(positioner, partition, request)
        partition.newest = newest

    return careless


#: Those of sessions on keyed stores; see BUGS.
KEYED_BUGS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "records that belong together are appended one by one": (ManifestLog, "append", _records_one_by_one),
    "keyed stores in memory are used without a look at their lineage": (
        Positioner,
        "position",
        _keyed_lineage_not_verified,
    ),
    "a snapshot of what was rolled back to is taken for the newest version": (
        Positioner,
        "position",
        _newest_not_rolled_back,
    ),
}
#: name -> (owner, attribute, what to make of it)
BUGS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "conflicts of the log are ignored": (ManifestLog, "append", _conflicts_ignored),
    "replaced owners may commit": (StateLedger, "decide_commits", _owners_not_fenced),
    "memory is used without a look at its lineage": (Store, "_verify_lineage", _lineage_not_verified),
    "a put without an answer is taken for done": (ManifestLog, "_put", _silence_taken_for_success),
    "runs that were replaced may come back": (StateLedger, "check_query", _past_runs_welcome),
    "a coordinator answers from an old memory": (ManifestLog, "is_newest", _memory_taken_for_log),
    "files of failed commits are deleted": (
        store_actors.serving.operator_shards,
        "FencedError",
        _files_of_failed_commits_deleted,
    ),
    "the age of a commit is checked before it waits": (Coordinator, "commit_all", _age_checked_at_the_door),
    **KEYED_BUGS,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Run with one of the bugs."""
    owner, attribute, spoil = BUGS[name]
    sound = getattr(owner, attribute)
    setattr(owner, attribute, spoil(sound))
    try:
        yield
    finally:
        setattr(owner, attribute, sound)
