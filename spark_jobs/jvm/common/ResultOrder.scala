package org.apache.spark.sql.statefleet

import java.util.UUID
import org.apache.spark.{SparkContext, TaskContext}
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{Alias, LeafExpression, Nondeterministic}
import org.apache.spark.sql.catalyst.expressions.codegen.CodegenFallback
import org.apache.spark.sql.catalyst.plans.logical.{LogicalPlan, Project}
import org.apache.spark.sql.execution.streaming.continuous.EpochTracker
import org.apache.spark.sql.types.{DataType, LongType, StringType, StructType}
import org.apache.spark.unsafe.types.UTF8String

/**
 * Where a result stands among all those of its key: the epoch or batch, the run of the query, and its number among what
 * its task emits in the epoch. Of two results the later one has the greater order, also where a failure was between them:
 * a run that repeats an epoch has a greater number than those before it. The run's id is that of the version of the state
 * which an epoch that counts makes.
 */
case class ResultOrder() extends LeafExpression with Nondeterministic with CodegenFallback {
  @transient private var epoch = 0L
  @transient private var run = 0L
  @transient private var runId: UTF8String = _
  @transient private var number = 0L

  override def dataType: DataType = ResultOrder.Fields

  override def nullable: Boolean = false

  override protected def initializeInternal(partition: Int): Unit = {
    val task = TaskContext.get()
    def property(name: String) = Option(task.getLocalProperty(name)).fold(0L)(_.toLong)
    // Threads of later tasks inherit a continuous task's epoch.
    val isContinuous = task.getLocalProperty(StreamExecution.IS_CONTINUOUS_PROCESSING) == "true"
    epoch = EpochTracker.getCurrentEpoch.filter(_ => isContinuous).getOrElse(property(ResultOrder.Batch))
    run = property(ResultOrder.Run)
    runId = UTF8String.fromString(task.getLocalProperty(ResultOrder.RunId))
    number = 0L
  }

  override protected def evalInternal(input: InternalRow): Any = {
    number += 1
    InternalRow(epoch, run, number, runId)
  }
}

object ResultOrder {
  private val Fields = new StructType()
    .add("epoch", LongType, nullable = false)
    .add("run", LongType, nullable = false)
    .add("number", LongType, nullable = false)
    .add("run_id", StringType)

  /** Properties of a job: the number of a micro-batch, as Spark sets it, and the number and the id of the query's run. */
  private final val Batch = "streaming.sql.batchId"
  private final val Run = "statefleet.run"
  private final val RunId = "statefleet.run_id"

  def below(results: LogicalPlan, column: String): LogicalPlan =
    Project(results.output :+ Alias(ResultOrder(), column)(), results)

  /**
   * Has the jobs that this thread starts know the number and the id of their run. Each operator of a query has a number,
   * which grows from run to run, and so does the greatest of them; all have the same id.
   */
  def begin(context: SparkContext, run: Long, id: UUID): Unit = {
    val others = Option(context.getLocalProperty(Run)).fold(0L)(_.toLong)
    context.setLocalProperty(Run, math.max(run, others).toString)
    context.setLocalProperty(RunId, id.toString)
  }
}
