"""Queries that are refused when they are built: with the words that say what to do, and beside them what Spark says, where it does.

No query is started. Spark's own check is the one that ``writeStream.start`` runs on a plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupStateTimeout

from coordinator.model.errors import InvalidRequestError
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.operator_rules import UnboundedStateWarning
from spark_jobs.plan.spark_errors import RefusedQueryError
from spark_jobs.plan.spark_version import SPARK
from statefleet.fleet import Fleet
from tests.integration.spark_checks import check_as_spark_does
from tests.integration.streams import Streams

NONE, EVENT = GroupStateTimeout.NoTimeout, GroupStateTimeout.EventTimeTimeout
#: Gives a DataFrame's next stateful operator in an output mode: of the fleet, or Spark's own, which ignores the mode.
Operators = Callable[..., Any]
#: What Spark 3.5 says of a mode, and Spark 4.2.
NO_APPEND, NO_COMPLETE = (
    f"{mode.capitalize()} output mode not supported|Invalid streaming output mode: {mode}"
    for mode in ("append", "complete")
)
IS_SPARK_4 = bool(SPARK.PROCESSOR_CLASSES)


@dataclass(frozen=True)
class Refusal:
    """A query that cannot run.

    Attributes
    ----------
    build
        Builds it.
    says
        Pattern of the fleet's message, with the remedy.
    mode
        Output mode, of the operator and of the query.
    spark
        Pattern of what Spark says when the same query is started; None if Spark has no such operator, or finds out later.
    """

    build: Callable[[Operators, Streams], DataFrame]
    says: str
    mode: str = "append"
    spark: str | None = None


def keep(*_: Any) -> None:
    """A function that is never called."""


def in_pandas(grouped: Any, mode: str = "update", timeout: str = NONE, state: str = "n long") -> DataFrame:
    return grouped.applyInPandasWithState(keep, "k string", state, mode, timeout)  # type: ignore[no-any-return]


def in_arrow(grouped: Any, mode: str = "update", timeout: str = NONE, state: str = "n long") -> DataFrame:
    return grouped.applyInArrowWithState(keep, "k string", state, mode, timeout)  # type: ignore[no-any-return]


def with_vectors(rows: DataFrame) -> DataFrame:
    return rows.withColumn("v", array_to_vector(F.array(F.col("x").cast("double"))))


def with_intervals(rows: DataFrame) -> DataFrame:
    return rows.withColumn("v", F.make_interval(F.lit(0), F.col("x").cast("int")))


MODES = {
    "an unknown mode": Refusal(
        lambda op, i: op(i["a"]).groupBy("k").count(), "one of update, append, complete", "upsert"
    ),
    "append without a watermark": Refusal(
        lambda op, i: op(i["a"]).groupBy("k").count(),
        "append mode needs a watermark.*add withWatermark and group by window, or use update mode",
        spark=NO_APPEND,
    ),
    "append without event time among the keys": Refusal(
        lambda op, i: op(i["at"]).groupBy("k").count(),
        "append mode needs.*event-time column, or a window over it, among the grouping columns.*or use update mode",
        spark=NO_APPEND,
    ),
    "sessions in append mode without a watermark": Refusal(
        lambda op, i: op(i["a"]).groupBy(F.session_window("t", "5 seconds"), "k").count(),
        "append mode needs a watermark.*add withWatermark",
        spark=NO_APPEND,
    ),
    **{
        subject: Refusal(build, f"{operator} has no complete mode; leave outputMode out", "complete", NO_COMPLETE)
        for subject, operator, build in (
            ("all duplicates", "dropDuplicates", lambda op, i: op(i["a"]).dropDuplicates(["k"])),
            ("all of what is distinct", "dropDuplicates", lambda op, i: op(i["a"]).distinct()),
            (
                "all duplicates within the watermark",
                "dropDuplicatesWithinWatermark",
                lambda op, i: op(i["at"]).dropDuplicatesWithinWatermark(["k"]),
            ),
            ("all of the first rows", "limit", lambda op, i: op(i["a"]).limit(3)),
            ("a join in complete mode", "a join of two streams", lambda op, i: op(i["a"]).join(i["b"], "k")),
        )
    },
    "topN in complete mode": Refusal(
        lambda op, i: op(i["a"]).topN(3, "k", "x"), "topN has no complete mode.*use update", "complete"
    ),
    "keepLast in complete mode": Refusal(
        lambda op, i: op(i["a"]).keepLast("k", "t"), "keepLast has no complete mode.*use update", "complete"
    ),
    "a join in update mode": Refusal(
        lambda op, i: op(i["a"]).join(i["b"], "k"),
        "a join of two streams has no update mode.*leave outputMode out",
        "update",
        # Spark 4.2 runs an inner join in update mode, in which it emits the same; an outer one is refused below.
        None if IS_SPARK_4 else "is not supported in Update output mode, only in Append",
    ),
    "the first rows in update mode": Refusal(
        lambda op, i: op(i["a"]).limit(3),
        "limit has no update mode.*leave outputMode out",
        "update",
        "Limits are not supported .* in Update output mode",
    ),
    "a function in complete mode": Refusal(
        lambda op, i: in_pandas(op(i["a"]).groupBy("k"), "complete"), "append or update", "complete"
    ),
    "a function in append mode, its operator in update mode": Refusal(
        lambda op, i: in_pandas(op(i["a"]).groupBy("k"), "append"),
        "output modes of fleet.stateful and of its function differ",
        "update",
        "applyInPandasWithState in append mode is not supported with Update",
    ),
    "a function in another mode than its operator": Refusal(
        lambda op, i: in_arrow(op(i["a"]).groupBy("k"), "update"),
        "output modes of fleet.stateful and of its function differ",
    ),
}

WATERMARKS = {
    "within no watermark": Refusal(
        lambda op, i: op(i["a"]).dropDuplicatesWithinWatermark(["k"]),
        "needs a watermark; call withWatermark on the event-time column",
        spark="without watermark",
    ),
    "timeouts of no event time": Refusal(
        lambda op, i: in_pandas(op(i["a"]).groupBy("k"), "append", EVENT), "need a watermark.*call withWatermark before"
    ),
    "timeouts of event time that does not reach the function": Refusal(
        lambda op, i: in_arrow(op(i["at"].select("k", "x")).groupBy("k"), "append", EVENT),
        "its column among those that reach the function",
    ),
    "a session window alone": Refusal(
        lambda op, i: op(i["at"]).groupBy(F.session_window("t", "5 seconds")).count(),
        "at least one more grouping column.*group by what the sessions are of",
    ),
}

NEAR = "a.k = b.k and u between t - interval 5 seconds and t + interval 5 seconds"

JOINS = {
    "no equality": Refusal(
        lambda op, i: op(i["at"]).join(i["bt"], i["at"]["t"] > i["bt"]["u"]), "needs an equality.*add one"
    ),
    "no condition": Refusal(lambda op, i: op(i["at"]).join(i["bt"]), "needs an equality.*add one"),
    "left anti": Refusal(
        lambda op, i: op(i["a"]).join(i["b"], "k", "left_anti"), "left semi joins.*use one of these", spark="LeftAnti"
    ),
    **{
        f"{how} without a watermark": Refusal(
            lambda op, i, how=how: op(i["a"].alias("a")).join(i["b"].alias("b"), F.expr(NEAR), how),  # type: ignore[misc]
            "needs event time with a watermark among its equal keys, or a watermark on the side that may lack a match",
            spark="without a watermark",
        )
        for how in ("left_outer", "right_outer", "full_outer", "left_semi")
    },
    "left outer without a bound": Refusal(
        lambda op, i: op(i["at"]).join(i["bt"], "k", "left_outer"),
        "a condition that bounds the other side's rows by it",
        spark="watermark",
    ),
    "a condition that an outer join cannot evaluate": Refusal(
        lambda op, i: op(i["at"]).join(
            i["bt"].withColumnRenamed("k", "l"), F.expr("k = l and t = u and pow(x, y) > 3"), "left_outer"
        ),
        r"cannot evaluate a part of this join's condition.*expression=`pow\(",
    ),
    "every row with every row": Refusal(lambda op, i: op(i["at"]).crossJoin(i["bt"]), "needs an equality.*add one"),
}

TYPES = {
    "a sketch of too few registers": Refusal(
        lambda op, i: op(i["a"]).groupBy("k").agg(F.hll_sketch_agg("x", 3)),
        "HLL_INVALID_LG_K.*between 4 and 21",
        "update",
    ),
    "the first value of a type that a user made": Refusal(
        lambda op, i: op(i["a"]).groupBy("k").agg(F.first(array_to_vector(F.col("l").cast("array<double>")))),
        "cast the column, or take the fields.*of ML vectors, use pyspark.ml.functions.vector_to_array",
        "update",
    ),
    **{
        f"{subject} of a type that a user made": Refusal(
            build, "of ML vectors, use pyspark.ml.functions.vector_to_array"
        )
        for subject, build in {
            "distinct rows": lambda op, i: op(with_vectors(i["at"])).dropDuplicates(["v", "t"]),
            "groups": lambda op, i: op(with_vectors(i["at"])).groupBy("t", "v").count(),
            "joined rows": lambda op, i: op(with_vectors(i["at"])).join(i["bt"], F.expr("x = y and t = u")),
            "the newest rows": lambda op, i: op(with_vectors(i["at"]), "update").keepLast("k", "t"),
            "a function's keys": lambda op, i: in_pandas(op(with_vectors(i["at"])).groupBy("v"), "append"),
        }.items()
    },
    **{
        f"an interval of months and time: {subject}": Refusal(
            build,
            "no type for values that the operator would keep.*make_dt_interval.*column=`v` type=`INTERVAL`",
        )
        for subject, build in {
            "distinct rows": lambda op, i: op(with_intervals(i["a"])).dropDuplicates(["k"]),
            "groups": lambda op, i: op(with_intervals(i["a"]), "update").groupBy("k").agg(F.first("v").cast("string")),
            "joined rows": lambda op, i: op(with_intervals(i["at"])).join(i["bt"], F.expr("x = y and t = u")),
        }.items()
    },
    **{
        f"{function} of structs without fields": Refusal(
            lambda op, i, function=function: op(i["a"]).groupBy("k").agg(F.expr(f"{function}(named_struct())")),  # type: ignore[misc]
            "a struct without fields holds nothing; leave it out",
            "update",
        )
        for function in ("first", "collect_list")
    },
    "state of a type that Arrow does not carry": Refusal(
        lambda op, i: in_pandas(op(i["a"]).groupBy("k"), "append", state="d interval year to month"), "cast it"
    ),
    "state of no columns": Refusal(
        lambda op, i: in_arrow(op(i["a"]).groupBy("k"), "append", state="long"), "is a struct of at least one column"
    ),
    **{
        f"{subject} with two fields of one name, given to a function": Refusal(
            lambda op, i, alike=alike, run=run: run(  # type: ignore[misc]
                op(i["a"].withColumn("s", alike(F.struct(F.col("x").alias("f"), F.col("k").alias("f"))))).groupBy("k")
            ),
            "fields of one name cannot be told apart by the function.*names of their own.*column=`s`",
            "update",
        )
        for subject, alike, run in (
            ("structs", lambda struct: struct, in_pandas),
            ("lists of structs", F.array, in_arrow),
        )
    },
    "structs with two fields of one name, given by a function": Refusal(
        lambda op, i: (
            op(i["a"]).groupBy("k").applyInPandasWithState(keep, "s struct<f:int,f:int>", "n long", "append", NONE)
        ),
        "outputStructType has a struct with fields of one name; give them names of their own",
    ),
    "state of two columns of one name": Refusal(
        lambda op, i: in_arrow(op(i["a"]).groupBy("k"), "append", state="n long, n long"), "have distinct names"
    ),
}


def bloom_filter(column: str) -> Column:
    """Return a filter that Spark aggregates for its own plans only: each aggregate that a user can name is supported."""
    jvm: Any = SparkSession.active()._jvm
    arguments = (F.col(column), F.lit(100).cast("long"), F.lit(1000).cast("long"))
    made = jvm.org.apache.spark.sql.catalyst.expressions.aggregate.BloomFilterAggregate(
        *(Expression.of(argument)._java for argument in arguments)
    )
    return Expression(made.toAggregateExpression()).column()


ARGUMENTS = {
    "no columns": Refusal(
        lambda op, i: op(i["a"]).dropDuplicates([]),
        "dropDuplicates of no columns.*leave the columns out for all of them",
    ),
    "sessions rolled up": Refusal(
        lambda op, i: op(i["at"]).rollup(F.session_window("t", "5 seconds"), "k").count(),
        "session windows are not rolled up.*group by them, and once more without",
    ),
    "a function of rolled up keys": Refusal(
        lambda op, i: in_pandas(op(i["a"]).rollup("k"), "append"), "group by the columns of a key; rollup and cube"
    ),
    "an aggregate that the fleet has not": Refusal(
        lambda op, i: op(i["a"]).groupBy("k").agg(bloom_filter("x")),
        "it holds count, .*; use one of these, or Spark's own",
        "update",
    ),
    "a window of rows": Refusal(
        lambda op, i: op(i["a"]).groupBy("k").agg(F.rank().over(Window.partitionBy("k").orderBy("k"))),
        "aggregate first, and put what goes beyond",
        "update",
    ),
    "rows of an aggregate": Refusal(
        lambda op, i: op(i["a"]).groupBy("k").agg(F.explode(F.collect_list("x"))), "a select on the result", "update"
    ),
    "a result by its name": Refusal(
        lambda op, i: op(i["a"]).groupBy("k").agg(F.sum("x").alias("s"), F.expr("s + 1")),
        "a select on the result",
        "update",
    ),
    "no aggregate": Refusal(lambda op, i: op(i["a"]).groupBy("k").agg(), "needs at least one aggregate", "update"),
    "an aggregate by name": Refusal(
        lambda op, i: op(i["a"]).groupBy("k").agg("x"), r"takes Columns, such as F.sum\('amount'\)", "update"
    ),
    "a function of sessions": Refusal(
        lambda op, i: in_pandas(op(i["at"]).groupBy(F.session_window("t", "5 seconds")), "append"),
        "a function's keys are no session windows",
    ),
    "no function": Refusal(
        lambda op, i: (
            op(i["a"])
            .groupBy("k")
            .applyInPandasWithState(None, "n long", "n long", "append", GroupStateTimeout.NoTimeout)
        ),
        "the function is called for each key",
    ),
    "a stateful DataFrame": Refusal(lambda op, i: op(op(i["a"])).distinct(), "is stateful already.*on the result"),
    "no DataFrame": Refusal(lambda op, i: op([i["a"]]).distinct(), "takes a streaming DataFrame"),
    "no name": Refusal(lambda op, i: op(i["a"], name=None).distinct(), "a state's name is a folder"),
    "a number for a name": Refusal(lambda op, i: op(i["a"], name=3).distinct(), "a state's name is a folder"),
    "unknown timeouts": Refusal(
        lambda op, i: in_pandas(op(i["a"]).groupBy("k"), "append", "Never"),
        "timeoutConf is one of NoTimeout, Processing",
    ),
    "an unknown mode of a function": Refusal(
        lambda op, i: in_arrow(op(i["a"]).groupBy("k"), "upsert"), "append or update"
    ),
    "a function of everything": Refusal(
        lambda op, i: in_pandas(op(i["a"]).groupBy(), "append"), "for one state of everything, by a constant"
    ),
    "no rows": Refusal(lambda op, i: op(i["a"].drop("l")).topN(0, "k", "x"), "at least one row", "update"),
    "top rows of sessions": Refusal(
        lambda op, i: op(i["at"]).topN(1, F.session_window("t", "5 seconds"), "x"), "use F.window", "update"
    ),
    "no order": Refusal(lambda op, i: op(i["a"].drop("l")).topN(1, "k", []), "name at least one column", "update"),
    "a batch": Refusal(
        lambda op, i: op(i["static"]).groupBy("x").count(), "read with spark.readStream, or use df.groupBy", "update"
    ),
}


def doubled(op: Operators, i: Streams) -> DataFrame:
    """Two operators of one name below a third one."""
    left = op(i["a"], name="same").dropDuplicates(["k"])
    right = op(i["b"].where("y > 3"), name="same").dropDuplicates(["k"])
    return op(left.select("k")).join(right.select("k", "y"), "k")  # type: ignore[no-any-return]


CHAINS = {
    "changing rows below": Refusal(
        lambda op, i: op(op(i["a"], "update", name="below").groupBy("k").count()).dropDuplicates(),
        "use append mode below, or write its results to a sink",
    ),
    **{
        f"two aggregations in {mode} mode": Refusal(
            lambda op, i, mode=mode: (  # type: ignore[misc]
                op(op(i["at"], mode, name="below").groupBy(F.window("t", "5 seconds")).count()).groupBy("count").count()
            ),
            "use append mode below, or write its results to a sink",
            mode,
            "can emit rows older than the current watermark",
        )
        for mode in ("update", "complete")
    },
    "a function in update mode below": Refusal(
        lambda op, i: op(in_pandas(op(i["a"], name="below").groupBy("k"))).groupBy("k").count(),
        "use append mode below, or write its results to a sink",
        "update",
        "applyInPandasWithState in update mode is not supported with aggregation",
    ),
    "timeouts of event time below": Refusal(
        lambda op, i: (
            op(in_pandas(op(i["at"], "append", name="below").groupBy("k"), "append", EVENT)).groupBy("k").count()
        ),
        "use append mode below, or write its results to a sink",
        "update",
        "can emit rows older than the current watermark",
    ),
    "top rows below": Refusal(
        lambda op, i: op(op(i["a"].drop("l"), "update", name="below").topN(1, "k", "x")).dropDuplicates(),
        "use append mode below, or write its results to a sink",
    ),
    "Spark's own aggregation below": Refusal(
        lambda op, i: op(i["a"].groupBy("k").count()).groupBy("count").count(),
        "make that one an operator of the fleet in append mode",
        "update",
        "can emit rows older than the current watermark",
    ),
    "Spark's own function below": Refusal(
        lambda op, i: op(in_pandas(i["a"].groupBy("k"), "update")).groupBy("k").count(),
        "make that one an operator of the fleet in append mode",
        "update",
        "not supported",
    ),
    "one name twice": Refusal(
        lambda op, i: op(op(i["a"], name="one").dropDuplicates(["k"]), name="one").dropDuplicates(["x"]),
        "give each a name of its own",
    ),
    "one name on both sides": Refusal(doubled, "give each a name of its own"),
}

SPARKS = "Spark does not run this query.*nothing was started: "


#: What Spark's check finds in the rest of the query, and no rule of the fleet's own: its words are Spark's.
AS_SPARK = {
    subject: Refusal(build, SPARKS + words, mode, words)
    for subject, build, mode, words in [
        (
            "sorted rows below",
            lambda op, i: op(i["a"].orderBy("k")).groupBy("k").count(),
            "complete",
            "Sorting is not supported",
        ),
        (
            "limit below in update mode",
            lambda op, i: op(i["a"].limit(3)).groupBy("k").count(),
            "update",
            "Limits are not",
        ),
        (
            "a join below in update mode",
            lambda op, i: (
                op(i["at"].join(i["bt"].withColumnRenamed("k", "l"), F.expr("k = l and u = t"), "left_outer"))
                .groupBy("k")
                .count()
            ),
            "update",
            "(Join|LeftOuter join) between two streaming DataFrames/Datasets is not supported in Update output mode",
        ),
        (
            "numbers of rows",
            lambda op, i: op(i["a"]).withColumn("n", F.monotonically_increasing_id()).groupBy("n").count(),
            "update",
            r"Expression\(s\): monotonically_increasing_id",
        ),
        (
            "a union with a batch",
            lambda op, i: op(i["a"].select("x")).union(i["static"]).distinct(),
            "append",
            "Union between streaming and batch",
        ),
        (
            "a right join with a batch",
            lambda op, i: op(i["a"]).join(i["static"], "x", "right").groupBy("k").count(),
            "update",
            "RightOuter join with a streaming",
        ),
        (
            "what a batch has not",
            lambda op, i: op(i["static"].join(i["a"], "x", "left_anti")).distinct(),
            "append",
            "LeftAnti joins with a streaming",
        ),
    ]
}

REFUSED = {**MODES, **WATERMARKS, **JOINS, **TYPES, **ARGUMENTS, **CHAINS, **AS_SPARK}


@pytest.fixture
def operators(fleet: Fleet, name: str) -> Operators:
    def stateful(frame: DataFrame, mode: str = "append", *, name: str = name) -> Any:
        return fleet.stateful(frame, name=name, outputMode=mode, shards=2)

    return stateful


@pytest.mark.filterwarnings("ignore::spark_jobs.plan.operator_rules.UnboundedStateWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_when_it_is_built_with_its_remedy(
    operators: Operators, streams: Streams, name: str, case: str
) -> None:
    refused = REFUSED[case]

    def stateful(frame: DataFrame, mode: str = refused.mode, *, name: str = name) -> Any:
        return operators(frame, mode, name=name)

    # What Spark refuses by its analysis, a program catches as such.
    with pytest.raises(InvalidRequestError if refused.spark is None else RefusedQueryError, match=refused.says):
        refused.build(stateful, streams)


# Of Spark alone: what it says changes with its version only.
@pytest.mark.replay
@pytest.mark.parametrize("case", [case for case, refused in REFUSED.items() if refused.spark is not None])
def test_spark_refuses_the_same_of_its_own_operators(spark: SparkSession, streams: Streams, case: str) -> None:
    refused = REFUSED[case]
    query = refused.build(lambda frame, mode="", name="": frame, streams)
    with pytest.raises(AnalysisException, match=refused.spark):
        check_as_spark_does(spark, query, refused.mode)


@pytest.mark.filterwarnings("ignore::spark_jobs.plan.operator_rules.UnboundedStateWarning")
@pytest.mark.parametrize(
    ("above", "says"),
    [
        (lambda counts: counts.orderBy("k"), "Sorting is not supported"),
        (lambda counts: counts.limit(3), "Limits are not supported .* in Update output mode"),
        (lambda counts: counts.withColumn("n", F.monotonically_increasing_id()), "monotonically_increasing_id"),
    ],
)
def test_spark_refuses_above_an_operator_of_the_fleet_what_it_refuses_above_its_own(
    spark: SparkSession, operators: Operators, streams: Streams, above: Callable[[DataFrame], DataFrame], says: str
) -> None:
    for counts in (streams["a"].groupBy("k").count(), operators(streams["a"], "update").groupBy("k").count()):
        with pytest.raises(AnalysisException, match=says):
            check_as_spark_does(spark, above(counts), "update")


def test_the_same_operator_may_come_in_twice(operators: Operators, streams: Streams, name: str) -> None:
    once = operators(streams["at"], name=f"{name}-once").dropDuplicatesWithinWatermark(["k"])
    on = F.expr("one.k = two.k and two.t between one.t and one.t + interval 5 seconds")
    joined = operators(once.alias("one")).join(once.alias("two"), on)
    assert joined.columns == ["k", "t", "x"] * 2


GROWING: dict[str, tuple[Callable[[Operators, Streams], DataFrame], str]] = {
    "aggregation": (lambda op, i: op(i["a"], "update").groupBy("k").count(), "call withWatermark on the stream"),
    "aggregation beside event time": (lambda op, i: op(i["at"], "update").groupBy("k").count(), "add its column"),
    "duplicates": (lambda op, i: op(i["a"]).dropDuplicates(["k"]), "call withWatermark, and use dropDuplicatesWithin"),
    "duplicates beside event time": (lambda op, i: op(i["at"]).dropDuplicates(["k"]), "or have the event time among"),
    "join": (lambda op, i: op(i["at"]).join(i["bt"], "k"), "its left and its right side for ever"),
    "topN": (lambda op, i: op(i["at"], "update").topN(2, "k", "x"), "add the event time"),
    "keepLast": (lambda op, i: op(i["at"], "update").keepLast("k", "t"), "add the event time"),
}


@pytest.mark.parametrize("case", GROWING)
def test_state_without_an_end_is_warned_of_at_the_users_line(
    operators: Operators, streams: Streams, name: str, case: str
) -> None:
    build, text = GROWING[case]
    with pytest.warns(UnboundedStateWarning, match=rf"{text}.*\[state=`{name}`\]") as caught:
        build(operators, streams)
    assert [warning.filename for warning in caught if warning.category is UnboundedStateWarning] == [__file__]


BOUNDED: dict[str, Callable[[Operators, Streams], DataFrame]] = {
    "windows": lambda op, i: op(i["at"]).groupBy(F.window("t", "5 seconds"), "k").count(),
    "sessions": lambda op, i: op(i["at"]).groupBy(F.session_window("t", "5 seconds"), "k").count(),
    "updated sessions": lambda op, i: op(i["at"], "update").groupBy(F.session_window("t", "5 seconds"), "k").count(),
    "everything": lambda op, i: op(i["a"], "update").agg(F.count("*")),
    "complete": lambda op, i: op(i["a"], "complete").groupBy("k").count(),
    "duplicates": lambda op, i: op(i["at"]).dropDuplicates(["k", "t"]),
    "duplicates within the watermark": lambda op, i: op(i["at"]).dropDuplicatesWithinWatermark(["k"]),
    "join": lambda op, i: op(i["at"].alias("a")).join(i["bt"].alias("b"), F.expr(NEAR)),
    "topN": lambda op, i: op(i["at"], "update").topN(2, F.window("t", "5 seconds"), "x"),
    "limit": lambda op, i: op(i["a"]).limit(3),
    "function": lambda op, i: in_arrow(op(i["a"], "update").groupBy("k")),
}


@pytest.mark.parametrize("case", BOUNDED)
def test_bounded_state_is_built_in_silence(operators: Operators, streams: Streams, case: str) -> None:
    """Nothing is raised: the warning would be an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnboundedStateWarning)
        BOUNDED[case](operators, streams)
