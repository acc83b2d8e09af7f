"""What an aggregate accumulates, as text that stays the same from run to run: by it a changed query finds its state again."""

from __future__ import annotations

from pyspark.sql import SparkSession

from spark_jobs.plan.catalyst import Expression, class_name, rebuild, scala_list

__all__ = ["meaning_of", "unwrap"]

_REPLACEABLE = "org.apache.spark.sql.catalyst.expressions.RuntimeReplaceable"


def unwrap(spark: SparkSession, function: Expression) -> Expression:
    """The function that Spark really runs: ``any_value``, ``bool_and``, .. are other functions in disguise."""
    assert spark._jvm is not None
    replaceable = spark._jvm.java.lang.Class.forName(_REPLACEABLE)
    while replaceable.isInstance(function):
        function = function.replacement()
    return function


def meaning_of(spark: SparkSession, aggregate: Expression, function: Expression) -> tuple[str, str]:
    """What an AggregateExpression whose function is (unwrapped) `function` accumulates.

    Returns
    -------
    tuple
        The function over its arguments, in SQL: columns by name alone, without the casts that Spark adds (they follow the types of
        the columns, which may become wider). And the types that the query itself casts the one argument to, inside out:
        ``min(cast(v as bigint))`` goes on from where ``min(cast(v as int))`` was.
    """
    names = _Names(spark)
    arguments = scala_list(function.children())
    casts: list[str] = []
    if len(arguments) == 1:
        argument = arguments[0]
        while class_name(argument) == "Cast":
            if names.is_written(argument):
                casts.insert(0, str(argument.dataType().sql()))
            argument = argument.child()
        arguments = [argument]
    text = f"{class_name(function)}({', '.join(names.text(one) for one in arguments)})"
    if class_name(function) in ("First", "Last") and function.ignoreNulls():
        text += " ignoring nulls"
    condition = aggregate.filter()
    if condition.isDefined():
        text += f" where {names.text(condition.get())}"
    return text, " ".join(casts)


class _Names:
    """Writes expressions as SQL without what changes from one analysis of a query to the next."""

    def __init__(self, spark: SparkSession) -> None:
        assert spark._jvm is not None
        self._spark = spark
        self._expressions = spark._jvm.org.apache.spark.sql.catalyst.expressions
        self._case_sensitive = spark.conf.get("spark.sql.caseSensitive") == "true"
        #: Variables of lambdas, by expression id, in the order of their appearance.
        self._variables: dict[int, str] = {}

    def is_written(self, cast: Expression) -> bool:
        """Whether a cast stands in the query, rather than being Spark's own."""
        return bool(cast.getTagValue(self._expressions.Cast.USER_SPECIFIED_CAST()).isDefined())

    def text(self, expression: Expression) -> str:
        return str(rebuild(self._spark, expression, self._plain).sql())

    def _plain(self, node: Expression) -> Expression | None:
        kind = class_name(node)
        if kind == "Cast" and not self.is_written(node):
            return rebuild(self._spark, node.child(), self._plain)
        if kind == "AttributeReference":
            # The name as the query writes it, which need not be the column's case.
            name = node.name() if self._case_sensitive else node.name().lower()
            return self._named(f"`{name}`", node)
        if kind == "NamedLambdaVariable":
            number = len(self._variables)
            return self._named(self._variables.setdefault(node.exprId().id(), f"_{number}"), node)
        if kind == "Literal" and node.value() is None:
            return self._named("NULL", node)
        replaced = unwrap(self._spark, node)
        return None if replaced is node else rebuild(self._spark, replaced, self._plain)

    def _named(self, name: str, node: Expression) -> Expression:
        return self._expressions.PrettyAttribute(name, node.dataType())
