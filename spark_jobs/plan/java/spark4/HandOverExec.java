package statefleet.spark;

import java.util.ArrayList;
import org.apache.spark.rdd.RDD;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.codegen.CodeAndComment;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.MapInArrow;
import org.apache.spark.sql.execution.LocalTableScanExec;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.python.MapInArrowExec;
import scala.Option;
import scala.collection.immutable.Seq;

/** The tasks of an operator that hand rows over to store actors. Spark copies nodes by this constructor, so a node has no fields of its own. */
public class HandOverExec extends MapInArrowExec {
    public HandOverExec(Expression function, Seq output, SparkPlan child, boolean isBarrier, Option profile) {
        super(function, output, child, isBarrier, profile);
    }

    static SparkPlan of(LogicalPlan tasks, Seq output, SparkPlan exchange) {
        MapInArrow node = (MapInArrow) tasks;
        return new HandOverExec(node.functionExpr(), output, exchange, false, node.profile());
    }

    /** Returns generated code as the factory of a stage's iterators takes it. */
    static scala.util.Either stageCode(CodeAndComment code) {
        return new scala.util.Right(code);
    }

    public MapInArrowExec withNewChildInternal(SparkPlan child) {
        return new HandOverExec(func(), output(), child, isBarrier(), profile());
    }

    /** Code that is generated for a node above takes the plan along to executors, which do not have this class. */
    protected Object writeReplace() {
        return new LocalTableScanExec(output(), Lists.seq(new ArrayList()), Option.apply(null));
    }

    public RDD doExecute() {
        return HandedOver.emitted(this);
    }
}
