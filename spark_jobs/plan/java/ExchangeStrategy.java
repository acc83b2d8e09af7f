package statefleet.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.Arrays;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.plans.logical.RepartitionByExpression;
import org.apache.spark.sql.catalyst.plans.physical.HashPartitioning;
import org.apache.spark.sql.catalyst.plans.physical.Partitioning;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.SparkStrategy;
import org.apache.spark.sql.execution.exchange.REPARTITION_BY_NUM$;
import org.apache.spark.sql.execution.streaming.IncrementalExecution;
import scala.collection.Seq;

/** Plans the exchange of a fleet's operator as a StatefulExchangeExec, for as many shards as the batch has. */
class ExchangeStrategy extends SparkStrategy {
    public Seq apply(LogicalPlan plan) {
        // Names of results need no stage of their own.
        LogicalPlan node = HandedOver.isRenamed(plan) ? ((Project) plan).child() : plan;
        OperatorRows handedOver = HandedOver.of(node);
        if (handedOver != null) {
            return Lists.seq(Arrays.asList(new Object[] {HandOverExec.of(node, plan.output(), exchange(handedOver))}));
        }
        OperatorRows rows = OperatorRows.of(plan);
        return Lists.seq(rows == null ? new ArrayList() : Arrays.asList(new Object[] {exchange(rows)}));
    }

    private SparkPlan exchange(OperatorRows rows) {
        RepartitionByExpression repartition = rows.exchange;
        int shards = shards(repartition, rows.facts);
        Partitioning partitioning = new HashPartitioning(repartition.partitionExpressions(), shards);
        StatefulExchangeExec exchange = new StatefulExchangeExec(
            partitioning, rows.routed(planLater(rows.rows(shards)), shards), REPARTITION_BY_NUM$.MODULE$,
            repartition.optAdvisoryPartitionSize());
        exchange.bindToBatch();
        return exchange;
    }

    /** Returns the number of shards of the batch that is planned. */
    private static int shards(RepartitionByExpression repartition, JsonNode facts) {
        int planned = ((Number) repartition.optNumPartitions().get()).intValue();
        SparkSession session = SparkSession.active();
        IncrementalExecution execution = CurrentQuery.execution(session.sparkContext(), session);
        return execution == null ? planned : Shards.of(execution, facts, planned).number;
    }
}
