package org.apache.spark.sql.statefleet

import java.util.UUID
import java.util.function.{Function => JavaFunction}
import org.apache.spark.SparkContext

import scala.jdk.CollectionConverters._
import scala.reflect.ClassTag

/** Calls from the JVM into the driver's Python: a JSON message each, answered by JSON (spark_jobs/driver/driver_calls.py). */
object Driver {
  @volatile private[statefleet] var callback: JavaFunction[String, String] = _

  /**
   * Asks the driver's Python, and returns its answer.
   *
   * @param asked What is asked: a message of spark_jobs/driver/driver_calls.py.
   */
  def ask[T: ClassTag](asked: String, message: Map[String, Any]): T =
    Json.read[T](callback(Json.write(message + ("asked" -> asked))), "what Python answered")

  /** Returns the fields that identify a batch, as tasks and the driver's Python get them. */
  def batchFields(execution: IncrementalExecution): Map[String, Any] =
    Map[String, Any](
      "query_id" -> execution.queryId.toString,
      "run_id" -> execution.runId.toString,
      "batch_id" -> execution.currentBatchId,
      "time_ms" -> execution.offsetSeqMetadata.batchTimestampMs
    ) ++ execution.prevOffsetSeqMetadata.map("former_time_ms" -> _.batchTimestampMs)

  /** Returns the ids of the queries that run now. */
  def activeQueries(session: SparkSession): Seq[String] =
    session.sharedState.activeStreamingQueries.keySet.asScala.map(_.toString).toSeq
}

/** An answer without anything in it. */
case class Done()

/** The query that this thread plans or runs. */
object CurrentQuery {
  /** Returns the query that runs in this thread, if any. */
  def query(context: SparkContext, session: SparkSession): Option[StreamExecution] =
    Option(context.getLocalProperty(StreamExecution.QUERY_ID_KEY))
      .flatMap(id => Option(session.sharedState.activeStreamingQueries.get(UUID.fromString(id))))

  /** Returns the execution of the query's batch; None outside a streaming query, as for explain() before it starts. */
  def execution(session: SparkSession): Option[IncrementalExecution] =
    query(session.sparkContext, session).flatMap(query => Option(query.lastExecution))

  /** Whether a query's checkpoint is deleted when it ends. */
  def isTemporary(query: StreamExecution): Boolean =
    // Spark has it in a private field only.
    try {
      val field = classOf[StreamExecution].getDeclaredField("deleteCheckpointOnStop")
      field.setAccessible(true)
      field.getBoolean(query)
    } catch {
      case error: ReflectiveOperationException =>
        throw new IllegalStateException("this Spark does not say which checkpoints it deletes", error)
    }
}
