"""Aggregates of distinct values: exact, with a row of state for each group and value, in a state of their own."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

from pyspark.sql import DataFrame

from spark_jobs.api.target import Target
from spark_jobs.operators.kept_rows import build_deduplicate
from spark_jobs.operators.session_windows import Session
from spark_jobs.plan.distinct_aggregation import DistinctAggregation
from spark_jobs.plan.logical import analysed
from spark_jobs.plan.spark_errors import RefusedQueryError

_NO_LETTERS = re.compile(r"[^A-Za-z0-9_.]+")
_MOST_LETTERS = 40


def over_distinct_values(aggregated: DataFrame, target: Target) -> DataFrame:
    """Return an aggregation that has the results of one with DISTINCT: over its rows, and the first row of each group and value.

    `aggregated` is any result of ``groupBy(..).agg(..)``; one without DISTINCT is returned. The first rows are those of a
    ``dropDuplicates`` by group and values, with a state of its own for each set of values that is aggregated
    (``DistinctAggregation.scala``). Raises InvalidRequestError for groups that are session windows, whose values change hands when two
    of them become one.
    """
    aggregation = DistinctAggregation.of(aggregated)
    if aggregation is None:
        return aggregated
    if Session.among(analysed(aggregated).grouping) is not None:
        raise RefusedQueryError(
            "aggregates of distinct values are not held for session windows, which become one as rows come; use collect_set and size, "
            "or F.window",
            state=target.name,
        )
    firsts = []
    for values, rows in aggregation.sets():
        distinct = rows.dropDuplicates()
        plan = build_deduplicate(distinct, "append", within_watermark=False)
        of_values = replace(target, name=_state_name(target.name, values), output_mode=None).checked()
        firsts.append(of_values.run(plan, distinct))
    return aggregation.over(firsts)


def _state_name(name: str, values: str) -> str:
    """Return the name of the state that has the values of an aggregate, by what it aggregates."""
    readable = _NO_LETTERS.sub("-", values).strip("-")[:_MOST_LETTERS]
    if readable != values:
        readable += "-" + hashlib.sha256(values.encode()).hexdigest()[:6]
    return f"{name}-distinct-{readable}"
