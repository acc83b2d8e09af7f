"""State machine of an as-of join's shard, whose results come of all right rows that were ever on time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from coordinator.model.schema import Field
from store_actors.messages.requests import ShardInput
from store_actors.operators.as_of_join import AsOfShard
from store_actors.operators.join_schema import join_schema
from tests.unit.join_machine import SECOND, input_of, rows_of, through_json
from tests.unit.shard_machine import OperatorMachine

#: Key (of which the second part may be null in equal ones), time in seconds, whether it has one that is compared.
ROW = st.tuples(
    st.sampled_from(["a", "b", None]), st.sampled_from([None, 1]), st.integers(1, 20), st.sampled_from([True, True, False, None])
)  # fmt: skip


@dataclass(frozen=True)
class Kept:
    key: tuple[Any, ...]
    time: int
    number: int


@dataclass(frozen=True)
class AsOfModel:
    """Rows that are kept of both sides; right rows that were on time, at any time; and the watermark in seconds."""

    left: tuple[Kept, ...] = ()
    right: tuple[Kept, ...] = ()
    all_right: tuple[Kept, ...] = ()
    watermark: int = 0


class AsOfMachine(OperatorMachine[AsOfModel]):
    @initialize(is_outer=st.booleans(), within=st.sampled_from([None, 1, 3, 8]), is_strict=st.booleans())
    def start(self, is_outer: bool, within: int | None, is_strict: bool) -> None:
        self.is_outer, self.within, self.is_strict, self.ids = is_outer, within, is_strict, 0
        options = {
            "join_type": "left_outer" if is_outer else "inner",
            "null_safe": ["k1"],
            "event_time": ["lt", "rt"],
            "expiry": ["lt", "rx"],
            "pre": ["lp", "rp"],
            "output": [["lid"], ["rid"]],
            "as_of": {
                "times": ["lt", "rt"],
                "within_us": None if within is None else within * SECOND,
                "is_strict": is_strict,
            },
        }
        fields = [
            (Field(f"{s}id", "int64"), Field(f"{s}t", "timestamp"), Field(f"{s}x", "timestamp"), Field(f"{s}p", "bool"))
            for s in "lr"
        ]
        keys = (Field("k0", "string"), Field("k1", "int32"))
        self.schema = through_json(join_schema(keys, fields[0], fields[1], options, 1000))
        self.begin(AsOfModel())

    def new_shard(self) -> AsOfShard:
        return AsOfShard(self.schema)

    def no_rows(self) -> ShardInput:
        return input_of(self.schema, [], [])

    @precondition(lambda self: self.pending is None)
    @rule(left=st.lists(ROW, max_size=8), right=st.lists(ROW, max_size=12), ahead=st.integers(0, 4))
    def apply(self, left: list[tuple[Any, ...]], right: list[tuple[Any, ...]], ahead: int) -> None:
        watermark = self.newest.watermark + ahead
        sides = [self._numbered(side, rows) for side, rows in (("l", left), ("r", right))]
        change = self.apply_input(input_of(self.schema, *sides), watermark * 1000)
        new = [
            [row for row in rows if row[f"{s}t"] > self.newest.watermark * SECOND]
            for s, rows in zip("lr", sides, strict=True)
        ]
        model, emitted = self._after(new, watermark)
        assert rows_of(change.emitted) == emitted
        assert change.rows_late == len(left) + len(right) - sum(map(len, new))
        # Left rows leave through the results.
        assert len(self.newest.right) - change.rows_removed <= len(model.right)
        assert change.rows_updated == sum(
            kept not in before
            for before, after in ((self.newest.left, model.left), (self.newest.right, model.right))
            for kept in after
        )
        self.applied(change, model)

    def _numbered(self, side: str, rows: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
        begin = self.ids
        self.ids += len(rows)
        return [
            {"k0": k0, "k1": k1, f"{side}t": time * SECOND, f"{side}p": is_compared, f"{side}id": begin + index,
             f"{side}x": time * SECOND}
            for index, (k0, k1, time, is_compared) in enumerate(rows)
        ]  # fmt: skip

    def _after(self, new: list[list[dict[str, Any]]], watermark: int) -> tuple[AsOfModel, Counter[tuple[Any, ...]]]:
        newest = self.newest
        emitted: Counter[tuple[Any, ...]] = Counter()
        left, right = (
            [
                Kept((row["k0"], row["k1"]), row[f"{s}t"] // SECOND, row[f"{s}id"])
                for row in rows
                if row[f"{s}p"] and (row["k0"] is not None or (s == "l" and self.is_outer))
            ]
            for s, rows in zip("lr", new, strict=True)
        )
        if self.is_outer:
            emitted.update((row["lid"], None) for row in new[0] if not row["lp"])
        all_right, waiting = (*newest.all_right, *right), [*newest.left, *left]
        for row in (row for row in waiting if row.time <= watermark):
            match = max((other for other in all_right if self._matches(row, other)), key=_newness, default=None)
            if match is not None or self.is_outer:
                emitted[row.number, None if match is None else match.number] += 1
        passed = [row for row in (*newest.right, *right) if row.time <= watermark]
        kept = [row for row in (*newest.right, *right) if row.time > watermark]
        for key in {row.key for row in passed}:
            row = max((row for row in passed if row.key == key), key=_newness)
            kept += [row] if self.within is None or row.time + self.within > watermark else []
        model = AsOfModel(
            tuple(row for row in waiting if row.time > watermark),
            tuple(kept),
            all_right,
            watermark,
        )
        return model, emitted

    def _matches(self, left: Kept, right: Kept) -> bool:
        age = left.time - right.time
        is_near = age >= self.is_strict and (self.within is None or age <= self.within - self.is_strict)
        return left.key == right.key and left.key[0] is not None and is_near

    def check(self, model: AsOfModel) -> None:
        rows = self.shard.snapshot().to_pylist()
        for side, name, kept in ((0, "lid", model.left), (1, "rid", model.right)):
            numbers = [row[name] for row in rows if row["__side"] == side]
            assert Counter(numbers) == Counter(row.number for row in kept)
        assert len({row["__row"] for row in rows}) == len(rows) == len(self.shard)


def _newness(row: Kept) -> tuple[int, int]:
    return row.time, row.number
