package org.apache.spark.sql.statefleet

import org.apache.spark.sql.catalyst.expressions.{EvalMode, Expression}
import org.apache.spark.sql.catalyst.expressions.aggregate.{AggregateFunction, Sum}

/** Spark's sums. */
object Sums {
  /** isTried: whether a sum that overflows is null, and does not wrap. */
  def apply(values: Expression, isTried: Boolean): AggregateFunction =
    Sum(values, if (isTried) EvalMode.TRY else EvalMode.LEGACY)
}
