package org.apache.spark.sql

import java.util.UUID
import org.apache.spark.sql.catalyst.expressions.{EvalMode, Expression}
import org.apache.spark.sql.catalyst.expressions.aggregate.Sum
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan
import org.apache.spark.sql.catalyst.streaming.WriteToStreamStatement
import org.apache.spark.sql.execution.streaming.state._
import org.apache.spark.sql.streaming.StreamingQueryProgress

/** What Spark 4 has differently: names of classes that are in other packages there, and calls. */
package object statefleet {
  type Dataset[T] = org.apache.spark.sql.Dataset[T]
  type SparkSession = org.apache.spark.sql.SparkSession
  type MapInArrow = catalyst.plans.logical.PythonMapInArrow
  type MapInArrowExec = execution.python.PythonMapInArrowExec
  type IncrementalExecution = execution.streaming.IncrementalExecution
  type StateWriter = execution.streaming.StateStoreWriter
  type StatefulOperatorStateInfo = execution.streaming.StatefulOperatorStateInfo
  type StreamExecution = execution.streaming.StreamExecution
  type StreamProgress = execution.streaming.StreamProgress
  type MicroBatchExecution = execution.streaming.MicroBatchExecution
  type WatermarkExec = execution.streaming.EventTimeWatermarkExec
  type WatermarkPolicy = execution.streaming.MultipleWatermarkPolicy
  val WatermarkPolicy: execution.streaming.MultipleWatermarkPolicy.type = execution.streaming.MultipleWatermarkPolicy
  type SparkTracker = execution.streaming.WatermarkTracker
  val Dataset: org.apache.spark.sql.Dataset.type = org.apache.spark.sql.Dataset
  val SparkSession: org.apache.spark.sql.SparkSession.type = org.apache.spark.sql.SparkSession
  val StreamExecution: execution.streaming.StreamExecution.type = execution.streaming.StreamExecution
  val Active: execution.streaming.ACTIVE.type = execution.streaming.ACTIVE
  val Reconfiguring: execution.streaming.RECONFIGURING.type = execution.streaming.RECONFIGURING
  val StreamMetadata: execution.streaming.StreamMetadata.type = execution.streaming.StreamMetadata

  type OffsetSeqLog = execution.streaming.OffsetSeqLog
  type OffsetSeq = execution.streaming.OffsetSeq
  val OffsetSeq: execution.streaming.OffsetSeq.type = execution.streaming.OffsetSeq

  /** Returns what the offset log has of a batch that begins now. */
  def offsetMetadata(conf: RuntimeConfig): execution.streaming.OffsetSeqMetadata =
    execution.streaming.OffsetSeqMetadata(0L, System.currentTimeMillis(), conf)

  val SerializedOffset: execution.streaming.SerializedOffset.type = execution.streaming.SerializedOffset
  val CommitMetadata: execution.streaming.CommitMetadata.type = execution.streaming.CommitMetadata

  def operatorInfo(checkpoint: String, runId: UUID, id: Long, batchId: Long, shards: Int): StatefulOperatorStateInfo =
    new StatefulOperatorStateInfo(checkpoint, runId, id, batchId, shards)

  /** isTried: whether a sum that overflows is null, and does not wrap. */
  def sum(values: Expression, isTried: Boolean): Sum = Sum(values, if (isTried) EvalMode.TRY else EvalMode.LEGACY)

  /** Whether a query runs without batches that end before their results are seen. */
  def isContinuous(query: WriteToStreamStatement): Boolean = query.isContinuousTrigger

  /** Whether a query's trigger is continuous. */
  def isContinuousTrigger(query: WriteToStreamStatement): Boolean = query.isContinuousTrigger

  /** Opens a store at a version. */
  def openedStore(
      provider: StateStoreProvider,
      id: StateStoreId,
      state: StateRows,
      snapshot: Option[String]): ReadStateStore = {
    provider.init(id, state.keys, state.values, state.prefix, state.conf, state.hadoop.value)
    provider.getReadStore(state.version)
  }

  private lazy val updateProgress = {
    val method = classOf[execution.streaming.ProgressReporter]
      .getDeclaredMethod("updateProgress", classOf[StreamingQueryProgress])
    method.setAccessible(true)
    method
  }

  /** Has a query report what became of a batch or epoch. */
  def reportProgress(query: StreamExecution, progress: StreamingQueryProgress): Unit =
    updateProgress.invoke(query, progress)

  def rowsOf(reader: ReadStateStore): Iterator[UnsafeRowPair] = reader.iterator()
}

package statefleet {
  /** The watermark of a query by those of its sources, whose nodes stand in its plan. */
  class SparkWatermarks(policy: WatermarkPolicy, plan: LogicalPlan)
    extends execution.streaming.WatermarkTracker(policy)
}
