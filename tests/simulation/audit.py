"""What must hold: of the state that a newcomer would read, and of the history that the manifest log tells.

Two independent looks. `audit_state` is the next run of the query: the project's own coordinator and store, started on a copy of
the storage, asked for every shard. `audit_log` trusts none of the project's code: it folds the JSON records by rules of its
own and reads the deltas as ``docs/format.md`` says.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from coordinator.actor import Coordinator
from coordinator.model import (
    ActorLocation,
    StateMetadata,
    TaskIdentity,
)
from coordinator.storage import MemoryObjectStore
from store_actors.store import Store
from tests.simulation.event_loop import SimulatedLoop
from tests.simulation.scheduler import Violation
from tests.simulation.storage import RememberedObjects
from tests.simulation.workload import Groups, Workload, groups_of, history_of, stamps_of

__all__ = ["audit_log", "audit_state", "compare"]

_AUDITOR = ActorLocation("auditor", "auditor", "node", "host", 1)


def compare(what: str, found: Groups, expected: Groups) -> None:
    """Raise a Violation that shows which batches each differing group counted how often."""
    if found == expected:
        return
    lines = [f"{what} differ from the serial model's"]
    was, should = history_of(found), history_of(expected)
    lines += [
        f"  group {key}: rows by batch {was.get(key)}, should be {should.get(key)}"
        for key in sorted(was.keys() | should.keys(), key=str)
        if found.get(key) != expected.get(key)
    ]
    raise Violation("\n".join(lines))


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
    objects: MemoryObjectStore, make: Any, workload: Workload, state: str, query: str, version: int
) -> None:
    """Every shard as the next run of the query reads it, against the model.

    Parameters
    ----------
    objects
        A copy of the storage, which the audit writes to.
    make
        Makes a coordinator over an object store.
    version
        Batches that Spark has recorded as finished.
    """
    newcomer: Any = _Newcomer(objects, make)
    store = Store(objects, newcomer)
    schema = workload.schema
    metadata = StateMetadata(state, query, workload.shards, schema.output_mode, schema.to_json())
    try:
        for shard in range(workload.shards):
            task = TaskIdentity(state, query, "audit", version, shard, 0, "auditor")
            grant = newcomer.ask("attach_and_lease", task, metadata, _AUDITOR)
            if grant.base_version != version:
                raise Violation(
                    f"batch {version} of shard {shard} reads version {grant.base_version}: updates are lost"
                )
            rows = store.read(grant.lease.store_id, version, schema)
            compare(f"version {version} of shard {shard} as loaded", groups_of(rows), workload.states[shard][version])
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
    #: shard -> counted entries, oldest first
    chains: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    attempts: set[str] = field(default_factory=set)
    #: (shard, version, run) that were counted
    counted: set[tuple[int, int, str]] = field(default_factory=set)
    #: shard -> oldest retained version
    floors: dict[int, int] = field(default_factory=dict)
    #: shard -> counted snapshots
    snapshots: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def take(self, record: dict[str, Any]) -> None:
        match record["kind"]:
            case "run_started":
                self._newer_epoch(record["epoch"])
                _require(
                    record["run_id"] != self.run and record["run_id"] not in self.ended, "a run started twice", record
                )
                self.ended |= {self.run}
                self.run = record["run_id"]
                self.leases = dict.fromkeys(self.leases, self.epoch)
            case "shards_assigned":
                self._newer_epoch(record["epoch"])
                self.leases[record["partition_id"]] = self.epoch
            case "committed":
                self._commit(record["entry"])
            case "snapshot":
                self._snapshot(record["snapshot"])
            case "truncated":
                shard, floor = record["partition_id"], record["floor"]
                shown = any(one["version"] == floor for one in self.snapshots.get(shard, ()))
                _require(shown and floor > self.floors.get(shard, 0), "history is cut where no snapshot is", record)
                self.floors[shard] = floor
            case _:
                raise Violation(f"a record that no document knows: {record}")

    def _newer_epoch(self, epoch: int) -> None:
        _require(epoch > self.epoch, f"epoch {epoch} was given out before", {})
        self.epoch = epoch

    def _commit(self, entry: dict[str, Any]) -> None:
        shard, version = entry["partition_id"], entry["version"]
        chain = self.chains.setdefault(shard, [])
        below = [one for one in chain if one["version"] < version]
        _require(entry["run_id"] == self.run, "a commit of a run that was replaced counts", entry)
        _require(entry["epoch"] == self.leases.get(shard), "a commit of an owner that was replaced counts", entry)
        _require(entry["attempt_id"] not in self.attempts, "an attempt counts twice", entry)
        _require((shard, version, self.run) not in self.counted, "two attempts of one run count for a version", entry)
        _require(entry["base_version"] == (below[-1]["version"] if below else 0), "a version forks the chain", entry)
        self.attempts.add(entry["attempt_id"])
        self.counted.add((shard, version, self.run))
        self.chains[shard] = [*below, entry]
        self.snapshots[shard] = [one for one in self.snapshots.get(shard, ()) if one["version"] < version]

    def _snapshot(self, snapshot: dict[str, Any]) -> None:
        shard, shown = snapshot["partition_id"], (snapshot["version"], snapshot["attempt_id"])
        counted = [(entry["version"], entry["attempt_id"]) for entry in self.chains.get(shard, ())]
        _require(shown in counted, "a snapshot of a version that does not count", snapshot)
        self.snapshots.setdefault(shard, []).append(snapshot)


def _require(holds: bool, what: str, record: dict[str, Any]) -> None:
    if not holds:
        raise Violation(f"{what}: {record}")


def audit_log(objects: RememberedObjects, workload: Workload, state: str) -> int:
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
    read = [
        path for path in objects.rewritten if path > f"{state}/manifest/{(checkpoints or [''])[-1].rpartition('/')[2]}"
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
    here = {info.path for info in objects.list(state)}
    for shard, chain in history.chains.items():
        floor = history.floors.get(shard, 0)
        _audit_chain(objects.ever, workload, shard, chain)
        retained = [one for one in history.snapshots.get(shard, ()) if one["version"] >= floor]
        for snapshot in retained:
            groups = groups_of(_table(objects.ever[snapshot["file"]]))
            compare(f"snapshot {snapshot['file']}", groups, workload.states[shard][snapshot["version"]])
        for entry in [*retained, *(entry for entry in chain if entry["version"] > floor)]:
            _require(entry["file"] in here, "a file that a retained version needs is gone", entry)
    _require(not _has_run_of_the_past(objects, state), "a run began before batches that were finished", {})
    return records


def _has_run_of_the_past(objects: RememberedObjects, state: str) -> bool:
    """Whether a run started at a batch before the last that the state had versions of."""
    newest: dict[int, int] = {}
    for path in sorted(path for path in objects.ever if path.startswith(f"{state}/manifest/")):
        for record in json.loads(objects.ever[path])["records"]:
            if record["kind"] == "committed":
                newest[record["entry"]["partition_id"]] = record["entry"]["version"]
            elif record["kind"] == "run_started" and max(newest.values(), default=0) > record["batch_id"] + 1:
                return True
    return False


def _table(data: bytes) -> pa.Table:
    return pa.ipc.open_file(io.BytesIO(data)).read_all()


def _audit_chain(ever: dict[str, bytes], workload: Workload, shard: int, chain: list[dict[str, Any]]) -> None:
    """Versions of a shard, delta by delta, as ``docs/format.md`` reads them."""
    groups: Groups = {}
    stamps: dict[Any, int] = {}
    removed: set[Any] = set()
    for entry in chain:
        delta = _table(ever[entry["file"]])
        kinds = delta.column("__change").to_pylist()
        for (key, row), kind, (stamped, stamp) in zip(groups_of(delta).items(), kinds, stamps_of(delta), strict=True):
            _require(key not in removed, f"removed group {key} comes back", entry)
            rows_added = row[0] - groups.get(key, (0,))[0]
            own = stamped - stamps.get(key, 0)
            _require(
                own == rows_added * stamp, f"group {key} was built on rows of an attempt that does not count", entry
            )
            groups.pop(key, None)
            stamps[key] = stamped
            if kind == 0:
                groups[key] = row
            else:
                removed.add(key)
        compare(
            f"version {entry['version']} of shard {shard} by its deltas",
            groups,
            workload.states[shard][entry["version"]],
        )
