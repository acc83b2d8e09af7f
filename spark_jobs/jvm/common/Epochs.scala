package org.apache.spark.sql.statefleet

import java.nio.charset.StandardCharsets.UTF_8
import java.util.concurrent.atomic.AtomicReference
import org.apache.spark.{SparkContext, SparkException, TaskFailedReason, TaskKilled}
import org.apache.spark.internal.Logging
import org.apache.spark.rdd.RDD
import org.apache.spark.scheduler.{SparkListener, SparkListenerJobStart, SparkListenerTaskEnd}
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{Attribute, AttributeSet}
import org.apache.spark.sql.catalyst.plans.logical.{LeafNode, LogicalPlan}
import org.apache.spark.sql.connector.catalog._
import org.apache.spark.sql.connector.metric.CustomMetric
import org.apache.spark.sql.connector.read.streaming.Offset
import org.apache.spark.sql.connector.write._
import org.apache.spark.sql.connector.write.streaming.{StreamingDataWriterFactory, StreamingWrite}
import org.apache.spark.sql.execution.SparkPlan
import org.apache.spark.sql.execution.streaming.continuous.{ContinuousExecution, WriteToContinuousDataSource}
import org.apache.spark.sql.internal.connector.SupportsStreamingUpdateAsAppend
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.util.CaseInsensitiveStringMap
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
class EpochGate extends EpochHooks with Logging {
  @volatile private var run: Option[EpochRun] = None
  private var watch: Option[TaskWatch] = None

  /** The number of shards that the state is rescaled to; a run takes it from the one before. */
  @volatile private[statefleet] var wantedShards: Option[Int] = None

  /** The options of the query's sink. */
  @volatile private[statefleet] var sinkOptions = CaseInsensitiveStringMap.empty

  /** Runs, one after the other, that failed without an epoch in Spark's commit log. */
  private var failures = 0

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
      val begun = new EpochRun(this, query, execution, facts.copy(shards = wantedShards.orElse(facts.shards)), planned)
      if (watch.isEmpty) {
        watch = Some(new TaskWatch(query, this))
        watch.foreach(query.sparkSession.sparkContext.addSparkListener(_))
      }
      open = begun.firstEpoch
      newest = open - 1
      settling = newest
      run = Some(begun)
      begun
    }
  }

  /**
   * Waits until the next epoch may begin; true if shards have moved, or are others, so that the tasks have to run again.
   * Spark's thread that begins epochs ends by an InterruptedException: the run is over, and its next epoch never begins.
   */
  override def isToReconfigure(): Boolean = synchronized {
    while (newest < open - 1 && run.exists(_.goesOn)) wait(EpochGate.LookMs)
    // Tasks that still run would commit an epoch without the one before it in Spark's log, which no run could go on from.
    if (newest < open - 1) throw new InterruptedException
    open += 1
    run.foreach(_.beginEpoch(open))
    run.exists(_.areShardsElsewhere)
  }

  def present: Option[EpochRun] = run

  /**
   * A task of a run has failed, or its executor is lost: the query runs its tasks again, from the last epoch in its commit
   * log, and ends with the reason where that does not help. Spark itself would try the one task again, and refuse that.
   */
  def failed(of: EpochRun, why: String): Unit = synchronized {
    if (run.contains(of) && of.goesOn) {
      of.isOver = true
      failures = if (newest >= of.firstEpoch) 1 else failures + 1
      if (failures < of.query.sparkSession.sparkContext.conf.getInt("spark.task.maxFailures", 4)) {
        logWarning(s"${of.query} runs its tasks again from epoch ${newest + 1} on, as one of them failed: $why")
        EpochGate.restart(of.query)
      } else {
        of.query.stopInNewThread(
          new SparkException(
            s"the tasks of a continuous query failed $failures times without an epoch between; what was committed is " +
              s"safe, and the query goes on from there when it is started again: $why"))
      }
      notifyAll()
    }
  }

  /** Has an epoch count, whatever becomes of this driver, and Spark's log of ends have it. */
  def decide(epoch: Long): Unit = run.foreach(_.decide(epoch))

  /** Called once the query has ended. */
  def close(): Unit = synchronized {
    for (of <- run; listener <- watch) of.query.sparkSession.sparkContext.removeSparkListener(listener)
    watch = None
  }

  /** Waits until all shards have committed an epoch; called before Spark's commit log has it. */
  def settle(epoch: Long): Unit = {
    run.foreach(_.settle(epoch))
    synchronized { settling = epoch }
  }

  override def ended(end: SourceEnd): Unit = run.foreach(_.keepOffset(end))

  override def logged(end: Offset): Unit = synchronized {
    newest = settling
    run.foreach(_.report(newest))
    notifyAll()
  }
}

object EpochGate {
  private final val LookMs = 100L

  /** Has a query plan its tasks again, as Spark does where the partitions of a source have changed. */
  private[statefleet] def restart(query: ContinuousExecution): Unit = {
    val state = classOf[StreamExecution].getMethod("state").invoke(query).asInstanceOf[AtomicReference[AnyRef]]
    if (state.compareAndSet(Active, Reconfiguring)) query.queryExecutionThread.interrupt()
  }

  /** Returns the gate of a query that runs continuously; None for another one. */
  def of(session: SparkSession): Option[(ContinuousExecution, EpochGate)] = CurrentQuery.query(session).collect {
    case query: ContinuousExecution =>
      query.logicalPlan match {
        case WriteToContinuousDataSource(write: EpochWrite, _, _) => Some((query, write.gate))
        case _ => None
      }
  }.flatten
}

/** Tells the gate of a query of tasks that fail. */
private class TaskWatch(query: ContinuousExecution, gate: EpochGate) extends SparkListener {
  private val stages = TrieMap.empty[Int, EpochRun]

  override def onJobStart(job: SparkListenerJobStart): Unit =
    if (Option(job.properties).exists(_.getProperty(SparkContext.SPARK_JOB_GROUP_ID) == query.runId.toString)) {
      gate.present.foreach(run => job.stageIds.foreach(stages.put(_, run)))
    }

  override def onTaskEnd(task: SparkListenerTaskEnd): Unit = (stages.get(task.stageId), task.reason) match {
    case (Some(run), reason: TaskFailedReason) if !reason.isInstanceOf[TaskKilled] =>
      gate.failed(run, reason.toErrorString)
    case _ =>
  }
}

/** The sink of a continuous query; the fleet has an epoch before the sink commits it. */
case class EpochSink(table: Table with SupportsWrite, gate: EpochGate) extends TableInFront with SupportsWrite {
  override def newWriteBuilder(info: LogicalWriteInfo): WriteBuilder = {
    gate.sinkOptions = info.options()
    table.newWriteBuilder(info) match {
      case builder: SupportsStreamingUpdateAsAppend =>
        new EpochWriteBuilder(builder, gate) with SupportsStreamingUpdateAsAppend
      case builder => new EpochWriteBuilder(builder, gate)
    }
  }
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
    new EpochWriters(write.createStreamingWriterFactory(info))

  override def useCommitCoordinator(): Boolean = write.useCommitCoordinator()

  override def commit(epoch: Long, messages: Array[WriterCommitMessage]): Unit = {
    gate.settle(epoch)
    write.commit(epoch, messages)
    // Last, as a driver that goes on from there does not have the sink commit it again.
    gate.decide(epoch)
  }

  override def abort(epoch: Long, messages: Array[WriterCommitMessage]): Unit = write.abort(epoch, messages)

  override def toString: String = write.toString
}

/**
 * The tasks of an operator in a continuous query, which send its rows to the shards themselves: there is no shuffle.
 *
 * @param child The rows, of which the last column is the route.
 * @param calls What calls a user's function, a partition for each shard; None for an operator.
 */
case class EpochHandOverExec(
    output: Seq[Attribute],
    child: SparkPlan,
    operator: String,
    facts: Facts,
    calls: Option[SparkPlan] = None)(
    @transient val run: EpochRun)
  extends SparkPlan {
  override def children: Seq[SparkPlan] = child +: calls.toSeq

  override protected def otherCopyArgs: Seq[AnyRef] = Seq(run)

  override def producedAttributes: AttributeSet = outputSet

  override protected def stringArgs: Iterator[Any] = Iterator(output)

  override protected def withNewChildrenInternal(newChildren: IndexedSeq[SparkPlan]): EpochHandOverExec =
    copy(child = newChildren.head, calls = newChildren.tail.headOption)(run)

  override protected def doExecute(): RDD[InternalRow] = {
    val cores = Executors.coresByHost(sparkContext)
    val places = run.begin(cores)
    checkReachable(places, cores)
    val rows = child.execute()
    run.ringFor(rows.getNumPartitions)
    val work = EpochWork(
      facts.sockets.get,
      operator.getBytes(UTF_8),
      run.description,
      places.indices.toArray.groupBy(places(_)).toSeq.sortBy(_._2.head),
      Shards.routes(places.length),
      rows.getNumPartitions,
      StructType(child.schema.init),
      schema,
      conf.sessionLocalTimeZone,
      facts.state)
    val called = calls.map(_.execute())
    // Spark prepares what a job depends on for its way to tasks; this is no part of it.
    called.foreach(_.partitions)
    new EpochRDD(rows, work, called)
  }

  /** Raises an error unless a task of every executor can connect to the store actors of all shards. */
  private def checkReachable(places: Array[Place], cores: Map[String, Int]): Unit = {
    if (places.isEmpty || places.contains(null)) {
      throw new IllegalStateException(
        "no store actor has the shards of a continuous query; nothing was started; see the driver's log for why, and " +
          s"start the query again [state=`${facts.state}`]")
    }
    val hosts = cores.keySet ++ places.map(place => place.near.getOrElse(place.host))
    if (hosts.size > 1 && places.exists(_.direct.isEmpty)) {
      throw new IllegalStateException(
        "the executors and shards of a continuous query are on several nodes, and store actors take connections of " +
          "their own node only, as Ray has TLS, or as nothing can be listened to; nothing was started; run it with " +
          s"executors on one node, or without trigger(continuous=..) [state=`${facts.state}`]")
    }
  }
}
