package org.apache.spark.sql.statefleet

import java.io.{ByteArrayOutputStream, InterruptedIOException, IOException}
import java.net.{ConnectException, StandardProtocolFamily, UnixDomainSocketAddress}
import java.nio.ByteBuffer
import java.nio.channels.{ClosedChannelException, ReadableByteChannel, SelectionKey, Selector, SocketChannel}
import java.nio.charset.StandardCharsets.UTF_8
import java.nio.file.Path
import java.security.{MessageDigest, SecureRandom}
import java.util.Base64
import javax.crypto.Mac
import javax.crypto.spec.SecretKeySpec
import org.apache.spark.TaskContext

/** The store actor's process was lost; what it committed is safe. */
class Lost(what: String, cause: Throwable = null)
  extends IOException(
    s"the store actor of this node $what; what it committed is safe, and the next attempt of this task goes on " +
      s"from there",
    cause)

/**
 * A connection to a store actor's process, which has proved that it can read the store actor's file
 * (store_actors/connections/hand_over.py is the other side).
 *
 * A task waits as long as its connection is there: one whose process hangs (stopped, deadlocked) is ended by the watch
 * of Spark's driver (spark_jobs/nodes/node_watch.py), and Ray starts it again.
 *
 * @param address The store actor's file.
 * @param context The task, which may be cancelled while it waits.
 * @param proofSeconds Seconds until the process has to have proved who it is.
 */
class Connection(address: Path, context: TaskContext, proofSeconds: Long = Connection.ProofSeconds)
  extends ReadableByteChannel {
  import Connection._

  private val channel = SocketChannel.open(StandardProtocolFamily.UNIX)
  channel.configureBlocking(false)
  private val selector = Selector.open()
  private val key = channel.register(selector, 0)
  private val received = ByteBuffer.allocate(Request.BlockBytes)
  private val proofUntil = System.nanoTime() + proofSeconds * 1000000000L

  /** Whether the process has proved who it is. Another user's, which is not watched, could hang for ever. */
  private var isProved = false
  private var readBytes = 0L

  received.limit(0)
  try connect()
  catch {
    case error: Throwable =>
      close()
      throw error
  }

  /** Bytes that were read. */
  def consumed: Long = readBytes

  private def connect(): Unit = {
    val (process, secret) = SocketFolder.factsOf(address).split(" ") match {
      case Array(process, format, secret, _*) if format == Format.toString => (process, secret)
      case _ =>
        throw new IllegalStateException(
          "the fleet was started by another release of Statefleet than this query, and the two cannot talk; nothing " +
            "of this batch was lost; use the release that started it, or stop its queries and run `statefleet stop` " +
            s"with that one, and start the queries with this [socket=`$address`]")
    }
    if (!channel.connect(UnixDomainSocketAddress.of(s"$address.$process"))) {
      throw new ConnectException("too many connections wait to be taken")
    }
    checkProof(Base64.getDecoder.decode(secret))
  }

  /** Raises an error unless the process proves that it has the secret. */
  private def checkProof(secret: Array[Byte]): Unit = {
    val challenge = new Array[Byte](ProofBytes)
    new SecureRandom().nextBytes(challenge)
    val sent = ByteBuffer.wrap(challenge)
    while (sent.hasRemaining) send(sent)
    val proof = ByteBuffer.allocate(ProofBytes)
    fill(proof)
    val code = Mac.getInstance("HmacSHA256")
    code.init(new SecretKeySpec(secret, "HmacSHA256"))
    if (!MessageDigest.isEqual(code.doFinal(challenge), proof.array)) {
      throw new IllegalStateException(
        "the process that answers in the place of this node's store actor is another one; nothing was sent to it, " +
          s"and nothing of this batch was lost; see who owns the socket, then restart the query [socket=`$address`]")
    }
    isProved = true
  }

  /** Has the other side see that nothing follows. */
  def endSending(): Unit = channel.shutdownOutput()

  /**
   * Sends what the other side takes at once; if that is nothing, waits until it takes something, or something comes.
   */
  def send(bytes: ByteBuffer): Unit = {
    // Java copies what it writes, and keeps the memory.
    bytes.limit(math.min(bytes.limit(), bytes.position() + Request.BlockBytes))
    if (bytes.hasRemaining) {
      val size =
        try channel.write(bytes)
        catch {
          case error: ClosedChannelException => throw error
          // The other side may have sent an error that says why.
          case error: IOException => if (hasArrived()) 0 else throw new Lost(InTheMiddle, error)
        }
      if (size == 0) await(SelectionKey.OP_WRITE | SelectionKey.OP_READ)
    }
  }

  /** Returns whether something came. */
  def hasArrived(): Boolean = {
    if (!received.hasRemaining) {
      received.clear()
      val size = receivedNow(received)
      received.flip()
      if (size < 0) throw new Lost(InTheMiddle)
    }
    received.hasRemaining
  }

  /** Reads some bytes. An answer has an end of its own, so the end of the connection is a loss. */
  override def read(target: ByteBuffer): Int = {
    val isLarge = target.remaining >= Request.BlockBytes
    val size =
      if (!received.hasRemaining && isLarge) {
        receivedOrLost(target)
      } else {
        if (!received.hasRemaining) {
          received.clear()
          try receivedOrLost(received)
          finally received.flip()
        }
        val piece = received.duplicate()
        piece.limit(piece.position() + math.min(target.remaining, piece.remaining))
        val size = piece.remaining
        target.put(piece)
        received.position(piece.position())
        size
      }
    readBytes += size
    size
  }

  private def receivedOrLost(target: ByteBuffer): Int = {
    val size = receive(target)
    if (size < 0) throw new Lost(InTheMiddle)
    size
  }

  /** Reads bytes until a buffer is full. */
  def fill(target: ByteBuffer): Unit = while (target.hasRemaining) read(target)

  /** Returns all that the other side sends before it closes the connection, as text. */
  def readText(): String = {
    val text = new ByteArrayOutputStream
    try {
      do {
        text.write(received.array, received.position(), received.remaining)
        received.clear()
        received.limit(math.max(0, receive(received)))
        received.position(0)
      } while (received.hasRemaining)
    } catch {
      case _: Lost => // how a connection ends that the other side did not read to its end
    }
    text.toString(UTF_8)
  }

  /** Returns whether the other side sends nothing more. */
  def hasEnded(): Boolean = {
    received.compact()
    val hasEnded = received.position() == 0 && receive(received) < 0
    received.flip()
    hasEnded
  }

  /** Receives something; returns its size, or -1 at the end of the connection. */
  private def receive(target: ByteBuffer): Int = {
    var size = receivedNow(target)
    while (size == 0) {
      await(SelectionKey.OP_READ)
      size = receivedNow(target)
    }
    size
  }

  /** Receives what is there; returns its size, or -1 at the end of the connection. */
  private def receivedNow(target: ByteBuffer): Int =
    try channel.read(target)
    catch {
      case error: ClosedChannelException => throw error
      case error: IOException => throw new Lost(InTheMiddle, error)
    }

  /** Waits until something can be sent or received; looks meanwhile whether the task was cancelled. */
  private def await(operations: Int): Unit = {
    key.interestOps(operations)
    do {
      if (!isProved && System.nanoTime() > proofUntil) throw new Lost(s"did not say who it is in $proofSeconds s")
    } while (!isReady())
  }

  /** Waits for a second at most; returns whether something happened. */
  private def isReady(): Boolean = {
    selector.selectedKeys.clear()
    val isReady = selector.select(LookMs) > 0
    context.killTaskIfInterrupted()
    if (Thread.currentThread.isInterrupted) throw new InterruptedIOException
    isReady
  }

  override def isOpen: Boolean = channel.isOpen

  override def close(): Unit = {
    channel.close()
    selector.close()
  }
}

object Connection {
  /** Raised with each change of what is sent (_FORMAT in store_actors/connections/hand_over.py). */
  val Format = 4

  /** A store actor that hangs is ended sooner. */
  val ProofSeconds = 40L
  private val ProofBytes = 32

  /** Milliseconds between checks whether the task was cancelled, if nothing interrupts it. */
  private val LookMs = 1000L
  private val InTheMiddle = "was lost in the middle of a batch"
}
