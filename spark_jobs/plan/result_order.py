"""The order of what a query emits, for sinks that must tell a newer result of a key from an older one."""

from __future__ import annotations

from pyspark.sql import DataFrame

from spark_jobs.plan.stateful_exchange import jvm_classes


def with_result_order(results: DataFrame, column: str = "result_order") -> DataFrame:
    """Add where each result stands among those of its key.

    The column is ``STRUCT<epoch: BIGINT, run: BIGINT, number: BIGINT, run_id: STRING>``: the epoch of a continuous query, or the
    micro-batch; the query's run, of which a later one has a greater number; the number of the result among those of its task in the
    epoch; and the run's id. Of two results of a key the greater struct is the newer one, whatever failed between them: a process that
    was paused, and goes on after the query has begun again, emits lesser ones.

    An epoch is repeated by another run if it did not count. Those of its results count whose `run_id` is that of the version of the
    state that it made, ``epoch + 1`` (:meth:`LiveState.history`).

    Parameters
    ----------
    results
        What an operator of the fleet returned. Call this on it first: above a Python function rows are numbered where they are read.
    column
        Name of the new column.

    Returns
    -------
    DataFrame
        `results` with one more column.

    Examples
    --------
    >>> counts = fleet.stateful(clicks, name="clicks").groupBy("user").count()   # doctest: +SKIP
    >>> sf.with_result_order(counts).selectExpr("user", "count", "result_order.epoch")   # doctest: +SKIP
    """
    spark = results.sparkSession
    return DataFrame(jvm_classes(spark).ordered(results._jdf, column), spark)
