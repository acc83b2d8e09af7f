"""A continuous query with session windows, which are emitted once they are closed. Rows of the model are by end, name and start."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import ROW_COLUMN, Accumulator, Field, OperatorKind, StateSchema
from tests.simulation.event_time import seconds, unique
from tests.simulation.scheduler import Violation
from tests.simulation.state_rows import RowStream
from tests.simulation.streaming import Record
from tests.simulation.workload import Groups, Key

_SECOND_US = 1_000_000
_NAME, _ROW, _MARK = Field("name", "string"), Field(ROW_COLUMN, "int64", False), Field("mark", "int64")
_TIMES = (Field("session_start", "timestamp"), Field("session_end", "timestamp"))


class SessionStream(RowStream):
    """The number and the sum of marks of records whose times are so near to one another that they are one session."""

    def _draw_schema(self, rng: random.Random) -> StateSchema:
        self._gap_s, self.watermark = rng.choice((1, 2, 3)), False
        kinds = AccumulatorKind
        return StateSchema(
            keys=(_NAME, _ROW),
            inputs=(*_TIMES, _MARK),
            accumulators=(
                *(Accumulator(kinds.VALUE, (field.name,), (field,)) for field in _TIMES),
                Accumulator(kinds.COUNT_ROWS, (), (Field("n", "int64", False),), "count(1)"),
                Accumulator(kinds.SUM_INT, ("mark",), (Field("total", "int64"),), "sum(mark)"),
            ),
            expiry_key="session_end",
            delay_ms=self.delay_s * 1000,
            output_mode="append",
            operator=OperatorKind.SESSION,
        )

    def end_of(self, record: Record) -> int:
        return record.time + self._gap_s

    def _columns(self, records: Sequence[Record]) -> dict[str, pa.Array]:
        columns = super()._columns(records)
        starts = pa.array([record.time * _SECOND_US for record in records], pa.timestamp("us", tz="UTC"))
        return {**columns, "session_start": starts, "session_end": columns["end"]}

    def _partition_of(self, key: tuple[Any, ...]) -> Key:
        return None, key[1]

    def results_of(self, table: pa.Table) -> Groups:
        columns = seconds(table, "session_end"), table["name"].to_pylist(), seconds(table, "session_start")
        rows = list(zip(table["n"].to_pylist(), table["total"].to_pylist(), strict=True))
        return unique(list(zip(*columns, strict=True)), rows)

    def rows_of(self, table: pa.Table) -> Groups:
        return self.results_of(table)

    # -- the model ----------------------------------------------------------------------------------------------------

    def _applied(self, before: Groups, records: Sequence[Record]) -> Groups:
        pieces: list[tuple[Any, ...]] = [(name, start, end, *row) for (end, name, start), row in before.items()]  # type: ignore[misc]
        pieces += [(record.name, record.time, self.end_of(record), 1, record.bit) for record in records]
        sessions: list[tuple[Any, ...]] = []
        for name, start, end, n, total in sorted(pieces):
            if sessions and sessions[-1][0] == name and start <= sessions[-1][2]:
                _, first, last, count, marks = sessions.pop()
                sessions.append((name, first, max(last, end), count + n, marks + total))
            else:
                sessions.append((name, start, end, n, total))
        return {(end, name, start): (n, total) for name, start, end, n, total in sessions}  # type: ignore[misc]

    def _emitted(self, before: Groups, applied: Groups, closed: Groups) -> Groups:
        return closed

    def happened_in(self, epoch: int) -> dict[str, int]:
        return super().happened_in(epoch) | {"session_merged": self._model(epoch + 1).merged}

    def check_result(self, key: tuple[Any, ...], row: Any) -> None:
        (end, name, start), (n, total) = key, row
        records = [record for of_partition in self.source for record in of_partition if record.name == name]
        marks = sum(record.bit for record in records if start <= record.time and self.end_of(record) <= end)
        if total.bit_count() != n or total & ~marks:
            raise Violation(f"a session has {n} records of {key}, and these were {total:b}")

    def _replaced(self, rows: Groups, key: tuple[Any, ...]) -> Iterable[tuple[Any, ...]]:
        # A session takes the place of all that it was made of.
        (end, name, start) = key
        return [row for row in rows if row[1] == name and start <= row[2] and row[0] <= end]  # type: ignore[misc]
