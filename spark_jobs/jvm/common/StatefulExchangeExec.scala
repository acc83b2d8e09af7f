package org.apache.spark.sql.statefleet

import java.nio.charset.StandardCharsets.UTF_8
import org.apache.spark.{Partition, ShuffleDependency, SparkContext, SparkEnv, TaskContext}
import org.apache.spark.rdd.{CoalescedRDD, PartitionCoalescer, PartitionGroup, RDD}
import org.apache.spark.scheduler.TaskSchedulerImpl
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{Ascending, GenericInternalRow, SortOrder, UnsafeProjection}
import org.apache.spark.sql.catalyst.plans.physical.Partitioning
import org.apache.spark.sql.execution._
import org.apache.spark.sql.execution.exchange.{Exchange, ShuffleExchangeExec}
import org.apache.spark.sql.execution.metric._
import org.apache.spark.sql.execution.streaming.OneTimeTrigger
import org.apache.spark.sql.streaming.StateOperatorProgress
import org.apache.spark.sql.types.StructType
import org.apache.spark.util.CollectionAccumulator
import scala.collection.immutable.TreeMap
import scala.jdk.CollectionConverters._

/**
 * The exchange in front of an operator, as a stateful operator that Spark knows.
 *
 * Where a user's function gets the rows, in a Python worker, the last row of each shard has the batch: query, run,
 * batch and shard, and Spark's watermarks of this operator and batch. It shows that the rows are whole: Spark ends what
 * it sends a Python worker alike where its task was killed, or could not fetch the next rows.
 *
 * Spark runs batches without data for the operator, and its progress has the operator's stats. Once Spark is done with
 * a batch, and before its commit log has the batch, shards that no task of the batch ran for (a sink that read only
 * some rows) are run here. Once the commit log has the batch, it is reported to the driver's Python, and readers see
 * it.
 *
 * @param batch The batch that it is planned for; None outside a streaming query, as for explain() before it starts.
 * @param planningId The SQL execution in which it was planned, if any.
 */
case class StatefulExchangeExec(
    override val outputPartitioning: Partitioning,
    child: SparkPlan,
    planned: Int,
    facts: Facts)(
    @transient val batch: Option[IncrementalExecution],
    planningId: Option[String])
  extends Exchange
  with StateWriter {
  /** Set when it is executed: its tasks, and the shards that they are for if not all. */
  @transient private var tasks: Seq[ShardTask] = Nil
  @transient private var selected: Option[Seq[Int]] = None
  @transient private var evictMs = 0L
  @transient private var settled: Option[Settled] = None

  /** Whether Spark has begun to give the plan to the sink. */
  @transient private var isRunning = false

  /** Pairs of a shard and the number of rows that a task sent it, also of tasks that did so again. */
  @transient lazy val sentRows: CollectionAccumulator[Array[Long]] = sparkContext.collectionAccumulator[Array[Long]]

  override protected def otherCopyArgs: Seq[AnyRef] = Seq(batch, planningId)

  override protected def withNewChildInternal(newChild: SparkPlan): StatefulExchangeExec =
    copy(child = newChild)(batch, planningId)

  override def stringArgs: Iterator[Any] = Iterator(outputPartitioning, facts)

  private def shards: Int = outputPartitioning.numPartitions

  @transient private lazy val routes: Array[Int] = Shards.routes(shards)

  private def run: OperatorRun = Run.of(execution).operator(facts)

  private def shardsOfBatch: Shards = run.shardsOf(execution, planned)

  private def execution: IncrementalExecution = batch.getOrElse(
    throw new IllegalStateException(
      "a stateful DataFrame of the fleet runs only inside a streaming query; start it with writeStream " +
        s"[state=`${facts.state}`]"))

  // -- a stateful operator, as Spark calls it

  /**
   * The operator id is made of the state's name: the same in every batch, and far from the ids that Spark gives to its
   * operators.
   */
  override def stateInfo: Option[StatefulOperatorStateInfo] = batch.map { execution =>
    operatorInfo(execution.checkpointLocation, execution.runId, operatorId, execution.currentBatchId, shards)
  }

  private def operatorId: Long = 1000000L + (facts.state.hashCode & 0x3fffffff)

  /** Called after the commit log has this batch, when Spark plans the next one. */
  override def shouldRunAnotherBatch(newInputWatermark: Long): Boolean = {
    val again = needsAnotherBatch(newInputWatermark)
    // A caller that waits for the query to process all its input returns after this. If a batch follows, its start
    // reports this one.
    if (!again && !hasNewData) {
      batch.foreach(execution => Run.of(execution).report(execution, waitsForLog = true))
    }
    again
  }

  private def hasNewData: Boolean =
    CurrentQuery.query(session).forall(query => query.availableOffsets != query.committedOffsets)

  private def needsAnotherBatch(newWatermarkMs: Long): Boolean = facts.again match {
    // In complete mode no group ends.
    case _ if isComplete => false
    case "watermark" => newWatermarkMs > evictMs
    case "due" => settled.flatMap(_.dueMs).exists(_ < System.currentTimeMillis())
    case _ => false
  }

  private def isComplete: Boolean = facts.modeIn(batch).contains("complete")

  /** Below zero at first, as of Spark's own joins: the operators that follow have to see it move. */
  override def produceOutputWatermark(inputWatermarkMs: Long): Option[Long] = Some(inputWatermarkMs - facts.lagMs)

  override def shortName: String = facts.name

  /** Called at the end of each trigger: if the trigger ran a batch, once the commit log has it. */
  override def getProgress(): StateOperatorProgress = {
    if (settled.isDefined) Run.of(execution).report(execution, isLastCall)
    settled.getOrElse(Settled.Nothing).progress(shortName, shards)
  }

  /** Whether this is Spark's last call for the batch before a caller that waits for the query returns. */
  private def isLastCall: Boolean =
    CurrentQuery.query(session).exists(_.trigger == OneTimeTrigger) ||
      !execution.sparkSession.sessionState.conf.streamingNoDataMicroBatchesEnabled

  // -- running

  private lazy val writeMetrics = SQLShuffleWriteMetricsReporter.createShuffleWriteMetrics(sparkContext)
  private lazy val readMetrics = SQLShuffleReadMetricsReporter.createShuffleReadMetrics(sparkContext)

  override lazy val metrics: Map[String, SQLMetric] =
    Map("dataSize" -> SQLMetrics.createSizeMetric(sparkContext, "data size")) ++ readMetrics ++ writeMetrics

  @transient private lazy val inputTasks: RDD[InternalRow] = child.execute()

  /** The map tasks; of a small batch there are no more than cores, as each costs more than its rows. */
  private def mapTasks: RDD[InternalRow] = {
    val cores = coresByHost.values.sum
    if (isSmall && cores > 0 && cores < inputTasks.getNumPartitions) inputTasks.coalesce(cores) else inputTasks
  }

  /**
   * Whether a batch has few rows, as the one before had and as its sources say that can. Tasks of an operator below
   * wait for their commits, side by side.
   */
  @transient private lazy val isSmall: Boolean =
    run.isSmall && CurrentQuery.moved(session) <= OperatorRun.FewRows && fileBytes <= FewBytes &&
      child.find(_.isInstanceOf[Exchange]).isEmpty

  private def fileBytes: Long = child.collectLeaves().collect { case files: FileSourceScanExec =>
    files.relation.sizeInBytes
  }.sum

  /**
   * Whether one task reads the rows of all shards and hands them over, without a shuffle: a stage of Spark's takes
   * longer than its rows. An attempt of a task reads the rows again, so they have to be the same. In complete mode all
   * groups are emitted. Shards of several nodes have their tasks there.
   */
  private def isOneTask: Boolean =
    isSmall && !isOfFunction && selected.isEmpty && child.deterministic && !isComplete && hosts.size == 1 &&
      (1 to MostInputs).contains(inputTasks.getNumPartitions)

  /** The hosts of shards' tasks; None for those that may run anywhere. */
  private def hosts: Set[Option[String]] = (0 until shards).map(run.placeOf(_).flatMap(_.near)).toSet

  /** The rows of all shards, by their routes, in one partition. */
  private def sorted: RDD[InternalRow] = {
    val rows = RDDScanExec(child.output, inputTasks.coalesce(1), nodeName)
    SortExec(Seq(SortOrder(child.output.last, Ascending)), global = false, rows).execute()
  }

  @transient private lazy val dependency: ShuffleDependency[Int, InternalRow, InternalRow] =
    ShuffleExchangeExec.prepareShuffleDependency(
      mapTasks,
      child.output,
      outputPartitioning,
      new UnsafeRowSerializer(child.output.size, longMetric("dataSize")),
      writeMetrics)

  override protected def doExecute(): RDD[InternalRow] = {
    isRunning = true
    evictMs = execution.watermarkPropagator.getInputWatermarkForEviction(execution.currentBatchId, operatorId)
    val cores = coresByHost
    run.place(execution, shardsOfBatch, cores)
    if (isOneTask) {
      tasks = Seq(ShardTask((0 until shards).sortBy(routes(_)).toArray, hosts.head))
      new TaskRows(sorted, Seq(ShardTask(Array(0), hosts.head)))
    } else {
      tasks = ShardTask.of(selected.getOrElse(0 until shards), run, cores, isOfFunction, sparkContext)
      val rows = new TaskRows(new ShuffledRowRDD(dependency, readMetrics), tasks)
      if (isOfFunction) withEnds(rows) else rows
    }
  }

  private def description: Map[String, Any] = {
    val watermarks = execution.watermarkPropagator
    Driver.batchFields(execution) ++ Map(
      "late_ms" -> watermarks.getInputWatermarkForLateEvents(execution.currentBatchId, operatorId),
      "evict_ms" -> evictMs,
      "first_partition" -> shardsOfBatch.firstPartition,
      "output_mode" -> facts.modeIn(batch),
      "is_temporary" -> CurrentQuery.query(session).exists(CurrentQuery.isTemporary)
    )
  }

  /** Returns the work of tasks that hand the rows over; called once it is executed. */
  def handedOver(operator: String, outputType: StructType): HandOver = HandOver(
    facts.sockets.get,
    operator.getBytes(UTF_8),
    Driver.json.writeValueAsString(description),
    tasks.map(_.shards).toArray,
    facts.uri,
    tasks.map(task => run.placeOf(task.shards.head)).toArray,
    routes,
    StructType(child.schema.init),
    outputType,
    conf.sessionLocalTimeZone,
    sentRows
  )

  /** Whether a user's function gets the rows, in a Python worker; otherwise the tasks hand rows over. */
  private def isOfFunction: Boolean = facts.byPython.isDefined

  /** Returns the rows of each shard, and after them one of nulls, with the batch in the column before the route. */
  private def withEnds(rows: RDD[InternalRow]): RDD[InternalRow] = {
    val ofTasks = tasks.map(task => task.shards.head -> run.placeOf(task.shards.head)).toArray
    val ends = ShardEnds(facts.sockets.get, Driver.json.writeValueAsString(description), facts.uri, ofTasks, schema)
    rows.mapPartitionsWithIndexInternal((task, ofShard) => ofShard ++ Iterator.single(ends.of(task)))
  }

  private def coresByHost: Map[String, Int] = Executors.coresByHost(sparkContext)

  // -- the end of a batch

  /** Whether this thread runs the batch. */
  private def isInQuery: Boolean =
    batch != null && batch.isDefined && CurrentQuery.query(session).isDefined

  private def executionId: Option[String] = Option(sparkContext.getLocalProperty(SQLExecution.EXECUTION_ID_KEY))

  /** Spark describes the plan when it gives it to the sink, in an SQL execution of the batch's own. */
  override def nodeName: String = {
    if (isInQuery && executionId != planningId) isRunning = true
    "StatefulExchange"
  }

  /**
   * Spark walks the plan for the watermark once the sink is done with a batch and before the commit log has it. This is
   * the only moment at which missing shards can still be run, and at which an error still keeps the batch from being
   * committed.
   *
   * While the batch is planned, it is passed over: Spark 4 compares operators with those of the checkpoint, where it is
   * not.
   */
  override def foreach(f: SparkPlan => Unit): Unit = {
    if (isRunning && settled.isEmpty && isInQuery && executionId == planningId) settle()
    if (!isRunning && isInQuery) child.foreach(f) else super.foreach(f)
  }

  private def settle(): Unit = {
    var result = askSettled()
    if (result.missing.nonEmpty) {
      runShards(result.missing)
      result = askSettled()
      if (result.missing.nonEmpty) {
        throw new IllegalStateException(
          "shards of a stateful operator did not commit the batch, or nobody counted their rows, though their tasks " +
            "were run to their end; Spark's commit log does not count the batch, and a restart repeats it " +
            s"[state=`${facts.state}`, batch_id=`${execution.currentBatchId}`, " +
            s"shards=`${result.missing.mkString("[", ", ", "]")}`]")
      }
    }
    settled = Some(result)
  }

  private def askSettled(): Settled = {
    val sent = sentRows.value.asScala.toSeq.groupBy(pair => pair(0).toString).map { case (shard, pairs) =>
      shard -> pairs.map(pair => pair(1))
    }
    run.settle(execution, shardsOfBatch, if (isOfFunction) None else Some(sent))
  }

  private def runShards(missing: Array[Int]): Unit = {
    selected = Some(missing.toSeq)
    try execution.executedPlan.find(areItsTasks).foreach(_.execute().count())
    finally selected = None
  }

  private def areItsTasks(node: SparkPlan): Boolean = areTasks(node) && node.children.exists(isNext)

  /** Whether a node is this one, or is above it without tasks between them. */
  private def isNext(node: SparkPlan): Boolean = (node eq this) || !areTasks(node) && node.children.exists(isNext)

  private def areTasks(node: SparkPlan): Boolean = node.isInstanceOf[HandOverExec] || node.isInstanceOf[MapInArrowExec]

  /** Bytes of a small batch's files. */
  private final val FewBytes = 1L << 20

  /** Inputs of a small batch that one task reads, one after another. */
  private final val MostInputs = 16
}

/**
 * The rows after the last ones of shards, for a user's function.
 *
 * @param batch The batch, in JSON.
 * @param uri The fleet's.
 * @param tasks The shard of each task, and where it is, if that is known.
 */
case class ShardEnds(
    sockets: String,
    batch: String,
    uri: String,
    tasks: Array[(Int, Option[Place])],
    kind: StructType) {
  def of(task: Int): InternalRow = {
    val (shard, place) = tasks(task)
    val (host, isLost) = (SparkEnv.get.blockManager.blockManagerId.host, TaskContext.get().attemptNumber() > 0)
    val address = StoreActorAddress.nearest(sockets, place, host, uri, isLost)
    ShardEnds.row(kind, batch, Map("shard" -> shard, "store_actor" -> address.fields))
  }
}

object ShardEnds {
  /** Returns a row of nulls, but for the batch and what else its task is told, in the column before the route. */
  def row(kind: StructType, batch: String, more: Map[String, Any]): InternalRow = {
    val fields = Driver.json.readValue(batch, classOf[Map[String, Any]]) ++ more
    val values = new Array[Any](kind.length)
    values(values.length - 2) = Driver.json.writeValueAsBytes(fields)
    values(values.length - 1) = 0
    UnsafeProjection.create(kind)(new GenericInternalRow(values))
  }
}

object Executors {
  def coresByHost(context: SparkContext): Map[String, Int] = {
    // In local mode the driver is the executor.
    val executors = context.statusStore.executorList(activeOnly = true).filter(_.id != "driver" || context.isLocal)
    // An executor that has just joined has no port yet.
    val byHost = executors.groupBy(_.hostPort.replaceFirst(":[^:]*$", ""))
    TreeMap(byHost.toSeq: _*).map { case (host, ofHost) => host -> ofHost.map(_.totalCores).sum }
  }
}

/**
 * A task of an operator.
 *
 * @param host The host that it prefers, which has its shards; None if it may run anywhere.
 */
case class ShardTask(shards: Array[Int], host: Option[String])

object ShardTask {
  /**
   * Returns tasks that have several shards where there are more shards than cores: a task then has the commits of all
   * its shards under way at once, and waits for the object store once. A task has shards of one store actor only, and a
   * host has as many tasks as it has cores for.
   *
   * @param cores The cores of executors, by host.
   * @param areAlone Whether each shard has a task of its own.
   */
  def of(
      shards: Seq[Int],
      run: OperatorRun,
      cores: Map[String, Int],
      areAlone: Boolean,
      context: SparkContext): Seq[ShardTask] = {
    val each = math.max(1, context.conf.getInt("spark.task.cpus", 1))
    // A shard whose host has no executor may run anywhere.
    def hostOf(shard: Int) = run.placeOf(shard).flatMap(_.near).filter(cores.contains)
    val tasks = shards.groupBy(hostOf).toSeq.flatMap { case (host, ofHost) =>
      val slots = math.max(1, host.fold(context.defaultParallelism)(cores) / each)
      val byActor = ofHost.groupBy(run.placeOf(_).map(at => (at.host, at.actor))).values
      byActor.flatMap { ofActor =>
        val number = if (areAlone) ofActor.size else math.min(math.max(1, slots / byActor.size), ofActor.size)
        (0 until number).map(first => ShardTask((first until ofActor.size by number).map(ofActor(_)).toArray, host))
      }
    }
    tasks.sortBy(_.shards.head)
  }
}

/** The rows of partitions, by task. Spark asks for locations in the thread of its scheduler: they must not wait. */
class TaskRows(shuffled: RDD[InternalRow], tasks: Seq[ShardTask])
  extends CoalescedRDD[InternalRow](shuffled, tasks.size, Some(new TaskGroups(tasks))) {
  override def getPreferredLocations(split: Partition): Seq[String] =
    // A stage waits for a location that it prefers, also for a host that is gone.
    super.getPreferredLocations(split).filter(isAlive)

  private def isAlive(host: String): Boolean = sparkContext.taskScheduler match {
    case scheduler: TaskSchedulerImpl => scheduler.hasExecutorsAliveOnHost(host)
    case _ => true
  }
}

private class TaskGroups(@transient private val tasks: Seq[ShardTask]) extends PartitionCoalescer with Serializable {
  override def coalesce(most: Int, rows: RDD[_]): Array[PartitionGroup] = tasks.toArray.map { task =>
    val group = new PartitionGroup(task.host)
    group.partitions ++= task.shards.map(rows.partitions(_))
    group
  }
}
