"""What Spark knows of an aggregate: its function, the columns of its buffer, and the final expression over these."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import Column
from pyspark.sql import functions as F

from coordinator.model.errors import InvalidRequestError
from spark_jobs.plan.catalyst import CATALYST, Expression, java_class, optional, scala_list, scala_seq

__all__ = ["AggregateExpression", "AggregateFunction", "CountMinTable", "Registers", "nearest_biases"]

#: Precision (bits of a hash that choose a register) from which on HyperLogLog++ has no tables.
_NO_TABLES_FROM = 19
#: Its method that looks an estimate up in them.
_BIAS = "estimateBias"


class CountMinTable(NamedTuple):
    """A count-min sketch: lines of its table and their length, and what stands before it: a total, and each line's factor."""

    depth: int
    width: int
    head: tuple[int, ...]


@dataclass(frozen=True)
class Registers:
    """The registers by which ``approx_count_distinct`` counts, and how Spark makes its estimate of them.

    Attributes
    ----------
    words
        64-bit words that they take, ten registers a word.
    """

    words: int
    _helper: Any

    @property
    def precision(self) -> int:
        """Bits of a hash that choose a register."""
        return next(bits for bits in range(64) if (1 << bits) // 10 + 1 == self.words)

    def estimate(self, total: Column, zeros: Column) -> Column:
        """Distinct values, by the sum of ``2**-register`` and how many registers are 0."""
        count = 1 << self.precision
        share = {4: 0.673, 5: 0.697, 6: 0.709}.get(self.precision, 0.7213 / (1.0 + 1.079 / count))
        raw = F.lit(share * count * count) / total
        corrected = raw
        linear = F.lit(float(count)) * F.log(F.lit(float(count)) / zeros)
        is_small = raw <= 2.5 * count
        if self.precision < _NO_TABLES_FROM:
            corrected = F.when(raw < 5.0 * count, raw - self._bias(raw)).otherwise(raw)
            is_small = is_small | (linear <= self._helper.THRESHOLDS()[self.precision - 4])
        estimate = F.when((zeros > 0) & is_small, linear).otherwise(corrected)
        return F.floor(estimate + 0.5)

    def _bias(self, raw: Column) -> Column:
        """What Spark's tables say that a raw estimate is too large by."""
        expressions = f"{CATALYST}.expressions"
        invoke = java_class(f"{expressions}.objects.Invoke")
        helper = java_class(f"{expressions}.Literal").fromObject(self._helper)
        double = Expression.of(F.lit(0.0))._java.dataType()
        arguments, none = scala_seq([Expression.of(raw)._java]), scala_seq([])
        return Expression(invoke(helper, _BIAS, double, arguments, none, True, False, True)).column()


@dataclass(frozen=True, eq=False)
class AggregateFunction(Expression):
    """An aggregate function over its arguments, such as ``Sum``."""

    @property
    def shown_name(self) -> str:
        """Its name in SQL."""
        return str(self._java.prettyName())

    @property
    def buffer(self) -> list[Expression]:
        """Columns of its buffer."""
        return [Expression(one) for one in scala_list(self._java.aggBufferAttributes())]

    @property
    def is_serialised(self) -> bool:
        """Whether its buffer is an object, which Spark keeps as bytes."""
        typed = java_class(f"{CATALYST}.expressions.aggregate.TypedImperativeAggregate")
        return bool(java_class("java.lang.Class").forName(typed._fqn).isInstance(self._java))

    @property
    def result(self) -> Expression:
        """Its result, over the columns of its buffer."""
        return Expression(self._java.evaluateExpression())

    @property
    def registers(self) -> Registers:
        """Those of ``approx_count_distinct``."""
        helper = self._java.hllppHelper()
        return Registers(int(helper.numWords()), helper)

    @property
    def percentages(self) -> tuple[float, ...]:
        """Shares that percentiles are asked of."""
        told = self.children[1]._java.eval(None)
        return (float(told),) if isinstance(told, int | float) else tuple(told.toDoubleArray())

    @property
    def is_descending(self) -> bool:
        """Whether a percentile is of values from the largest down."""
        return self.kind in ("Percentile", "PercentileDisc") and bool(self._java.reverse())

    @property
    def empty_sketch(self) -> CountMinTable:
        """What ``count_min_sketch`` begins with."""
        written = bytes(self._java.createAggregationBuffer().toByteArray())
        _, total, depth, width = struct.unpack_from(">iqii", written)
        factors = struct.unpack_from(f">{depth}q", written, struct.calcsize(">iqii"))
        return CountMinTable(depth, width, (total, *factors))

    @property
    def bins(self) -> int:
        """How many a histogram has at most."""
        return int(self._java.nBins().eval(None))

    @property
    def lg_config_k(self) -> int:
        """Precision of an HLL sketch; of a union that of one without any sketch.

        Raises
        ------
        InvalidRequestError
            There are no such registers.
        """
        if self.kind != "HllSketchAgg":
            return 12
        try:
            return int(self._java.lgConfigK())
        except PySparkException as error:
            raise InvalidRequestError(str(error), aggregate=self.sql) from error

    @property
    def may_differ(self) -> bool:
        """Whether sketches of several precisions make a union."""
        return self.kind == "HllUnionAgg" and bool(self._java.allowDifferentLgConfigK())

    @property
    def ignores_nulls(self) -> bool:
        """Whether ``first`` or ``last`` does."""
        return bool(self._java.ignoreNulls())


@dataclass(frozen=True, eq=False)
class AggregateExpression(Expression):
    """A use of an aggregate function in a query."""

    @classmethod
    def at(cls, node: Expression) -> AggregateExpression | None:
        """The use that a node is; None if it is something else."""
        return cls(node._java) if node.kind == "AggregateExpression" else None

    @cached_property
    def function(self) -> AggregateFunction:
        """The function that Spark really runs."""
        return AggregateFunction(Expression(self._java.aggregateFunction()).unwrapped()._java)

    @property
    def is_distinct(self) -> bool:
        return bool(self._java.isDistinct())

    @cached_property
    def where(self) -> Expression | None:
        """The condition of its FILTER."""
        found = optional(self._java.filter())
        return None if found is None else Expression(found)


def nearest_biases(node: Expression) -> tuple[list[float], list[float]] | None:
    """The tables in which an expression of :meth:`Registers.estimate` looks up how much an estimate is too large by.

    None of any other expression: estimates, and biases. It is that of its second child.
    """
    if node._java.functionName() != _BIAS:
        return None
    helper = node._java.targetObject().value()
    place = Registers(int(helper.numWords()), helper).precision - 4
    return list(helper.RAW_ESTIMATE_DATA()[place]), list(helper.BIAS_DATA()[place])
