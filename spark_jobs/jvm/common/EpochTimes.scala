package org.apache.spark.sql.statefleet

import org.apache.spark.TaskContext
import org.apache.spark.rdd.RDD
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{Attribute, BindReferences, Expression}
import org.apache.spark.sql.catalyst.plans.logical.{EventTimeWatermark, LogicalPlan, UnaryNode}
import org.apache.spark.sql.execution.{SparkPlan, UnaryExecNode}
import scala.collection.mutable

/**
 * The watermark of a continuous query, in place of Spark's own node, which reports it when a task ends, and a continuous
 * query's never do.
 */
case class EpochWatermark(eventTime: Attribute, delayMs: Long, child: LogicalPlan) extends UnaryNode {
  override def output: Seq[Attribute] = child.output

  override protected def withNewChildInternal(newChild: LogicalPlan): EpochWatermark = copy(child = newChild)
}

object EpochWatermark {
  def in(plan: LogicalPlan): LogicalPlan = plan.transform { case watermark: EventTimeWatermark =>
    EpochWatermark(watermark.eventTime, EventTimeWatermark.getDelayMs(watermark.delay), watermark.child)
  }
}

/** Each task keeps the greatest event time that it has read, less the delay, and its markers carry that. */
case class EpochTimesExec(eventTime: Attribute, delayMs: Long, child: SparkPlan) extends UnaryExecNode {
  override def output: Seq[Attribute] = child.output

  override protected def withNewChildInternal(newChild: SparkPlan): EpochTimesExec = copy(child = newChild)

  override protected def doExecute(): RDD[InternalRow] = {
    val time = BindReferences.bindReference[Expression](eventTime, child.output)
    val delay = delayMs
    child.execute().mapPartitionsInternal { rows =>
      val times = EpochTimes.of(TaskContext.get())
      rows.map { row =>
        // As of Spark, no time is that of 1970.
        val micros = time.eval(row)
        times.read(Math.floorDiv(if (micros == null) 0L else micros.asInstanceOf[Long], 1000L) - delay)
        row
      }
    }
  }
}

/** What a task has read so far of a continuous query. */
class EpochTimes {
  @volatile private var newestMs = Long.MinValue

  /** The watermark by the rows that were read, in milliseconds since the epoch; the least number without any. */
  def watermarkMs: Long = newestMs

  /** Called by the one thread that reads. */
  def read(watermarkMs: Long): Unit = if (watermarkMs > newestMs) newestMs = watermarkMs
}

object EpochTimes {
  private val tasks = mutable.Map.empty[Long, EpochTimes]

  /** Returns those of a task, in all of its epochs. */
  def of(context: TaskContext): EpochTimes = synchronized {
    tasks.getOrElseUpdate(
      context.taskAttemptId(), {
        context.addTaskCompletionListener[Unit](_ => forget(context))
        new EpochTimes
      })
  }

  private def forget(context: TaskContext): Unit = synchronized(tasks.remove(context.taskAttemptId()))
}
