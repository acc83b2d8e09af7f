package org.apache.spark.sql.statefleet

import java.nio.ByteBuffer
import java.nio.channels.WritableByteChannel
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
  private var written = 0L
  private var kept = true

  /** Bytes that were written. */
  def size: Long = written

  /** Whether all blocks are still here, and can be sent again. */
  def isKept: Boolean = kept

  /** Whether it may be kept with what is written next. */
  def isSmall: Boolean = written <= KeptBytes

  override def write(source: ByteBuffer): Int = {
    val all = source.remaining
    written += all
    while (source.hasRemaining) {
      if (blocks.isEmpty || !blocks.last.hasRemaining) blocks += emptyBlock()
      val piece = source.duplicate()
      piece.limit(piece.position() + math.min(blocks.last.remaining, piece.remaining))
      blocks.last.put(piece)
      source.position(piece.position())
    }
    all
  }

  /** Adds a block, whose bytes are no longer its writer's. */
  def add(block: ByteBuffer): Unit = {
    written += block.position()
    blocks += block
  }

  /** Returns a buffer for a block. */
  def emptyBlock(): ByteBuffer =
    if (unused.isEmpty) ByteBuffer.allocate(BlockBytes) else unused.remove(unused.size - 1)

  /** Whether all that is written was sent. */
  def isSent: Boolean = current == blocks.size - 1 && sent == blocks(current).position()

  /** Begins to send from the first byte on. */
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
    kept = false
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

  /** Bytes of a length. */
  val LengthBytes = 4
}
