package org.apache.spark.sql.statefleet

import java.nio.charset.StandardCharsets.UTF_8
import java.util.{Map => JavaMap, Set => JavaSet, UUID}
import org.apache.spark.rdd.RDD
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{Attribute, AttributeSet}
import org.apache.spark.sql.catalyst.plans.logical.{LeafNode, LogicalPlan}
import org.apache.spark.sql.connector.catalog._
import org.apache.spark.sql.connector.expressions.Transform
import org.apache.spark.sql.connector.metric.CustomMetric
import org.apache.spark.sql.connector.read.streaming.Offset
import org.apache.spark.sql.connector.write._
import org.apache.spark.sql.connector.write.streaming.{StreamingDataWriterFactory, StreamingWrite}
import org.apache.spark.sql.execution.{SparkPlan, UnaryExecNode}
import org.apache.spark.sql.execution.streaming.continuous.{ContinuousExecution, WriteToContinuousDataSource}
import org.apache.spark.sql.internal.connector.SupportsStreamingUpdateAsAppend
import org.apache.spark.sql.types.StructType
import scala.annotation.nowarn
import scala.collection.concurrent.TrieMap

/**
 * The plan of a continuous query while Spark's analysis checks it. Spark's list of what such a query may have knows no
 * stateful operator; StartRule has its own.
 */
case class CheckedContinuous(query: LogicalPlan) extends LeafNode {
  override def output: Seq[Attribute] = query.output

  override def isStreaming: Boolean = true

  /** The name of a source, which may stand in a continuous query. */
  override def nodeName: String = "StreamingRelationV2"
}

/**
 * The epochs of a continuous query on the driver. An epoch begins only when the one before the last is in Spark's commit
 * log, and that has no epoch before all shards have committed it. So a slow object store makes epochs longer, while
 * results go on; and no shard is ahead of Spark's log by more than the epoch that it commits.
 */
class EpochGate extends EpochHooks {
  @volatile private var run: Option[EpochRun] = None

  /** The epoch that tasks are in, the newest one in Spark's commit log, and the one that is settled. */
  private var open = 0L
  private var newest = -1L
  private var settling = -1L

  /**
   * Returns the run that the query plans or executes now: one for each execution, which Spark plans once more to describe
   * it. It is planned before its first epoch may end.
   */
  def runOf(query: ContinuousExecution, facts: Facts, planned: Int): EpochRun = synchronized {
    val execution = query.lastExecution
    run.filter(_.execution eq execution).getOrElse {
      val begun = new EpochRun(query, execution, facts, planned)
      open = begun.firstEpoch
      newest = open - 1
      settling = newest
      run = Some(begun)
      begun
    }
  }

  /** Waits until the next epoch may begin. */
  override def isToReconfigure(): Boolean = synchronized {
    while (newest < open - 1 && isActive) wait(EpochGate.LookMs)
    open += 1
    false
  }

  private def isActive: Boolean = run.exists(_.query.isActive)

  /** Waits until all shards have committed an epoch; called before Spark's commit log has it. */
  def settle(epoch: Long): Unit = {
    run.foreach(_.settle(epoch))
    synchronized { settling = epoch }
  }

  override def logged(end: Offset): Unit = synchronized {
    newest = settling
    run.foreach(_.report(newest))
    notifyAll()
  }
}

object EpochGate {
  private final val LookMs = 100L

  /** Returns the gate of a query that runs continuously; None for another one. */
  def of(session: SparkSession): Option[(ContinuousExecution, EpochGate)] = CurrentQuery.query(session).collect {
    case query: ContinuousExecution =>
      query.logicalPlan match {
        case WriteToContinuousDataSource(write: EpochWrite, _, _) => Some((query, write.gate))
        case _ => None
      }
  }.flatten
}

/** A run of a continuous query's tasks, from the epoch after the last one in Spark's commit log. */
class EpochRun(val query: ContinuousExecution, val execution: IncrementalExecution, facts: Facts, planned: Int) {
  val firstEpoch: Long = execution.currentBatchId

  /** Of the run and not of the query, which may run its tasks again. */
  private val id = UUID.randomUUID

  private def fields(epoch: Long): Map[String, Any] = Map[String, Any](
    "query_id" -> query.id.toString,
    "run_id" -> id.toString,
    "batch_id" -> epoch,
    "time_ms" -> null)

  lazy val shards: Shards = Driver.ask[Shards](
    "begin",
    fields(firstEpoch) ++
      Map("operator" -> facts, "shards" -> planned, "active" -> Driver.activeQueries(query.sparkSession)))

  private def ofShards(epoch: Long): Map[String, Any] = fields(epoch) ++
    Map("operator" -> facts, "shards" -> shards.shards, "first_partition" -> shards.firstPartition)

  /** Begins the run; returns for each shard where it is. */
  def begin(cores: Map[String, Int]): Array[Place] = {
    // What an earlier run ended with, and did not commit, is not the end of these epochs.
    query.offsetLog.purgeAfter(firstEpoch - 1)
    EpochRun.begun(query.runId, id)
    Driver.ask[Array[Place]]("place", ofShards(firstEpoch) + ("cores" -> cores))
  }

  /** Returns the run's first epoch, in JSON, as its tasks send it. */
  def description: String = Driver.json.writeValueAsString(
    fields(firstEpoch) ++ Map[String, Any](
      "late_ms" -> 0,
      "evict_ms" -> 0,
      "first_partition" -> shards.firstPartition,
      "output_mode" -> facts.modeIn(Some(execution)),
      "is_temporary" -> CurrentQuery.isTemporary(query)))

  /** Waits until all shards have committed an epoch. Once the query ends, what is under way still has a moment. */
  def settle(epoch: Long): Unit =
    try {
      var wasActive = true
      while (isMissing(epoch)) {
        if (!wasActive) throw new InterruptedException
        wasActive = query.isActive
      }
    } catch {
      case error: Throwable =>
        // Spark only logs what its thread raises here.
        if (query.isActive) query.stopInNewThread(error)
        throw error
    }

  private def isMissing(epoch: Long): Boolean =
    Driver.ask[Settled]("settle", ofShards(epoch) + ("wait_s" -> EpochRun.WaitSeconds)).missing.nonEmpty

  def report(epoch: Long): Unit = Driver.tell(
    "finished",
    Map(
      "run_id" -> id.toString,
      "batch_id" -> epoch,
      "at_once" -> false,
      "states" -> Map(facts.uri -> Seq(facts.state))))
}

object EpochRun {
  private final val WaitSeconds = 1.0

  /** By run of Spark's, the newest run of its tasks. */
  private val runs = TrieMap.empty[UUID, UUID]

  private def begun(query: UUID, run: UUID): Unit = runs.put(query, run).foreach(ended)

  /** Tells the driver's Python that a run of Spark's has ended, if it was continuous. */
  def end(query: UUID): Unit = runs.remove(query).foreach(ended)

  private def ended(run: UUID): Unit = Driver.tell("ended", Map("run_id" -> run.toString))
}

/** The sink of a continuous query; the fleet has an epoch before the sink commits it. */
case class EpochSink(table: Table with SupportsWrite, gate: EpochGate) extends Table with SupportsWrite {
  override def name(): String = table.name()

  @nowarn("cat=deprecation")
  override def schema(): StructType = table.schema()

  override def columns(): Array[Column] = table.columns()

  override def partitioning(): Array[Transform] = table.partitioning()

  override def properties(): JavaMap[String, String] = table.properties()

  override def capabilities(): JavaSet[TableCapability] = table.capabilities()

  override def newWriteBuilder(info: LogicalWriteInfo): WriteBuilder = table.newWriteBuilder(info) match {
    case builder: SupportsStreamingUpdateAsAppend =>
      new EpochWriteBuilder(builder, gate) with SupportsStreamingUpdateAsAppend
    case builder => new EpochWriteBuilder(builder, gate)
  }

  override def toString: String = table.toString
}

private class EpochWriteBuilder(builder: WriteBuilder, gate: EpochGate) extends WriteBuilder {
  override def build(): Write = {
    val write = builder.build()
    new Write {
      override def description(): String = write.description()
      override def toStreaming: StreamingWrite = EpochWrite(write.toStreaming, gate)
      override def supportedCustomMetrics(): Array[CustomMetric] = write.supportedCustomMetrics()
    }
  }
}

case class EpochWrite(write: StreamingWrite, gate: EpochGate) extends StreamingWrite {
  override def createStreamingWriterFactory(info: PhysicalWriteInfo): StreamingDataWriterFactory =
    write.createStreamingWriterFactory(info)

  override def useCommitCoordinator(): Boolean = write.useCommitCoordinator()

  override def commit(epoch: Long, messages: Array[WriterCommitMessage]): Unit = {
    gate.settle(epoch)
    write.commit(epoch, messages)
  }

  override def abort(epoch: Long, messages: Array[WriterCommitMessage]): Unit = write.abort(epoch, messages)

  override def toString: String = write.toString
}

/**
 * The tasks of an operator in a continuous query, which send its rows to the shards themselves: there is no shuffle.
 *
 * @param child The rows, of which the last column is the route.
 */
case class EpochHandOverExec(
    output: Seq[Attribute],
    child: SparkPlan,
    operator: String,
    facts: Facts)(
    @transient val run: EpochRun)
  extends UnaryExecNode {
  override protected def otherCopyArgs: Seq[AnyRef] = Seq(run)

  override def producedAttributes: AttributeSet = outputSet

  override protected def stringArgs: Iterator[Any] = Iterator(output)

  override protected def withNewChildInternal(newChild: SparkPlan): EpochHandOverExec =
    copy(child = newChild)(run)

  override protected def doExecute(): RDD[InternalRow] = {
    val places = run.begin(Executors.coresByHost(sparkContext))
    val hosts = places.map(place => Option(place).map(_.host)).distinct
    if (hosts.length > 1 || hosts.contains(None)) {
      throw new IllegalStateException(
        "a continuous query runs on one node, with its shards, and these are on several, or on none; nothing was " +
          s"started; run it with executors on one node, or without trigger(continuous=..) [state=`${facts.state}`]")
    }
    val rows = child.execute()
    val work = EpochWork(
      facts.sockets.get,
      operator.getBytes(UTF_8),
      run.description,
      places.indices.toArray.groupBy(places(_).actor).toSeq.sortBy(_._1),
      Shards.routes(places.length),
      rows.getNumPartitions,
      StructType(child.schema.init),
      schema,
      conf.sessionLocalTimeZone)
    rows.mapPartitionsWithIndexInternal(work)
  }
}
