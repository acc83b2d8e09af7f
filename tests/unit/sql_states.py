"""States of a fleet that is none, for the server of SQL: tables, whose first column is the key."""

from __future__ import annotations

import datetime as dt
import decimal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from coordinator.model.errors import InvalidRequestError
from statefleet.reads.projections import FoundKey

NOW = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.UTC)
DAY = dt.date(2020, 2, 29)
CLICKS = pa.table(
    {
        "user": ["u1", "u2", "it's"],
        "n": [1, 2, 3],
        "total": [1.5, None, float("inf")],
        "share": pa.array([0.1, None, -2.5], pa.float32()),
        "price": pa.array([decimal.Decimal("12.340"), decimal.Decimal("-0.001"), None], pa.decimal128(10, 3)),
        "seen": pa.array([NOW, NOW, None], pa.timestamp("us", "UTC")),
        "local": pa.array([NOW.replace(tzinfo=None)] * 3, pa.timestamp("us")),
        "day": [DAY, None, DAY],
        "list": [[1, 2], [], None],
        "names": [["a", 'b"\\', None], None, ["NULL", "c,d"]],
        "struct": [{"a": 1, "b": "x"}, None, {"a": None, "b": "ü"}],
        "raw": [b"\x00x", b"", None],
        "ok": [True, False, None],
    }
)
TABLES = {
    "clicks": CLICKS,
    "orders.left": pa.table({"id": pa.array([1, 2], pa.int32()), "amount": pa.array([10, 20], pa.int64())}),
    "many": pa.table({"k": pa.array(range(5000)), "text": ["x" * 200] * 5000}),
}
#: Which version has only the first row; the newest one.
EARLIER, NEWEST = 3, 5


class State:
    """A table as a state. It counts how often keys were looked up, and scans."""

    parts = ()

    def __init__(self, fleet: States, name: str, version: int = NEWEST) -> None:
        if name not in TABLES:
            raise InvalidRequestError("there is no such state", state=name)
        self._fleet, self._name, self.version = fleet, name, version
        rows = TABLES[name]
        self._rows = rows.slice(0, 1) if version == EARLIER else rows
        self.schema = rows.schema
        self.keys = (rows.schema.names[0],)

    def at(self, version: int) -> State:
        if version not in (EARLIER, NEWEST):
            raise InvalidRequestError("there is no such version", version=version)
        return State(self._fleet, self._name, version)

    def scan(self, columns: Sequence[str]) -> pa.Table:
        self._fleet.scans += 1
        return self._rows.select(columns)

    def find_each(
        self, keys: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, *, is_patient: bool
    ) -> list[FoundKey]:
        self._fleet.calls.append(len(keys))
        self._fleet.may_find.wait(10)
        if any(value == "broken" for key in keys for value in key.values()):
            raise InvalidRequestError("the key is broken")
        rows = self._rows.to_pylist()
        return [
            FoundKey(
                tuple(
                    {column: row[column] for column in columns or self.schema.names}
                    for row in rows
                    if all(row[name] == value for name, value in key.items())
                ),
                self._name, "", 0, self.version,
            )
            for key in keys
        ]  # fmt: skip


class States:
    """All of :data:`TABLES`."""

    def __init__(self) -> None:
        self.scans = 0
        self.calls: list[int] = []
        self.may_find = threading.Event()
        self.may_find.set()

    def states(self) -> list[str]:
        return sorted(TABLES)

    def state(self, name: str) -> Any:
        return State(self, name)

    table = state
