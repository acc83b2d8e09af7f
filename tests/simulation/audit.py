"""Invariants: of the state that the next run would read, and of the history that is in the manifest log.

Two independent looks. `audit_state` is the next run of the query: the project's own coordinator and store, started on a copy of
the storage, asked for every shard. `audit_log` trusts none of the project's code: it folds the JSON records by rules of its
own and reads the deltas as ``docs/format.md`` says.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import pyarrow as pa
from msgspec import structs

from coordinator.model.identities import ActorLocation, TaskIdentity
from coordinator.service.coordinator import Coordinator
from tests.memory_store import MemoryObjectStore
from tests.simulation.event_loop import SimulatedLoop
from tests.simulation.keyed import Workload
from tests.simulation.scheduler import Violation
from tests.simulation.storage import RememberedObjects
from tests.simulation.workload import Entry

#: (shard, store)
ActorSlot = tuple[int, str]

_AUDITOR = ActorLocation("auditor", "auditor", "node", "host", 1)


class _Newcomer:
    """A coordinator of its own over a copy of the storage, as a store's client; nothing in it ever waits."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._loop = SimulatedLoop()  # type: ignore[abstract]
        self._coordinator = coordinator

    def leave(self) -> None:
        self._loop.abandon()

    def __getattr__(self, method: str) -> Any:
        """Return a method of the coordinator."""
        return lambda *args: self._loop.result_of(getattr(self._coordinator, method)(*args))


def audit_state(
    objects: MemoryObjectStore,
    make: Any,
    workload: Workload,
    state: str,
    query: str,
    version: int,
    forms: Mapping[int, Sequence[int]],
) -> None:
    """Compare every shard, as the next run of the query reads it, with the model.

    Parameters
    ----------
    objects
        A copy of the storage, which the audit writes to.
    forms
        Of the query, by which each batch of a shard counts (:func:`counted_forms`).
    make
        Makes a coordinator over an object store.
    version
        Batches that Spark has recorded as finished.
    """
    newcomer: Any = _Newcomer(make(objects))
    metadata = workload.metadata(state, query)
    try:
        whole = TaskIdentity(state, query, "audit", version, 0, 0, "auditor")
        shards: range = newcomer.begin_batch(whole, workload.shards, None)
        for shard in shards:
            task = structs.replace(whole, partition_id=shard)
            grant = newcomer.attach_and_lease(task, metadata, _AUDITOR)
            if grant.base_version != version:
                raise Violation(
                    f"batch {version} of shard {shard} reads version {grant.base_version}: updates are lost"
                )
            workload.check_version(objects, newcomer, grant, version, forms[shard][:version])
    finally:
        newcomer.leave()


@dataclass(slots=True)
class _History:
    """The manifest log, by its records."""

    run: str = ""
    ended: set[str] = field(default_factory=set)
    epoch: int = 0
    #: shard -> epoch of its present lease
    leases: dict[int, int] = field(default_factory=dict)
    #: (shard, store) -> counted entries, oldest first
    chains: dict[ActorSlot, list[Entry]] = field(default_factory=dict)
    #: (attempt, store)
    attempts: set[tuple[str, str]] = field(default_factory=set)
    #: (place, version, run) that were counted
    counted: set[tuple[ActorSlot, int, str]] = field(default_factory=set)
    #: (shard, store) -> oldest retained version
    floors: dict[ActorSlot, int] = field(default_factory=dict)
    #: (shard, store) -> counted snapshots
    snapshots: dict[ActorSlot, list[Entry]] = field(default_factory=dict)
    #: Rescales, by the first of the partitions that they made.
    made: dict[int, Entry] = field(default_factory=dict)
    next_partition: int = 0
    #: Those (by the same) that are more than a wish of their run.
    counting: set[int] = field(default_factory=set)
    #: Files that cleaning took for left-overs.
    discarded: set[str] = field(default_factory=set)

    def take(self, record: Entry) -> None:
        match record["kind"]:
            case "run_started":
                self._newer_epoch(record["epoch"])
                _require(
                    record["run_id"] != self.run and record["run_id"] not in self.ended, "a run started twice", record
                )
                self.ended |= {self.run}
                self.run = record["run_id"]
                void = [
                    partition
                    for partition in self.made
                    if partition not in self.counting and self.made[partition]["run_id"] != self.run
                ]
                for first in void:
                    made = self.made.pop(first)
                    for slot in [slot for slot in self.chains if first <= slot[0] < first + made["num_shards"]]:
                        for kept in (self.chains, self.snapshots, self.floors):
                            kept.pop(slot, None)
                self.leases = dict.fromkeys(self.leases, self.epoch)
            case "dropped":
                # The next state of the name begins with nothing; epochs continue, so a process that slept is refused.
                self.ended |= {self.run}
                self.run = ""
                for facts in (self.leases, self.chains, self.floors, self.snapshots, self.made):
                    facts.clear()
                self.counting, self.next_partition = set(), 0
            case "state_begun":
                _require(not self.run and not self.chains, "a state begins that has begun", record)
            case "batch_finished":
                newest = max((chain[-1]["version"] for chain in self.chains.values() if chain), default=0)
                is_of_run = record["run_id"] == self.run and newest > record["batch_id"]
                _require(is_of_run, "a batch was finished that its run has not committed", record)
            case "shards_assigned":
                self._newer_epoch(record["epoch"])
                self.leases[record["partition_id"]] = self.epoch
            case "schema_changed":
                _require(
                    record["run_id"] == self.run and record["epoch"] <= self.epoch, "a schema without its run", record
                )
            case "committed":
                self._commit(record["entry"])
            case "snapshot":
                self._snapshot(record["snapshot"])
            case "truncated":
                slot, floor = _place(record), record["floor"]
                has_snapshot = any(snapshot["version"] == floor for snapshot in self.snapshots.get(slot, ()))
                _require(
                    has_snapshot and floor > self.floors.get(slot, 0), "history is cut where no snapshot is", record
                )
                self.floors[slot] = floor
            case "discarded":
                counted = {
                    entry["file"]
                    for slot, chain in self.chains.items()
                    for entry in chain
                    if entry["version"] > self.floors.get(slot, 0)
                }
                _require(not counted & set(record["files"]), "a file that counts is discarded", record)
                self.discarded |= set(record["files"])
            case "move_failed":
                # It says what was tried; nothing follows from it.
                _require(
                    record["error"] and record["partition_id"] in self.leases, "a move that nobody could try", record
                )
            case "rescale_asked":
                _require(record["run_id"] == self.run, "a run is asked that does not go on", record)
            case "rescaled":
                _require(record["first_partition"] >= self.next_partition, "a partition is given twice", record)
                self.next_partition = record["first_partition"] + record["num_shards"]
                self.made[record["first_partition"]] = record
            case _:
                raise Violation(f"a record that no document knows: {record}")

    def _made_of(self, partition: int) -> Entry | None:
        """Return the rescale that made a partition."""
        return next(
            (rescale for first, rescale in self.made.items() if first <= partition < first + rescale["num_shards"]),
            None,
        )

    def _line(self, partition: int) -> list[Entry]:
        """Return the rescales that led to a partition, newest first."""
        line, made = [], self._made_of(partition)
        while made is not None:
            line.append(made)
            made = self._made_of(made["former_partition"])
        return line

    def _supersede_generations(self, partition: int) -> None:
        """Shards that all have a commit end those that are not of their line, and what this one left behind."""
        ends = {rescale["former_partition"]: rescale["version"] for rescale in self._line(partition)}
        rescale = self._made_of(partition)
        alive = {0 if rescale is None else rescale["first_partition"]: None, **ends}
        for slot in list(self.chains):
            made = self._made_of(slot[0])
            first = 0 if made is None else made["first_partition"]
            if first not in alive:
                del self.chains[slot]
                self.snapshots.pop(slot, None)
                self.floors.pop(slot, None)
            elif (end := alive[first]) is not None:
                self.chains[slot] = [entry for entry in self.chains[slot] if entry["version"] <= end]
                self.snapshots[slot] = [
                    snapshot for snapshot in self.snapshots.get(slot, ()) if snapshot["version"] <= end
                ]
                if not self.chains[slot]:
                    del self.chains[slot], self.snapshots[slot]
        self.made = {
            partition: made
            for partition, made in self.made.items()
            if partition in alive or partition not in self.counting
        }

    def needs(self, slot: ActorSlot) -> bool:
        """Return whether a retained version of any shard is read from the files of a slot."""
        partition, store = slot
        made = self._made_of(partition)
        first = 0 if made is None else made["first_partition"]
        later = [
            rescale
            for rescale in self.made.values()
            if rescale["former_partition"] == first and rescale["first_partition"] in self.counting
        ]
        if not later:
            return True
        children = [
            child
            for rescale in later
            for child in range(rescale["first_partition"], rescale["first_partition"] + rescale["num_shards"])
            # Numbers that leave both remainders exist.
            if (child - rescale["first_partition"] - partition + first)
            % gcd(rescale["num_shards"], rescale["former_shards"])
            == 0
        ]
        return any(not self.floors.get((child, store)) and self.needs((child, store)) for child in children)

    def _newer_epoch(self, epoch: int) -> None:
        _require(epoch > self.epoch, f"epoch {epoch} was given out before", {})
        self.epoch = epoch

    def _commit(self, entry: Entry) -> None:
        slot, version, attempt = _place(entry), entry["version"], (entry["attempt_id"], entry["store_name"])
        chain = self.chains.setdefault(slot, [])
        below = [earlier for earlier in chain if earlier["version"] < version]
        _require(entry["run_id"] == self.run, "a commit of a run that was replaced counts", entry)
        _require(entry["epoch"] == self.leases.get(slot[0]), "a commit of an owner that was replaced counts", entry)
        _require(attempt not in self.attempts, "an attempt counts twice", entry)
        _require((slot, version, self.run) not in self.counted, "two attempts of one run count for a version", entry)
        made = self._made_of(slot[0])
        first = 0 if made is None else made["version"]
        _require(
            entry["base_version"] == (below[-1]["version"] if below else first), "a version forks the chain", entry
        )
        _require(made is None or version > first, "a shard has a version from before it was made", entry)
        _require(entry["file"] not in self.discarded, "a file that was discarded counts", entry)
        self.attempts.add(attempt)
        self.counted.add((slot, version, self.run))
        self.chains[slot] = [*below, entry]
        self.snapshots[slot] = [snapshot for snapshot in self.snapshots.get(slot, ()) if snapshot["version"] < version]
        for sibling in [peer for peer in self.chains if peer[0] == slot[0]]:
            # Also what an earlier run counted of stores that this one does not ask for.
            kept = [
                committed
                for committed in self.chains[sibling]
                if committed["version"] < version or committed["epoch"] >= entry["epoch"]
            ]
            superseded = {committed["version"] for committed in self.chains[sibling]} - {
                committed["version"] for committed in kept
            }
            self.chains[sibling] = kept
            self.snapshots[sibling] = [
                snapshot for snapshot in self.snapshots.get(sibling, ()) if snapshot["version"] not in superseded
            ]
        if made is not None and made["first_partition"] not in self.counting and self._is_whole(made):
            self.counting |= {rescale["first_partition"] for rescale in self._line(slot[0])}
            self._supersede_generations(slot[0])

    def _is_whole(self, made: Entry) -> bool:
        partitions = range(made["first_partition"], made["first_partition"] + made["num_shards"])
        return {partition for (partition, _), chain in self.chains.items() if chain} >= set(partitions)

    def _snapshot(self, snapshot: Entry) -> None:
        slot, version = _place(snapshot), (snapshot["version"], snapshot["attempt_id"])
        counted = [(entry["version"], entry["attempt_id"]) for entry in self.chains.get(slot, ())]
        _require(version in counted, "a snapshot of a version that does not count", snapshot)
        _require(snapshot["file"] not in self.discarded, "a file that was discarded counts", snapshot)
        self.snapshots.setdefault(slot, []).append(snapshot)

    def check_stores_are_together(self, stores: tuple[str, ...]) -> None:
        """Check that all stores of a shard are at the same commits, for a process that loads the log up to here."""
        for shard in {shard for shard, _ in self.chains}:
            ends = {store: self.chains.get((shard, store), [{}])[-1].get("attempt_id") for store in stores}
            _require(len(set(ends.values())) == 1, f"stores of shard {shard} do not commit together", ends)


def _place(record: Entry) -> ActorSlot:
    return record["partition_id"], record["store_name"]


def _require(holds: bool, violation: str, record: Entry) -> None:
    if not holds:
        raise Violation(f"{violation}: {record}")


def logged(objects: RememberedObjects, state: str) -> Iterator[Entry]:
    """Yield all records that ever were in the state's log, in their order."""
    for path in sorted(path for path in objects.ever if path.startswith(f"{state}/manifest/")):
        yield from json.loads(objects.ever[path])["records"]


def counted_forms(objects: RememberedObjects, state: str, form_of: Callable[[str], int]) -> dict[int, list[int]]:
    """Return the forms of the query by which each batch of a shard counts, by the log; also of versions that were replaced since."""
    runs: dict[int, dict[int, str]] = defaultdict(dict)
    for record in logged(objects, state):
        if record["kind"] == "dropped":
            runs.clear()
        elif record["kind"] == "committed":
            entry = record["entry"]
            versions = runs[entry["partition_id"]]
            for later in [version for version in versions if version > entry["version"]]:
                del versions[later]
            versions[entry["version"]] = entry["run_id"]
    return defaultdict(
        list,
        {
            shard: [form_of(runs_by_version[at]) for at in sorted(runs_by_version)]
            for shard, runs_by_version in runs.items()
        },
    )


def audit_log(objects: RememberedObjects, workload: Workload, state: str, form_of: Callable[[str], int]) -> int:
    """Check the whole manifest log and the files it names, also those that were cleaned since; return the number of records.

    Raises
    ------
    Violation
        A gap, or a number that was taken twice; a commit by an owner or a run that had been replaced; a version with two
        attempts of one run; a fork; a retained file that is missing; a version or snapshot whose rows are not the model's; a
        removed group that comes back.
    """
    checkpoints = [info.path for info in objects.list(f"{state}/checkpoints")]
    # What a coordinator from the past writes where the log was cleaned away must never be read.
    # Metadata go with a state that is dropped, and come with the next one of its name.
    read = [
        path
        for path in objects.rewritten
        if path > f"{state}/manifest/{(checkpoints or [''])[-1].rpartition('/')[2]}"
        and path != f"{state}/metadata.json"
    ]
    _require(not read, f"objects were written anew: {read}", {})
    paths = sorted(path for path in objects.ever if path.startswith(f"{state}/manifest/"))
    history, records = _History(), 0
    for seq, path in enumerate(paths, 1):
        body = json.loads(objects.ever[path])
        _require(body["seq"] == seq == int(path.rpartition("/")[2].partition(".")[0]), "a gap in the log", body)
        for record in body["records"]:
            history.take(record)
            records += 1
        history.check_stores_are_together(workload.stores)
    stored = {info.path for info in objects.list(state)}

    def read(entry: Entry) -> pa.Table:
        return pa.ipc.open_file(io.BytesIO(objects.ever[entry["file"]])).read_all()

    for shard in sorted({shard for shard, _ in history.chains}):
        chains = {store: chain for (partition, store), chain in history.chains.items() if partition == shard}
        workload.check_history(shard, chains, read, form_of)
    for slot, chain in history.chains.items():
        if not history.needs(slot):
            continue
        floor = history.floors.get(slot, 0)
        retained = [snapshot for snapshot in history.snapshots.get(slot, ()) if snapshot["version"] >= floor]
        for snapshot in retained:
            workload.check_snapshot(snapshot, read)
        for entry in [*retained, *(entry for entry in chain if entry["version"] > floor)]:
            _require(entry["file"] in stored, "a file that a retained version needs is gone", entry)
    _require(not _has_run_of_the_past(objects, state), "a run began before batches that were finished", {})
    return records


def _has_run_of_the_past(objects: RememberedObjects, state: str) -> bool:
    """Return whether a run started at a batch before the last that the state had versions of."""
    newest: dict[int, int] = {}
    for record in logged(objects, state):
        if record["kind"] == "dropped":
            newest.clear()
        elif record["kind"] == "committed":
            newest[record["entry"]["partition_id"]] = record["entry"]["version"]
        elif record["kind"] == "run_started" and max(newest.values(), default=0) > record["batch_id"] + 1:
            return True
    return False
