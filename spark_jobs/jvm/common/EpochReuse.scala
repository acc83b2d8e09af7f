package org.apache.spark.sql.statefleet

import org.apache.spark.TaskContext
import org.apache.spark.rdd.RDD
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{Attribute, Expression, NamedExpression, UnsafeProjection}
import org.apache.spark.sql.catalyst.expressions.codegen.CodegenFallback
import org.apache.spark.sql.connector.metric.CustomTaskMetric
import org.apache.spark.sql.connector.write.{DataWriter, WriterCommitMessage}
import org.apache.spark.sql.connector.write.streaming.StreamingDataWriterFactory
import org.apache.spark.sql.execution.{SparkPlan, UnaryExecNode}

/*
 * What a task of a continuous query keeps for all of its epochs, where Spark makes another one in each: making it
 * generates code, for some milliseconds in which no result leaves.
 */

/** A projection of which Spark generates no whole stage. */
case class EpochProjectExec(columns: Seq[NamedExpression], child: SparkPlan) extends UnaryExecNode {
  override def output: Seq[Attribute] = columns.map(_.toAttribute)

  override protected def withNewChildInternal(newChild: SparkPlan): EpochProjectExec = copy(child = newChild)

  override protected def doExecute(): RDD[InternalRow] = {
    val projection = new TaskProjection(columns, child.output)
    child.execute().mapPartitionsWithIndexInternal(projection(_, _))
  }
}

object EpochProjectExec {
  /** Whether Spark generates no whole stage for columns, as some of what is in them has no code of its own. */
  def isFor(columns: Seq[NamedExpression]): Boolean = columns.exists(_.exists(_.isInstanceOf[CodegenFallback]))
}

/** A task has one, as it has the closure that it is in. */
private class TaskProjection(columns: Seq[Expression], input: Seq[Attribute]) extends Serializable {
  @transient private lazy val projection = UnsafeProjection.create(columns, input)

  def apply(partition: Int, rows: Iterator[InternalRow]): Iterator[InternalRow] = {
    projection.initialize(partition)
    rows.map(projection)
  }
}

/** The writers of a task, which has this factory for itself. One of Kafka's knows of no epoch, and is used again. */
private class EpochWriters(writers: StreamingDataWriterFactory) extends StreamingDataWriterFactory {
  @transient private var kept: KeptWriter = _
  @transient private var isEndWatched = false

  override def createWriter(partition: Int, task: Long, epoch: Long): DataWriter[InternalRow] = {
    if (kept != null && kept.isOld) end()
    if (kept != null) kept else keptIfKafkas(writers.createWriter(partition, task, epoch))
  }

  private def keptIfKafkas(writer: DataWriter[InternalRow]): DataWriter[InternalRow] =
    if (writer.getClass.getName == KeptWriter.Kafka) {
      kept = new KeptWriter(writer)
      // Once: a task has a new writer each minute, for as long as the query runs.
      if (!isEndWatched) TaskContext.get().addTaskCompletionListener[Unit](_ => end())
      isEndWatched = true
      kept
    } else {
      writer
    }

  private def end(): Unit = if (kept != null) {
    val ended = kept
    kept = null
    ended.end()
  }
}

/** A writer that several epochs close, and that stays open. */
private class KeptWriter(writer: DataWriter[InternalRow]) extends DataWriter[InternalRow] {
  private val madeAt = System.nanoTime()

  /** Whether another one is to be made: it has a new token where Kafka's are delegated. */
  def isOld: Boolean = System.nanoTime() - madeAt > KeptWriter.KeptNs

  def end(): Unit = writer.close()

  override def write(row: InternalRow): Unit = writer.write(row)

  override def commit(): WriterCommitMessage = writer.commit()

  override def abort(): Unit = writer.abort()

  override def close(): Unit = ()

  override def currentMetricsValues(): Array[CustomTaskMetric] = writer.currentMetricsValues()
}

object KeptWriter {
  private[statefleet] final val Kafka = "org.apache.spark.sql.kafka010.KafkaStreamDataWriter"
  private final val KeptNs = 60L * 1000000000L
}
