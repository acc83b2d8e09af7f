package org.apache.spark.sql.statefleet

import java.nio.ByteBuffer
import java.nio.charset.StandardCharsets.UTF_8
import org.apache.spark.{SparkEnv, TaskContext}
import org.apache.spark.rdd.RDD
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{Attribute, AttributeSet}
import org.apache.spark.sql.catalyst.plans.physical.{Partitioning, UnknownPartitioning}
import org.apache.spark.sql.execution.{SparkPlan, UnaryExecNode}
import org.apache.spark.sql.execution.exchange.ReusedExchangeExec
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.util.ArrowUtils
import org.apache.spark.util.CollectionAccumulator

/**
 * What the tasks of an operator do in a batch: each hands the rows of its shards over to the store actor of its node,
 * and gets the rows that they emit (store_actors/connections/hand_over.py is the other side).
 *
 * @param sockets How the paths of the fleet's sockets begin.
 * @param operator The operator as the store actor gets it, in JSON (store_actors/client/operator_task.py).
 * @param batch The batch, in JSON.
 * @param shards The shards of each task.
 * @param actors The number, on its node, of the store actor that has the shards of each task.
 * @param routes The route of each shard.
 * @param inputType The columns of rows before the route.
 * @param sentRows Collects, for the driver, pairs of a shard and the number of rows that its operator is sent.
 */
case class HandOver(
    sockets: String,
    operator: Array[Byte],
    batch: String,
    shards: Array[Array[Int]],
    actors: Array[Int],
    routes: Array[Int],
    inputType: StructType,
    outputType: StructType,
    timeZone: String,
    sentRows: CollectionAccumulator[Array[Long]])
  extends ((Int, Iterator[InternalRow]) => Iterator[InternalRow]) {

  /** Returns the rows that a task emits. */
  override def apply(task: Int, rows: Iterator[InternalRow]): Iterator[InternalRow] =
    new HandOverTask(this, task, rows, TaskContext.get(), SparkEnv.get.blockManager.blockManagerId.host)
}

/**
 * A task sends the rows of one shard after another, and returns results as they come: it sends only while there are
 * none. So neither side has all rows of a large task. The first megabytes are kept, and sent again to the next store
 * actor if one was lost before it answered. A row is valid until the next one is asked for.
 */
class HandOverTask(work: HandOver, task: Int, input: Iterator[InternalRow], context: TaskContext, host: String)
  extends Iterator[InternalRow] {
  private val allocator = ArrowUtils.rootAllocator.newChildAllocator("statefleet", 0L, Long.MaxValue)
  private val shards = work.shards(task)
  private val request = new Request
  private val answer = new Answer(work.outputType, allocator)
  private var rows: ShardRows = _
  private var row: InternalRow = _
  private var connection: Connection = _

  /** Whether all rows are in the request. */
  private var isWritten = false

  /** The deadline of another store actor; 0 if none was lost. */
  private var until = 0L

  context.addTaskCompletionListener[Unit](_ => close())

  override def hasNext: Boolean = {
    if (row == null) row = read()
    row != null
  }

  override def next(): InternalRow = {
    if (!hasNext) throw new NoSuchElementException
    val next = row
    row = null
    next
  }

  private def close(): Unit = {
    if (connection != null) connection.close()
    answer.close()
    if (rows != null) rows.close()
    allocator.close()
  }

  /** Returns the next row that the shards emit; null after the last one. */
  private def read(): InternalRow = {
    if (rows == null) begin()
    var found = answer.next()
    while (found == null && !answer.isOver) {
      try {
        if (connection == null) {
          connection = SocketFolder.connected(work.sockets, host, work.actors(task), context)
        }
        if (isSent || connection.hasArrived()) answer.readMore(connection, isSent) else sendMore()
      } catch {
        case error: Lost => sendAgain(error)
      }
      found = answer.next()
    }
    found
  }

  private def isSent: Boolean = isWritten && request.isSent

  /** Writes what is kept before anything is sent. */
  private def begin(): Unit = {
    val head = s"""{"batch": ${work.batch}, "attempt": ${context.taskAttemptId()}, """ +
      s""""executor": "$host:${ProcessHandle.current.pid}", "operator_bytes": ${work.operator.length}, """ +
      s""""unsafe_rows": ${UnsafeTypes.areSupported(work.inputType)}, """ +
      s""""unsafe_results": ${UnsafeTypes.areSupported(work.outputType)}, """ +
      s""""shards": ${shards.mkString("[", ", ", "]")}}"""
    val text = head.getBytes(UTF_8)
    request.write(ByteBuffer.allocate(Request.LengthBytes).putInt(0, text.length))
    request.write(ByteBuffer.wrap(text))
    request.write(ByteBuffer.wrap(work.operator))
    val count = (shard: Int, rows: Long) => work.sentRows.add(Array(shard.toLong, rows))
    rows = ShardRows(TaskInput(input, shards, work.routes, work.inputType, count), work.timeZone, request, allocator)
    rows.begin()
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
