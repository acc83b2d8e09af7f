package org.apache.spark.sql.statefleet

import java.util.UUID
import org.apache.hadoop.fs.Path
import org.apache.spark.sql.execution.streaming.continuous.ContinuousExecution
import scala.collection.concurrent.TrieMap

/** A run of a continuous query's tasks, from the epoch after the last one in Spark's commit log. */
class EpochRun(
    val gate: EpochGate,
    val query: ContinuousExecution,
    val execution: IncrementalExecution,
    facts: Facts,
    planned: Int) {
  val firstEpoch: Long = execution.currentBatchId
  @volatile private[statefleet] var isOver = false

  /** Where shards were when the last epoch was settled, and whether the next one is of other shards or places. */
  private var settledPlaces: Option[Seq[Place]] = None
  @volatile private[statefleet] var areShardsElsewhere = false

  def goesOn: Boolean = !isOver && query.isActive

  /** Of the run and not of the query, which may run its tasks again. */
  private val id = UUID.randomUUID

  private def fields(epoch: Long): Map[String, Any] = Map[String, Any](
    "query_id" -> query.id.toString,
    "run_id" -> id.toString,
    "batch_id" -> epoch,
    "time_ms" -> null)

  private lazy val begun = Driver.ask[Begun](
    "begin",
    fields(firstEpoch) ++
      Map(
        "operator" -> facts,
        "shards" -> planned,
        "active" -> Driver.activeQueries(query.sparkSession),
        "kafka" -> CurrentQuery.kafka(query)))

  lazy val shards: Shards = begun.layout

  private def ofShards(epoch: Long): Map[String, Any] = fields(epoch) ++
    Map("operator" -> facts, "shards" -> shards.shards, "first_partition" -> shards.firstPartition)

  private val progress = new EpochProgress(query, facts)

  private val bell = new EpochBell(firstEpoch)

  /** Tells the tasks that an epoch begins. */
  def beginEpoch(epoch: Long): Unit = {
    progress.begin(epoch)
    bell.ring(epoch)
  }

  /** Has tasks that are started next be told when an epoch begins. */
  def ringFor(tasks: Int): Unit = bell.open(execution.sparkSession.sparkContext, tasks)

  /** Begins the run; returns for each shard where it is. */
  def begin(cores: Map[String, Int]): Array[Place] = {
    completeLog()
    // A task that was told of an epoch asks for the next one so much later. Its source has the setting from here.
    val conf = execution.sparkSession.sessionState.conf
    if (!conf.contains(EpochRun.PollInterval)) conf.setConfString(EpochRun.PollInterval, EpochRun.PollMs)
    ResultOrder.begin(execution.sparkSession.sparkContext, begun.run, id)
    EpochRun.begun(this)
    progress.begin(firstEpoch)
    Driver.ask[Array[Place]]("place", ofShards(firstEpoch) ++ Map("cores" -> cores, "connect_directly" -> true))
  }

  /**
   * Has Spark's logs have the newest epoch that counts, with its end, and the run begin after it. Another driver may have
   * had it count, with the end of its own rows: this one's log has not heard of it, or remembers another end.
   */
  private def completeLog(): Unit = {
    val newest = Driver.ask[EpochEnd]("newest_epoch", fields(firstEpoch) + ("operator" -> facts))
    val isAnother = newest.epoch == firstEpoch - 1 && !EpochLogs.endsWith(query, newest.epoch, newest.end)
    if (newest.epoch >= 0 && (newest.epoch == firstEpoch || isAnother)) {
      EpochLogs.setEnd(query, newest.epoch, newest.end)
      query.commitLog.add(newest.epoch, CommitMetadata())
      EpochGate.restart(query)
      throw new InterruptedException
    }
  }

  /**
   * Has an epoch count, with its end. From here on another driver does not begin with it. Before, another one may have
   * begun, so that this one is refused.
   */
  def decide(epoch: Long): Unit =
    try {
      // Tasks that are cancelled report the end of one more before the last of them has ended this one.
      val end = ends.remove(epoch).get
      Driver.tell("end_epoch", ofShards(epoch) + ("end" -> end))
      EpochLogs.setEnd(query, epoch, end)
    } catch {
      case error: Throwable =>
        if (goesOn) query.stopInNewThread(error)
        throw error
    }

  /** Returns the run's first epoch, in JSON, as its tasks send it. */
  def description: String = Driver.json.writeValueAsString(
    fields(firstEpoch) ++ Map[String, Any](
      "late_ms" -> 0,
      "evict_ms" -> 0,
      "first_partition" -> shards.firstPartition,
      "output_mode" -> facts.modeIn(Some(execution)),
      "is_temporary" -> CurrentQuery.isTemporary(query)))

  /** The epoch whose end Spark's offset log gets next; and the ends of epochs that do not count yet. */
  private var nextEnd = firstEpoch
  private val ends = TrieMap.empty[Long, String]

  /**
   * Writes the end of an epoch into Spark's offset log, with the settings and the time of which micro-batches begin
   * there: Spark itself writes neither, and leaves what is there as it is. It would also compare the offset with the one
   * before, without those, and wake up who waits for the query to process all that is there.
   */
  def keepOffset(end: SourceEnd): Unit = synchronized {
    val before = query.offsetLog.get(nextEnd - 1).flatMap(_.offsets.head)
    if (before.exists(_.json == end.offset.json)) EpochRun.noNewData.invoke(query, Boolean.box(true))
    query.offsetLog.add(nextEnd, OffsetSeq(Seq(Some(end.offset)), Some(offsetMetadata(execution.sparkSession.conf))))
    ends(nextEnd) = end.offset.json
    progress.end(nextEnd, before.map(_.json), end)
    nextEnd += 1
  }

  /** Waits until all shards have committed an epoch. Once the query ends, what is under way still has a moment. */
  def settle(epoch: Long): Unit =
    try {
      var wasActive = true
      var settled = askSettled(epoch)
      while (settled.missing.nonEmpty) {
        // Called by a thread of Spark's that takes messages, which would end by an InterruptedException, and take no more.
        if (!wasActive) throw new IllegalStateException(s"the run has ended before epoch $epoch counts; it is repeated")
        wasActive = goesOn
        settled = askSettled(epoch)
      }
      val now = settled.places.toSeq
      if (settled.next.shards != shards.shards) gate.wantedShards = Some(settled.next.shards)
      areShardsElsewhere = settled.next != shards || settledPlaces.exists(_ != now)
      settledPlaces = Some(now)
      progress.settle(epoch, settled, shards.shards)
    } catch {
      case error: Throwable =>
        // Spark only logs what its thread raises here.
        if (goesOn) query.stopInNewThread(error)
        throw error
    }

  private def askSettled(epoch: Long): Settled =
    Driver.ask[Settled]("settle", ofShards(epoch) + ("wait_s" -> EpochRun.WaitSeconds))

  /** Tells the driver's Python that the run has ended. */
  private def end(): Unit = {
    bell.close()
    Driver.tell("ended", Map("run_id" -> id.toString))
  }

  def report(epoch: Long): Unit = {
    Driver.tell(
      "finished",
      Map(
        "run_id" -> id.toString,
        "batch_id" -> epoch,
        "at_once" -> false,
        "states" -> Map(facts.uri -> Seq(facts.state))))
    progress.report(epoch)
  }
}

object EpochRun {
  private val noNewData = classOf[StreamExecution].getMethod("noNewData_$eq", classOf[Boolean])
  private final val PollInterval = "spark.sql.streaming.continuous.executorPollIntervalMs"
  private final val PollMs = "10"
  private final val WaitSeconds = 1.0

  /** By run of Spark's, the newest run of its tasks. */
  private val runs = TrieMap.empty[UUID, EpochRun]

  private def begun(run: EpochRun): Unit = runs.put(run.query.runId, run).foreach(_.end())

  /** Ends what belongs to a run of Spark's that has ended, if it was continuous. */
  def end(query: UUID): Unit = runs.remove(query).foreach { run =>
    run.end()
    run.gate.close()
  }
}

/** An epoch that counts, and its end. */
case class EpochEnd(epoch: Long, end: String)

/** Spark's log of the ends of epochs, in which Spark itself leaves whatever is there. */
private object EpochLogs {
  /** Whether an epoch ends there, by what the query's tasks begin with: Spark's object remembers what it wrote. */
  def endsWith(query: ContinuousExecution, epoch: Long, end: String): Boolean =
    query.offsetLog.get(epoch).exists(_.offsets.flatten.exists(_.json == end))

  /**
   * Has the log have an epoch's end. A run that does not count may have written another one: an earlier one of this
   * query, or that of a driver which was paused and goes on. It writes each end once.
   */
  def setEnd(query: ContinuousExecution, epoch: Long, end: String): Unit = {
    val log = query.offsetLog
    while ({ log.batchCache.remove(epoch); !endsWith(query, epoch, end) }) {
      new Path(log.metadataPath, epoch.toString) match {
        case file => file.getFileSystem(query.sparkSession.sessionState.newHadoopConf()).delete(file, false)
      }
      val metadata = offsetMetadata(query.lastExecution.sparkSession.conf)
      log.add(epoch, OffsetSeq(Seq(Some(SerializedOffset(end))), Some(metadata)))
    }
  }
}
