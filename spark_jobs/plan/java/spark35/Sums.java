package statefleet.spark;

import org.apache.spark.sql.catalyst.expressions.EvalMode$;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.aggregate.AggregateFunction;
import org.apache.spark.sql.catalyst.expressions.aggregate.Sum;

/** Spark's sums. */
class Sums {
    /** isTried: whether a sum that overflows is null, and does not wrap. */
    static AggregateFunction of(Expression values, boolean isTried) {
        return new Sum(values, isTried ? EvalMode$.MODULE$.TRY() : EvalMode$.MODULE$.LEGACY());
    }
}
