package statefleet.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.Arrays;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.plans.logical.RepartitionByExpression;
import org.apache.spark.sql.catalyst.plans.physical.HashPartitioning;
import org.apache.spark.sql.catalyst.plans.physical.Partitioning;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.SparkStrategy;
import org.apache.spark.sql.execution.exchange.REPARTITION_BY_NUM$;
import org.apache.spark.sql.execution.streaming.IncrementalExecution;
import scala.Some;
import scala.collection.Seq;

/** Plans the exchange of a fleet's operator as a StatefulExchangeExec, for as many shards as the batch has. */
class ExchangeStrategy extends SparkStrategy {
    public Seq apply(LogicalPlan plan) {
        // Names of results need no stage of their own.
        LogicalPlan node = HandedOver.isRenamed(plan) ? ((Project) plan).child() : plan;
        HandedOver operator = HandedOver.of(node, SparkSession.active());
        if (operator != null) {
            int shards = shards(operator.exchange, operator.facts);
            Partitioning partitioning = new HashPartitioning(operator.exchange.partitionExpressions(), shards);
            SparkPlan rows = operator.routed(planLater(operator.rows(shards)), shards);
            SparkPlan exchange = exchange(operator.exchange, partitioning, rows);
            return Lists.seq(Arrays.asList(new Object[] {HandOverExec.of(node, plan.output(), exchange)}));
        }
        if (plan instanceof RepartitionByExpression) {
            RepartitionByExpression repartition = (RepartitionByExpression) plan;
            String route = Route.nameIn(repartition.partitionExpressions());
            if (route != null) {
                int shards = shards(repartition, Route.facts(route));
                LogicalPlan below = repartition.child();
                if (shards != planned(repartition)) {
                    below = renumbered(below, shards);
                    repartition = new RepartitionByExpression(
                        repartition.partitionExpressions(), below, new Some(Integer.valueOf(shards)), repartition.optAdvisoryPartitionSize());
                }
                return Lists.seq(Arrays.asList(new Object[] {exchange(repartition, repartition.partitioning(), planLater(below))}));
            }
        }
        return Lists.seq(new ArrayList());
    }

    private static SparkPlan exchange(RepartitionByExpression repartition, Partitioning partitioning, SparkPlan below) {
        StatefulExchangeExec exchange = new StatefulExchangeExec(
            partitioning, below, REPARTITION_BY_NUM$.MODULE$, repartition.optAdvisoryPartitionSize());
        exchange.bindToBatch();
        return exchange;
    }

    private static int planned(RepartitionByExpression repartition) {
        return ((Number) repartition.optNumPartitions().get()).intValue();
    }

    /** Returns the number of shards of the batch that is planned. */
    private static int shards(RepartitionByExpression repartition, JsonNode facts) {
        SparkSession session = SparkSession.active();
        IncrementalExecution execution = CurrentQuery.execution(session.sparkContext(), session);
        return execution == null ? planned(repartition) : Shards.of(execution, facts, planned(repartition)).number;
    }

    /** Returns the rows for a number of shards, which the functions above them read in the name of a column (spark_jobs/worker/exchange.py). */
    private static LogicalPlan renumbered(LogicalPlan node, int shards) {
        ArrayList changed = new ArrayList();
        Seq children = node.children();
        boolean isMapped = node.getClass().getSimpleName().endsWith("MapInArrow");
        for (int i = 0; i < children.size(); i++) {
            LogicalPlan child = (LogicalPlan) children.apply(i);
            changed.add(isMapped ? renamed(child, shards) : renumbered(child, shards));
        }
        return (LogicalPlan) node.withNewChildren(Lists.seq(changed));
    }

    private static LogicalPlan renamed(LogicalPlan rows, int shards) {
        ArrayList columns = new ArrayList();
        Seq output = rows.output();
        for (int i = 0; i < output.size(); i++) {
            Attribute column = (Attribute) output.apply(i);
            columns.add(!column.name().equals("__hash") ? column
                : (Object) Columns.named(column, "__hash/" + shards, column.exprId()));
        }
        return new Project(Lists.seq(columns), rows);
    }
}
