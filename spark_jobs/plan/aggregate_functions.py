"""Spark's aggregates: the function, the columns of its buffer, and the final expression over these."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import Column
from pyspark.sql import functions as F

from spark_jobs.plan.catalyst import CATALYST, Expression, java_class, optional, scala_list, scala_seq
from spark_jobs.plan.spark_errors import RefusedQueryError
from spark_jobs.plan.spark_version import SPARK

#: Precision (bits of a hash that choose a register) from which on HyperLogLog++ has no tables.
_NO_TABLES_FROM = 19
#: Method of its helper that looks an estimate up in these tables.
_BIAS = "estimateBias"


class CountMinTable(NamedTuple):
    """A count-min sketch: lines of its table, their length, and the header before the table: a total, and the factor of each line."""

    depth: int
    width: int
    head: tuple[int, ...]


@dataclass(frozen=True)
class Registers:
    """The registers by which ``approx_count_distinct`` counts, and the estimate that Spark computes from them."""

    #: Number of 64-bit slots, each of ten registers.
    slots: int
    _helper: Any

    @property
    def precision(self) -> int:
        """Number of bits of a hash that choose a register."""
        return next(bits for bits in range(64) if (1 << bits) // 10 + 1 == self.slots)

    def estimate(self, total: Column, zeros: Column) -> Column:
        """Return the number of distinct values, by the sum of ``2**-register`` and the number of registers that are 0."""
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
        """Return the bias of a raw estimate by Spark's tables."""
        expressions = f"{CATALYST}.expressions"
        invoke = java_class(f"{expressions}.objects.Invoke")
        helper = java_class(f"{expressions}.Literal").fromObject(self._helper)
        double = java_class("org.apache.spark.sql.types.DataTypes").DoubleType
        arguments, no_types = scala_seq([Expression.of(raw)._java]), scala_seq([])
        return Expression(invoke(helper, _BIAS, double, arguments, no_types, True, False, True)).column()


@dataclass(frozen=True, eq=False)
class AggregateFunction(Expression):
    """An aggregate function over its arguments, such as ``Sum``."""

    @property
    def sql_name(self) -> str:
        return str(self._java.prettyName())

    @property
    def buffer(self) -> list[Expression]:
        return [Expression(attribute) for attribute in scala_list(self._java.aggBufferAttributes())]

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
        helper = self._java.hllppHelper()
        return Registers(int(helper.numWords()), helper)

    @property
    def percentages(self) -> tuple[float, ...]:
        """The shares of the percentiles that it computes."""
        value = self.children[1]._java.eval(None)
        return (float(value),) if isinstance(value, int | float) else tuple(value.toDoubleArray())

    @property
    def is_descending(self) -> bool:
        """Whether a percentile counts values from the largest down."""
        return self.kind in ("Percentile", "PercentileDisc") and bool(self._java.reverse())

    @property
    def empty_sketch(self) -> CountMinTable:
        """The sketch of ``count_min_sketch`` before any value."""
        serialised = bytes(self._java.createAggregationBuffer().toByteArray())
        _, total, depth, width = struct.unpack_from(">iqii", serialised)
        factors = struct.unpack_from(f">{depth}q", serialised, struct.calcsize(">iqii"))
        return CountMinTable(depth, width, (total, *factors))

    @property
    def bins(self) -> int:
        return int(self._java.nBins().eval(None))

    @property
    def lg_config_k(self) -> int:
        """Precision of an HLL sketch; for a union, that of a union of no sketches.

        Raises
        ------
        InvalidRequestError
            Spark does not support the precision.
        """
        if self.kind != "HllSketchAgg":
            return 12
        try:
            return int(self._java.lgConfigK())
        except PySparkException as error:
            raise RefusedQueryError(str(error), aggregate=self.sql) from error

    @property
    def may_differ(self) -> bool:
        """Whether a union accepts sketches of several precisions."""
        return self.kind == "HllUnionAgg" and bool(self._java.allowDifferentLgConfigK())

    @property
    def added_option(self) -> str:
        """The option of its use that Spark 3.5 does not have; "" for none."""
        return SPARK.added_option(self._java, self.kind)

    @property
    def ignores_nulls(self) -> bool:
        """Whether ``first`` or ``last`` ignores nulls."""
        return bool(self._java.ignoreNulls())


@dataclass(frozen=True, eq=False)
class AggregateExpression(Expression):
    """A use of an aggregate function in a query."""

    @classmethod
    def at(cls, node: Expression) -> AggregateExpression | None:
        """Return the use that a node is; None for any other node."""
        return cls(node._java) if node.kind == "AggregateExpression" else None

    @cached_property
    def function(self) -> AggregateFunction:
        """The function that Spark really runs."""
        return AggregateFunction(Expression(self._java.aggregateFunction()).unwrapped()._java)

    @cached_property
    def where(self) -> Expression | None:
        """The condition of its FILTER."""
        condition = optional(self._java.filter())
        return None if condition is None else Expression(condition)


def nearest_biases(node: Expression) -> tuple[list[float], list[float]] | None:
    """Return raw estimates and their biases, by which an expression of :meth:`Registers.estimate` finds the bias of its second child;
    None for any other expression.
    """
    if node._java.functionName() != _BIAS:
        return None
    helper = node._java.targetObject().value()
    index = Registers(int(helper.numWords()), helper).precision - 4
    return list(helper.RAW_ESTIMATE_DATA()[index]), list(helper.BIAS_DATA()[index])
