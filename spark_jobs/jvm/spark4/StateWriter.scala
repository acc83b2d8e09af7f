package org.apache.spark.sql.statefleet

import java.util.UUID
import org.apache.hadoop.conf.Configuration
import org.apache.spark.sql.catalyst.rules.RuleId
import org.apache.spark.sql.catalyst.trees.TreePatternBits
import org.apache.spark.sql.execution.SparkPlan
import org.apache.spark.sql.execution.streaming.operators.stateful._
import org.apache.spark.sql.execution.streaming.state.StateSchemaValidationResult

/**
 * A stateful operator of Spark 4 whose state is not in a store of Spark's: it has none of the schemas and checkpoint
 * ids that Spark 4 keeps of its own stores.
 */
trait StateWriter extends StateStoreWriter { self: SparkPlan =>
  /** The batch that the operator is planned for. */
  def batch: Option[IncrementalExecution]

  /**
   * Spark's rule that writes schemas and names of operators into the checkpoint passes over this one: the fleet keeps
   * and compares its own, and a checkpoint of Spark 3.5, or of a branch, has none.
   */
  override def transformDownWithPruning(
      cond: TreePatternBits => Boolean,
      ruleId: RuleId)(
      rule: PartialFunction[SparkPlan, SparkPlan]): SparkPlan =
    if (batch.exists(_.StateSchemaAndOperatorMetadataRule.rule eq rule)) {
      mapChildren(_.transformDownWithPruning(cond, ruleId)(rule))
    } else {
      super.transformDownWithPruning(cond, ruleId)(rule)
    }

  override def validateAndMaybeEvolveStateSchema(
      conf: Configuration,
      batchId: Long,
      version: Int): List[StateSchemaValidationResult] = Nil

  /** None: Spark counts the commits of these stores when a sink is a function. */
  override val stateStoreNames: Seq[String] = Nil

  override def getStateStoreCheckpointInfo(): Array[StatefulOpStateStoreCheckpointInfo] = Array.empty

  protected def operatorInfo(checkpoint: String, runId: UUID, id: Long, batchId: Long, shards: Int) =
    new StatefulOperatorStateInfo(checkpoint, runId, id, batchId, shards, None, None)
}
