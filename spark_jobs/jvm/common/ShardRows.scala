package org.apache.spark.sql.statefleet

import java.nio.ByteBuffer
import org.apache.arrow.memory.BufferAllocator
import org.apache.arrow.vector.{DurationVector, FieldVector, IntervalYearVector, VectorSchemaRoot}
import org.apache.arrow.vector.complex.StructVector
import org.apache.arrow.vector.ipc.ArrowStreamWriter
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.execution.arrow.ArrowWriter
import org.apache.spark.sql.types._
import org.apache.spark.sql.util.ArrowUtils
import org.apache.spark.unsafe.Platform
import scala.annotation.tailrec

/**
 * The rows of a task.
 *
 * @param rows The rows, of which the last column is the route, by shard.
 * @param shards The task's shards, in the order of their rows.
 * @param routes The route of each shard of the operator.
 * @param kind The columns before the route.
 * @param count Takes a shard and the number of rows that it is sent.
 */
case class TaskInput(
    rows: Iterator[InternalRow],
    shards: Array[Int],
    routes: Array[Int],
    kind: StructType,
    count: (Int, Long) => Unit)

/**
 * Writes the rows of a task's shards to its request, a shard after the other. Each shard's rows end with their number
 * and bytes.
 */
abstract class ShardRows(input: TaskInput, request: Request, root: VectorSchemaRoot) {
  import input._

  private val routeColumn = kind.length

  /** The column of the number of rows that a row stands for; below zero if there is none. */
  private val countColumn = kind.fieldNames.indexOf(ShardRows.CountColumn)

  /**
   * The place of the shard whose rows are written; of it: rows, what they stand for, and where they begin in the
   * request.
   */
  private var place = 0
  private var rowsWritten = 0L
  private var rowsRead = 0L
  private var shardBegin = 0L

  /** Begins the rows of a shard. */
  protected def beginShard(): Unit

  /** Adds a row of the shard; returns whether rows were written to the request. */
  protected def add(row: UnsafeRow): Boolean

  /** Writes what is left of the shard, and the end of its rows. */
  protected def finishShard(): Unit

  /** Begins the first shard. */
  def begin(): Unit = {
    shardBegin = request.size
    beginShard()
  }

  /** Writes some rows; returns whether there may be more. */
  def write(): Boolean = {
    var isFull = false
    while (!isFull && rows.hasNext) {
      val row = rows.next().asInstanceOf[UnsafeRow]
      toShardOf(row.getInt(routeColumn))
      rowsWritten += 1
      rowsRead += (if (countColumn < 0) 1L else row.getLong(countColumn))
      isFull = add(row)
    }
    if (!isFull) {
      while (place < shards.length) endShard()
      close()
    }
    isFull
  }

  @tailrec private def toShardOf(route: Int): Unit = if (routes(shards(place)) != route) {
    endShard()
    if (place == shards.length) {
      throw new IllegalStateException(
        "Spark's shuffle gave a task a row of a shard that is not the task's, or after that shard's rows; nothing of " +
          s"the shard counts [shards=`${shards.mkString("[", ", ", "]")}`]")
    }
    toShardOf(route)
  }

  private def endShard(): Unit = {
    finishShard()
    val end = ByteBuffer.allocate(20).putInt(shards(place)).putLong(rowsWritten).putLong(request.size - shardBegin)
    end.flip()
    request.write(end)
    count(shards(place), rowsRead)
    rowsWritten = 0L
    rowsRead = 0L
    place += 1
    if (place < shards.length) begin()
  }

  def close(): Unit = root.close()
}

object ShardRows {
  /** The column of the number of rows that a partially aggregated one stands for. */
  val CountColumn = "__rows"

  /** Returns a writer of rows, in Spark's own format if that can have them. */
  def apply(input: TaskInput, timeZone: String, request: Request, allocator: BufferAllocator): ShardRows = {
    val root = VectorSchemaRoot.create(
      ArrowUtils.toArrowSchema(input.kind, timeZone, errorOnDuplicatedFieldNames = true, largeVarTypes = false),
      allocator)
    if (UnsafeTypes.areSupported(input.kind)) new UnsafeShardRows(input, request, root)
    else new ArrowShardRows(input, request, root)
  }
}

/** Rows as they are, after a stream that only has their schema. */
private class UnsafeShardRows(input: TaskInput, request: Request, root: VectorSchemaRoot)
  extends ShardRows(input, request, root) {
  import Request.{BlockBytes, LengthBytes}
  import UnsafeShardRows._

  /** Bytes before each row: its size, where a column has texts. */
  private val sizeBytes = if (UnsafeTypes.haveTexts(input.kind)) 8 else 0

  /** A block after its length, which is part of the request once it is full. */
  private var bytes = new Array[Byte](BlockBytes)
  private var used = LengthBytes

  private val schema = new ArrowStreamWriter(root, null, request)
  schema.start()
  schema.end()

  override protected def beginShard(): Unit = ()

  override protected def add(row: UnsafeRow): Boolean = {
    val size = row.getSizeInBytes
    val isFull = used > LengthBytes && !fits(size)
    if (isFull) addBlock()
    // A block of its own, with room for nothing else.
    if (!fits(size)) bytes = new Array[Byte](Math.addExact(size, LengthBytes + sizeBytes))
    if (sizeBytes > 0) {
      Platform.putLong(bytes, Platform.BYTE_ARRAY_OFFSET + used, size)
      used += sizeBytes
    }
    copy(row, size)
    used += size
    isFull
  }

  private def fits(size: Int): Boolean = size <= bytes.length - used - sizeBytes

  /** Adds the block to the request, which has its bytes from now on. */
  private def addBlock(): Unit = {
    val block = ByteBuffer.wrap(bytes).putInt(0, used - LengthBytes)
    block.position(used)
    request.add(block)
    bytes = request.emptyBlock().array
    used = LengthBytes
  }

  /** A block without rows is the end. */
  override protected def finishShard(): Unit = {
    if (bytes.length > BlockBytes) {
      addBlock()
    } else if (used > LengthBytes) {
      // Small shards share a block of the request.
      request.write(ByteBuffer.wrap(bytes, 0, used).putInt(0, used - LengthBytes))
      used = LengthBytes
    }
    request.write(ByteBuffer.allocate(LengthBytes))
  }

  private def copy(row: UnsafeRow, size: Int): Unit = {
    val begin = Platform.BYTE_ARRAY_OFFSET + used
    if (size > SmallRow) {
      Platform.copyMemory(row.getBaseObject, row.getBaseOffset, bytes, begin, size)
    } else {
      var at = 0
      while (at < size) {
        Platform.putLong(bytes, begin + at, Platform.getLong(row.getBaseObject, row.getBaseOffset + at))
        at += 8
      }
    }
  }
}

private object UnsafeShardRows {
  /** Rows of more bytes are copied by a call. */
  private val SmallRow = 64
}

/** An Arrow stream for each shard. */
private class ArrowShardRows(input: TaskInput, request: Request, root: VectorSchemaRoot)
  extends ShardRows(input, request, root) {
  import ArrowShardRows._

  root.getFieldVectors.forEach(reserve(_))
  private val writer = ArrowWriter.create(root)
  private var stream: ArrowStreamWriter = _
  private var pending = 0
  private var bytes = 0L

  override protected def beginShard(): Unit = {
    stream = new ArrowStreamWriter(root, null, request)
    stream.start()
  }

  override protected def add(row: UnsafeRow): Boolean = {
    writer.write(row)
    pending += 1
    bytes += row.getSizeInBytes
    val isFull = pending == MostRows || bytes >= MostBytes
    if (isFull) writeBatch()
    isFull
  }

  override protected def finishShard(): Unit = {
    if (pending > 0) writeBatch()
    stream.end()
  }

  private def writeBatch(): Unit = {
    writer.finish()
    stream.writeBatch()
    writer.reset()
    pending = 0
    bytes = 0L
  }
}

private object ArrowShardRows {
  /** Has a vector of intervals begin with room for a whole batch: Spark 3.5 writes them without looking for room. */
  private def reserve(vector: FieldVector): Unit = vector match {
    case intervals @ (_: DurationVector | _: IntervalYearVector) => intervals.setInitialCapacity(MostRows)
    case struct: StructVector => struct.getChildrenFromFields.forEach(reserve(_))
    case _ =>
  }

  /** Rows and bytes of a record batch at most; the last row may exceed the bytes. */
  private val MostRows = 1 << 16
  private val MostBytes = 16L << 20
}

/** Which rows are sent as Spark has them in memory (store_actors/connections/unsafe_rows.py reads and writes them too). */
object UnsafeTypes {
  /** Returns whether rows of a type can be sent so. */
  def areSupported(rows: StructType): Boolean = rows.forall(field => isWord(field.dataType) || isText(field.dataType))

  /** Returns whether a row of a type has a size of its own. */
  def haveTexts(rows: StructType): Boolean = rows.exists(field => isText(field.dataType))

  private def isWord(kind: DataType): Boolean = kind match {
    case decimal: DecimalType => decimal.precision <= Decimal.MAX_LONG_DIGITS
    case BooleanType | ByteType | ShortType | IntegerType | LongType | FloatType | DoubleType => true
    case DateType | TimestampType | TimestampNTZType => true
    case _ => false
  }

  private def isText(kind: DataType): Boolean = kind.isInstanceOf[StringType] || kind == BinaryType
}
