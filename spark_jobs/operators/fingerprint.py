"""The fingerprint of an aggregate: text, equal in every run, by which a changed query finds its state."""

from __future__ import annotations

from pyspark.sql import SparkSession

from spark_jobs.plan.aggregate_functions import AggregateExpression
from spark_jobs.plan.catalyst import Expression


def fingerprint_of(spark: SparkSession, aggregate: AggregateExpression) -> tuple[str, str]:
    """Return the fingerprint of a use of an aggregate function.

    Returns
    -------
    tuple
        The function over its arguments, in SQL. Columns stand by name alone, without the casts that Spark adds: these follow the
        types of the columns, which may become wider. Second, the types to which the query itself casts a single argument, from the
        inside out: ``min(cast(v as bigint))`` can continue the state of ``min(cast(v as int))``.
    """
    names, function = _Names(spark), aggregate.function
    arguments = function.children
    casts: list[str] = []
    if len(arguments) == 1:
        argument = arguments[0]
        while argument.kind == "Cast":
            if argument.is_written_cast:
                casts.insert(0, argument.type_sql)
            argument = argument.child
        arguments = [argument]
    text = f"{function.kind}({', '.join(names.text(argument) for argument in arguments)})"
    if function.kind in ("First", "Last") and function.ignores_nulls:
        text += " ignoring nulls"
    if function.kind == "HyperLogLogPlusPlus":
        text += f" in {function.registers.slots} words"
    if function.is_descending:
        text += " descending"
    if function.kind in ("Sum", "Average") and function.eval_mode == "TRY":
        text += " or null"
    if aggregate.where is not None:
        text += f" where {names.text(aggregate.where)}"
    return text, " ".join(casts)


class _Names:
    """Writes expressions as SQL that is equal in every analysis of a query."""

    def __init__(self, spark: SparkSession) -> None:
        self._case_sensitive = spark.conf.get("spark.sql.caseSensitive") == "true"
        #: Variables of lambdas, by expression id, in the order of their appearance.
        self._variables: dict[int, str] = {}

    def text(self, expression: Expression) -> str:
        return expression.rebuilt(self._plain).sql

    def _plain(self, node: Expression) -> Expression | None:
        if node.kind == "Cast" and not node.is_written_cast:
            return node.child.rebuilt(self._plain)
        if node.is_attribute:
            # The query may write the name in another case than the column's.
            name = node.name if self._case_sensitive else node.name.lower()
            return node.as_leaf(f"`{name}`")
        if node.kind == "NamedLambdaVariable":
            number = len(self._variables)
            return node.as_leaf(self._variables.setdefault(node.id, f"_{number}"))
        if node.kind == "Literal" and node.literal is None:
            return node.as_leaf("NULL")
        replaced = node.unwrapped()
        return None if replaced is node else replaced.rebuilt(self._plain)
