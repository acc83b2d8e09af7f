"""Inputs of accumulators side by side, and what each of them is expected to come to for the rows of one group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from msgspec import structs

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, StateSchema
from tests.unit.grouped_rows import Rows, schema_of


@dataclass(frozen=True)
class Given:
    """The rows of one group by part, and whether each part is combined by a table of its own before it is merged."""

    parts: list[Rows]
    combined: bool

    @property
    def rows(self) -> Rows:
        return [row for part in self.parts for row in part]

    @property
    def values(self) -> list[Any]:
        """The first column without its nulls."""
        return [value for value, *_ in self.rows if value is not None]

    def totals(self) -> Iterator[int]:
        """Yield each sum on the way, of which none may leave its type: those of each part, too, if it is combined."""
        total = 0
        for part in self.parts:
            inner = 0
            for value, *_ in part:
                inner += int(value or 0)
                yield inner if self.combined else total + inner
            total += inner
            yield total


class Such:
    """Equals what `holds` is true of."""

    def __init__(self, holds: Callable[[Any], object]) -> None:
        self._holds = holds

    def __eq__(self, value: object) -> bool:
        return bool(self._holds(value))

    __hash__ = None  # type: ignore[assignment]


#: What an accumulator emits of its rows: a value, or a tuple of the values of all that it emits.
Expected = Callable[[Given], Any]


@dataclass(frozen=True)
class Inputs:
    """Accumulators over the same columns, side by side.

    Attributes
    ----------
    types, values
        The columns' types, and strategies of their values.
    accumulators
        Each with what it emits. Names of their fields are those of their places.
    examples
        How many examples are tried.
    """

    types: list[str]
    values: list[st.SearchStrategy[Any]]
    accumulators: list[tuple[Accumulator, Expected]]
    examples: int = 25

    @property
    def schema(self) -> StateSchema:
        def named(fields: Sequence[Field], place: int) -> tuple[Field, ...]:
            return tuple(structs.replace(field, name=f"a{place}_{number}") for number, field in enumerate(fields))

        placed = (
            structs.replace(item, state=named(item.state, place), result=named(item.result, place))
            for place, (item, _) in enumerate(self.accumulators)
        )
        return schema_of(*placed, types=self.types)

    @property
    def parts(self) -> st.SearchStrategy[list[Rows]]:
        """Parts of rows with a key before the values."""
        row = st.tuples(st.integers(0, 1), *(st.one_of(st.none(), values) for values in self.values))
        return st.lists(st.lists(row, min_size=1, max_size=10), min_size=1, max_size=3)


def of(
    kind: AccumulatorKind,
    state: Sequence[str],
    expected: Expected,
    *,
    inputs: int = 1,
    result: Sequence[str] = (),
    **options: Any,
) -> tuple[Accumulator, Expected]:
    """An accumulator whose state and result have these types, of which those with ``!`` are never null."""
    states, results = (
        tuple(Field("", name.removesuffix("!"), not name.endswith("!")) for name in names) for names in (state, result)
    )
    columns = tuple(f"v{number}" for number in range(inputs))
    return Accumulator(kind, columns, states, result=results, options=options), expected
