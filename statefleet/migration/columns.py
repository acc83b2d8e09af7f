"""Conversion of the columns of Spark's state to those of an operator of the fleet, and checks that they fit."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError, StateMismatchError
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.checkpoint_state import SPARK_DEFAULT_STORE, SparkStore
from spark_jobs.plan.keys import Key, key_of
from spark_jobs.plan.logical import resolved
from spark_jobs.worker.exchange import HASH_COLUMN
from statefleet.migration.checkpoint import SparkOperator


def store_of(operator: SparkOperator, name: str = SPARK_DEFAULT_STORE, *, has_keys: bool = True) -> SparkStore:
    """Return a store of a Spark operator; see :meth:`SparkOperator.store`.

    Raises
    ------
    StateMismatchError
        The operator has no store of that name, or Spark did not write down what it holds.
    CorruptStateError
        Partitions of the store are missing.
    """
    store = operator.store(name, has_keys=has_keys)
    if store is None:
        reason = "the checkpoint's operator is another one than the query's; nothing was written; import it for the query that it is of"
        if operator.is_undescribed(name):
            reason = (
                "Spark did not write down what the checkpoint's state holds: Spark before 3.1 never did, and later ones do not if told "
                "so (spark.sql.streaming.stateStore.stateSchemaCheck); nothing was written; let the old query run a batch on this "
                "version of Spark, with that setting on, which writes it down, and import again"
            )
        raise StateMismatchError(
            reason, checkpoint=operator.checkpoint.folder.uri, operator=operator.number, store=name
        )
    return store


def check_types(
    operator: SparkOperator, columns: str, existing: T.StructType, expected: Sequence[tuple[str | None, T.DataType]]
) -> None:
    """Check that the columns of a state (named `columns` in the error) have the names (None for any name) and types of the query's.

    Raises StateMismatchError if they differ; the error has both.
    """
    present = [(column.name, column.dataType.simpleString()) for column in existing.fields]
    required = [(name, kind.simpleString()) for name, kind in expected]
    fits = len(present) == len(required) and all(
        kind == required_kind and name in (None, present_name)
        for (present_name, kind), (name, required_kind) in zip(present, required, strict=True)
    )
    if not fits:
        raise StateMismatchError(
            f"the {columns} of the query are not those of the checkpoint's state; nothing was written; build the query as the one was "
            "that made the checkpoint",
            checkpoint=operator.checkpoint.folder.uri,
            operator=operator.number,
            existing=", ".join(f"{name} {kind}" for name, kind in present),
            asked=", ".join(f"{name or '?'} {kind}" for name, kind in required),
        )


def named_columns(prefix: str, types: Sequence[tuple[T.DataType, bool]]) -> list[T.StructField]:
    """Return columns that are named by a prefix and their index, from their types and nullability."""
    return [T.StructField(f"{prefix}{index}", kind, nullable) for index, (kind, nullable) in enumerate(types)]


def keys_over(rows: DataFrame, keys: Sequence[Key], columns: Sequence[str], *, normalised: bool = True) -> list[Key]:
    """Return the keys of an operator over columns with their values, flattened to the same leaves."""
    over: list[Key] = []
    for key, name in zip(keys, columns, strict=True):
        # The prefix of the names of the key's leaves.
        path = key.leaves[0].name.partition("_")[0]
        over.append(key_of(resolved(rows, name).as_nullable_as(key.expression), path, normalised=normalised))
        if [leaf.name for leaf in over[-1].leaves] != [leaf.name for leaf in key.leaves]:
            raise InvalidRequestError(
                "a part of a key may be null where it never is in the query, so the key is another one; nothing was written; group by "
                "the parts, each a column of its own",
                key=key.expression.sql,
            )
    return over


def hashed(keys: Sequence[Key]) -> Column:
    """Return the hash by which an aggregation or a deduplication partitions its rows."""
    columns = [column for key in keys for column in key.columns]
    return (F.hash(*columns) if columns else F.lit(0)).alias(HASH_COLUMN)


def key_columns(keys: Sequence[Key]) -> list[Column]:
    """Return the leaves of keys, under their names."""
    return [column.alias(leaf.name) for key in keys for leaf, column in zip(key.leaves, key.columns, strict=True)]


def key_name(expression: Expression) -> str | None:
    """Return the name of a key in Spark's state; None for a generated name."""
    if not expression.is_attribute or expression.name.startswith("_groupingexpression"):
        return None
    return expression.name
