package org.apache.spark.sql.statefleet

import java.nio.ByteBuffer
import java.nio.channels.WritableByteChannel
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
import scala.collection.mutable.ArrayBuffer

/** What a task sends: all of it while it is kept, and then what is written but not sent yet. */
class Request extends WritableByteChannel {
  import Request._

  /** Buffers, whose positions are the ends of what they have. */
  private val blocks = ArrayBuffer.empty[ByteBuffer]
  private val unused = ArrayBuffer.empty[ByteBuffer]

  /** The block of which bytes are sent next, and how many of them are sent. */
  private var current = 0
  private var sent = 0
  var size = 0L

  /** Whether all blocks are still here, and can be sent again. */
  var isKept = true

  /** Whether it may be kept with what is written next. */
  def isSmall: Boolean = size <= KeptBytes

  override def write(source: ByteBuffer): Int = {
    val all = source.remaining
    size += all
    while (source.hasRemaining) {
      if (blocks.isEmpty || !blocks.last.hasRemaining) blocks += emptyBlock()
      move(source, blocks.last)
    }
    all
  }

  /** Adds a block, whose bytes are no longer its writer's. */
  def add(block: ByteBuffer): Unit = {
    size += block.position()
    blocks += block
  }

  def emptyBlock(): ByteBuffer =
    if (unused.isEmpty) ByteBuffer.allocate(BlockBytes) else unused.remove(unused.size - 1)

  def isSent: Boolean = current == blocks.size - 1 && sent == blocks(current).position()

  def rewind(): Unit = {
    current = 0
    sent = 0
  }

  /** Sends some of what is written and was not sent yet: as much of a block as the connection takes. */
  def sendTo(connection: Connection): Unit = {
    if (sent == blocks(current).position()) {
      current += 1
      sent = 0
    }
    val bytes = blocks(current).duplicate()
    bytes.flip()
    bytes.position(sent)
    connection.send(bytes)
    sent = bytes.position()
  }

  /** Drops all blocks, which were sent; their buffers are used again. */
  def forget(): Unit = {
    isKept = false
    blocks.filter(_.capacity == BlockBytes).foreach { block =>
      block.clear()
      unused += block
    }
    blocks.clear()
    rewind()
  }

  override def isOpen: Boolean = true

  override def close(): Unit = ()
}

object Request {
  /** Bytes of a block, unless one row is larger. */
  val BlockBytes: Int = 1 << 18

  /** Bytes of a request after which it is no longer kept, to be sent again. */
  val KeptBytes: Int = 1 << 22
  val LengthBytes = 4

  /** Moves as many bytes as there are and fit; returns how many. */
  def move(source: ByteBuffer, target: ByteBuffer): Int = {
    val size = math.min(source.remaining, target.remaining)
    target.put(source.duplicate().limit(source.position() + size))
    source.position(source.position() + size)
    size
  }
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
private trait RowFormat {
  def begin(): Unit

  /** Adds a row of the shard; returns whether rows were written to the request. */
  def add(row: UnsafeRow): Boolean

  /** Writes what is left of the shard, and the end of its rows. */
  def finish(): Unit
}

/** Rows as they are, after a stream that only has their schema. */
private class UnsafeFormat(request: Request, root: VectorSchemaRoot, haveTexts: Boolean) extends RowFormat {
  import Request.{BlockBytes, LengthBytes}

  /** Rows of more bytes are copied by a call. */
  private final val SmallRow = 64

  /** Bytes before each row: its size, where a column has texts. */
  private val sizeBytes = if (haveTexts) 8 else 0

  /** A block after its length, which is part of the request once it is full. */
  private var bytes = new Array[Byte](BlockBytes)
  private var used = LengthBytes

  private val schema = new ArrowStreamWriter(root, null, request)
  schema.start()
  schema.end()

  override def begin(): Unit = ()

  override def add(row: UnsafeRow): Boolean = {
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
  override def finish(): Unit = {
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
      row.writeToMemory(bytes, begin)
    } else {
      var at = 0
      while (at < size) {
        Platform.putLong(bytes, begin + at, Platform.getLong(row.getBaseObject, row.getBaseOffset + at))
        at += 8
      }
    }
  }
}

/** An Arrow stream for each shard. */
private class ArrowFormat(request: Request, root: VectorSchemaRoot) extends RowFormat {
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

/** Which rows are sent as Spark has them in memory (store_actors/connections/unsafe_rows.py reads and writes them too). */
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
