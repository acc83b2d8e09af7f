package org.apache.spark.sql.statefleet

import java.nio.ByteBuffer
import java.nio.channels.ReadableByteChannel
import java.nio.charset.StandardCharsets.UTF_8
import org.apache.arrow.memory.BufferAllocator
import org.apache.arrow.vector.ipc.ArrowStreamReader
import org.apache.spark.{SparkEnv, TaskContext}
import org.apache.spark.rdd.RDD
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{Attribute, AttributeSet, UnsafeProjection, UnsafeRow}
import org.apache.spark.sql.catalyst.plans.physical.{Partitioning, UnknownPartitioning}
import org.apache.spark.sql.execution.{SparkPlan, UnaryExecNode}
import org.apache.spark.sql.execution.exchange.ReusedExchangeExec
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.util.ArrowUtils
import org.apache.spark.sql.vectorized.{ArrowColumnVector, ColumnarBatch, ColumnVector}
import org.apache.spark.unsafe.Platform
import org.apache.spark.util.{CollectionAccumulator, NextIterator}
import scala.jdk.CollectionConverters._

/**
 * What the tasks of an operator do in a batch: each hands the rows of its shards over to the store actor of its node,
 * and gets the rows that they emit (store_actors/connections/hand_over.py is the other side).
 *
 * @param sockets How the paths of the fleet's sockets begin.
 * @param operator The operator as the store actor gets it, in JSON (store_actors/client/operator_task.py).
 * @param batch The batch, in JSON.
 * @param shards The shards of each task.
 * @param uri The fleet's.
 * @param places Where the shards of each task are, if that is known.
 * @param routes The route of each shard.
 * @param inputType The columns of rows before the route.
 * @param sentRows Collects, for the driver, pairs of a shard and the number of rows that its operator is sent.
 */
case class HandOver(
    sockets: String,
    operator: Array[Byte],
    batch: String,
    shards: Array[Array[Int]],
    uri: String,
    places: Array[Option[Place]],
    routes: Array[Int],
    inputType: StructType,
    outputType: StructType,
    timeZone: String,
    sentRows: CollectionAccumulator[Array[Long]])
  extends ((Int, Iterator[InternalRow]) => Iterator[InternalRow]) {

  override def apply(task: Int, rows: Iterator[InternalRow]): Iterator[InternalRow] =
    new HandOverTask(this, task, rows, TaskContext.get(), SparkEnv.get.blockManager.blockManagerId.host)
}

/**
 * A task sends the rows of one shard after another, and returns results as they come: it sends only while there are
 * none. So neither side has all rows of a large task. The first megabytes are kept, and sent again to the next store
 * actor if one was lost before it answered. A row is valid until the next one is asked for.
 */
class HandOverTask(work: HandOver, task: Int, input: Iterator[InternalRow], context: TaskContext, host: String)
  extends NextIterator[InternalRow] {
  private val allocator = ArrowUtils.rootAllocator.newChildAllocator("statefleet", 0L, Long.MaxValue)
  private val request = new Request
  private val answer = new Answer(work.outputType, allocator)
  private var rows: ShardRows = _
  private var connection: Connection = _
  private var isWritten = false

  /** The deadline of another store actor; 0 if none was lost. */
  private var until = 0L

  context.addTaskCompletionListener[Unit](_ => closeIfNeeded())

  override protected def close(): Unit = {
    if (connection != null) connection.close()
    answer.close()
    if (rows != null) rows.close()
    allocator.close()
  }

  override protected def getNext(): InternalRow = {
    if (rows == null) begin()
    var found = answer.next()
    while (found == null && !answer.isOver) {
      try {
        if (connection == null) {
          val isLost = until > 0L || context.attemptNumber() > 0
          val address = StoreActorAddress.nearest(work.sockets, work.places(task), host, work.uri, isLost)
          connection = address.connected(context)
        }
        if (isSent || connection.hasArrived()) answer.readMore(connection, isSent) else sendMore()
      } catch {
        case error: Lost => sendAgain(error)
      }
      found = answer.next()
    }
    finished = found == null
    found
  }

  private def isSent: Boolean = isWritten && request.isSent

  /** Writes what is kept before anything is sent. */
  private def begin(): Unit = {
    val head = s"""{"batch": ${work.batch}, "attempt": ${context.taskAttemptId()}, """ +
      s""""executor": "$host:${ProcessHandle.current.pid}", "operator_bytes": ${work.operator.length}, """ +
      s""""unsafe_rows": ${UnsafeTypes.areSupported(work.inputType)}, """ +
      s""""unsafe_results": ${UnsafeTypes.areSupported(work.outputType)}, """ +
      s""""shards": ${work.shards(task).mkString("[", ", ", "]")}}"""
    val text = head.getBytes(UTF_8)
    request.write(ByteBuffer.allocate(Request.LengthBytes).putInt(0, text.length))
    request.write(ByteBuffer.wrap(text))
    request.write(ByteBuffer.wrap(work.operator))
    rows = new ShardRows(work, task, input, request, allocator)
    while (request.isSmall && !isWritten) writeMore()
  }

  private def writeMore(): Unit = isWritten = !rows.write()

  private def sendMore(): Unit = {
    if (request.isSent) {
      request.forget()
      writeMore()
    }
    request.sendTo(connection)
    if (isSent) connection.endSending()
  }

  /** Begins again with another store actor, if nothing came of this one and everything is still here. */
  private def sendAgain(error: Lost): Unit = {
    if (until == 0L) until = SocketFolder.deadline()
    if (!request.isKept || answer.hasBegun || System.nanoTime() > until) throw error
    connection.close()
    connection = null
    request.rewind()
    SocketFolder.pause()
  }
}

/**
 * The rows that a store actor answers with: in Spark's own format (store_actors/engine/unsafe_rows.py), or as Arrow has them.
 * They end with their number and bytes.
 */
class Answer(kind: StructType, allocator: BufferAllocator) {
  private var rows: Rows = _

  /** How many rows were read, and where they began among what came of the connection. */
  private var rowsRead = 0L
  private var begin = 0L
  var hasBegun = false

  /** Whether all of it was read, and is whole. */
  var isOver = false

  /** Returns the next row of what was read; null after the last one. */
  def next(): InternalRow = {
    val row = if (rows == null) null else rows.next()
    if (row != null) rowsRead += 1
    row
  }

  /**
   * Reads a block, or a record batch, of rows. The store actor has written all of it when it has written some of it.
   *
   * @param isSent Whether the store actor has all rows of the task's shards.
   */
  def readMore(connection: Connection, isSent: Boolean): Unit = if (rows == null || !rows.read()) {
    val bytes = if (rows == null) 0L else connection.consumed - begin
    val mark = nextMark(connection)
    hasBegun = true
    mark match {
      case Done => finish(connection, isSent, bytes)
      // An error ends the rows, too, and a stream that was cut looks like one that has ended.
      case _ if rows != null => throw malformed("something else follows them")
      case UnsafeRows => rows = new UnsafeBlocks(connection)
      case ArrowRows => rows = new ArrowBatches(connection)
      case other => throw malformed(s"they begin with $other")
    }
    begin = connection.consumed
  }

  def close(): Unit = if (rows != null) rows.close()

  /** Reads the end, after its mark, and compares it with the rows that came and their bytes. */
  private def finish(connection: Connection, isSent: Boolean, bytes: Long): Unit = {
    val end = connection.next(16)
    if (end.getLong(0) != rowsRead || end.getLong(8) != bytes) {
      throw malformed(
        s"${end.getLong(0)} rows in ${end.getLong(8)} bytes were sent, and $rowsRead in $bytes came")
    }
    if (!isSent) throw malformed("they ended before all rows of the task's shards were sent")
    if (!connection.hasEnded()) throw malformed("something follows their end")
    isOver = true
  }

  /** Returns what follows: rows, or the end. An error that follows is raised. */
  private def nextMark(connection: Connection): Byte = {
    val mark = connection.next(1).get(0)
    if (mark == Failed) throw new IllegalStateException(UTF_8.decode(connection.next(nextLength(connection))).toString)
    mark
  }

  private def nextLength(connection: Connection): Int = connection.next(Request.LengthBytes).getInt(0)

  private sealed trait Rows {
    /** Reads more rows; returns false at their end. */
    def read(): Boolean
    def next(): InternalRow
    def close(): Unit = ()
  }

  private class UnsafeBlocks(connection: Connection) extends Rows {
    private val row = new UnsafeRow(kind.length)

    /** The size of a row without strings; 0 if each has one of its own. */
    private val rowBytes =
      if (UnsafeTypes.haveTexts(kind)) 0 else UnsafeRow.calculateBitSetWidthInBytes(kind.length) + 8 * kind.length

    /** A block, its end, and where the next row begins. */
    private var block = Array.emptyByteArray
    private var end = 0
    private var position = 0

    override def read(): Boolean = {
      end = nextLength(connection)
      position = 0
      if (end < 0) throw malformed(s"a block of $end bytes is among them")
      if (block.length < end) block = new Array[Byte](end)
      connection.fill(ByteBuffer.wrap(block, 0, end))
      end > 0
    }

    override def next(): InternalRow =
      if (position >= end) {
        null
      } else {
        var size = rowBytes
        if (size == 0) {
          size = Platform.getLong(block, Platform.BYTE_ARRAY_OFFSET + position).toInt
          position += 8
        }
        if (size <= 0 || size > end - position) throw malformed(s"a row of $size bytes is among them")
        row.pointTo(block, Platform.BYTE_ARRAY_OFFSET + position, size)
        position += size
        row
      }
  }

  private class ArrowBatches(connection: Connection) extends Rows {
    private val rows = new ArrowRows(connection, kind, allocator)

    override def read(): Boolean = rows.read()

    override def next(): InternalRow = rows.next()

    override def close(): Unit = rows.close()
  }

  /** What follows (store_actors/connections/hand_over.py). */
  private final val ArrowRows: Byte = 0
  private final val Done: Byte = 1
  private final val Failed: Byte = 2
  private final val UnsafeRows: Byte = 3

  private def malformed(what: String) = new IllegalStateException(
    s"what the store actor of this node answered are not the rows of the task's shards: $what; none of them count; " +
      "what the shards committed is safe, and the next attempt of this task gets their rows again")
}

/** Rows of an Arrow stream. A row is valid until the next one is asked for. */
class ArrowRows(source: ReadableByteChannel, kind: StructType, allocator: BufferAllocator) {
  private val reader = new ArrowStreamReader(source, allocator)
  private val projection = UnsafeProjection.create(kind)
  private var rows: Iterator[InternalRow] = Iterator.empty

  /** Reads a record batch; returns false at the end. */
  def read(): Boolean = {
    val isRead = reader.loadNextBatch()
    rows = if (isRead) ofBatch() else Iterator.empty
    isRead
  }

  private def ofBatch(): Iterator[InternalRow] = {
    val root = reader.getVectorSchemaRoot
    val columns = root.getFieldVectors.asScala.map(vector => new ArrowColumnVector(vector): ColumnVector).toArray
    new ColumnarBatch(columns, root.getRowCount).rowIterator.asScala
  }

  /** Returns the next row of what was read; null after the last one. */
  def next(): InternalRow = if (rows.hasNext) projection(rows.next()) else null

  /** Lets go of its memory, and not of the source. */
  def close(): Unit = reader.close(false)
}

/** The tasks of an operator that hand rows over to store actors. */
case class HandOverExec(output: Seq[Attribute], child: SparkPlan, operator: String) extends UnaryExecNode {
  override def producedAttributes: AttributeSet = outputSet

  override def outputPartitioning: Partitioning = UnknownPartitioning(child.outputPartitioning.numPartitions)

  override protected def stringArgs: Iterator[Any] = Iterator(output)

  override protected def withNewChildInternal(newChild: SparkPlan): HandOverExec = copy(child = newChild)

  override protected def doExecute(): RDD[InternalRow] = {
    val rows = child.execute()
    rows.mapPartitionsWithIndexInternal(exchange.handedOver(operator, schema))
  }

  private def exchange: StatefulExchangeExec = child match {
    case exchange: StatefulExchangeExec => exchange
    case ReusedExchangeExec(_, exchange: StatefulExchangeExec) => exchange
    case other => throw new IllegalStateException(s"an operator's tasks are above ${other.nodeName}")
  }
}
