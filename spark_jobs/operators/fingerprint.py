"""What an aggregate accumulates, as text that stays the same from run to run: by it a changed query finds its state again."""

from __future__ import annotations

from pyspark.sql import SparkSession

from spark_jobs.plan.aggregate_functions import AggregateExpression
from spark_jobs.plan.catalyst import Expression

__all__ = ["meaning_of"]


def meaning_of(spark: SparkSession, aggregate: AggregateExpression) -> tuple[str, str]:
    """What a use of an aggregate function accumulates.

    Returns
    -------
    tuple
        The function over its arguments, in SQL: columns by name alone, without the casts that Spark adds (they follow the types of
        the columns, which may become wider). And the types that the query itself casts the one argument to, inside out:
        ``min(cast(v as bigint))`` goes on from where ``min(cast(v as int))`` was.
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
    text = f"{function.kind}({', '.join(names.text(one) for one in arguments)})"
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
    """Writes expressions as SQL without what changes from one analysis of a query to the next."""

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
            # The name as the query writes it, which need not be the column's case.
            name = node.name if self._case_sensitive else node.name.lower()
            return node.shown_as(f"`{name}`")
        if node.kind == "NamedLambdaVariable":
            number = len(self._variables)
            return node.shown_as(self._variables.setdefault(node.id, f"_{number}"))
        if node.kind == "Literal" and node.literal is None:
            return node.shown_as("NULL")
        replaced = node.unwrapped()
        return None if replaced is node else replaced.rebuilt(self._plain)
