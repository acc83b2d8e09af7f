"""Spark's own (Catalyst) expressions, read and rebuilt through Py4J.

Statefleet lets Spark analyse a query and takes the analysed expressions apart, so names, types, casts and final formulas are
Spark's, not a copy of them. What is the JVM's is touched in this package only: here, in :mod:`spark_jobs.plan.logical` (plans),
:mod:`spark_jobs.plan.aggregate_functions` and :mod:`spark_jobs.plan.join_rules`. Everyone else is given their classes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.errors import PythonException
from pyspark.sql import Column
from pyspark.sql.types import DataType, _parse_datatype_json_string

__all__ = [
    "CATALYST",
    "JOB_FAILURES",
    "WATERMARK_KEY",
    "Expression",
    "conjunction",
    "java_class",
    "optional",
    "scala_list",
    "scala_seq",
]

#: How a job that Spark ran fails, seen from Python.
JOB_FAILURES = (PythonException, Py4JJavaError)

#: Package of expressions, plans and rules.
CATALYST = "org.apache.spark.sql.catalyst"

_EXPRESSIONS = f"{CATALYST}.expressions"
_REPLACEABLE = f"{_EXPRESSIONS}.RuntimeReplaceable"
#: In the metadata of a column, the delay of its watermark.
WATERMARK_KEY = "spark.watermarkDelayMs"
_SESSION_KEY = "spark.sessionWindow"


def java_class(name: str) -> Any:
    """A class of the running Spark application's JVM, or an object of Scala's, by its full name."""
    context = SparkContext._active_spark_context
    assert context is not None, "expressions are those of a session"
    return _found(context._jvm, name)


@cache
def _found(jvm: Any, name: str) -> Any:
    # Once: each part of the name is a call of the JVM.
    return reduce(getattr, name.split("."), jvm)


def scala_list(sequence: Any) -> list[Any]:
    """Python list of a Scala Seq."""
    return [sequence.apply(position) for position in range(sequence.size())]


def scala_seq(items: Iterable[Any]) -> Any:
    """Scala Seq of JVM objects."""
    return java_class("org.apache.spark.api.python.PythonUtils").toSeq(list(items))


def optional(option: Any) -> Any:
    """What a Scala Option holds; None if it is empty."""
    return option.get() if option.isDefined() else None


@dataclass(frozen=True, eq=False)
class Expression:
    """An expression of Catalyst. Two are compared by :meth:`matches`; a property says of what kinds it is, if not of all."""

    _java: Any

    @classmethod
    def of(cls, column: Column) -> Expression:
        """What a PySpark column stands for."""
        return cls(column._jc.expr())

    def column(self) -> Column:
        """PySpark's column of it."""
        return Column(java_class("org.apache.spark.sql.Column")(self._java))

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
        return [Expression(one) for one in scala_list(self._java.children())]

    @property
    def child(self) -> Expression:
        """The only child."""
        return Expression(self._java.child())

    @property
    def unaliased(self) -> Expression:
        """The expression that an alias names; itself if it is none."""
        return self.child if self.kind == "Alias" else self

    @property
    def type(self) -> DataType:
        return _parse_datatype_json_string(self._java.dataType().json())

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
        """The name that Spark gives a column of it."""
        if self.is_attribute:
            return self.name
        return str(java_class(f"{CATALYST}.util.package").toPrettySQL(self._java))

    @property
    def is_resolved(self) -> bool:
        """Whether Spark knows its type by now."""
        return bool(self._java.resolved())

    @property
    def canonical(self) -> str:
        """Text that is the same for expressions that differ in looks only."""
        return str(self._java.canonicalized().toString())

    def matches(self, other: Expression) -> bool:
        """Whether both have the same result, as Spark tells."""
        return bool(self._java.semanticEquals(other._java))

    # -- named ones: attributes and aliases -----------------------------------------------------------------------

    @property
    def name(self) -> str:
        return str(self._java.name())

    @property
    def id(self) -> int:
        """Number by which Spark tells columns of one name apart."""
        return int(self._java.exprId().id())

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of a resolved attribute: that it is event time, or a window, goes with the column."""
        told: dict[str, Any] = json.loads(self._java.metadata().json())
        return told

    @property
    def attribute(self) -> Expression:
        """The column that a plan has of it."""
        return Expression(self._java.toAttribute())

    @property
    def watermark_delay_ms(self) -> int | None:
        """Delay of an attribute that carries a watermark, as Spark marks it; None for any other expression."""
        if not self._is_marked(WATERMARK_KEY):
            return None
        return int(self._java.metadata().getLong(WATERMARK_KEY))

    @property
    def is_session(self) -> bool:
        """Whether it is a session window, or a column that holds one."""
        return self.kind == "SessionWindow" or self._is_marked(_SESSION_KEY)

    def _is_marked(self, key: str) -> bool:
        return self.is_attribute and bool(self._java.metadata().contains(key))

    def nullable_attribute(self) -> Expression:
        """The attribute, able to be null."""
        return Expression(self._java.withNullability(True))

    # -- other kinds ----------------------------------------------------------------------------------------------

    @property
    def literal(self) -> Any:
        """A literal's value, as JSON has it: a number that is none in words."""
        value = self._java.value()
        if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            return value
        return bytes(value).hex() if isinstance(value, bytes | bytearray) else str(value)

    @property
    def is_written_cast(self) -> bool:
        """Whether a cast stands in the query, rather than being Spark's own."""
        tag = java_class(f"{_EXPRESSIONS}.Cast").USER_SPECIFIED_CAST()
        return bool(self._java.getTagValue(tag).isDefined())

    @property
    def is_widening_cast(self) -> bool:
        """Whether a cast holds every value of what it casts."""
        cast = java_class(f"{_EXPRESSIONS}.Cast")
        return bool(cast.canUpCast(self._java.child().dataType(), self._java.dataType()))

    @property
    def eval_mode(self) -> str:
        """What arithmetic, a cast, a sum or an average does with what cannot be computed.

        ``LEGACY`` (integers wrap, else null), ``ANSI`` (it fails), ``TRY`` (it is null).
        """
        return str(self._java.evalMode().toString())

    @property
    def field_name(self) -> str:
        """The field that is taken out of a struct."""
        return str(self._java.extractFieldName())

    def field(self, place: int, name: str) -> Expression:
        """A field of a struct by its place: two may have one name."""
        return Expression(
            java_class(f"{_EXPRESSIONS}.GetStructField")(self._java, place, java_class("scala.Some")(name))
        )

    # -- trees ----------------------------------------------------------------------------------------------------

    @property
    def references(self) -> list[Expression]:
        """Columns that it reads."""
        return [Expression(one) for one in scala_list(self._java.references().toSeq())]

    def leaves(self) -> Iterator[Expression]:
        """Nodes of the tree that have no children."""
        children = self.children
        if not children:
            yield self
        for child in children:
            yield from child.leaves()

    def conjuncts(self) -> list[Expression]:
        """The parts that must all be true."""
        if self.kind != "And":
            return [self]
        return [part for side in self.children for part in side.conjuncts()]

    def rebuilt(self, replacement: Callable[[Expression], Expression | None]) -> Expression:
        """Copy of the tree in which every node that `replacement` answers for (not None) is replaced by the answer."""
        replaced = replacement(self)
        if replaced is not None:
            return replaced
        children = self.children
        made = [child.rebuilt(replacement) for child in children]
        if all(new is old for new, old in zip(made, children, strict=True)):
            return self
        return Expression(self._java.withNewChildren(scala_seq(one._java for one in made)))

    # -- others made of it ----------------------------------------------------------------------------------------

    def unwrapped(self) -> Expression:
        """The expression that Spark really runs: ``any_value``, ``bool_and``, .. are other functions in disguise."""
        replaceable = java_class("java.lang.Class").forName(_REPLACEABLE)
        java = self._java
        while replaceable.isInstance(java):
            java = java.replacement()
        return self if java is self._java else Expression(java)

    def normalised(self) -> Expression:
        """Floating-point numbers as Spark groups them: one NaN, and -0.0 is 0.0."""
        return Expression(java_class(f"{CATALYST}.optimizer.NormalizeNaNAndZero")(self._java))

    def murmur(self, seed: int, *, times: int = 1) -> Expression:
        """The 32-bit hash of its value under a seed; of `times` more than one, each under the hash before it."""
        hashed = java_class(f"{_EXPRESSIONS}.Murmur3Hash")
        return Expression(hashed(scala_seq([self._java] * times), seed))

    def shown_as(self, name: str) -> Expression:
        """A leaf of the same type whose SQL is `name`."""
        return Expression(java_class(f"{_EXPRESSIONS}.PrettyAttribute")(name, self._java.dataType()))

    def as_nullable_as(self, attribute: Expression) -> Expression:
        """The expression with an attribute's nullability, whatever its own is."""
        if self.nullable == attribute.nullable:
            return self
        tag = "KnownNullable" if attribute.nullable else "KnownNotNull"
        return Expression(java_class(f"{_EXPRESSIONS}.{tag}")(self._java))

    def known_not_null(self) -> Expression:
        """The expression, which Spark then takes for one that is never null."""
        return Expression(java_class(f"{_EXPRESSIONS}.KnownNotNull")(self._java))

    def known_nullable(self) -> Expression:
        """The expression, which Spark then takes for one that may be null."""
        return Expression(java_class(f"{_EXPRESSIONS}.KnownNullable")(self._java))

    def named_as(self, attribute: Expression) -> Expression:
        """The expression under the name, the id and the metadata of an attribute."""
        alias, wanted = java_class(f"{_EXPRESSIONS}.Alias"), attribute._java
        metadata = java_class("scala.Some")(wanted.metadata())
        return Expression(
            alias(self._java, wanted.name(), wanted.exprId(), wanted.qualifier(), metadata, scala_seq([]))
        )


def conjunction(parts: Iterable[Expression]) -> Expression | None:
    """That all of the parts are true; None of none."""
    both = java_class(f"{_EXPRESSIONS}.And")
    found = [one._java for one in parts]
    return Expression(reduce(both, found)) if found else None
