"""A continuous query that drops duplicates: rows of a name and a window, or those of a name within a watermark.

State of the model are the keys that are known, by the second at which each is forgotten, with the marks of the records of which one is
the first. Which one that is depends on the order in which tasks send them. Within a watermark the time at which a name is forgotten
depends on it, too: there each name is of one task.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, OperatorKind, StateSchema
from tests.simulation.event_time import seconds, unique
from tests.simulation.scheduler import Violation
from tests.simulation.state_rows import RowStream
from tests.simulation.streaming import Record
from tests.simulation.workload import Groups, Key

_SECOND_US = 1_000_000
_END, _NAME, _MARK = Field("end", "timestamp"), Field("name", "string"), Field("mark", "int64")
_EXPIRES = Field("expires", "timestamp")


class FirstStream(RowStream):
    """The first record of each key. A result is a mark, and one of the model the set of those that it may be."""

    is_sealed = False
    emits = "emitted_first"

    def _draw_schema(self, rng: random.Random) -> StateSchema:
        self._window_s = rng.choice((2, 4))
        #: Seconds after its time at which a name is forgotten; 0 if keys have a window by which that is.
        self._within_s = rng.choice((0, self.delay_s))
        facts: dict[str, Any] = {"delay_ms": self.delay_s * 1000, "output_mode": "append"}
        kind = OperatorKind.DEDUPLICATE
        if not self._within_s:
            return StateSchema((_END, _NAME), (_MARK,), (), "end", operator=kind, **facts)
        self.watermark = False
        self.source = [
            [replace(record, name=f"{record.name}{number}") for record in records]
            for number, records in enumerate(self.source)
        ]
        expiry = Accumulator(AccumulatorKind.VALUE, (), (_EXPIRES,))
        options = {"late_us": self._within_s * _SECOND_US}
        return StateSchema(
            (_NAME,), (_MARK, _END, _EXPIRES), (expiry,), "expires", operator=kind, options=options, **facts
        )

    def end_of(self, record: Record) -> int:
        return record.time if self._within_s else (record.time // self._window_s + 1) * self._window_s

    def _columns(self, records: Sequence[Record]) -> dict[str, pa.Array]:
        times = [(self.end_of(record) + self._within_s) * _SECOND_US for record in records]
        return {**super()._columns(records), "expires": pa.array(times, pa.timestamp("us", tz="UTC"))}

    def _partition_of(self, key: tuple[Any, ...]) -> Key:
        return (None if self._within_s else key[0]), key[1]

    def results_of(self, table: pa.Table) -> Groups:
        keys = list(zip(seconds(table, "end"), table["name"].to_pylist(), strict=True))
        return unique(keys, table["mark"].to_pylist())

    def rows_of(self, table: pa.Table) -> Groups:
        times = seconds(table, "expires" if self._within_s else "end")
        return unique(list(zip(times, table["name"].to_pylist(), strict=True)), [0] * len(times))

    # -- the model ----------------------------------------------------------------------------------------------------

    def at(self, version: int) -> Groups:
        return dict.fromkeys(super().at(version), 0)  # type: ignore[arg-type]

    def _applied(self, before: Groups, records: Sequence[Record]) -> Groups:
        known = {self._partition_of(key) for key in before}
        new: defaultdict[Key, list[Record]] = defaultdict(list)
        for record in records:
            if self.key_of(record) not in known:
                new[self.key_of(record)].append(record)
        firsts: dict[Key, Any] = {}
        for first, *others in new.values():
            marks = [first.bit, *(record.bit for record in others if not self._within_s)]
            firsts[self.end_of(first) + self._within_s, first.name] = frozenset(marks)
        return before | firsts

    def _emitted(self, before: Groups, applied: Groups, closed: Groups) -> Groups:
        return {(key[0] - self._within_s, key[1]): row for key, row in applied.items() if key not in before}  # type: ignore[operator]

    def happened_in(self, epoch: int) -> dict[str, int]:
        return super().happened_in(epoch) | {"duplicate": self._model(epoch + 1).merged}

    def check_result(self, key: tuple[Any, ...], row: Any) -> None:
        records = [record for of_partition in self.source for record in of_partition if record.name == key[1]]
        if (key[0], row) not in [(self.end_of(record), record.bit) for record in records]:
            raise Violation(f"a row is emitted that never was: {key} with mark {row:b}")
