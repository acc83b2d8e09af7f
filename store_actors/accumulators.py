"""The table of accumulators: of each kind, how its state is held, how a new group begins and which compiled step moves it.

Whatever depends on an accumulator's kind is derived from :data:`RULES`: where its state sits and begins
(``engine/layout.py``), the numbers of the compiled steps (``engine/kernels.py``), how partial states are merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum, auto

__all__ = ["RULES", "AccumulatorKind", "OpCode", "Ordering", "Rule", "StateForm"]


class AccumulatorKind(StrEnum):
    """The primitives that every supported aggregate is made of. Nulls are ignored unless stated."""

    #: Rows; no input. State: one int64, never null.
    COUNT_ROWS = "count_rows"
    #: Rows in which every input is non-null. State: one int64, never null.
    COUNT_VALID = "count_valid"
    #: Wrapping int64 sum, as Spark without ANSI mode. State: one int64, null until a value came.
    SUM_INT = "sum_int"
    #: Float64 sum. State: one float64, null until a value came.
    SUM_FLOAT = "sum_float"
    #: Decimal sum. State: decimal (null once it overflowed its precision, and then for good) and ``is_empty`` boolean.
    SUM_DECIMAL = "sum_decimal"
    #: State: one value of the input's type, null until a value came. Float NaN is the largest value, as in Spark.
    MIN = "min"
    MAX = "max"
    #: State: the value and ``value_set`` boolean. A null is a value.
    FIRST = "first"
    LAST = "last"
    #: The same, skipping nulls (``ignorenulls=True``).
    FIRST_VALID = "first_valid"
    LAST_VALID = "last_valid"
    #: Central moments of order two (Welford, merged as Chan et al.). Input float64; state: n, avg, m2, all float64.
    MOMENTS = "moments"
    #: All values, in the order of their arrival. State: a list of the input's type, never null.
    COLLECT_LIST = "collect_list"
    #: Distinct values: of -0.0 and 0.0 the one that came first; no NaN is another one, as in Spark. State: as COLLECT_LIST's.
    COLLECT_SET = "collect_set"
    #: A value column of a keyed store: written whole, folded by nothing. No input; state: one value, null if it is null.
    VALUE = "value"
    #: A list or map of the user's, as an operator's schema tells of its state variables; their columns are VALUEs.
    LIST = "list"
    MAP = "map"


class OpCode(IntEnum):
    """Numbers of the branches of ``kernels._step`` and ``kernels._fold_block``."""

    COUNT = 0
    ADD_INT = 1
    ADD_FLOAT = 2
    ADD_DECIMAL = 3
    MIN_INT = 4
    MAX_INT = 5
    MIN_FLOAT = 6
    MAX_FLOAT = 7
    MIN_DECIMAL = 8
    MAX_DECIMAL = 9
    MIN_STRING = 10
    MAX_STRING = 11
    FIRST = 12
    LAST = 13
    MOMENTS = 14
    MERGE_MOMENTS = 15


class Ordering(Enum):
    """How values of a type are compared, as words."""

    INT = auto()
    FLOAT = auto()
    DECIMAL = auto()
    STRING = auto()


class StateForm(Enum):
    """How a kind's state is held."""

    #: In a fixed number of words of its group's row, moved by a compiled step.
    FOLDED = auto()
    #: In a list that grows with its group (``engine/lists.py``): the one state field is of a list type.
    GROWING = auto()
    #: In words of the row, written whole.
    WRITTEN = auto()
    #: In stores of its own: the schema only tells of it.
    ELSEWHERE = auto()


@dataclass(frozen=True, slots=True)
class Rule:
    """What holds for one kind.

    Attributes
    ----------
    raw, merge
        Step by which an input row, and a partial state, moves it; by the type's ordering, where it compares values.
    nullable_fields
        How many leading state fields are null in a new group; the others are valid.
    initial
        First words of the state fields of a new group; empty: all are 0.
    skips_nulls
        Whether a step that can take a null for a value does not.
    distinct
        Whether a list that grows has no value twice.
    means
        Kinds whose states are the same thing have the same name here; empty: no other has.
    """

    form: StateForm
    raw: OpCode | Mapping[Ordering, OpCode] | None = None
    merge: OpCode | Mapping[Ordering, OpCode] | None = None
    nullable_fields: int = 0
    initial: tuple[int, ...] = ()
    skips_nulls: bool = False
    distinct: bool = False
    means: str = ""


def _folded(
    raw: OpCode | Mapping[Ordering, OpCode], merge: OpCode | None = None, *, nullable: int = 0, **rest: object
) -> Rule:
    return Rule(StateForm.FOLDED, raw, raw if merge is None else merge, nullable, **rest)  # type: ignore[arg-type]


_SMALLER = {
    Ordering.INT: OpCode.MIN_INT,
    Ordering.FLOAT: OpCode.MIN_FLOAT,
    Ordering.DECIMAL: OpCode.MIN_DECIMAL,
    Ordering.STRING: OpCode.MIN_STRING,
}
_LARGER = {
    Ordering.INT: OpCode.MAX_INT,
    Ordering.FLOAT: OpCode.MAX_FLOAT,
    Ordering.DECIMAL: OpCode.MAX_DECIMAL,
    Ordering.STRING: OpCode.MAX_STRING,
}

RULES: Mapping[AccumulatorKind, Rule] = {
    # Which rows are counted depends on whether a column can be null, which may change under a query.
    AccumulatorKind.COUNT_ROWS: _folded(OpCode.COUNT, OpCode.ADD_INT, means="rows counted"),
    AccumulatorKind.COUNT_VALID: _folded(OpCode.COUNT, OpCode.ADD_INT, means="rows counted"),
    AccumulatorKind.SUM_INT: _folded(OpCode.ADD_INT, nullable=1),
    AccumulatorKind.SUM_FLOAT: _folded(OpCode.ADD_FLOAT, nullable=1),
    AccumulatorKind.SUM_DECIMAL: _folded(OpCode.ADD_DECIMAL, initial=(0, 1)),
    AccumulatorKind.MIN: _folded(_SMALLER, nullable=1),
    AccumulatorKind.MAX: _folded(_LARGER, nullable=1),
    AccumulatorKind.FIRST: _folded(OpCode.FIRST, nullable=1),
    AccumulatorKind.LAST: _folded(OpCode.LAST, nullable=1),
    AccumulatorKind.FIRST_VALID: _folded(OpCode.FIRST, nullable=1, skips_nulls=True),
    AccumulatorKind.LAST_VALID: _folded(OpCode.LAST, nullable=1, skips_nulls=True),
    AccumulatorKind.MOMENTS: _folded(OpCode.MOMENTS, OpCode.MERGE_MOMENTS),
    AccumulatorKind.COLLECT_LIST: Rule(StateForm.GROWING),
    AccumulatorKind.COLLECT_SET: Rule(StateForm.GROWING, distinct=True),
    AccumulatorKind.VALUE: Rule(StateForm.WRITTEN, nullable_fields=1),
    AccumulatorKind.LIST: Rule(StateForm.ELSEWHERE),
    AccumulatorKind.MAP: Rule(StateForm.ELSEWHERE),
}
