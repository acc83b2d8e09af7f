package statefleet.spark;

import java.util.ArrayList;
import org.apache.spark.rdd.RDD;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.codegen.CodeAndComment;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.PythonMapInArrow;
import org.apache.spark.sql.execution.LocalTableScanExec;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.python.PythonMapInArrowExec;
import scala.collection.Seq;

/** The tasks of an operator that hand rows over to store actors. Spark copies nodes by this constructor, so a node has no fields of its own. */
public class HandOverExec extends PythonMapInArrowExec {
    public HandOverExec(Expression function, Seq output, SparkPlan child, boolean isBarrier) {
        super(function, output, child, isBarrier);
    }

    static SparkPlan of(LogicalPlan tasks, Seq output, SparkPlan exchange) {
        PythonMapInArrow node = (PythonMapInArrow) tasks;
        return new HandOverExec(node.functionExpr(), output, exchange, false);
    }

    /** Returns generated code as the factory of a stage's iterators takes it. */
    static CodeAndComment stageCode(CodeAndComment code) {
        return code;
    }

    public PythonMapInArrowExec withNewChildInternal(SparkPlan child) {
        return new HandOverExec(func(), output(), child, isBarrier());
    }

    /** Code that is generated for a node above takes the plan along to executors, which do not have this class. */
    protected Object writeReplace() {
        return new LocalTableScanExec(output(), Lists.seq(new ArrayList()));
    }

    public RDD doExecute() {
        return HandedOver.emitted(this);
    }
}
