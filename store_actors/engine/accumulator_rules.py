"""The table of accumulators: for each kind, how its state is stored, how a new group begins and which compiled step moves it.

Everything that depends on an accumulator's kind is derived from :data:`RULES`: where its state sits and begins
(``engine/layout.py``), which compiled step moves it (numbers: ``engine/op_code_kernels.py``), how partial states are merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from coordinator.model.accumulator_kinds import AccumulatorKind
from store_actors.engine.op_code_kernels import OpCode


class Ordering(Enum):
    """The comparison of a type's values, as 64-bit words."""

    INT = auto()
    FLOAT = auto()
    DECIMAL = auto()
    STRING = auto()
    #: Arrays and structs, by their parts.
    NESTED = auto()


class StateForm(Enum):
    """The form in which a kind's state is stored."""

    #: In a fixed number of words of its group's row, moved by a compiled step.
    FOLDED = auto()
    #: In a list that grows with its group (``engine/lists.py``): the one state field is of a list type.
    GROWING = auto()
    #: In words of the row, written whole.
    WRITTEN = auto()
    #: In stores of its own: the schema only names it.
    ELSEWHERE = auto()


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one kind."""

    form: StateForm
    #: ``raw``, ``merge``: Step by which an input row, and a partial state, moves it; by the type's ordering, where it compares
    #: values.
    raw: OpCode | Mapping[Ordering, OpCode] | None = None
    merge: OpCode | Mapping[Ordering, OpCode] | None = None
    #: How many leading state fields are null in a new group; the others are valid.
    nullable_fields: int = 0
    #: First words of the state fields of a new group; empty: all are 0.
    initial: tuple[int, ...] = ()
    #: Whether a step that can take a null for a value does not.
    skips_nulls: bool = False
    #: Whether a list that grows has no value twice.
    distinct: bool = False
    #: Index of the state field whose type decides the ordering of a step that compares values.
    compared: int = 0
    #: Whether a batch fails that leaves the first state field null for good.
    fails_on_overflow: bool = False


def _folded(
    raw: OpCode | Mapping[Ordering, OpCode], merge: OpCode | None = None, *, nullable: int = 0, **fields: object
) -> Rule:
    return Rule(StateForm.FOLDED, raw, raw if merge is None else merge, nullable, **fields)  # type: ignore[arg-type]


def _by_ordering(step: str) -> Mapping[Ordering, OpCode]:
    return {ordering: OpCode[f"{step}_{ordering.name}"] for ordering in Ordering}


RULES: Mapping[AccumulatorKind, Rule] = {
    AccumulatorKind.COUNT_ROWS: _folded(OpCode.COUNT, OpCode.ADD_INT),
    AccumulatorKind.COUNT_VALID: _folded(OpCode.COUNT, OpCode.ADD_INT),
    AccumulatorKind.SUM_INT: _folded(OpCode.ADD_INT, nullable=1),
    AccumulatorKind.SUM_FLOAT: _folded(OpCode.ADD_FLOAT, nullable=1),
    AccumulatorKind.SUM_DECIMAL: _folded(OpCode.ADD_DECIMAL, initial=(0, 1)),
    AccumulatorKind.SUM_INT_OR_NULL: _folded(OpCode.ADD_INT_CHECKED, initial=(0, 1)),
    AccumulatorKind.SUM_INT_CHECKED: _folded(OpCode.ADD_INT_CHECKED, initial=(0, 1), fails_on_overflow=True),
    AccumulatorKind.PRODUCT: _folded(OpCode.MULTIPLY_FLOAT, nullable=1),
    AccumulatorKind.BIT_AND: _folded(OpCode.AND_INT, nullable=1),
    AccumulatorKind.BIT_OR: _folded(OpCode.OR_INT, nullable=1),
    AccumulatorKind.BIT_XOR: _folded(OpCode.XOR_INT, nullable=1),
    AccumulatorKind.MAX_BY: _folded(_by_ordering("MAX_BY"), nullable=2, compared=1),
    AccumulatorKind.MIN_BY: _folded(_by_ordering("MIN_BY"), nullable=2, compared=1),
    AccumulatorKind.MIN: _folded(_by_ordering("MIN"), nullable=1),
    AccumulatorKind.MAX: _folded(_by_ordering("MAX"), nullable=1),
    AccumulatorKind.FIRST: _folded(OpCode.FIRST, nullable=1),
    AccumulatorKind.LAST: _folded(OpCode.LAST, nullable=1),
    AccumulatorKind.FIRST_VALID: _folded(OpCode.FIRST, nullable=1, skips_nulls=True),
    AccumulatorKind.LAST_VALID: _folded(OpCode.LAST, nullable=1, skips_nulls=True),
    AccumulatorKind.MOMENTS: _folded(OpCode.MOMENTS, OpCode.MERGE_MOMENTS),
    AccumulatorKind.MOMENTS_3: _folded(OpCode.MOMENTS, OpCode.MERGE_MOMENTS),
    AccumulatorKind.MOMENTS_4: _folded(OpCode.MOMENTS, OpCode.MERGE_MOMENTS),
    AccumulatorKind.COVARIANCE: _folded(OpCode.CO_MOMENTS, OpCode.MERGE_CO_MOMENTS),
    AccumulatorKind.CORRELATION: _folded(OpCode.CO_MOMENTS, OpCode.MERGE_CO_MOMENTS),
    AccumulatorKind.DISTINCT_REGISTERS: _folded(OpCode.ADD_HASH, OpCode.MERGE_REGISTERS),
    AccumulatorKind.BITMAP: _folded(OpCode.SET_BIT, OpCode.OR_WORDS),
    AccumulatorKind.BITMAP_OR: _folded(OpCode.OR_WORDS),
    AccumulatorKind.COUNT_MIN: _folded(OpCode.COUNT_LONG, OpCode.MERGE_COUNTS),
    AccumulatorKind.COUNT_MIN_BYTES: _folded(OpCode.COUNT_HASHES, OpCode.MERGE_COUNTS),
    AccumulatorKind.HISTOGRAM: _folded(OpCode.ADD_TO_BINS, OpCode.MERGE_BINS),
    AccumulatorKind.COLLECT_LIST: Rule(StateForm.GROWING),
    AccumulatorKind.COLLECT_SET: Rule(StateForm.GROWING, distinct=True),
    AccumulatorKind.COUNTED: Rule(StateForm.GROWING),
    AccumulatorKind.HLL_SKETCH: Rule(StateForm.GROWING),
    AccumulatorKind.HLL_UNION: Rule(StateForm.GROWING),
    AccumulatorKind.VALUE: Rule(StateForm.WRITTEN, nullable_fields=1),
    AccumulatorKind.LIST: Rule(StateForm.ELSEWHERE),
    AccumulatorKind.MAP: Rule(StateForm.ELSEWHERE),
}
