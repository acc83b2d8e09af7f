"""A query that aggregates: what goes into each batch, what a serial dictionary makes of it, and how to compare.

The query is deployed in two forms: one has an aggregate more (``again``, a sum as ``total``). What that one should be follows from who
committed the versions of the shard: it starts from nothing where the other form committed in between, and nowhere else.

The value of each row is a digit of its own for each batch (``8 ** batch``), so that a group's sum tells how often each batch
was applied to it: a history to check, not only a number. Each task attempt also stamps its rows with a number of its own, as a
task that is not deterministic would: so the deltas tell which attempt they were built on (:func:`stamps_of`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.identities import DEFAULT_STORE, TaskIdentity
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.storage.protocol import ObjectStore
from store_actors.client.fleet_client import FleetClient
from store_actors.client.operator_task import ShardWork, apply_all
from store_actors.messages.requests import ShardInput
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from tests.simulation.scheduler import Violation
from tests.stored_shards import stored_rows

#: An entry of the manifest log: JSON data.
Entry = dict[str, Any]
#: The rows of the file of an entry, also if it was deleted since.
Read = Callable[[Entry], pa.Table]


#: (end of life in seconds or None, name) -> (rows, sum of marks, last batch)
Key = tuple[int | None, str]
Groups = dict[Key, tuple[int, int, int]]

_DIGIT = 8
_SECOND_US = 1_000_000
_DELAY_S = 2


@dataclass(frozen=True, slots=True)
class Row:
    end: int | None
    name: str


def schema_of(*, watermark: bool, output_mode: str, whole: bool = True) -> StateSchema:
    """Count, sum and last value by name, with an event time to expire by if `watermark`; and the sum again, if `whole`."""
    ends = (Field("end", "timestamp"),) if watermark else ()
    kinds = AccumulatorKind
    again = Accumulator(kinds.SUM_INT, ("mark",), (Field("again", "int64"),), "again(mark)")
    return StateSchema(
        keys=(*ends, Field("name", "string")),
        inputs=(Field("mark", "int64"), Field("batch", "int64"), Field("stamp", "int64")),
        accumulators=(
            *([again] if whole else []),
            Accumulator(kinds.COUNT_ROWS, (), (Field("n", "int64", False),), "count(1)"),
            Accumulator(kinds.SUM_INT, ("mark",), (Field("total", "int64"),), "sum(mark)"),
            Accumulator(kinds.LAST, ("batch",), (Field("newest", "int64"), Field("newest_set", "bool")), "last(batch)"),
            Accumulator(kinds.SUM_INT, ("stamp",), (Field("stamps", "int64"),), "sum(stamp)"),
            Accumulator(kinds.LAST, ("stamp",), (Field("stamp", "int64"), Field("stamp_set", "bool")), "last(stamp)"),
        ),
        expiry_key="end" if watermark else None,
        delay_ms=_DELAY_S * 1000 if watermark else None,
        output_mode=output_mode,
    )


class AggregationWorkload:
    """Batches of one query: the rows of each shard, and the model's states and output. Other queries have the same methods.

    Attributes
    ----------
    stores
        Names of the stores of each shard.
    forms
        How many forms of the query there are; the first is what audits read by.
    together
        Whether a task may have several shards.
    states
        ``states[shard][version]``: the groups after that many batches.
    emitted
        ``emitted[shard][batch]``: the rows that the batch emits.
    """

    stores = (DEFAULT_STORE,)
    forms = 2
    together = True

    def __init__(self, rng: random.Random, further_batches: int = 0) -> None:
        kind = rng.choice(("plain", "update", "append"))
        self.watermark, mode = kind != "plain", "append" if kind == "append" else "update"
        self._schemas = [schema_of(watermark=self.watermark, output_mode=mode, whole=whole) for whole in (True, False)]
        self.schema = self._schemas[0]
        self.batches, self.shards = rng.randint(2, 4) + further_batches, rng.choice((1, 2, 2))
        self._rows = [[self._draw_rows(rng, batch) for _ in range(self.shards)] for batch in range(self.batches)]
        self.max_event_ms = [self._newest_event(shards) for shards in self._rows]
        self.states: list[list[Groups]] = []
        self.emitted: list[list[Groups]] = []
        for shard in range(self.shards):
            states, emitted = self._serial(shard)
            self.states.append(states)
            self.emitted.append(emitted)

    def _draw_rows(self, rng: random.Random, batch: int) -> list[Row]:
        ends = [None if not self.watermark else batch * 2 + rng.randint(-3, 4) for _ in range(rng.randint(0, 4))]
        return [Row(None if end is None else max(end, 1), rng.choice("abc")) for end in ends]

    def _newest_event(self, shards: list[list[Row]]) -> int | None:
        ends = [row.end for rows in shards for row in rows if row.end is not None]
        return max(ends) * 1000 if ends else None

    def input_of(self, batch: int, shard: int, stamp: int, schema: StateSchema) -> ShardInput:
        """Return the rows that a task attempt hands to its shard."""
        rows = self._rows[batch][shard]
        columns = {
            "name": pa.array([row.name for row in rows], pa.string()),
            "mark": pa.array([_DIGIT**batch] * len(rows), pa.int64()),
            "batch": pa.array([batch] * len(rows), pa.int64()),
            "stamp": pa.array([stamp] * len(rows), pa.int64()),
        }
        if self.watermark:
            ends = [None if row.end is None else row.end * _SECOND_US for row in rows]
            columns["end"] = pa.array(ends, pa.timestamp("us", tz="UTC"))
        names = schema.raw_schema().names
        return ShardInput.of_raw(schema, pa.record_batch([columns[name] for name in names], schema=schema.raw_schema()))

    def all_keys(self, schema: StateSchema) -> pa.RecordBatch:
        """Return every key that a row of any batch has."""
        rows = sorted({row for batch in self._rows for of_shard in batch for row in of_shard}, key=str)
        columns = {"name": pa.array([row.name for row in rows], pa.string())}
        ends = [None if row.end is None else row.end * _SECOND_US for row in rows]
        columns["end"] = pa.array(ends, pa.timestamp("us", tz="UTC"))
        fields = [key.arrow() for key in schema.input_keys]
        return pa.record_batch([columns[field.name] for field in fields], schema=pa.schema(fields))

    def rows_at(self, version: int, partition: int) -> Groups:
        """Return the rows of a partition at a version."""
        return self.states[partition][version]

    def emitted_by(self, batch: int, partition: int) -> Groups:
        """Return the rows that a partition emits in a batch."""
        return self.emitted[partition][batch]

    # -- what schedules do with it --------------------------------------------------------------------------------------

    def metadata(self, state: str, query: str, form: int = 0) -> StateMetadata:
        """Return what is fixed about the state."""
        return StateMetadata(state, query, self.shards, self.schema.output_mode, self._schemas[form])

    def run_task(
        self, client: FleetClient, tasks: Sequence[TaskIdentity], metadata: StateMetadata, stamp: int, form: int
    ) -> None:
        """Do an attempt's work as a Spark task does it; a Violation if what it is given is not the model's.

        Parameters
        ----------
        stamp
            A number of the attempt's own.
        """
        batch, schema = tasks[0].batch_id, self._schemas[form]
        newest = self.max_event_ms[batch]
        evict_ms = 0 if newest is None or not self.watermark else newest - _DELAY_S * 1000
        works = [
            ShardWork(task, self.input_of(batch, task.partition_id, stamp, schema), evict_ms=evict_ms) for task in tasks
        ]
        emitting = apply_all(client.calls, works, metadata, schema, is_limited=False)
        for task, emitted in zip(tasks, emitting, strict=True):
            shard = task.partition_id
            compare(
                f"rows emitted by batch {batch} of shard {shard}", groups_of(emitted), self.emitted_by(batch, shard)
            )

    def check_version(
        self, objects: ObjectStore, coordinator: Any, grant: LeaseGrant, version: int, forms: Sequence[int]
    ) -> None:
        """Compare what a newcomer reads of a shard, with the project's own code, with the model.

        Parameters
        ----------
        forms
            Of the query, by which each batch up to the version was committed.
        """
        store_id = grant.lease.store_id
        rows = stored_rows(OperatorShards(Partitions(objects, coordinator)), store_id, version, self.schema)
        subject = f"version {version} of shard {store_id.partition_id} as loaded"
        compare(subject, groups_of(rows), self.rows_at(version, store_id.partition_id))
        check_again(subject, rows, forms)

    def check_snapshot(self, snapshot: Entry, read: Read) -> None:
        """Compare the rows of an accepted snapshot with the model."""
        expected = self.rows_at(snapshot["version"], snapshot["partition_id"])
        compare(f"snapshot {snapshot['file']}", groups_of(read(snapshot)), expected)

    def check_history(
        self, shard: int, chains: dict[str, list[Entry]], read: Read, form_of: Callable[[str], int]
    ) -> None:
        """Compare the accepted deltas of the stores of a shard, oldest first, with the model, version by version.

        Parameters
        ----------
        form_of
            The form of the query that a run had.
        """
        entries = chains[DEFAULT_STORE]
        # A shard that was made of others begins with rows, whose attempts its own deltas do not tell.
        groups = dict(self.rows_at(entries[0]["base_version"], shard)) if entries else {}
        stamps: dict[Any, int | None] = dict.fromkeys(groups)
        forms: list[int] = []
        removed: set[Any] = set()
        for entry in entries:
            delta = read(entry)
            kinds = delta.column("__change").to_pylist()
            for (key, row), kind, (stamped, stamp) in zip(
                groups_of(delta).items(), kinds, stamps_of(delta), strict=True
            ):
                if key in removed:
                    raise Violation(f"removed group {key} comes back: {entry}")
                rows_added, before = row[0] - groups.get(key, (0,))[0], stamps.get(key, 0)
                if before is not None and stamped - before != rows_added * stamp:
                    raise Violation(f"group {key} was built on rows of an attempt that does not count: {entry}")
                groups.pop(key, None)
                stamps[key] = stamped
                if kind == 0:
                    groups[key] = row
                else:
                    removed.add(key)
            version = entry["version"]
            subject = f"version {version} of shard {shard} by its deltas"
            compare(subject, groups, self.rows_at(version, shard))
            forms.append(form_of(entry["run_id"]))
            check_again(subject, delta, forms)

    # -- the model ----------------------------------------------------------------------------------------------------

    def _serial(self, shard: int) -> tuple[list[Groups], list[Groups]]:
        states: list[Groups] = [{}]
        emitted: list[Groups] = []
        watermark_ms = 0
        for batch in range(self.batches):
            groups, touched = dict(states[-1]), set()
            for row in self._rows[batch][shard]:
                if row.end is not None and row.end * 1000 <= watermark_ms:
                    continue
                key = (row.end, row.name)
                n, total, _ = groups.get(key, (0, 0, 0))
                groups[key] = (n + 1, total + _DIGIT**batch, batch)
                touched.add(key)
            newest = self.max_event_ms[batch]
            if newest is not None:
                watermark_ms = max(watermark_ms, newest - _DELAY_S * 1000)
            closed = {key: row for key, row in groups.items() if key[0] is not None and key[0] * 1000 <= watermark_ms}
            appends = self.schema.output_mode == "append"
            emitted.append(closed if appends else {key: groups[key] for key in touched})
            states.append({key: row for key, row in groups.items() if key not in closed})
        return states, emitted


def groups_of(table: pa.Table) -> Groups:
    """Return the groups of a table of state or output."""
    groups: Groups = {}
    names = table.column("name").to_pylist()
    ends: list[int | None] = [None] * len(names)
    if "end" in table.column_names:
        ends = [None if end is None else end // _SECOND_US for end in table.column("end").cast(pa.int64()).to_pylist()]
    columns = [table.column(name).to_pylist() for name in ("n", "total", "newest")]
    for end, name, n, total, newest in zip(ends, names, *columns, strict=True):
        if (end, name) in groups:
            raise AssertionError(f"group {(end, name)} appears twice")
        groups[end, name] = (n, total, newest)
    return groups


def check_again(subject: str, rows: pa.Table, forms: Sequence[int]) -> None:
    """Check the sum that only the first form of the query has: of batches since the last one that the other form committed."""
    if "again" not in rows.column_names:
        return
    begun = _DIGIT ** max((batch + 1 for batch, form in enumerate(forms) if form), default=0)
    for row in rows.select(["name", "total", "again"]).to_pylist():
        if row["again"] != (row["total"] // begun * begun or None):
            raise Violation(f"{subject}: after the forms {forms} a sum begins where it should not: {row}")


def stamps_of(table: pa.Table) -> list[tuple[int, int]]:
    """Return (sum of stamps, newest stamp) of each row of a delta."""
    return list(zip(table.column("stamps").to_pylist(), table.column("stamp").to_pylist(), strict=True))


def history_of(groups: Groups) -> dict[Key, dict[int, int]]:
    """Return how many rows of which batch each group counted, by its sum."""
    histories: dict[Key, dict[int, int]] = {}
    for key, (_, total, _) in groups.items():
        digits, remainder = {}, total
        for batch in range(20):
            remainder, digit = divmod(remainder, _DIGIT)
            if digit:
                digits[batch] = digit
        histories[key] = digits
    return histories


def compare(subject: str, actual: Groups, expected: Groups) -> None:
    """Raise a Violation that shows which batches each differing group counted how often."""
    if actual == expected:
        return
    lines = [f"{subject} differ from the serial model's"]
    was, should = history_of(actual), history_of(expected)
    lines += [
        f"  group {key}: rows by batch {was.get(key)}, should be {should.get(key)}"
        for key in sorted(was.keys() | should.keys(), key=str)
        if actual.get(key) != expected.get(key)
    ]
    raise Violation("\n".join(lines))
