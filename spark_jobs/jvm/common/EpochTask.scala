package org.apache.spark.sql.statefleet

import java.nio.channels.Selector
import org.apache.spark.{Partition, SparkContext, SparkEnv, TaskContext}
import org.apache.spark.rdd.RDD
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.execution.streaming.continuous._
import org.apache.spark.sql.types.StructType
import org.apache.spark.util.NextIterator

/**
 * What the tasks of an operator do in a continuous query: each sends its rows to the store actors in small pieces, and
 * gets what they emit (store_actors/connections/epoch_stream.py is the other side).
 *
 * Spark has a task compute its rows again in each epoch; what is here stays for all of them.
 *
 * @param batch The run's first epoch, in JSON.
 * @param shards The shards of each store actor.
 * @param routes The route of each shard.
 * @param tasks How many tasks there are.
 * @param inputType The columns of rows before the route.
 */
case class EpochWork(
    sockets: String,
    operator: Array[Byte],
    batch: String,
    shards: Seq[(Place, Array[Int])],
    routes: Array[Int],
    tasks: Int,
    inputType: StructType,
    outputType: StructType,
    timeZone: String,
    state: String) {
  @transient private var task: EpochTask = _

  /**
   * Returns the rows that a task emits in the epoch in which it is.
   *
   * @param rows Returns the task's input in an epoch.
   */
  def emitted(number: Int, rows: () => Iterator[InternalRow], calls: Option[RDD[InternalRow]]): Iterator[InternalRow] = {
    val epoch = EpochTracker.getCurrentEpoch.get
    if (task == null) {
      task = new EpochTask(this, number, TaskContext.get(), SparkEnv.get.blockManager.blockManagerId.host)
      calls.foreach(task.call)
      task.read(rows, epoch)
    }
    new EpochRows(task, epoch)
  }
}

/**
 * The rows that tasks emit.
 *
 * @param calls What calls a user's function, a partition for each shard.
 */
class EpochRDD(rows: RDD[InternalRow], work: EpochWork, calls: Option[RDD[InternalRow]])
  extends RDD[InternalRow](rows) {
  override protected def getPartitions: Array[Partition] = rows.partitions

  override def compute(split: Partition, context: TaskContext): Iterator[InternalRow] = {
    // Spark tries a task again that failed, and its source refuses that at once: the query ends before EpochGate has all
    // tasks run again.
    val until = System.nanoTime() + EpochTask.RetrySeconds * 1000000000L
    while (context.attemptNumber() > 0 && System.nanoTime() < until) {
      context.killTaskIfInterrupted()
      Thread.sleep(EpochTask.PauseMs)
    }
    work.emitted(split.index, () => rows.iterator(split, context), calls)
  }
}

/** The one row that a user's function gets for a shard: where it has to ask for others (spark_jobs/functions/epoch_worker.py). */
class CallRows(context: SparkContext, shards: Int, kind: StructType) extends RDD[InternalRow](context, Nil) {
  override protected def getPartitions: Array[Partition] = Array.tabulate(shards)(new ShardPartition(_))

  override def compute(split: Partition, context: TaskContext): Iterator[InternalRow] = {
    val (batch, more) = EpochTask.call.get
    Iterator.single(ShardEnds.row(kind, batch, more))
  }
}

private class ShardPartition(override val index: Int) extends Partition

/**
 * A task's connections, and the rows that it has not sent yet. A thread reads the task's input, which blocks; the task's own
 * thread sends and receives. So rows of the next epoch are read while the sink commits the one before.
 */
class EpochTask(val work: EpochWork, val number: Int, val context: TaskContext, host: String) {
  val selector: Selector = Selector.open()

  context.addTaskCompletionListener[Unit](_ => selector.close())

  val streams: Array[PieceStream] = work.shards.map { case (place, shards) =>
    val connection = StoreActorAddress.holder(work.sockets, place, host).connected(context)
    connection.release()
    val stream = new PieceStream(this, shards, connection.socket, connection.channel)
    // Now, as another store actor may not be there.
    context.addTaskCompletionListener[Unit](_ => stream.close())
    stream
  }.toArray
  private val routeColumn = work.inputType.length

  /** For each route, its shard's stream. */
  private val streamOf = new Array[PieceStream](work.routes.max + 1)
  private val shardOf = new Array[Int](work.routes.max + 1)

  /** How many rows wait to be sent, and their bytes; and how many were sent and are not answered yet. */
  private var waiting = 0
  private var waitingBytes = 0L
  @volatile private var unanswered = 0

  /** The last epoch of which all rows were read, and the last one whose end was sent. */
  @volatile private var readEpoch = -1L
  private var markedEpoch = -1L

  /** The last epoch that the driver is known to have ended; and who tells. */
  private var endedEpoch = -1L
  private lazy val coordinator =
    EpochBell.coordinator(context.getLocalProperty(ContinuousExecution.EPOCH_COORDINATOR_ID_KEY))

  /** When rows were sent last, and how long the next ones gather. */
  @volatile private var cutAt = System.nanoTime() - EpochTask.GatherNs
  @volatile private var gatherNs = EpochTask.GatherNs

  /** Since when the oldest row waits, and the oldest unanswered one did; and the longest wait of a row in the epoch. */
  private var waitingSince = 0L
  private var unansweredSince = 0L
  private var longest = 0L

  streams.foreach { stream =>
    stream.shards.foreach { shard =>
      streamOf(work.routes(shard)) = stream
      shardOf(work.routes(shard)) = shard
    }
    stream.begin(host)
  }
  /** Why the input is not read, or the user's function is not called, any more. */
  @volatile private var failure: Throwable = _

  def check(): Unit = if (failure != null) throw failure

  /** Has the user's function called, on a thread and in a Python worker for each shard whose results leave by this task. */
  def call(calls: RDD[InternalRow]): Unit = {
    val batch = Driver.json.readTree(work.batch)
    for ((place, shards) <- work.shards; shard <- shards if shard % work.tasks == number) {
      val asked = Map[String, Any](
        "is_worker" -> true, "state" -> work.state, "batch" -> batch, "tasks" -> work.tasks, "shards" -> Seq(shard))
      val address = StoreActorAddress.holder(work.sockets, place, host)
      val told = Map[String, Any]("shard" -> shard, "store_actor" -> address.fields, "run" -> asked)
      start(s"statefleet-function-$number-$shard") {
        EpochTask.call.set((work.batch, told))
        calls.iterator(new ShardPartition(shard), context).foreach(_ => ())
      }
    }
  }

  /** Has another thread read the input, from an epoch on. */
  def read(input: () => Iterator[InternalRow], first: Long): Unit =
    start(s"statefleet-epoch-reader-$number") {
      // A count of this thread's own: it is ahead of the task's.
      EpochTracker.initializeCurrentEpoch(first)
      while (!context.isInterrupted()) {
        val rows = input()
        val epoch = EpochTracker.getCurrentEpoch.get
        while (rows.hasNext) add(rows.next().asInstanceOf[UnsafeRow], epoch)
        // Spark ends an interrupted task's input as it ends an epoch.
        if (!context.isInterrupted()) end(epoch)
        EpochTracker.incrementCurrentEpoch()
      }
    }

  private def start(name: String)(work: => Unit): Unit = {
    val run: Runnable = () =>
      try {
        TaskContext.setTaskContext(context)
        work
      } catch {
        case _: InterruptedException if context.isInterrupted() =>
        case error: Throwable => failure = error
      } finally {
        TaskContext.unset()
        if (selector.isOpen) selector.wakeup()
      }
    val thread = new Thread(run, name)
    thread.setDaemon(true)
    context.addTaskCompletionListener[Unit](_ => thread.interrupt())
    thread.start()
  }

  /**
   * Whether rows that wait are to be sent: at once where none is unanswered, so that pieces grow with the load, but not
   * at every moment, as a piece of a few rows costs as much as one of fifty.
   */
  def isDue: Boolean = unanswered == 0 && untilDue <= 0

  private def untilDue: Long = cutAt + gatherNs - System.nanoTime()

  /** Whether all rows of an epoch were read. */
  def isRead(epoch: Long): Boolean = readEpoch == epoch

  /** Adds a row to those of its shard; waits while too many wait to be sent. Called by the thread that reads. */
  private def add(row: UnsafeRow, epoch: Long): Unit = {
    // Shards that hold all rows of an epoch answer no more of them before its end, which comes behind those in the source's
    // queue: they are taken.
    while (!tryAdd(row, isEnding = endedEpoch == epoch)) {
      if (coordinator.askSync[Long](GetCurrentEpoch) > epoch) endedEpoch = epoch
    }
  }

  /** Adds a row if there is room, or is within some time; returns whether that was done. There always is at an epoch's end. */
  private def tryAdd(row: UnsafeRow, isEnding: Boolean): Boolean = synchronized {
    if (!isEnding && isFull) wait(EpochTask.FullMs)
    val isTaken = isEnding || !isFull
    if (isTaken) {
      val route = row.getInt(routeColumn)
      streamOf(route).add(shardOf(route), row)
      waiting += 1
      waitingBytes += row.getSizeInBytes
      if (waiting == 1) {
        waitingSince = System.nanoTime()
        if (isDue) selector.wakeup()
      }
    }
    isTaken
  }

  private def isFull: Boolean = waiting >= EpochTask.MostRows || waitingBytes >= EpochTask.MostBytes

  /** Notes that all rows of an epoch were read, and waits until its end was sent: what follows is of the next one. */
  private def end(epoch: Long): Unit = synchronized {
    readEpoch = epoch
    selector.wakeup()
    while (markedEpoch < epoch) wait()
  }

  /** Sends the end of an epoch, after its last rows. */
  def mark(epoch: Long): Unit = synchronized {
    cut(epoch)
    val waited = longest
    longest = 0L
    streams.foreach(_.mark(epoch, EpochTimes.of(context).watermarkMs, waited))
    markedEpoch = epoch
    notifyAll()
  }

  /** Makes pieces of the rows that wait. */
  def cut(epoch: Long): Unit = synchronized {
    if (waiting > 0) {
      streams.foreach(_.cut(epoch))
      if (unanswered == 0) unansweredSince = waitingSince
      unanswered += waiting
      gatherNs = if (waiting >= EpochTask.BusyRows) EpochTask.BusyGatherNs else EpochTask.GatherNs
      waiting = 0
      waitingBytes = 0L
      cutAt = System.nanoTime()
      notifyAll()
    }
  }

  def answered(rows: Int): Unit = if (rows > 0) synchronized {
    unanswered -= rows
    if (unanswered == 0) longest = math.max(longest, System.nanoTime() - unansweredSince)
  }

  /** Waits until something can be sent or has come, or rows wait to be sent. */
  def await(): Unit = {
    streams.foreach(_.ask())
    streams.foreach(_.checkQuiet())
    val left = if (unanswered == 0) untilDue else 0L
    selector.select(if (left > 0) 1 + left / 1000000 else EpochTask.LookMs)
    selector.selectedKeys.clear()
    if (context.isInterrupted()) throw new InterruptedException
    if (Thread.interrupted()) throw new InterruptedException
  }
}

object EpochTask {
  /** The run's first epoch, and what else the user's function is told that this thread calls. */
  private[statefleet] val call = new ThreadLocal[(String, Map[String, Any])]

  /** Rows, and their bytes, that wait to be sent, after which no more are read: a slow shard stops its source. */
  private final val MostRows = 1 << 16
  private final val MostBytes = 1L << 24

  /** Milliseconds between questions whether an epoch was ended for which there is no room. */
  private final val FullMs = 100L

  /** Nanoseconds between two times at which rows are sent, at least; and between those of a busy task, which sent so many. */
  private final val GatherNs = 4000000L
  private final val BusyGatherNs = 8000000L
  private final val BusyRows = 50

  /** Milliseconds between looks whether the task was cancelled, if nothing wakes it. */
  private final val LookMs = 1000L

  /** Seconds for which a task that is tried again waits until it is cancelled, and milliseconds between looks. */
  private[statefleet] final val RetrySeconds = 60L
  private[statefleet] final val PauseMs = 10L
}

/** The rows that a task emits in an epoch. */
private class EpochRows(task: EpochTask, epoch: Long) extends NextIterator[InternalRow] {
  private var isMarked = false

  override protected def getNext(): InternalRow = {
    var row = if (isOver) null else nextRow()
    while (row == null && !isOver) {
      send()
      val arrived = task.streams.map(_.receive()).reduce(_ || _)
      row = nextRow()
      if (row == null && !arrived && !isOver) task.await()
    }
    finished = row == null
    row
  }

  private def nextRow(): InternalRow = {
    var row: InternalRow = null
    var at = 0
    while (row == null && at < task.streams.length) {
      val stream = task.streams(at)
      // What follows the last answer to a marker is of the next epoch, which others may be in.
      if (!stream.isMarked(epoch)) row = stream.next()
      at += 1
    }
    row
  }

  private def isOver: Boolean = isMarked && task.streams.forall(_.isMarked(epoch))

  private def send(): Unit = {
    task.check()
    if (!isMarked && task.isRead(epoch)) {
      task.mark(epoch)
      isMarked = true
    } else if (task.isDue) {
      // Those after the marker are of the next epoch: shards have them while the sink commits this one.
      task.cut(if (isMarked) epoch + 1 else epoch)
    }
    task.streams.foreach(_.send())
  }

  override protected def close(): Unit = ()
}
