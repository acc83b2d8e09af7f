"""Columns of Spark's state as what an operator of the fleet holds, and what does not fit."""

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

__all__ = ["check_types", "hashed", "keys_over", "named_columns", "store_of"]


def store_of(operator: SparkOperator, name: str = SPARK_DEFAULT_STORE, *, has_keys: bool = True) -> SparkStore:
    """A store that an operator of Spark's has; see :meth:`SparkOperator.store`.

    Raises
    ------
    StateMismatchError
        It has none of that name, or Spark did not write down what is in it.
    CorruptStateError
        Partitions of it are missing.
    """
    store = operator.store(name, has_keys=has_keys)
    if store is None:
        raise StateMismatchError(
            "the checkpoint's operator is another one than the query's, or Spark was told not to write down what its state holds "
            "(spark.sql.streaming.stateStore.stateSchemaCheck); nothing was written; import it for the query that it is of",
            checkpoint=operator.checkpoint.folder.uri,
            operator=operator.number,
            store=name,
        )
    return store


def check_types(
    operator: SparkOperator, what: str, found: T.StructType, wanted: Sequence[tuple[str | None, T.DataType]]
) -> None:
    """Refuse columns of a state that are not those of the query's own.

    Parameters
    ----------
    wanted
        Names (None if any will do) and types.

    Raises
    ------
    StateMismatchError
        They differ; shows both.
    """
    own = [(one.name, one.dataType.simpleString()) for one in found.fields]
    asked = [(name, kind.simpleString()) for name, kind in wanted]
    fits = len(own) == len(asked) and all(
        kind == other and name in (None, mine) for (mine, kind), (name, other) in zip(own, asked, strict=True)
    )
    if not fits:
        raise StateMismatchError(
            f"the {what} of the query are not those of the checkpoint's state; nothing was written; build the query as the one was "
            "that made the checkpoint",
            checkpoint=operator.checkpoint.folder.uri,
            operator=operator.number,
            existing=", ".join(f"{name} {kind}" for name, kind in own),
            asked=", ".join(f"{name or '?'} {kind}" for name, kind in asked),
        )


def named_columns(prefix: str, types: Sequence[tuple[T.DataType, bool]]) -> list[T.StructField]:
    """Columns with numbers for names, of these types, which may be null or not."""
    return [T.StructField(f"{prefix}{place}", kind, nullable) for place, (kind, nullable) in enumerate(types)]


def keys_over(rows: DataFrame, keys: Sequence[Key], columns: Sequence[str], *, normalised: bool = True) -> list[Key]:
    """Keys of an operator over columns that hold their values, flattened to the same leaves."""
    made = []
    for key, name in zip(keys, columns, strict=True):
        path = _path(key)
        made.append(key_of(resolved(rows, name).as_nullable_as(key.expression), path, normalised=normalised))
        if [one.name for one in made[-1].leaves] != [one.name for one in key.leaves]:
            raise InvalidRequestError(
                "a part of a key may be null where it never is in the query, so the key is another one; nothing was written; group by "
                "the parts, each a column of its own",
                key=key.expression.sql,
            )
    return made


def _path(key: Key) -> str:
    """What the names of a key's leaves begin with."""
    return key.leaves[0].name.partition("_")[0]


def hashed(keys: Sequence[Key]) -> Column:
    """By what rows are partitioned, as an aggregation or a deduplication does."""
    columns = [column for key in keys for column in key.columns]
    return (F.hash(*columns) if columns else F.lit(0)).alias(HASH_COLUMN)


def key_columns(keys: Sequence[Key]) -> list[Column]:
    """Leaves of keys, under their names."""
    return [column.alias(leaf.name) for key in keys for leaf, column in zip(key.leaves, key.columns, strict=True)]


def key_name(expression: Expression) -> str | None:
    """Name that Spark's state has for a key; None for one that it made up."""
    if not expression.is_attribute or expression.name.startswith("_groupingexpression"):
        return None
    return expression.name
