package org.apache.spark.sql.statefleet

import java.io.{ByteArrayInputStream, IOException}
import java.nio.ByteBuffer
import java.nio.channels.{ByteChannel, Channels, ClosedChannelException, SelectionKey, Selector, SocketChannel}
import java.nio.charset.StandardCharsets.UTF_8
import org.apache.arrow.vector.VectorSchemaRoot
import org.apache.arrow.vector.ipc.ArrowStreamWriter
import org.apache.spark.{Partition, SparkContext, SparkEnv, TaskContext}
import org.apache.spark.rdd.RDD
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{GenericInternalRow, UnsafeProjection, UnsafeRow}
import org.apache.spark.sql.execution.streaming.continuous._
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.util.ArrowUtils
import org.apache.spark.unsafe.Platform
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
    val values = new Array[Any](kind.length)
    values(kind.fieldIndex("__end")) = EpochTask.call.get.getBytes(UTF_8)
    values(kind.length - 1) = 0
    Iterator.single(UnsafeProjection.create(kind)(new GenericInternalRow(values)))
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
    val stream = directOf(place) match {
      case Some(address) =>
        val channel = SealedChannel.connected(address, context)
        new PieceStream(this, shards, channel.socket, channel)
      case None =>
        val channel = SocketFolder.connected(work.sockets, place.host, place.actor, context).released()
        new PieceStream(this, shards, channel, channel)
    }
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
    EpochCoordinatorRef.get(context.getLocalProperty(ContinuousExecution.EPOCH_COORDINATOR_ID_KEY), SparkEnv.get)

  /** When rows were sent last. */
  @volatile private var cutAt = System.nanoTime() - EpochTask.GatherNs

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

  /** Where this task finds a store actor of another node; None for one of its own. */
  private def directOf(place: Place): Option[DirectAddress] =
    if (place.host == host) {
      None
    } else {
      if (place.direct.isEmpty) {
        throw new IllegalStateException(
          s"this task is on another node ($host) than a store actor (${place.host}) which only takes connections of " +
            s"its own node, as Ray has TLS, or as nothing can be listened to [state=`${work.state}`]")
      }
      place.direct
    }

  def check(): Unit = if (failure != null) throw failure

  /** Has the user's function called, on a thread and in a Python worker for each shard whose results leave by this task. */
  def call(calls: RDD[InternalRow]): Unit = {
    val batch = Driver.json.readValue(work.batch, classOf[Map[String, Any]])
    for ((place, shards) <- work.shards; shard <- shards if shard % work.tasks == number) {
      val asked = Map[String, Any](
        "is_worker" -> true, "state" -> work.state, "batch" -> batch, "tasks" -> work.tasks, "shards" -> Seq(shard))
      val where = Map[String, Any](
        "sockets" -> work.sockets,
        "host" -> place.host,
        "actor" -> place.actor,
        "direct" -> directOf(place),
        "request" -> asked)
      val header = Driver.json.writeValueAsString(batch ++ Map[String, Any]("shard" -> shard, "worker" -> where))
      start(s"statefleet-function-$number-$shard") {
        EpochTask.call.set(header)
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

  private def untilDue: Long = cutAt + EpochTask.GatherNs - System.nanoTime()

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
  /** What the user's function is told that this thread calls. */
  private[statefleet] val call = new ThreadLocal[String]

  /** Rows, and their bytes, that wait to be sent, after which no more are read: a slow shard stops its source. */
  private final val MostRows = 1 << 16
  private final val MostBytes = 1L << 24

  /** Milliseconds between questions whether an epoch was ended for which there is no room. */
  private final val FullMs = 100L

  /** Nanoseconds between two times at which rows are sent, at least. */
  private final val GatherNs = 4000000L

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
      row = task.streams(at).next()
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
    } else if (!isMarked && task.isDue) {
      task.cut(epoch)
    }
    task.streams.foreach(_.send())
  }

  override protected def close(): Unit = ()
}

/**
 * The frames of one connection.
 *
 * @param channel What they are sent to and received from, by way of the socket.
 */
class PieceStream(task: EpochTask, val shards: Array[Int], socket: SocketChannel, channel: ByteChannel) {
  import PieceStream._

  private val key = socket.register(task.selector, SelectionKey.OP_READ)
  private val (inputType, outputType) = (task.work.inputType, task.work.outputType)
  private val pieces = shards.map(shard => shard -> new PieceRows(inputType)).toMap
  private val out = new Request

  /** Rows of other types are sent, or come, as Arrow has them. */
  private val (areSentAsTheyAre, comeAsTheyAre) =
    (UnsafeTypes.areSupported(inputType), UnsafeTypes.areSupported(outputType))
  private val root = VectorSchemaRoot.create(
    ArrowUtils.toArrowSchema(inputType, task.work.timeZone, errorOnDuplicatedFieldNames = true, largeVarTypes = false),
    ArrowUtils.rootAllocator)
  private lazy val asArrow = new ArrowFormat(out, root)
  private var arrowRows: ArrowRows = _
  private val row = new UnsafeRow(outputType.length)
  private val hasTexts = UnsafeTypes.haveTexts(outputType)
  private val rowBytes = UnsafeRow.calculateBitSetWidthInBytes(outputType.length) + 8 * outputType.length

  /** What came and is not used yet: from `begin` to `end`. */
  private var bytes = new Array[Byte](Request.BlockBytes)
  private var begin = 0
  private var end = 0

  /** The end of the rows that are given out, and whether others have come behind them. */
  private var rowsEnd = 0

  /** The epoch whose markers were answered last, and by how many shards. */
  private var markedEpoch = -1L
  private var marked = 0

  def isMarked(epoch: Long): Boolean = markedEpoch == epoch && marked == shards.length

  /** Writes the request. */
  def begin(host: String): Unit = {
    val work = task.work
    val head = s"""{"batch": ${work.batch}, "attempt": ${task.context.taskAttemptId()}, """ +
      s""""executor": "$host:${ProcessHandle.current.pid}", "operator_bytes": ${work.operator.length}, """ +
      s""""unsafe_rows": $areSentAsTheyAre, "unsafe_results": $comeAsTheyAre, """ +
      s""""state": ${Driver.json.writeValueAsString(work.state)}, """ +
      s""""task": ${task.number}, "tasks": ${work.tasks}, "shards": ${shards.mkString("[", ", ", "]")}}"""
    val text = head.getBytes(UTF_8)
    out.write(ByteBuffer.allocate(Request.LengthBytes).putInt(0, text.length))
    out.write(ByteBuffer.wrap(text))
    out.write(ByteBuffer.wrap(work.operator))
    val writer = new ArrowStreamWriter(root, null, out)
    writer.start()
    writer.end()
  }

  def add(shard: Int, row: UnsafeRow): Unit = pieces(shard).add(row)

  /** Writes the rows of each shard as a piece. */
  def cut(epoch: Long): Unit = pieces.foreach { case (shard, rows) =>
    if (rows.count > 0) {
      val begin = out.end
      out.write(ByteBuffer.allocate(PieceHead).put(Piece).putInt(shard).putLong(epoch).putInt(rows.count).rewind())
      if (areSentAsTheyAre) {
        rows.writeTo(out)
      } else {
        asArrow.begin()
        rows.foreach(asArrow.add(_))
        asArrow.finish()
      }
      ByteBuffer.wrap(out.bytes).putInt(begin + PieceHead - 4, out.end - begin - PieceHead)
      rows.forget()
    }
  }

  /** Writes the end of an epoch, the watermark by the rows that the task has read, and how long one waited at most. */
  def mark(epoch: Long, watermarkMs: Long, longest: Long): Unit = {
    val frame = ByteBuffer.allocate(29 + 12 * shards.length).put(Marker).putLong(epoch).putLong(watermarkMs)
    frame.putLong(longest).putInt(shards.length)
    pieces.foreach { case (shard, rows) => frame.putInt(shard).putLong(rows.takeSent()) }
    out.write(frame.flip())
  }

  /** Sends what the other side takes at once. */
  def send(): Unit = {
    try {
      if (!out.isSent) {
        out.sendTo(channel)
        if (out.isSent) out.forget()
      }
      flushing.foreach(_.flush())
    } catch {
      case error: ClosedChannelException => throw error
      case error: IOException =>
        // The other side may have sent an error that says why.
        while (receive()) while (next() != null) ()
        throw lost(error)
    }
  }

  private def lost(cause: Throwable = null) =
    new Lost("was lost in the middle of an epoch", cause, if (flushing.isEmpty) "of this node" else "of another node")

  /** When something came last. */
  private var cameAt = System.nanoTime()

  /** Raises an error if a store actor of another node, which sends something from time to time, has not for long. */
  def checkQuiet(): Unit =
    if (flushing.nonEmpty && System.nanoTime() - cameAt > QuietSeconds * 1000000000L) {
      throw new Lost(s"has sent nothing for $QuietSeconds s", who = s"at ${socket.getRemoteAddress}")
    }

  /** Where a message may wait to be sent on. */
  private val flushing = Option(channel).collect { case sealing: SealedChannel => sealing }

  /** Has the selector wait for what is of use. */
  def ask(): Unit = {
    val isSent = out.isSent && flushing.forall(_.isFlushed)
    key.interestOps(SelectionKey.OP_READ | (if (isSent) 0 else SelectionKey.OP_WRITE))
  }

  /** Receives what is there, and returns whether that was anything; rows that were given out are not valid any more. */
  def receive(): Boolean = {
    if (begin > 0 && begin == end) {
      begin = 0
      end = 0
      rowsEnd = 0
    }
    if (end == bytes.length) makeRoom()
    val size =
      try channel.read(ByteBuffer.wrap(bytes, end, bytes.length - end))
      catch {
        case error: ClosedChannelException => throw error
        case error: IOException => throw lost(error)
      }
    if (size < 0) throw lost()
    if (size > 0) cameAt = System.nanoTime()
    end += size
    size > 0
  }

  private def makeRoom(): Unit = {
    val left = end - begin
    val larger = if (2 * left > bytes.length) new Array[Byte](2 * bytes.length) else bytes
    System.arraycopy(bytes, begin, larger, 0, left)
    rowsEnd -= begin
    bytes = larger
    begin = 0
    end = left
  }

  /** Returns the next row of what came; null if there is none yet. */
  def next(): InternalRow = {
    var found = if (arrowRows == null) null else nextOfArrow()
    while (found == null && begin == rowsEnd && takeFrame()) if (arrowRows != null) found = nextOfArrow()
    if (found == null && begin < rowsEnd) {
      var size = rowBytes
      if (hasTexts) {
        size = Platform.getLong(bytes, Platform.BYTE_ARRAY_OFFSET + begin).toInt
        begin += 8
      }
      row.pointTo(bytes, Platform.BYTE_ARRAY_OFFSET + begin, size)
      begin += size
      found = row
    }
    found
  }

  private def nextOfArrow(): InternalRow = {
    var found = arrowRows.next()
    while (found == null && arrowRows.read()) found = arrowRows.next()
    if (found == null) {
      arrowRows.close()
      arrowRows = null
    }
    found
  }

  /** Takes the next frame if all of it has come; returns whether there may be another. */
  private def takeFrame(): Boolean = {
    val frame = ByteBuffer.wrap(bytes, begin, end - begin)
    if (frame.remaining < 1) {
      false
    } else {
      frame.get() match {
        case Rows if frame.remaining >= 12 =>
          val (answered, _, size) = (frame.getInt(), frame.getInt(), frame.getInt())
          val isThere = frame.remaining >= size
          if (isThere) {
            task.answered(answered)
            if (comeAsTheyAre) {
              begin = frame.position()
              rowsEnd = begin + size
            } else {
              if (size > 0) {
                val stream = new ByteArrayInputStream(bytes, frame.position(), size)
                arrowRows = new ArrowRows(Channels.newChannel(stream), outputType, ArrowUtils.rootAllocator)
              }
              skipTo(frame.position() + size)
            }
          }
          isThere
        case Marked if frame.remaining >= 8 =>
          val epoch = frame.getLong()
          marked = if (epoch == markedEpoch) marked + 1 else 1
          markedEpoch = epoch
          skipTo(frame.position())
          // What follows then may be of the next epoch, in which other tasks are.
          marked != shards.length
        case Failed if frame.remaining >= 4 =>
          val text = new Array[Byte](frame.getInt())
          if (frame.remaining < text.length) {
            false
          } else {
            frame.get(text)
            throw new IllegalStateException(new String(text, UTF_8))
          }
        case Rows | Marked | Failed => false
        case other => throw new IllegalStateException(s"a store actor sent a frame of kind $other; start the query again")
      }
    }
  }

  private def skipTo(position: Int): Boolean = {
    begin = position
    rowsEnd = position
    true
  }

  def close(): Unit = {
    channel.close()
    root.close()
    if (arrowRows != null) arrowRows.close()
  }
}

private object PieceStream {
  /** Bytes of the head of a piece, of which the last four are the length of its rows. */
  private final val PieceHead = 21

  /** Seconds without anything from a store actor of another node; it has an empty answer each five. */
  private final val QuietSeconds = 30L

  /** Frames to a store actor, and from it. */
  private final val Piece: Byte = 1
  private final val Marker: Byte = 2
  private final val Rows: Byte = 1
  private final val Marked: Byte = 2
  private final val Failed: Byte = 3
}

/** Rows of one shard that wait to be sent. */
private class PieceRows(kind: StructType) {
  private val isAfterSize = UnsafeTypes.haveTexts(kind) || !UnsafeTypes.areSupported(kind)
  private var bytes = new Array[Byte](1 << 12)
  private var size = 0
  var count = 0
  private var sent = 0L

  def add(row: UnsafeRow): Unit = {
    val needed = size + row.getSizeInBytes + 8
    if (needed > bytes.length) bytes = java.util.Arrays.copyOf(bytes, math.max(needed, 2 * bytes.length))
    if (isAfterSize) {
      Platform.putLong(bytes, Platform.BYTE_ARRAY_OFFSET + size, row.getSizeInBytes)
      size += 8
    }
    row.writeToMemory(bytes, Platform.BYTE_ARRAY_OFFSET + size)
    size += row.getSizeInBytes
    count += 1
  }

  def writeTo(out: Request): Unit = out.write(ByteBuffer.wrap(bytes, 0, size))

  def foreach(use: UnsafeRow => Unit): Unit = {
    val row = new UnsafeRow(kind.length + 1)
    var at = 0
    while (at < size) {
      val length = Platform.getLong(bytes, Platform.BYTE_ARRAY_OFFSET + at).toInt
      row.pointTo(bytes, Platform.BYTE_ARRAY_OFFSET + at + 8, length)
      use(row)
      at += 8 + length
    }
  }

  /** Lets go of the rows, which are sent. */
  def forget(): Unit = {
    sent += count
    size = 0
    count = 0
  }

  /** Returns how many rows were sent since the last time. */
  def takeSent(): Long = {
    val rows = sent
    sent = 0L
    rows
  }
}
