package org.apache.spark.sql.statefleet

import java.io.{ByteArrayInputStream, IOException}
import java.nio.ByteBuffer
import java.nio.channels.{ByteChannel, Channels, ClosedChannelException, SelectionKey, SocketChannel}
import java.nio.charset.StandardCharsets.UTF_8
import org.apache.arrow.vector.VectorSchemaRoot
import org.apache.arrow.vector.ipc.ArrowStreamWriter
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.util.ArrowUtils
import org.apache.spark.unsafe.Platform

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
    if (size < 0) {
      // What is not taken yet may have an error that says why.
      while (next() != null) ()
      throw lost()
    }
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
          // What follows then is of the next epoch.
          !isMarked(epoch)
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
