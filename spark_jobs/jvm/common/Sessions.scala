package org.apache.spark.sql.statefleet

import java.util.function.{Function => JavaFunction}
import org.apache.spark.sql.Row
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan
import org.apache.spark.sql.catalyst.rules.Rule
import org.apache.spark.sql.catalyst.types.DataTypeUtils.toAttributes
import org.apache.spark.sql.streaming.StreamingQueryListener
import org.apache.spark.sql.types.StructType
import scala.jdk.CollectionConverters._

/** What Python calls. */
object Sessions {
  /**
   * Makes a session plan the fleet's operators; a second call has no effect.
   *
   * @param driver A function of the driver's Python, from JSON to JSON (spark_jobs/driver/driver_calls.py).
   */
  def install(session: SparkSession, driver: JavaFunction[String, String]): Unit = {
    Driver.callback = driver
    val methods = session.experimental
    if (!isInstalled(session)) {
      session.streams.addListener(RunEnds)
      methods.extraStrategies :+= ExchangeStrategy
    }
    Seq[Rule[LogicalPlan]](UnmarkRule, LateRowsRule)
      .filterNot(methods.extraOptimizations.contains)
      .foreach(rule => methods.extraOptimizations :+= rule)
    StartRule.install(session)
  }

  def isInstalled(session: SparkSession): Boolean = session.experimental.extraStrategies.contains(ExchangeStrategy)

  /**
   * Returns the rows of an operator's inputs, each by its shard.
   *
   * @param inputs Rows with the columns that a shard reads, and their hash in a column `__hash`.
   * @param columns The columns behind it; the last one is the route.
   * @param shards The number of shards that the query is built with.
   * @param facts What the operator is, in JSON.
   */
  def exchanged(inputs: java.util.List[Dataset[Row]], columns: StructType, shards: Int, facts: String): Dataset[Row] = {
    val rows = inputs.asScala.toSeq
    val node = StatefulExchange(rows.map(_.logicalPlan), toAttributes(columns), shards, factsOf(facts))
    dataset(rows.head.sparkSession, node)
  }

  /**
   * Returns the rows that an operator's tasks emit.
   *
   * @param operator The operator as store actors get it, in JSON.
   */
  def handedOver(rows: Dataset[Row], columns: StructType, operator: String): Dataset[Row] =
    dataset(rows.sparkSession, HandedOver(rows.logicalPlan, toAttributes(columns), operator))

  /** Returns the facts of an operator whose exchange a node is, in JSON; null for any other node. */
  def factsOf(node: LogicalPlan): String = node match {
    case exchange: StatefulExchange => Json.write(exchange.facts)
    case _ => null
  }

  private def factsOf(facts: String): Facts = Json.read[Facts](facts, "the facts of an operator")

  /** Returns for each of a number of shards a number that Spark's hash partitioning puts there. */
  def routes(shards: Int): Array[Int] = Shards.routes(shards)

  /** Returns rows of a state store, a partition in each task. */
  def stateRows(session: SparkSession, partitions: Int, rows: StateRows): Dataset[Row] = {
    val none = session.sparkContext.parallelize(Seq.empty[InternalRow], partitions)
    session.internalCreateDataFrame(none.mapPartitionsWithIndexInternal(rows), rows.rows)
  }

  private def dataset(session: SparkSession, plan: LogicalPlan): Dataset[Row] = Dataset.ofRows(session, plan)
}

/**
 * Reports ended runs to the driver's Python. A listener of PySpark's would get the progress of each batch as well,
 * which costs hundreds of calls between the JVM and Python each time.
 */
private object RunEnds extends StreamingQueryListener {
  override def onQueryStarted(event: StreamingQueryListener.QueryStartedEvent): Unit = ()

  override def onQueryProgress(event: StreamingQueryListener.QueryProgressEvent): Unit = ()

  override def onQueryTerminated(event: StreamingQueryListener.QueryTerminatedEvent): Unit = Run.end(event.runId)
}
