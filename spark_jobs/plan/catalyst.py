"""Spark's own (Catalyst) expressions, read and rebuilt through Py4J.

Statefleet lets Spark analyse a query and takes the analysed expressions apart, so names, types, casts and final formulas are
Spark's, not a copy of them. Only this package touches objects of the JVM: this module, :mod:`spark_jobs.plan.logical` (plans),
:mod:`spark_jobs.plan.aggregate_functions` and :mod:`spark_jobs.plan.logical`. All other code uses their classes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.errors import PySparkValueError
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import Column, SparkSession
from pyspark.sql.types import DataType, _parse_datatype_json_string

from spark_jobs.plan.spark_errors import RefusedQueryError
from spark_jobs.plan.spark_version import SPARK

#: Errors by which a job that Spark ran fails, seen from Python: PySpark's own where it has a class for the error.
JOB_FAILURES = (CapturedException, Py4JJavaError)

#: Package of expressions, plans and rules.
CATALYST = "org.apache.spark.sql.catalyst"

_EXPRESSIONS = f"{CATALYST}.expressions"
_REPLACEABLE = f"{_EXPRESSIONS}.RuntimeReplaceable"
#: In the metadata of a column, the delay of its watermark.
WATERMARK_KEY = "spark.watermarkDelayMs"
_SESSION_KEY = "spark.sessionWindow"


def java_class(name: str) -> Any:
    """Return a class of the running Spark application's JVM, or a Scala object, by its full name in Spark 3.5."""
    context = SparkContext._active_spark_context
    assert context is not None, "expressions are those of a session"
    return _java_class(context._jvm, SPARK.MOVED_CLASSES.get(name, name))


@cache
def _java_class(jvm: Any, name: str) -> Any:
    # Cached: with each part of the name the JVM looks for a class through all of its jars.
    return reduce(getattr, name.split("."), jvm)


def scala_list(sequence: Any) -> list[Any]:
    return [sequence.apply(index) for index in range(sequence.size())]


def scala_seq(items: Iterable[Any]) -> Any:
    return java_class("org.apache.spark.api.python.PythonUtils").toSeq(list(items))


def java_type(spark: SparkSession, kind: DataType) -> Any:
    return spark._jsparkSession.parseDataType(kind.json())


def optional(option: Any) -> Any:
    """Return the value of a Scala Option; None if it is empty."""
    return option.get() if option.isDefined() else None


@dataclass(frozen=True, eq=False)
class Expression:
    """An expression of Catalyst. Compare two by :meth:`matches`. A property that only some kinds have names them."""

    _java: Any

    @classmethod
    def of(cls, column: Column) -> Expression:
        """Return the expression of a PySpark column."""
        return cls(SPARK.expression_of(java_class, column._jc))

    def column(self) -> Column:
        return Column(SPARK.column_of(java_class, self._java))

    @cached_property
    def kind(self) -> str:
        """Simple name of its class, such as ``Sum``."""
        return str(self._java.getClass().getSimpleName())

    @property
    def is_attribute(self) -> bool:
        """Whether it is a column of a plan."""
        return self.kind == "AttributeReference"

    @property
    def children(self) -> list[Expression]:
        return [Expression(child) for child in scala_list(self._java.children())]

    @property
    def child(self) -> Expression:
        return Expression(self._java.child())

    @property
    def unaliased(self) -> Expression:
        """The expression that an alias names; the expression itself if it is not an alias."""
        return self.child if self.kind == "Alias" else self

    @property
    def type(self) -> DataType:
        """Its type.

        Raises
        ------
        InvalidRequestError
            If PySpark has no such type, as for intervals of months, days and microseconds at once.
        """
        # For such an interval PySpark 3.5 has no class. PySpark 4 has one, but no type of Arrow's.
        with suppress(PySparkValueError):
            data_type = _parse_datatype_json_string(self._java.dataType().json())
            if data_type.typeName() != "interval":
                return data_type
        raise RefusedQueryError(
            "PySpark has no type for values that the operator would keep; select the column away before the operator, or cast it to a "
            "string; of an interval, make one of days and time, or of years and months (make_dt_interval, make_ym_interval)",
            column=self.sql,
            type=self.type_sql,
        )

    @property
    def type_sql(self) -> str:
        """The type as SQL writes it."""
        return str(self._java.dataType().sql())

    @property
    def nullable(self) -> bool:
        return bool(self._java.nullable())

    @property
    def deterministic(self) -> bool:
        return bool(self._java.deterministic())

    @property
    def sql(self) -> str:
        return str(self._java.sql())

    @property
    def column_name(self) -> str:
        """The name that Spark gives a column of this expression."""
        if self.is_attribute:
            return self.name
        return str(SPARK.pretty_sql(java_class, self._java))

    @property
    def is_resolved(self) -> bool:
        return bool(self._java.resolved())

    @property
    def canonical(self) -> str:
        """Text that is equal for expressions that differ only in how they are written."""
        return str(self._java.canonicalized().toString())

    def matches(self, other: Expression) -> bool:
        """Return whether both have the same result, by Spark's own comparison."""
        return bool(self._java.semanticEquals(other._java))

    # -- named expressions: attributes and aliases -----------------------------------------------------------------------

    @property
    def name(self) -> str:
        return str(self._java.name())

    @property
    def id(self) -> int:
        """Number by which Spark distinguishes columns of the same name."""
        return int(self._java.exprId().id())

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of a resolved attribute, by which a column is marked as event time or as a window."""
        metadata: dict[str, Any] = json.loads(self._java.metadata().json())
        return metadata

    @property
    def attribute(self) -> Expression:
        """The attribute by which a plan refers to this expression."""
        return Expression(self._java.toAttribute())

    @property
    def watermark_delay_ms(self) -> int | None:
        """Delay of an attribute that carries a watermark, as Spark marks it; None for any other expression."""
        if not self._is_marked(WATERMARK_KEY):
            return None
        return int(self._java.metadata().getLong(WATERMARK_KEY))

    @property
    def is_session(self) -> bool:
        """Whether it is a session window, or a column of session windows."""
        return self.kind == "SessionWindow" or self._is_marked(_SESSION_KEY)

    def _is_marked(self, key: str) -> bool:
        return self.is_attribute and bool(self._java.metadata().contains(key))

    def nullable_attribute(self) -> Expression:
        return Expression(self._java.withNullability(True))

    # -- other kinds ----------------------------------------------------------------------------------------------

    @property
    def literal(self) -> Any:
        """A literal's value as JSON: bytes as hex, and values that JSON lacks, such as NaN, as their text."""
        value = self._java.value()
        if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            return value
        return bytes(value).hex() if isinstance(value, bytes | bytearray) else str(value)

    @property
    def is_written_cast(self) -> bool:
        """Whether the user wrote the cast; Spark inserts casts of its own."""
        tag = java_class(f"{_EXPRESSIONS}.Cast").USER_SPECIFIED_CAST()
        return bool(self._java.getTagValue(tag).isDefined())

    @property
    def is_widening_cast(self) -> bool:
        """Whether a cast preserves every value."""
        cast = java_class(f"{_EXPRESSIONS}.Cast")
        return bool(cast.canUpCast(self._java.child().dataType(), self._java.dataType()))

    @property
    def eval_mode(self) -> str:
        """Mode in which arithmetic, a cast, a sum or an average handles values that cannot be computed.

        ``LEGACY`` (integers wrap, else null), ``ANSI`` (it fails), ``TRY`` (it is null).
        """
        return str(SPARK.eval_mode(self._java, self.kind).toString())

    @property
    def field_name(self) -> str:
        return str(self._java.extractFieldName())

    def field(self, index: int, name: str) -> Expression:
        """Return a field of a struct by its index, as two fields may have the same name."""
        return Expression(
            java_class(f"{_EXPRESSIONS}.GetStructField")(self._java, index, java_class("scala.Some")(name))
        )

    # -- trees ----------------------------------------------------------------------------------------------------

    @property
    def references(self) -> list[Expression]:
        return [Expression(attribute) for attribute in scala_list(self._java.references().toSeq())]

    def leaves(self) -> Iterator[Expression]:
        """Yield the nodes of the tree that have no children."""
        children = self.children
        if not children:
            yield self
        for child in children:
            yield from child.leaves()

    def conjuncts(self) -> list[Expression]:
        """Return the operands of nested ANDs; the expression itself if it is no AND."""
        if self.kind != "And":
            return [self]
        return [conjunct for side in self.children for conjunct in side.conjuncts()]

    def rebuilt(self, replacement: Callable[[Expression], Expression | None]) -> Expression:
        """Return a copy of the tree in which each node is replaced by the result of `replacement` for it, unless that is None."""
        replaced = replacement(self)
        if replaced is not None:
            return replaced
        children = self.children
        new_children = [child.rebuilt(replacement) for child in children]
        if all(new is old for new, old in zip(new_children, children, strict=True)):
            return self
        return Expression(self._java.withNewChildren(scala_seq(child._java for child in new_children)))

    # -- derived expressions --------------------------------------------------------------------------------------

    def unwrapped(self) -> Expression:
        """Return the expression that Spark runs: ``any_value``, ``bool_and`` and others are replaced by other functions."""
        replaceable = java_class("java.lang.Class").forName(_REPLACEABLE)
        java = self._java
        while replaceable.isInstance(java):
            java = java.replacement()
        return self if java is self._java else Expression(java)

    def with_comparisons(self) -> Expression:
        """Return the expression with ``a BETWEEN b AND c`` as two comparisons, as Spark 3.5 writes it and as all Spark's rules know it.

        Spark 4 has an expression of its own, which evaluates ``a`` once. It stays if it has to be evaluated once.
        """

        def comparisons(node: Expression) -> Expression | None:
            return (
                node.unwrapped()._inlined().with_comparisons()
                if node.kind == "Between" and node.deterministic
                else None
            )

        return self.rebuilt(comparisons)

    def _inlined(self) -> Expression:
        """Return the body of an expression that names parts of it (``With``), with these parts in the places of their names."""
        if self.kind != "With":
            return self
        parts = {part.id().id(): Expression(part.child()) for part in scala_list(self._java.defs())}

        def named(node: Expression) -> Expression | None:
            return parts.get(node._java.id().id()) if node.kind == "CommonExpressionRef" else None

        return self.child.rebuilt(named)

    def normalised(self) -> Expression:
        """Return floating-point numbers as Spark groups them: a single NaN, and 0.0 for -0.0."""
        return Expression(java_class(f"{CATALYST}.optimizer.NormalizeNaNAndZero")(self._java))

    def murmur(self, *, times: int = 1) -> Expression:
        """Return the 32-bit hash of the value by seed 0; for `times` above 1, repeated with the hash before as the seed."""
        murmur3 = java_class(f"{_EXPRESSIONS}.Murmur3Hash")
        return Expression(murmur3(scala_seq([self._java] * times), 0))

    def as_leaf(self, name: str) -> Expression:
        """Return a leaf of the same type whose SQL is `name`."""
        return Expression(java_class(f"{_EXPRESSIONS}.PrettyAttribute")(name, self._java.dataType()))

    def as_nullable_as(self, attribute: Expression) -> Expression:
        """Return the expression with the nullability of an attribute, also of what is inside of its values."""
        kind = attribute._java.dataType()
        if not self._java.dataType().equals(kind):
            return Expression.of(Column(self.column()._jc.cast(kind))).as_nullable_as(attribute)
        if self.nullable == attribute.nullable:
            return self
        return self.known(nullable=attribute.nullable)

    def known(self, *, nullable: bool) -> Expression:
        """Return the expression, marked for Spark as nullable, or as never null."""
        tag = "KnownNullable" if nullable else "KnownNotNull"
        return Expression(java_class(f"{_EXPRESSIONS}.{tag}")(self._java))

    def named_as(self, attribute: Expression) -> Expression:
        """Return the expression under the name, the id and the metadata of an attribute."""
        alias, java = java_class(f"{_EXPRESSIONS}.Alias"), attribute._java
        metadata = java_class("scala.Some")(java.metadata())
        return Expression(alias(self._java, java.name(), java.exprId(), java.qualifier(), metadata, scala_seq([])))


def conjunction(conditions: Iterable[Expression]) -> Expression | None:
    """Return the AND of the conditions; None if there are none."""
    and_class = java_class(f"{_EXPRESSIONS}.And")
    operands = [condition._java for condition in conditions]
    return Expression(reduce(and_class, operands)) if operands else None
