"""What must hold: of the state that a newcomer would read, and of the history that the manifest log tells.

Two independent looks. `audit_state` is the next run of the query: the project's own coordinator and store, started on a copy of
the storage, asked for every shard. `audit_log` trusts none of the project's code: it folds the JSON records by rules of its
own and reads the deltas as ``docs/format.md`` says.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

import pyarrow as pa

from coordinator.ledger.rescaling import BatchShards
from coordinator.model.identities import ActorLocation, TaskIdentity
from coordinator.service.coordinator import Coordinator
from coordinator.storage.memory import MemoryObjectStore
from tests.simulation.event_loop import SimulatedLoop
from tests.simulation.scheduler import Violation
from tests.simulation.storage import RememberedObjects
from tests.simulation.workload import Entry, Workload

__all__ = ["audit_log", "audit_state", "counted_forms"]

#: (shard, store)
ActorSlot = tuple[int, str]

_AUDITOR = ActorLocation("auditor", "auditor", "node", "host", 1)


class _Newcomer:
    """A coordinator of its own over a copy of the storage, as a store's client; nothing in it ever waits."""

    def __init__(self, objects: MemoryObjectStore, make: Any) -> None:
        self._loop = SimulatedLoop()  # type: ignore[abstract]
        self._coordinator: Coordinator = make(objects)

    def ask(self, method: str, *args: Any) -> Any:
        return self._loop.result_of(getattr(self._coordinator, method)(*args))

    def leave(self) -> None:
        self._loop.abandon()

    def __getattr__(self, method: str) -> Any:
        """What a store asks of the coordinator is a method of the coordinator."""
        return lambda *args: self.ask(method, *args)


def audit_state(
    objects: MemoryObjectStore,
    make: Any,
    workload: Workload,
    state: str,
    query: str,
    version: int,
    forms: Mapping[int, Sequence[int]],
) -> None:
    """Every shard as the next run of the query reads it, against the model.

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
    newcomer: Any = _Newcomer(objects, make)
    metadata = workload.metadata(state, query)
    try:
        whole = TaskIdentity(state, query, "audit", version, 0, 0, "auditor")
        shards: BatchShards = newcomer.ask("begin_batch", whole, workload.shards, None)
        for shard in shards.partitions:
            task = replace(whole, partition_id=shard)
            grant = newcomer.ask("attach_and_lease", task, metadata, _AUDITOR)
            if grant.base_version != version:
                raise Violation(
                    f"batch {version} of shard {shard} reads version {grant.base_version}: updates are lost"
                )
            workload.check_version(objects, newcomer, grant, version, forms[shard][:version])
    finally:
        newcomer.leave()


@dataclass(slots=True)
class _History:
    """The manifest log as told by its records."""

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
    given: int = 0
    #: Those (by the same) that are more than a wish of their run.
    counting: set[int] = field(default_factory=set)
    #: Files that cleaning took for nobody's.
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
                void = [one for one in self.made if one not in self.counting and self.made[one]["run_id"] != self.run]
                for first in void:
                    made = self.made.pop(first)
                    for place in [one for one in self.chains if first <= one[0] < first + made["num_shards"]]:
                        for kept in (self.chains, self.snapshots, self.floors):
                            kept.pop(place, None)
                self.leases = dict.fromkeys(self.leases, self.epoch)
            case "dropped":
                # The next state of the name begins with nothing; epochs go on, so whoever slept is refused.
                self.ended |= {self.run}
                self.run = ""
                for facts in (self.leases, self.chains, self.floors, self.snapshots, self.made):
                    facts.clear()
                self.counting, self.given = set(), 0
            case "state_begun":
                _require(not self.run and not self.chains, "a state begins that has begun", record)
            case "batch_finished":
                newest = max((one[-1]["version"] for one in self.chains.values() if one), default=0)
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
                place, floor = _place(record), record["floor"]
                shown = any(one["version"] == floor for one in self.snapshots.get(place, ()))
                _require(shown and floor > self.floors.get(place, 0), "history is cut where no snapshot is", record)
                self.floors[place] = floor
            case "discarded":
                counted = {
                    one["file"]
                    for place, chain in self.chains.items()
                    for one in chain
                    if one["version"] > self.floors.get(place, 0)
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
                _require(record["first_partition"] >= self.given, "a partition is given twice", record)
                self.given = record["first_partition"] + record["num_shards"]
                self.made[record["first_partition"]] = record
            case _:
                raise Violation(f"a record that no document knows: {record}")

    def _made_of(self, partition: int) -> Entry | None:
        """The rescale that made a partition."""
        return next((one for first, one in self.made.items() if first <= partition < first + one["num_shards"]), None)

    def _line(self, partition: int) -> list[Entry]:
        """The rescales that led to a partition, newest first."""
        found, made = [], self._made_of(partition)
        while made is not None:
            found.append(made)
            made = self._made_of(made["former_partition"])
        return found

    def _supersede_generations(self, partition: int) -> None:
        """Shards of which all have a commit are the end of all that are not of their line, and of what this one left behind."""
        ends = {one["former_partition"]: one["version"] for one in self._line(partition)}
        own = self._made_of(partition)
        alive = {0 if own is None else own["first_partition"]: None, **ends}
        for place in list(self.chains):
            made = self._made_of(place[0])
            first = 0 if made is None else made["first_partition"]
            if first not in alive:
                del self.chains[place]
                self.snapshots.pop(place, None)
                self.floors.pop(place, None)
            elif (end := alive[first]) is not None:
                self.chains[place] = [one for one in self.chains[place] if one["version"] <= end]
                self.snapshots[place] = [one for one in self.snapshots.get(place, ()) if one["version"] <= end]
                if not self.chains[place]:
                    del self.chains[place], self.snapshots[place]
        self.made = {one: made for one, made in self.made.items() if one in alive or one not in self.counting}

    def needs(self, place: ActorSlot) -> bool:
        """Whether a retained version of any shard is read from the files of a place."""
        partition, store = place
        made = self._made_of(partition)
        first = 0 if made is None else made["first_partition"]
        later = [
            one
            for one in self.made.values()
            if one["former_partition"] == first and one["first_partition"] in self.counting
        ]
        if not later:
            return True
        children = [
            child
            for one in later
            for child in range(one["first_partition"], one["first_partition"] + one["num_shards"])
            # Numbers that leave both remainders exist.
            if (child - one["first_partition"] - partition + first) % gcd(one["num_shards"], one["former_shards"]) == 0
        ]
        return any(not self.floors.get((child, store)) and self.needs((child, store)) for child in children)

    def _newer_epoch(self, epoch: int) -> None:
        _require(epoch > self.epoch, f"epoch {epoch} was given out before", {})
        self.epoch = epoch

    def _commit(self, entry: Entry) -> None:
        place, version, attempt = _place(entry), entry["version"], (entry["attempt_id"], entry["store_name"])
        chain = self.chains.setdefault(place, [])
        below = [one for one in chain if one["version"] < version]
        _require(entry["run_id"] == self.run, "a commit of a run that was replaced counts", entry)
        _require(entry["epoch"] == self.leases.get(place[0]), "a commit of an owner that was replaced counts", entry)
        _require(attempt not in self.attempts, "an attempt counts twice", entry)
        _require((place, version, self.run) not in self.counted, "two attempts of one run count for a version", entry)
        made = self._made_of(place[0])
        first = 0 if made is None else made["version"]
        _require(
            entry["base_version"] == (below[-1]["version"] if below else first), "a version forks the chain", entry
        )
        _require(made is None or version > first, "a shard has a version from before it was made", entry)
        _require(entry["file"] not in self.discarded, "a file that was discarded counts", entry)
        self.attempts.add(attempt)
        self.counted.add((place, version, self.run))
        self.chains[place] = [*below, entry]
        self.snapshots[place] = [one for one in self.snapshots.get(place, ()) if one["version"] < version]
        for other in [one for one in self.chains if one[0] == place[0]]:
            # Also what an earlier run counted of stores that this one does not ask for.
            kept = [one for one in self.chains[other] if one["version"] < version or one["epoch"] >= entry["epoch"]]
            gone = {one["version"] for one in self.chains[other]} - {one["version"] for one in kept}
            self.chains[other] = kept
            self.snapshots[other] = [one for one in self.snapshots.get(other, ()) if one["version"] not in gone]
        if made is not None and made["first_partition"] not in self.counting and self._is_whole(made):
            self.counting |= {one["first_partition"] for one in self._line(place[0])}
            self._supersede_generations(place[0])

    def _is_whole(self, made: Entry) -> bool:
        partitions = range(made["first_partition"], made["first_partition"] + made["num_shards"])
        return {one for (one, _), chain in self.chains.items() if chain} >= set(partitions)

    def _snapshot(self, snapshot: Entry) -> None:
        place, shown = _place(snapshot), (snapshot["version"], snapshot["attempt_id"])
        counted = [(entry["version"], entry["attempt_id"]) for entry in self.chains.get(place, ())]
        _require(shown in counted, "a snapshot of a version that does not count", snapshot)
        _require(snapshot["file"] not in self.discarded, "a file that was discarded counts", snapshot)
        self.snapshots.setdefault(place, []).append(snapshot)

    def check_stores_are_together(self, stores: tuple[str, ...]) -> None:
        """Whoever loads the log up to here finds all stores of a shard at the same commits."""
        for shard in {shard for shard, _ in self.chains}:
            ends = {store: self.chains.get((shard, store), [{}])[-1].get("attempt_id") for store in stores}
            _require(len(set(ends.values())) == 1, f"stores of shard {shard} do not commit together", ends)


def _place(record: Entry) -> ActorSlot:
    return record["partition_id"], record["store_name"]


def _require(holds: bool, what: str, record: Entry) -> None:
    if not holds:
        raise Violation(f"{what}: {record}")


def counted_forms(objects: RememberedObjects, state: str, form_of: Callable[[str], int]) -> dict[int, list[int]]:
    """Forms of the query by which each batch of a shard counts, as the log tells; also of versions that were let go since."""
    runs: dict[int, dict[int, str]] = defaultdict(dict)
    for path in sorted(path for path in objects.ever if path.startswith(f"{state}/manifest/")):
        for record in json.loads(objects.ever[path])["records"]:
            if record["kind"] == "dropped":
                runs.clear()
            elif record["kind"] == "committed":
                entry = record["entry"]
                versions = runs[entry["partition_id"]]
                for later in [version for version in versions if version > entry["version"]]:
                    del versions[later]
                versions[entry["version"]] = entry["run_id"]
    return defaultdict(list, {shard: [form_of(one[at]) for at in sorted(one)] for shard, one in runs.items()})


def audit_log(objects: RememberedObjects, workload: Workload, state: str, form_of: Callable[[str], int]) -> int:
    """The whole manifest log and the files it names, also what was cleaned away since; returns the number of records.

    Raises
    ------
    Violation
        A gap, or a place that was taken twice; a commit by an owner or a run that had been replaced; a version with two
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
    here = {info.path for info in objects.list(state)}

    def read(entry: Entry) -> pa.Table:
        return pa.ipc.open_file(io.BytesIO(objects.ever[entry["file"]])).read_all()

    for shard in sorted({shard for shard, _ in history.chains}):
        chains = {store: chain for (one, store), chain in history.chains.items() if one == shard}
        workload.check_history(shard, chains, read, form_of)
    for place, chain in history.chains.items():
        if not history.needs(place):
            continue
        floor = history.floors.get(place, 0)
        retained = [one for one in history.snapshots.get(place, ()) if one["version"] >= floor]
        for snapshot in retained:
            workload.check_snapshot(snapshot, read)
        for entry in [*retained, *(entry for entry in chain if entry["version"] > floor)]:
            _require(entry["file"] in here, "a file that a retained version needs is gone", entry)
    _require(not _has_run_of_the_past(objects, state), "a run began before batches that were finished", {})
    return records


def _has_run_of_the_past(objects: RememberedObjects, state: str) -> bool:
    """Whether a run started at a batch before the last that the state had versions of."""
    newest: dict[int, int] = {}
    for path in sorted(path for path in objects.ever if path.startswith(f"{state}/manifest/")):
        for record in json.loads(objects.ever[path])["records"]:
            if record["kind"] == "dropped":
                newest.clear()
            elif record["kind"] == "committed":
                newest[record["entry"]["partition_id"]] = record["entry"]["version"]
            elif record["kind"] == "run_started" and max(newest.values(), default=0) > record["batch_id"] + 1:
                return True
    return False
