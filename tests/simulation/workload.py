"""What goes into each batch, and what a serial dictionary makes of it.

The value of each row is a digit of its own for each batch (``8 ** batch``), so that a group's sum tells how often each batch
was applied to it: a history to check, not only a number. Each task attempt also stamps its rows with a number of its own, as a
task that is not deterministic would: so the deltas tell which attempt they were built on (:func:`stamps_of`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pyarrow as pa

from store_actors.messages import ShardInput
from store_actors.schema import Accumulator, AccumulatorKind, Field, StateSchema

__all__ = ["Groups", "Workload", "groups_of", "history_of", "stamps_of"]

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


def schema_of(*, watermark: bool, output_mode: str) -> StateSchema:
    """Count, sum and last value by name, with an event time to expire by if `watermark`."""
    ends = (Field("end", "timestamp"),) if watermark else ()
    return StateSchema(
        keys=(*ends, Field("name", "string")),
        inputs=(Field("mark", "int64"), Field("batch", "int64"), Field("stamp", "int64")),
        accumulators=(
            Accumulator(AccumulatorKind.COUNT_ROWS, (), (Field("n", "int64", False),)),
            Accumulator(AccumulatorKind.SUM_INT, ("mark",), (Field("total", "int64"),)),
            Accumulator(AccumulatorKind.LAST, ("batch",), (Field("newest", "int64"), Field("newest_set", "bool"))),
            Accumulator(AccumulatorKind.SUM_INT, ("stamp",), (Field("stamps", "int64"),)),
            Accumulator(AccumulatorKind.LAST, ("stamp",), (Field("stamp", "int64"), Field("stamp_set", "bool"))),
        ),
        expiry_key="end" if watermark else None,
        delay_ms=_DELAY_S * 1000 if watermark else None,
        output_mode=output_mode,
    )


class Workload:
    """Batches of one query: the rows of each shard, and the model's states and output.

    Attributes
    ----------
    states
        ``states[shard][version]``: the groups after that many batches.
    emitted
        ``emitted[shard][batch]``: the rows that the batch emits.
    """

    def __init__(self, rng: random.Random) -> None:
        kind = rng.choice(("plain", "update", "append"))
        self.watermark = kind != "plain"
        self.schema = schema_of(watermark=self.watermark, output_mode="append" if kind == "append" else "update")
        self.batches, self.shards = rng.randint(2, 4), rng.choice((1, 2, 2))
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

    def input_of(self, batch: int, shard: int, stamp: int) -> ShardInput:
        """The rows that a task attempt hands to its shard."""
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
        names = self.schema.raw_schema().names
        return ShardInput.of_raw(
            self.schema, pa.record_batch([columns[name] for name in names], schema=self.schema.raw_schema())
        )

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
    """Groups of a table of state or output."""
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


def stamps_of(table: pa.Table) -> list[tuple[int, int]]:
    """(sum of stamps, newest stamp) of each row of a delta."""
    return list(zip(table.column("stamps").to_pylist(), table.column("stamp").to_pylist(), strict=True))


def history_of(groups: Groups) -> dict[Key, dict[int, int]]:
    """How many rows of which batch each group counted: what its sum says."""
    histories: dict[Key, dict[int, int]] = {}
    for key, (_, total, _) in groups.items():
        digits, rest = {}, total
        for batch in range(20):
            rest, digit = divmod(rest, _DIGIT)
            if digit:
                digits[batch] = digit
        histories[key] = digits
    return histories
