"""The coordinator's rules, pure: records in, decisions out. No I/O, no clock, no randomness, no Ray.

Theory of operation
-------------------
A state's truth is its manifest log (``manifest_log.py``), a sequence of records that only grows. :class:`StateLedger` is the
fold of that sequence. A ``decide_*`` method reads the ledger and returns the records that would make its answer true,
changing nothing; the answer is given only once those records are in the log. So whoever replays the log (a restarted
coordinator) answers the same, and whoever has an old ledger (a zombie) cannot append, because its place in the log is taken.

Epochs are one counter a state. A run that starts takes the next epoch, and every lease moves to it: from then on commits of
older runs are refused. A shard given to another store actor takes the next epoch: from then on commits of its former owner
are refused.

Versions: batch ``b`` reads the newest counted version ``<= b`` of its shard and commits ``b + 1``. (Usually that is version ``b``;
Spark may optimise a batch without input away, in which case the shard skips a version.) A later run that commits a version
supersedes what earlier runs counted from that version on: the batch had failed or is being replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from coordinator.errors import FencedError, InvalidRequestError, StateMismatchError
from coordinator.model import (
    ActorLocation,
    CommitEntry,
    Lease,
    RecordKind,
    StateMetadata,
    StateStoreId,
    StateStoreProviderId,
    TaskIdentity,
)

__all__ = ["InstanceRegistry", "LeaseGrant", "Record", "StateLedger", "check_metadata"]

#: One record of the manifest log, as JSON data: ``kind`` (a RecordKind) and the kind's own fields.
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """A lease and the version that the task's batch reads."""

    lease: Lease
    base_version: int


@dataclass(frozen=True, slots=True)
class _Assignment:
    epoch: int
    location: ActorLocation


def check_metadata(existing: StateMetadata, asked: StateMetadata) -> None:
    """Refuse a query that does not fit the state.

    Raises
    ------
    StateMismatchError
        Schema, number of shards or output mode differ; both are shown.
    """
    facts = {"state": existing.state_name}
    if existing.num_shards != asked.num_shards:
        raise StateMismatchError(
            "the number of shards is fixed for the life of a state; ask for the existing number (or leave it out), or use "
            "another name",
            existing=existing.num_shards,
            asked=asked.num_shards,
            **facts,
        )
    if existing.output_mode != asked.output_mode:
        raise StateMismatchError(
            "the state was made in another output mode; use that, or another name",
            existing=existing.output_mode,
            asked=asked.output_mode,
            **facts,
        )
    for part in ("keys", "accumulators", "inputs", "expiry_key", "delay_ms"):
        if existing.schema.get(part) != asked.schema.get(part) and _state_part(existing, part) != _state_part(
            asked, part
        ):
            raise StateMismatchError(
                f"the query's {part} differ from those of the existing state, whose rows it could not read; nothing was "
                "changed; restore the query, or use another name for the new one",
                existing=_brief(existing.schema.get(part)),
                asked=_brief(asked.schema.get(part)),
                **facts,
            )


def _state_part(metadata: StateMetadata, part: str) -> Any:
    """What of a schema's part must stay: state fields and kinds, not how the query computes its inputs or its delay."""
    if part in ("inputs", "delay_ms"):
        return None
    if part == "accumulators":
        return [(item["kind"], [_typed(field) for field in item["state"]]) for item in metadata.schema.get(part, [])]
    if part == "keys":
        return [_typed(field) for field in metadata.schema.get(part, [])]
    return metadata.schema.get(part)


def _typed(field: Mapping[str, Any]) -> tuple[Any, Any]:
    return field["name"], field["type"]


def _brief(part: Any) -> Any:
    """A schema part as a person reads it: ``name type`` for fields, ``kind(inputs)`` for accumulators."""
    if not isinstance(part, list | tuple):
        return part
    return ", ".join(
        f"{item['name']} {item['type']}"
        if "type" in item
        else f"{item['kind']}({', '.join(item['inputs'])}) {' '.join(field['type'] for field in item['state'])}"
        for item in part
    )


class StateLedger:
    """Everything decided about one state so far.

    Parameters
    ----------
    root
        Folder of the state, ``<fleet uri>/<state name>``.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.epoch = 0
        self.run_id = ""
        self.query_id = ""
        #: Runs that a newer run has replaced; they may not lease or commit any more.
        self.retired: set[str] = set()
        self._assignments: dict[int, _Assignment] = {}
        #: Counted entries of each shard, versions ascending.
        self._chains: dict[int, list[CommitEntry]] = {}

    @property
    def state_name(self) -> str:
        return self.root.rsplit("/", 1)[-1]

    # -- reading --------------------------------------------------------------------------------------------------

    def newest(self, partition_id: int) -> CommitEntry | None:
        """Newest counted entry of a shard."""
        chain = self._chains.get(partition_id)
        return chain[-1] if chain else None

    def commit_chain(self, partition_id: int, version: int) -> tuple[CommitEntry, ...]:
        """Counted entries of a shard up to a version; their deltas in order make it."""
        return tuple(entry for entry in self._chains.get(partition_id, ()) if entry.version <= version)

    def base_version(self, partition_id: int, batch_id: int) -> int:
        """Version that a batch reads: the newest counted one up to the batch's number, 0 without any."""
        for entry in reversed(self._chains.get(partition_id, ())):
            if entry.version <= batch_id:
                return entry.version
        return 0

    def location(self, partition_id: int) -> tuple[int, ActorLocation] | None:
        """(epoch, store actor) of a shard's present lease."""
        assignment = self._assignments.get(partition_id)
        return None if assignment is None else (assignment.epoch, assignment.location)

    def has_versions(self) -> bool:
        return any(self._chains.values())

    # -- deciding -------------------------------------------------------------------------------------------------

    def check_query(self, task: TaskIdentity) -> None:
        """Refuse a task whose query does not own the state.

        Raises
        ------
        StateMismatchError
            Another query wrote the state, or the checkpoint is ahead of a state that has nothing.
        FencedError
            A newer run of the query has started.
        """
        if task.run_id in self.retired:
            raise FencedError(
                "a newer run of this query has taken the state over; this run may not touch it any more; nothing of "
                "this batch was committed by it",
                state=self.state_name,
                run_id=task.run_id,
                newer_run_id=self.run_id,
            )
        if self.has_versions():
            if self.query_id != task.query_id:
                raise StateMismatchError(
                    "the state belongs to another query (each checkpoint is a query of its own); start with the checkpoint "
                    "that the state was made with, or use another name",
                    state=self.state_name,
                    owner_query_id=self.query_id,
                    query_id=task.query_id,
                )
        elif task.batch_id > 0:
            raise StateMismatchError(
                "the checkpoint has finished batches but the state has no version; refusing to count from nothing; restore the "
                "state's folder, or start with a new checkpoint",
                state=self.state_name,
                root=self.root,
                batch_id=task.batch_id,
            )

    def decide_lease(
        self, task: TaskIdentity, local: ActorLocation, is_lost: Callable[[ActorLocation], bool]
    ) -> tuple[list[Record], LeaseGrant]:
        """Give a task the store actor of its shard.

        The shard stays where it is as long as that store actor lives, also when a new run starts: hot state survives the
        driver. Otherwise it goes to `local`, the store actor of the task's own node.
        """
        self.check_query(task)
        records: list[Record] = []
        epoch = self.epoch
        if task.run_id != self.run_id:
            epoch += 1
            records.append(
                {
                    "kind": RecordKind.RUN_STARTED,
                    "run_id": task.run_id,
                    "query_id": task.query_id,
                    "batch_id": task.batch_id,
                    "epoch": epoch,
                }
            )
        assignment = self._assignments.get(task.partition_id)
        if assignment is not None and not is_lost(assignment.location):
            lease_epoch = epoch if records else assignment.epoch
            location = assignment.location
        else:
            lease_epoch, location = epoch + 1, local
            records.append(
                {
                    "kind": RecordKind.SHARDS_ASSIGNED,
                    "partition_id": task.partition_id,
                    "epoch": lease_epoch,
                    "location": asdict(local),
                }
            )
        store_id = StateStoreId(self.root, 0, task.partition_id)
        lease = Lease(store_id=store_id, run_id=task.run_id, epoch=lease_epoch, location=location)
        return records, LeaseGrant(lease, self.base_version(task.partition_id, task.batch_id))

    def decide_commit(self, entry: CommitEntry) -> tuple[list[Record], CommitEntry]:
        """Count a commit, or say which one counts.

        Raises
        ------
        FencedError
            The run or the lease is no longer the newest; nothing was counted.
        InvalidRequestError
            The entry builds on a version that is not the one below it.
        """
        chain = self._chains.get(entry.partition_id, [])
        for counted in chain:
            if counted.attempt_id == entry.attempt_id:
                return [], counted
        assignment = self._assignments.get(entry.partition_id)
        if entry.run_id != self.run_id or assignment is None or entry.epoch != assignment.epoch:
            raise FencedError(
                "a newer owner holds this shard; the commit was not counted and no version changed",
                state=self.state_name,
                partition=entry.partition_id,
                version=entry.version,
                epoch=entry.epoch,
                newest_epoch=None if assignment is None else assignment.epoch,
            )
        for counted in chain:
            if counted.version == entry.version and counted.run_id == entry.run_id:
                return [], counted
        base = self.base_version(entry.partition_id, entry.version - 1)
        if entry.base_version != base:
            raise InvalidRequestError(
                "the commit builds on a version that is not the newest below it; nothing was counted",
                state=self.state_name,
                partition=entry.partition_id,
                version=entry.version,
                base_version=entry.base_version,
                expected=base,
            )
        return [{"kind": RecordKind.COMMITTED, "entry": entry.to_json()}], entry

    # -- folding --------------------------------------------------------------------------------------------------

    def fold(self, record: Mapping[str, Any]) -> None:
        """Take one record of the log in."""
        match RecordKind(record["kind"]):
            case RecordKind.RUN_STARTED:
                if self.run_id:
                    self.retired.add(self.run_id)
                self.run_id, self.query_id, self.epoch = record["run_id"], record["query_id"], record["epoch"]
                self._assignments = {
                    partition: replace(assignment, epoch=self.epoch)
                    for partition, assignment in self._assignments.items()
                }
            case RecordKind.SHARDS_ASSIGNED:
                self.epoch = record["epoch"]
                location = ActorLocation(**record["location"])
                self._assignments[record["partition_id"]] = _Assignment(self.epoch, location)
            case RecordKind.COMMITTED:
                entry = CommitEntry.from_json(record["entry"])
                chain = self._chains.setdefault(entry.partition_id, [])
                while chain and chain[-1].version >= entry.version:
                    chain.pop()
                chain.append(entry)

    def to_json(self) -> dict[str, Any]:
        """The ledger as data, for a checkpoint of the log."""
        return {
            "epoch": self.epoch,
            "run_id": self.run_id,
            "query_id": self.query_id,
            "retired": sorted(self.retired),
            "assignments": {str(key): asdict(value) for key, value in self._assignments.items()},
            "chains": {str(key): [entry.to_json() for entry in chain] for key, chain in self._chains.items()},
        }

    @classmethod
    def from_json(cls, root: str, data: Mapping[str, Any]) -> StateLedger:
        """Ledger of a checkpoint."""
        ledger = cls(root)
        ledger.epoch, ledger.run_id, ledger.query_id = data["epoch"], data["run_id"], data["query_id"]
        ledger.retired = set(data["retired"])
        ledger._assignments = {
            int(key): _Assignment(value["epoch"], ActorLocation(**value["location"]))
            for key, value in data["assignments"].items()
        }
        ledger._chains = {
            int(key): [CommitEntry.from_json(entry) for entry in chain] for key, chain in data["chains"].items()
        }
        return ledger


class InstanceRegistry:
    """Which store actor has which shard loaded, per query run: Spark's StateStoreCoordinator, message by message.

    Volatile on purpose, as in Spark: it is a hint for placement and unloading. Who may commit is the ledger's matter.
    """

    def __init__(self) -> None:
        self._instances: dict[StateStoreProviderId, ActorLocation] = {}

    def report_active_instance(
        self, provider_id: StateStoreProviderId, location: ActorLocation, ids_to_check: Iterable[StateStoreProviderId]
    ) -> list[StateStoreProviderId]:
        """Record that a store actor has loaded a shard (the last reporter wins).

        Returns
        -------
        list of StateStoreProviderId
            Those of `ids_to_check` that are recorded elsewhere or nowhere: the reporter should unload them.
        """
        self._instances[provider_id] = location
        return [other for other in ids_to_check if not self.verify_if_instance_active(other, location)]

    def verify_if_instance_active(self, provider_id: StateStoreProviderId, location: ActorLocation) -> bool:
        """Whether the shard is recorded at exactly this store actor."""
        recorded = self._instances.get(provider_id)
        return recorded is not None and recorded.instance_id == location.instance_id

    def get_location(self, provider_id: StateStoreProviderId) -> ActorLocation | None:
        """Store actor that has the shard loaded, None if nobody reported it."""
        return self._instances.get(provider_id)

    def deactivate_instances(self, run_id: str) -> int:
        """Forget all shards of one query run; returns how many there were."""
        ended = [provider_id for provider_id in self._instances if provider_id.query_run_id == run_id]
        for provider_id in ended:
            del self._instances[provider_id]
        return len(ended)
