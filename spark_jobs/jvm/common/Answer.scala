package org.apache.spark.sql.statefleet

import java.nio.ByteBuffer
import org.apache.arrow.memory.BufferAllocator
import org.apache.arrow.vector.ipc.ArrowStreamReader
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{UnsafeProjection, UnsafeRow}
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.vectorized.{ArrowColumnVector, ColumnarBatch, ColumnVector}
import org.apache.spark.unsafe.Platform
import scala.jdk.CollectionConverters._

/**
 * The rows that a store actor answers with: in Spark's own format (store_actors/connections/unsafe_rows.py), or as Arrow has them.
 * They end with their number and bytes.
 */
class Answer(kind: StructType, allocator: BufferAllocator) {
  import Answer._

  private var rows: Rows = _

  /** How many rows were read, and where they began among what came of the connection. */
  private var rowsRead = 0L
  private var begin = 0L
  private var over = false

  /** Whether some of the answer has come. */
  def hasBegun: Boolean = rows != null

  /** Whether all of it was read, and is whole. */
  def isOver: Boolean = over

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
  def readMore(connection: Connection, isSent: Boolean): Unit =
    if (rows == null) {
      val mark = nextMark(connection)
      begin = connection.consumed
      rows = mark match {
        case Done => NoRows
        case UnsafeRows => new UnsafeBlocks(connection)
        case ArrowRows => new ArrowBatches(connection)
        case other => throw malformed(s"they begin with $other")
      }
      if (mark == Done) finish(connection, isSent, 0L)
    } else if (!rows.read()) {
      // An error ends the rows, too, and a stream that was cut looks like one that has ended.
      if (nextMark(connection) != Done) throw malformed("something else follows them")
      finish(connection, isSent, connection.consumed - 1L - begin)
    }

  def close(): Unit = if (rows != null) rows.close()

  /** Reads the end, after its mark, and compares it with the rows that came and their bytes. */
  private def finish(connection: Connection, isSent: Boolean, bytes: Long): Unit = {
    val end = ByteBuffer.allocate(16)
    connection.fill(end)
    if (end.getLong(0) != rowsRead || end.getLong(8) != bytes) {
      throw malformed(
        s"${end.getLong(0)} rows in ${end.getLong(8)} bytes were sent, and $rowsRead in $bytes came")
    }
    if (!isSent) throw malformed("they ended before all rows of the task's shards were sent")
    if (!connection.hasEnded()) throw malformed("something follows their end")
    over = true
  }

  /** Returns what follows: rows, or the end. An error that follows is raised. */
  private def nextMark(connection: Connection): Byte = {
    val one = ByteBuffer.allocate(1)
    connection.read(one)
    if (one.get(0) == Failed) throw new IllegalStateException(connection.readText())
    one.get(0)
  }

  private sealed trait Rows {
    /** Reads more rows; returns false at their end. */
    def read(): Boolean
    def next(): InternalRow
    def close(): Unit = ()
  }

  private object NoRows extends Rows {
    override def read(): Boolean = false
    override def next(): InternalRow = null
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
      val length = ByteBuffer.allocate(Request.LengthBytes)
      connection.fill(length)
      end = length.getInt(0)
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
    private val reader = new ArrowStreamReader(connection, allocator)
    private val projection = UnsafeProjection.create(kind)
    private var rows: Iterator[InternalRow] = Iterator.empty

    override def read(): Boolean = {
      val isRead = reader.loadNextBatch()
      rows = if (isRead) ofBatch() else Iterator.empty
      isRead
    }

    private def ofBatch(): Iterator[InternalRow] = {
      val root = reader.getVectorSchemaRoot
      val columns = root.getFieldVectors.asScala.map(vector => new ArrowColumnVector(vector): ColumnVector).toArray
      new ColumnarBatch(columns, root.getRowCount).rowIterator.asScala
    }

    override def next(): InternalRow = if (rows.hasNext) projection(rows.next()) else null

    override def close(): Unit = reader.close(false)
  }
}

object Answer {
  /** What follows (store_actors/connections/hand_over.py). */
  private val ArrowRows: Byte = 0
  private val Done: Byte = 1
  private val Failed: Byte = 2
  private val UnsafeRows: Byte = 3

  private def malformed(what: String) = new IllegalStateException(
    s"what the store actor of this node answered are not the rows of the task's shards: $what; none of them count; " +
      "what the shards committed is safe, and the next attempt of this task gets their rows again")
}
