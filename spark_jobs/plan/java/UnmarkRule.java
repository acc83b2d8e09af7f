package statefleet.spark;

import java.util.ArrayList;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.catalyst.plans.logical.Aggregate;
import org.apache.spark.sql.catalyst.plans.logical.Deduplicate;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.plans.logical.RepartitionByExpression;
import org.apache.spark.sql.catalyst.rules.Rule;
import org.apache.spark.sql.catalyst.trees.TreeNode;
import scala.Option;
import scala.collection.Seq;

/**
 * Above the exchange of an aggregation that has its query's output mode, or complete mode, stands an Aggregate that aggregates nothing, so that
 * Spark's checks see an aggregation. This rule takes it out before the query is planned.
 */
class UnmarkRule extends Rule {
    public TreeNode apply(TreeNode plan) {
        return unmarked((LogicalPlan) plan, true);
    }

    /** asTable: whether no node above is stateful itself, as a streaming dropDuplicates is. */
    private static LogicalPlan unmarked(LogicalPlan plan, boolean asTable) {
        Seq children = plan.children();
        ArrayList changed = new ArrayList();
        boolean differs = false;
        for (int i = 0; i < children.size(); i++) {
            LogicalPlan child = (LogicalPlan) children.apply(i);
            LogicalPlan after = unmarked(child, asTable && !(plan instanceof Deduplicate));
            differs |= after != child;
            changed.add(after);
        }
        LogicalPlan node = differs ? (LogicalPlan) plan.withNewChildren(Lists.seq(changed)) : plan;
        if (node instanceof Aggregate) {
            LogicalPlan below = result(((Aggregate) node).child(), asTable);
            if (below != null) {
                return new Project(((Aggregate) node).aggregateExpressions(), below);
            }
        }
        return node;
    }

    /** Returns the exchange of an operator with the projections above it; null if the plan is no such exchange. */
    private static LogicalPlan result(LogicalPlan plan, boolean asTable) {
        if (plan instanceof Project) {
            LogicalPlan below = result(((Project) plan).child(), asTable);
            return below == null ? null : new Project(((Project) plan).projectList(), below);
        }
        if (plan instanceof RepartitionByExpression && !(plan instanceof ResultExchange)) {
            RepartitionByExpression exchange = (RepartitionByExpression) plan;
            String name = Route.nameIn(exchange.partitionExpressions());
            if (name != null) {
                SparkSession session = SparkSession.active();
                String mode = Mode.of(Route.facts(name), CurrentQuery.execution(session.sparkContext(), session));
                return !asTable || !"complete".equals(mode) ? exchange : new ResultExchange(
                    exchange.partitionExpressions(),
                    exchange.child(),
                    exchange.optNumPartitions(),
                    exchange.optAdvisoryPartitionSize());
            }
        }
        return null;
    }
}

/**
 * An exchange whose rows are a whole result, not a stream of changes: the nodes above (sorting, limits) are planned as for a table.
 */
public class ResultExchange extends RepartitionByExpression {
    public ResultExchange(Seq by, LogicalPlan child, Option partitions, Option advisory) {
        super(by, child, partitions, advisory);
    }

    public boolean isStreaming() {
        return false;
    }

    public RepartitionByExpression withNewChildInternal(LogicalPlan child) {
        return new ResultExchange(partitionExpressions(), child, optNumPartitions(), optAdvisoryPartitionSize());
    }

    protected Object writeReplace() {
        return new RepartitionByExpression(partitionExpressions(), child(), optNumPartitions(), optAdvisoryPartitionSize());
    }
}
