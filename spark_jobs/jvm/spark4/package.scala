package org.apache.spark.sql

import java.util.UUID
import org.apache.hadoop.conf.Configuration
import org.apache.spark.sql.catalyst.expressions.{EvalMode, Expression, NumericEvalContext}
import org.apache.spark.sql.catalyst.expressions.aggregate.Sum
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan
import org.apache.spark.sql.catalyst.rules.RuleId
import org.apache.spark.sql.catalyst.streaming.WriteToStreamStatement
import org.apache.spark.sql.catalyst.trees.TreePatternBits
import org.apache.spark.sql.execution.SparkPlan
import org.apache.spark.sql.execution.streaming.{ContinuousTrigger, RealTimeTrigger}
import org.apache.spark.sql.execution.streaming.operators.stateful._
import org.apache.spark.sql.execution.streaming.state._
import org.apache.spark.sql.streaming.StreamingQueryProgress

/** What Spark 3.5 has differently: names of classes that are in other packages there, and calls. */
package object statefleet {
  type Dataset[T] = classic.Dataset[T]
  type SparkSession = classic.SparkSession
  type MapInArrow = catalyst.plans.logical.MapInArrow
  type MapInArrowExec = execution.python.MapInArrowExec
  type IncrementalExecution = execution.streaming.runtime.IncrementalExecution
  type StatefulOperatorStateInfo = execution.streaming.operators.stateful.StatefulOperatorStateInfo
  type StreamExecution = execution.streaming.runtime.StreamExecution
  type StreamProgress = execution.streaming.runtime.StreamProgress
  type MicroBatchExecution = execution.streaming.runtime.MicroBatchExecution
  type WatermarkExec = execution.streaming.operators.stateful.EventTimeWatermarkExec
  type WatermarkPolicy = execution.streaming.runtime.MultipleWatermarkPolicy
  val WatermarkPolicy: execution.streaming.runtime.MultipleWatermarkPolicy.type = execution.streaming.runtime.MultipleWatermarkPolicy
  type SparkTracker = execution.streaming.runtime.WatermarkTracker
  val Dataset: classic.Dataset.type = classic.Dataset
  val SparkSession: classic.SparkSession.type = classic.SparkSession
  val StreamExecution: execution.streaming.runtime.StreamExecution.type = execution.streaming.runtime.StreamExecution
  val Active: execution.streaming.runtime.ACTIVE.type = execution.streaming.runtime.ACTIVE
  val Reconfiguring: execution.streaming.runtime.RECONFIGURING.type = execution.streaming.runtime.RECONFIGURING
  val StreamMetadata: execution.streaming.runtime.StreamMetadata.type = execution.streaming.runtime.StreamMetadata

  type OffsetSeqLog = execution.streaming.checkpointing.OffsetSeqLog
  type OffsetSeq = execution.streaming.checkpointing.OffsetSeq
  val OffsetSeq: execution.streaming.checkpointing.OffsetSeq.type = execution.streaming.checkpointing.OffsetSeq

  /** Returns what the offset log has of a batch that begins now. */
  def offsetMetadata(conf: RuntimeConfig): execution.streaming.checkpointing.OffsetSeqMetadata =
    execution.streaming.checkpointing.OffsetSeqMetadata(0L, System.currentTimeMillis(), conf)

  val SerializedOffset: execution.streaming.runtime.SerializedOffset.type = execution.streaming.runtime.SerializedOffset
  val CommitMetadata: execution.streaming.checkpointing.CommitMetadata.type =
    execution.streaming.checkpointing.CommitMetadata

  def operatorInfo(checkpoint: String, runId: UUID, id: Long, batchId: Long, shards: Int): StatefulOperatorStateInfo =
    new StatefulOperatorStateInfo(checkpoint, runId, id, batchId, shards, None, None)

  /** isTried: whether a sum that overflows is null, and does not wrap. */
  def sum(values: Expression, isTried: Boolean): Sum =
    Sum(values, NumericEvalContext(if (isTried) EvalMode.TRY else EvalMode.LEGACY, allowDecimalPrecisionLoss = true))

  /** Whether a query runs without batches that end before their results are seen. */
  def isContinuous(query: WriteToStreamStatement): Boolean = query.trigger match {
    case _: ContinuousTrigger | _: RealTimeTrigger => true
    case _ => false
  }

  /** Whether a query's trigger is continuous. */
  def isContinuousTrigger(query: WriteToStreamStatement): Boolean = query.trigger.isInstanceOf[ContinuousTrigger]

  /** Opens a store without column families at a version. */
  def openedStore(
      provider: StateStoreProvider,
      id: StateStoreId,
      state: StateRows,
      snapshot: Option[String]): ReadStateStore = {
    val lookups =
      if (state.prefix == 0) NoPrefixKeyStateEncoderSpec(state.keys)
      else PrefixKeyScanStateEncoderSpec(state.keys, state.prefix)
    provider.init(id, state.keys, state.values, lookups, false, state.conf, state.hadoop.value, false, None)
    provider.getReadStore(state.version, snapshot)
  }

  private lazy val progressReporter = classOf[StreamExecution].getMethod("progressReporter")

  /** Has a query report what became of a batch or epoch. */
  def reportProgress(query: StreamExecution, progress: StreamingQueryProgress): Unit =
    progressReporter.invoke(query).asInstanceOf[execution.streaming.runtime.ProgressReporter].updateProgress(progress)

  def rowsOf(reader: ReadStateStore): Iterator[UnsafeRowPair] = reader.iterator(StateStore.DEFAULT_COL_FAMILY_NAME)
}

package statefleet {
  /** The watermark of a query by those of its sources, whose nodes stand in its plan. */
  class SparkWatermarks(policy: WatermarkPolicy, plan: LogicalPlan)
    extends execution.streaming.runtime.WatermarkTracker(policy, plan)

  /**
   * A stateful operator whose state is not in a store of Spark's: it has none of the schemas and checkpoint ids that
   * Spark 4 keeps of its own stores.
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
  }
}
