package org.apache.spark.sql.statefleet

import java.nio.ByteBuffer
import java.nio.channels.WritableByteChannel
import java.util.Arrays
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

/** What a task sends: all of it while it is kept, and then what is written but not sent yet. */
class Request extends WritableByteChannel {
  import Request._

  /** What is here, and its end; all before `sent` is sent. */
  private[statefleet] var bytes = new Array[Byte](BlockBytes)
  private[statefleet] var end = 0
  private var sent = 0

  /** How many bytes were sent before those that are here. */
  private var dropped = 0L

  def size: Long = dropped + end

  /** Whether all of it is still here, and can be sent again. */
  def isKept: Boolean = dropped == 0

  /** Whether it may be kept with what is written next. */
  def isSmall: Boolean = size <= KeptBytes

  /** Makes room for more bytes after the end. */
  def reserve(more: Int): Unit = {
    val needed = end.toLong + more
    if (needed > bytes.length) {
      if (needed > Largest) throw tooLarge(more)
      bytes = Arrays.copyOf(bytes, math.max(needed, math.min(2L * bytes.length, Largest)).toInt)
    }
  }

  private def tooLarge(more: Int) = new IllegalStateException(
    s"a row, or some rows, of $more bytes follow $end bytes that were not sent yet, and a task hands over at most " +
      s"$Largest bytes at once; nothing of the task's shards counts; make such rows smaller before the operator")

  override def write(source: ByteBuffer): Int = {
    val size = source.remaining
    reserve(size)
    source.get(bytes, end, size)
    end += size
    size
  }

  def isSent: Boolean = sent == end

  def rewind(): Unit = sent = 0

  /** Sends some of what was not sent yet: as much as the connection takes at once. */
  def sendTo(connection: Connection): Unit = {
    val unsent = ByteBuffer.wrap(bytes, sent, end - sent)
    connection.send(unsent)
    sent = unsent.position()
  }

  def sendTo(channel: WritableByteChannel): Unit = sent += channel.write(ByteBuffer.wrap(bytes, sent, end - sent))

  /** Drops what is here, which was sent; its memory is used again, unless one row took much. */
  def forget(): Unit = {
    dropped += end
    end = 0
    sent = 0
    if (bytes.length > ReusedBytes) bytes = new Array[Byte](BlockBytes)
  }

  override def isOpen: Boolean = true

  override def close(): Unit = ()
}

object Request {
  /** Bytes of a block of rows, after which rows are sent. */
  val BlockBytes: Int = 1 << 18

  /** Bytes of a request after which it is no longer kept, to be sent again. */
  val KeptBytes: Int = 1 << 22
  val LengthBytes = 4

  /** Bytes of memory that is used again: a record batch has no more. */
  private val ReusedBytes = 1 << 25

  /** Bytes of Java's largest array. */
  private val Largest = Int.MaxValue - 8L
}

/**
 * Writes the rows of a task's shards to its request, a shard after the other. Each shard's rows end with their number
 * and bytes.
 *
 * @param rows The rows, of which the last column is the route, by shard.
 */
class ShardRows(
    work: HandOver,
    task: Int,
    rows: Iterator[InternalRow],
    request: Request,
    allocator: BufferAllocator) {
  private val shards = work.shards(task)
  private val routes = work.routes
  private val kind = work.inputType
  private val routeColumn = kind.length

  /** The column of the number of rows that a row stands for; below zero if there is none. */
  private val countColumn = kind.fieldNames.indexOf(ShardRows.CountColumn)
  private val root = VectorSchemaRoot.create(
    ArrowUtils.toArrowSchema(kind, work.timeZone, errorOnDuplicatedFieldNames = true, largeVarTypes = false),
    allocator)
  private val format =
    if (UnsafeTypes.areSupported(kind)) new UnsafeFormat(request, root, UnsafeTypes.haveTexts(kind))
    else new ArrowFormat(request, root)

  /**
   * The place of the shard whose rows are written; of it: rows, what they stand for, and where they begin in the
   * request.
   */
  private var place = 0
  private var rowsWritten = 0L
  private var rowsRead = 0L
  private var shardBegin = request.size

  format.begin()

  /** Writes some rows; returns whether there may be more. */
  def write(): Boolean = {
    var isFull = false
    while (!isFull && rows.hasNext) {
      val row = rows.next().asInstanceOf[UnsafeRow]
      toShardOf(row.getInt(routeColumn))
      rowsWritten += 1
      rowsRead += (if (countColumn < 0) 1L else row.getLong(countColumn))
      isFull = format.add(row)
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
    format.finish()
    val end = ByteBuffer.allocate(20).putInt(shards(place)).putLong(rowsWritten).putLong(request.size - shardBegin)
    end.flip()
    request.write(end)
    work.sentRows.add(Array(shards(place).toLong, rowsRead))
    rowsWritten = 0L
    rowsRead = 0L
    place += 1
    if (place < shards.length) {
      shardBegin = request.size
      format.begin()
    }
  }

  def close(): Unit = root.close()
}

object ShardRows {
  /** The column of the number of rows that a partially aggregated one stands for. */
  val CountColumn = "__rows"
}

/** How rows of a shard are written to a request. */
private[statefleet] trait RowFormat {
  def begin(): Unit

  /** Adds a row of the shard; returns whether rows were written to the request. */
  def add(row: UnsafeRow): Boolean

  /** Writes what is left of the shard, and the end of its rows. */
  def finish(): Unit
}

/** Rows as they are, in blocks that follow their length, after a stream that only has their schema. */
private class UnsafeFormat(request: Request, root: VectorSchemaRoot, haveTexts: Boolean) extends RowFormat {
  import Request.{BlockBytes, LengthBytes}

  /** Rows of more bytes are copied by a call. */
  private final val SmallRow = 64

  /** Bytes before each row: its size, where a column has texts. */
  private val sizeBytes = if (haveTexts) 8 else 0

  /** Where the block that is written begins in the request; below zero if there is none. */
  private var block = -1

  private val schema = new ArrowStreamWriter(root, null, request)
  schema.start()
  schema.end()

  override def begin(): Unit = ()

  override def add(row: UnsafeRow): Boolean = {
    val size = row.getSizeInBytes
    request.reserve(LengthBytes + sizeBytes + size)
    if (block < 0) {
      block = request.end
      request.end += LengthBytes
    }
    if (sizeBytes > 0) {
      Platform.putLong(request.bytes, Platform.BYTE_ARRAY_OFFSET + request.end, size)
      request.end += sizeBytes
    }
    copy(row, size)
    request.end += size
    val isFull = request.end - block >= BlockBytes
    if (isFull) endBlock()
    isFull
  }

  private def endBlock(): Unit = {
    ByteBuffer.wrap(request.bytes).putInt(block, request.end - block - LengthBytes)
    block = -1
  }

  /** A block without rows is the end. */
  override def finish(): Unit = {
    if (block >= 0) endBlock()
    request.write(ByteBuffer.allocate(LengthBytes))
  }

  private def copy(row: UnsafeRow, size: Int): Unit = {
    val begin = Platform.BYTE_ARRAY_OFFSET + request.end
    if (size > SmallRow) {
      row.writeToMemory(request.bytes, begin)
    } else {
      var at = 0
      while (at < size) {
        Platform.putLong(request.bytes, begin + at, Platform.getLong(row.getBaseObject, row.getBaseOffset + at))
        at += 8
      }
    }
  }
}

/** An Arrow stream for each shard. */
private[statefleet] class ArrowFormat(request: Request, root: VectorSchemaRoot) extends RowFormat {
  /** Rows and bytes of a record batch at most; the last row may exceed the bytes. */
  private final val MostRows = 1 << 16
  private final val MostBytes = 16L << 20

  root.getFieldVectors.forEach(reserve(_))
  private val writer = ArrowWriter.create(root)
  private var stream: ArrowStreamWriter = _
  private var pending = 0
  private var bytes = 0L

  override def begin(): Unit = {
    stream = new ArrowStreamWriter(root, null, request)
    stream.start()
  }

  override def add(row: UnsafeRow): Boolean = {
    writer.write(row)
    pending += 1
    bytes += row.getSizeInBytes
    val isFull = pending == MostRows || bytes >= MostBytes
    if (isFull) writeBatch()
    isFull
  }

  override def finish(): Unit = {
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

  /** Has a vector of intervals begin with room for a whole batch: Spark 3.5 writes them without looking for room. */
  private def reserve(vector: FieldVector): Unit = vector match {
    case intervals @ (_: DurationVector | _: IntervalYearVector) => intervals.setInitialCapacity(MostRows)
    case struct: StructVector => struct.getChildrenFromFields.forEach(reserve(_))
    case _ =>
  }
}

/** Which rows are sent as Spark has them in memory (store_actors/engine/unsafe_rows.py reads and writes them too). */
object UnsafeTypes {
  def areSupported(rows: StructType): Boolean = rows.forall(field => isWord(field.dataType) || isText(field.dataType))

  def haveTexts(rows: StructType): Boolean = rows.exists(field => isText(field.dataType))

  private def isWord(kind: DataType): Boolean = kind match {
    case decimal: DecimalType => decimal.precision <= Decimal.MAX_LONG_DIGITS
    case BooleanType | ByteType | ShortType | IntegerType | LongType | FloatType | DoubleType => true
    case DateType | TimestampType | TimestampNTZType => true
    case _ => false
  }

  private def isText(kind: DataType): Boolean = kind.isInstanceOf[StringType] || kind == BinaryType
}
