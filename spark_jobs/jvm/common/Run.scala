package org.apache.spark.sql.statefleet

import com.fasterxml.jackson.databind.{DeserializationFeature, JsonNode, ObjectMapper, PropertyNamingStrategies}
import com.fasterxml.jackson.module.scala.DefaultScalaModule
import java.util.UUID
import java.util.function.{Function => JavaFunction}
import org.apache.spark.sql.catalyst.streaming.StreamingRelationV2
import org.apache.spark.sql.execution.SparkPlan
import org.apache.spark.sql.execution.streaming.continuous.WriteToContinuousDataSource
import org.apache.spark.sql.execution.streaming.sources.WriteToMicroBatchDataSource
import org.apache.spark.sql.streaming.StateOperatorProgress
import org.apache.spark.sql.util.CaseInsensitiveStringMap
import org.apache.spark.unsafe.hash.Murmur3_x86_32
import scala.collection.concurrent.TrieMap
import scala.collection.mutable
import scala.jdk.CollectionConverters._
import scala.reflect.{classTag, ClassTag}

/** Calls from the JVM into the driver's Python: a JSON message each, answered by JSON (spark_jobs/driver/driver_calls.py). */
object Driver {
  @volatile private[statefleet] var callback: JavaFunction[String, String] = _

  /** JSON of case classes, whose fields have their names in snake case there, and of maps, whose keys stay as they are. */
  val json: ObjectMapper = new ObjectMapper()
    .registerModule(DefaultScalaModule)
    .setPropertyNamingStrategy(PropertyNamingStrategies.SNAKE_CASE)
    .disable(DeserializationFeature.FAIL_ON_UNKNOWN_PROPERTIES)

  /**
   * Tells the driver's Python something, and returns its answer.
   *
   * @param asked The kind of the message.
   * @param refuse Raises an error with the text of a refusal.
   */
  def tell(
      asked: String,
      message: Map[String, Any],
      refuse: String => Nothing = text => throw new IllegalStateException(text)): JsonNode = {
    val answer = json.readTree(callback(json.writeValueAsString(message + ("asked" -> asked))))
    if (answer.hasNonNull("refused")) refuse(answer.get("refused").asText)
    answer
  }

  def ask[T: ClassTag](asked: String, message: Map[String, Any]): T =
    json.treeToValue(tell(asked, message), classTag[T].runtimeClass.asInstanceOf[Class[T]])

  /** Returns the fields that identify a batch, as tasks and the driver's Python get them. */
  def batchFields(execution: IncrementalExecution): Map[String, Any] =
    Map[String, Any](
      "query_id" -> execution.queryId.toString,
      "run_id" -> execution.runId.toString,
      "batch_id" -> execution.currentBatchId,
      "time_ms" -> execution.offsetSeqMetadata.batchTimestampMs
    ) ++ execution.prevOffsetSeqMetadata.map("former_time_ms" -> _.batchTimestampMs)

  def activeQueries(session: SparkSession): Seq[String] =
    session.sharedState.activeStreamingQueries.keySet.asScala.map(_.toString).toSeq
}

/** The query that this thread plans or runs. */
object CurrentQuery {
  def query(session: SparkSession): Option[StreamExecution] =
    Option(session.sparkContext.getLocalProperty(StreamExecution.QUERY_ID_KEY))
      .flatMap(id => Option(session.sharedState.activeStreamingQueries.get(UUID.fromString(id))))

  /** Returns the execution of the query's batch; None outside a streaming query, as for explain() before it starts. */
  def execution(session: SparkSession): Option[IncrementalExecution] =
    query(session).flatMap(query => Option(query.lastExecution))

  /**
   * Returns how far the offsets of the query's sources move in its batch: for most, by the number of its rows.
   */
  def moved(session: SparkSession): Long = query(session).fold(Long.MaxValue) { query =>
    def total(offsets: StreamProgress) = offsets.values.map(offset => sum(Driver.json.readTree(offset.json))).sum
    total(query.availableOffsets) - total(query.committedOffsets)
  }

  /** Returns the sum of the numbers in an offset. */
  private def sum(offset: JsonNode): Long =
    if (offset.isNumber) offset.asLong else offset.elements.asScala.map(sum).sum

  /** Returns the topics, if they are named, and the servers of each source of Kafka, and of the sink. */
  def kafka(query: StreamExecution): Seq[Map[String, String]] = {
    val sources = query.analyzedPlan.collectLeaves().collect { case source: StreamingRelationV2 => source.extraOptions }
    val sink = query.logicalPlan match {
      case batches: WriteToMicroBatchDataSource => Some(new CaseInsensitiveStringMap(batches.writeOptions.asJava))
      case WriteToContinuousDataSource(write: EpochWrite, _, _) => Some(write.gate.sinkOptions)
      case _ => None
    }
    (sources ++ sink).filter(_.containsKey("kafka.bootstrap.servers")).map { options =>
      Map(
        "subscribe" -> options.get("subscribe"),
        "topic" -> options.get("topic"),
        "servers" -> options.get("kafka.bootstrap.servers"))
    }
  }

  /** Whether a query's checkpoint is deleted when it ends. Spark has it in a private field only. */
  def isTemporary(query: StreamExecution): Boolean =
    try {
      val field = classOf[StreamExecution].getDeclaredField("deleteCheckpointOnStop")
      field.setAccessible(true)
      field.getBoolean(query)
    } catch {
      case error: ReflectiveOperationException =>
        throw new IllegalStateException("this Spark does not say which checkpoints it deletes", error)
    }
}

/** What is known of a run of a query, from its first batch to its end. */
class Run private (id: UUID) {
  private val operators = TrieMap.empty[String, OperatorRun]

  /** The newest batch that was reported as finished, and the newest that is known to be in the states' logs. */
  @volatile private var reported = -1L
  @volatile private var logged = -1L

  def operator(facts: Facts): OperatorRun = operators.getOrElseUpdate(facts.stateId, new OperatorRun(facts))

  /**
   * Reports a batch that Spark's commit log has: once, for all operators of the query.
   *
   * @param waitsForLog Whether to return only once the states' logs have the batch.
   */
  def report(execution: IncrementalExecution, waitsForLog: Boolean): Unit = {
    val batch = execution.currentBatchId
    if (batch != logged && (waitsForLog || batch != reported)) {
      val states = Run.factsOf(execution.executedPlan).groupBy(_.uri).map { case (uri, facts) =>
        uri -> facts.map(_.state)
      }
      Driver.tell(
        "finished",
        Map("run_id" -> id.toString, "batch_id" -> batch, "at_once" -> waitsForLog, "states" -> states))
      reported = batch
      if (waitsForLog) logged = batch
    }
  }
}

object Run {
  private val runs = TrieMap.empty[UUID, Run]

  def of(execution: IncrementalExecution): Run = runs.getOrElseUpdate(execution.runId, new Run(execution.runId))

  /** Forgets a run, and tells the driver's Python that it has ended. */
  def end(id: UUID): Unit = {
    runs.remove(id)
    EpochRun.end(id)
    Driver.tell("ended", Map("run_id" -> id.toString))
  }

  /** Not by foreach(), which has an effect on exchanges. */
  private def factsOf(plan: SparkPlan): Seq[Facts] =
    Seq(plan).collect { case exchange: StatefulExchangeExec => exchange.facts } ++ plan.children.flatMap(factsOf)
}

/** The shards of a batch, as the coordinator has decided: how many, and the partition id of the first. */
case class Shards(shards: Int, firstPartition: Int)

/** The first batch's shards, and the number of the run, which is greater than those of the runs before it. */
case class Begun(shards: Int, firstPartition: Int, run: Long) {
  def layout: Shards = Shards(shards, firstPartition)
}

object Shards {
  /** Spark's seed of hashes of rows. */
  private val Seed = 42

  /** Returns for each shard a route, the least one that Spark's partitioning puts there. */
  def routes(number: Int): Array[Int] = {
    val routes = Array.fill(number)(-1)
    var missing = number
    var route = 0
    while (missing > 0) {
      val shard = Math.floorMod(Murmur3_x86_32.hashInt(route, Seed), number)
      if (routes(shard) < 0) {
        routes(shard) = route
        missing -= 1
      }
      route += 1
    }
    routes
  }
}

/**
 * Where a shard is.
 *
 * @param host The address of a store actor's node, as Ray knows it.
 * @param actor The number of the store actor there.
 * @param near The host of executors on its machine, as Spark knows it, if there are any.
 * @param direct Where tasks of other machines find it, if there may be any.
 */
case class Place(host: String, actor: Int, near: Option[String] = None, direct: Option[DirectAddress] = None)

/**
 * What the shards did in a batch.
 *
 * @param missing Shards that lack the batch, or whose rows no task counted.
 * @param places For each shard where it is, or null.
 * @param next The next batch's shards.
 * @param dueMs When the operator has something to do without new rows.
 * @param watermarkMs The watermark after it.
 * @param custom Further metrics.
 */
case class Settled(
    missing: Array[Int],
    places: Array[Place],
    next: Shards,
    dueMs: Option[java.lang.Long],
    watermarkMs: Long,
    custom: java.util.HashMap[String, java.lang.Long],
    rowsTotal: Long,
    rowsUpdated: Long,
    rowsRemoved: Long,
    rowsLate: Long,
    memoryBytes: Long,
    updatesMs: Long,
    commitMs: Long) {
  def rowsRead: Long = custom.get("rowsRead")

  /** Returns what Spark reports of an operator of so many shards. */
  def progress(operator: String, shards: Int): StateOperatorProgress = new StateOperatorProgress(
    operatorName = operator,
    numRowsTotal = rowsTotal,
    numRowsUpdated = rowsUpdated,
    allUpdatesTimeMs = updatesMs,
    numRowsRemoved = rowsRemoved,
    // Expired rows are removed with the updates.
    allRemovalsTimeMs = 0L,
    commitTimeMs = commitMs,
    memoryUsedBytes = memoryBytes,
    numRowsDroppedByWatermark = rowsLate,
    numShufflePartitions = shards,
    numStateStoreInstances = places.length,
    customMetrics = custom)
}

object Settled {
  /** What is reported before a batch. */
  val Nothing: Settled =
    Settled(Array.empty, Array.empty, Shards(0, 0), None, 0L, new java.util.HashMap, 0L, 0L, 0L, 0L, 0L, 0L, 0L)
}

/** What is known of an operator in a run, and of its last batch. */
class OperatorRun(facts: Facts) {
  private val shards = mutable.Map.empty[Long, Shards]
  @volatile private var placedFor: Option[(Int, Map[String, Int])] = None

  /** For each shard where it is, or null. */
  @volatile private var places = Array.empty[Place]

  /** Rows and groups of the last batch that had rows. */
  @volatile private var last: Option[(Long, Long)] = None

  /**
   * Returns the shards of a batch: as answered at the end of the batch before, or else as the coordinator answers now.
   * They do not change within a batch.
   *
   * @param planned The number of shards that the query was built with.
   */
  def shardsOf(execution: IncrementalExecution, planned: Int): Shards = synchronized {
    shards.getOrElseUpdate(
      execution.currentBatchId, {
        val session = execution.sparkSession
        val message = Map[String, Any](
          "shards" -> planned,
          "active" -> Driver.activeQueries(session),
          "kafka" -> CurrentQuery.query(session).toSeq.flatMap(CurrentQuery.kafka))
        val begun = Driver.ask[Begun]("begin", fields(execution) ++ message)
        ResultOrder.begin(session.sparkContext, begun.run, execution.runId)
        shards.clear()
        begun.layout
      })
  }

  /**
   * Has the shards of a batch placed before the first task of a run, and whenever the executors have changed.
   *
   * @param cores The cores of executors, by host.
   */
  def place(execution: IncrementalExecution, shards: Shards, cores: Map[String, Int]): Unit = {
    // Shards of another layout are placed again.
    val wanted = Some((shards.firstPartition, cores))
    if (placedFor != wanted) {
      places = Driver.ask[Array[Place]]("place", fields(execution, shards) + ("cores" -> cores))
      placedFor = wanted
    }
  }

  /** Returns where a shard is; None if it may run anywhere. */
  def placeOf(shard: Int): Option[Place] = places.lift(shard).flatMap(Option(_))

  /**
   * Has a batch settled, and returns what its shards did.
   *
   * @param sent For each shard the numbers of rows that tasks sent it; None if a user's function got them.
   */
  def settle(execution: IncrementalExecution, of: Shards, sent: Option[Map[String, Seq[Long]]]): Settled = {
    val settled = Driver.ask[Settled]("settle", fields(execution, of) ++ sent.map("sent" -> _))
    places = settled.places
    synchronized {
      shards(execution.currentBatchId + 1) = settled.next
      shards.keys.filter(_ < execution.currentBatchId).toSeq.foreach(shards.remove)
    }
    // A batch without rows says nothing of the next one.
    if (settled.rowsRead > 0) last = Some((settled.rowsRead, settled.rowsUpdated))
    settled
  }

  /** True if the last batch had two rows a group; true if unknown, since hot keys are the worst case. */
  def repeats: Boolean = last.forall { case (rows, groups) => rows >= Repeated * groups }

  def isSmall: Boolean = last.exists { case (rows, _) => rows <= OperatorRun.FewRows }

  private def fields(execution: IncrementalExecution): Map[String, Any] =
    Driver.batchFields(execution) + ("operator" -> facts)

  private def fields(execution: IncrementalExecution, of: Shards): Map[String, Any] =
    fields(execution) ++ Map("shards" -> of.shards, "first_partition" -> of.firstPartition)

  /** Rows a group, in a whole batch, from which on a map task's rows are aggregated. */
  private final val Repeated = 2
}

object OperatorRun {
  /** Rows up to which more tasks cost more than they balance: each takes as long as some ten thousand rows. */
  val FewRows = 10000L
}
