package org.apache.spark.sql.statefleet

import java.io.{DataInputStream, DataOutputStream, IOException}
import java.net.InetSocketAddress
import java.nio.ByteBuffer
import java.nio.channels.{ByteChannel, ClosedByInterruptException, SocketChannel}
import java.nio.charset.StandardCharsets.US_ASCII
import java.security.{MessageDigest, SecureRandom}
import java.util.{Arrays, Base64}
import java.util.concurrent.ThreadLocalRandom
import org.apache.spark.TaskContext

/**
 * Where a store actor is found by tasks of other nodes.
 *
 * @param key The secret, in Base64, that both sides prove to have.
 */
case class DirectAddress(host: String, port: Int, key: String) {
  override def toString: String = s"$host:$port"
}

/**
 * A connection to a store actor of another node, after both sides have proved that they have its key
 * (store_actors/connections/direct_calls.py is the other side). Each message has a code that only they can make. It is not
 * encrypted.
 *
 * @param socket Does not block.
 */
class SealedChannel private (val socket: SocketChannel, sends: MessageCodes, receives: MessageCodes) extends ByteChannel {
  import SealedChannel._

  private val out = ByteBuffer.allocate(HeadBytes + MostBytes)
  private var in = ByteBuffer.allocate(HeadBytes + MostBytes)

  /** What came of a message, and is not used yet. */
  private var content = ByteBuffer.allocate(0)

  out.limit(0)

  def isFlushed: Boolean = !out.hasRemaining

  def flush(): Unit = if (out.hasRemaining) socket.write(out)

  /** Takes bytes for a message if the one before is sent; returns how many. */
  override def write(source: ByteBuffer): Int = {
    flush()
    val size = if (isFlushed) math.min(source.remaining, MostBytes) else 0
    if (size > 0) {
      out.clear()
      out.position(HeadBytes)
      out.put(source.duplicate().limit(source.position() + size))
      source.position(source.position() + size)
      out.flip()
      out.putInt(0, CodeBytes + size).put(LengthBytes, sends.next(out.array, HeadBytes, size))
      socket.write(out)
    }
    size
  }

  override def read(target: ByteBuffer): Int =
    if (content.hasRemaining || receive()) {
      val size = math.min(content.remaining, target.remaining)
      target.put(content.duplicate().limit(content.position() + size))
      content.position(content.position() + size)
      size
    } else if (hasEnded) {
      -1
    } else {
      0
    }

  private var hasEnded = false

  /** Receives what is there of the next message; returns whether that is all of it. */
  private def receive(): Boolean = {
    if (!content.hasRemaining && in.position() == 0) in.limit(HeadBytes)
    hasEnded = socket.read(in) < 0
    if (!in.hasRemaining && in.limit() == HeadBytes) {
      val size = in.getInt(0) - CodeBytes
      if (size <= 0) throw new IOException(s"a store actor sent a message of $size bytes")
      if (HeadBytes + size > in.capacity) {
        in = ByteBuffer.wrap(Arrays.copyOf(in.array, HeadBytes + size)).position(HeadBytes)
      }
      in.limit(HeadBytes + size)
      hasEnded = socket.read(in) < 0
    }
    val isWhole = !in.hasRemaining
    if (isWhole) {
      val code = Arrays.copyOfRange(in.array, LengthBytes, HeadBytes)
      if (!MessageDigest.isEqual(code, receives.next(in.array, HeadBytes, in.limit() - HeadBytes))) {
        throw new IOException("a message is not the next one that the store actor sent")
      }
      content = ByteBuffer.wrap(in.array, HeadBytes, in.limit() - HeadBytes)
      in.clear()
      // The content is used before more is received.
    }
    isWhole
  }

  override def isOpen: Boolean = socket.isOpen

  override def close(): Unit = socket.close()
}

/** The codes of a connection's messages in one direction. */
private class MessageCodes(key: Array[Byte]) {
  private val code = Connection.hmac(key)
  private val number = ByteBuffer.allocate(8)
  private var count = 0L

  def next(bytes: Array[Byte], begin: Int, size: Int): Array[Byte] = {
    code.update(number.putLong(0, count).array)
    code.update(bytes, begin, size)
    count += 1
    Arrays.copyOf(code.doFinal(), SealedChannel.CodeBytes)
  }
}

object SealedChannel {
  private final val LengthBytes = 4
  private[statefleet] final val CodeBytes = 16
  private final val HeadBytes = LengthBytes + CodeBytes

  /** Bytes of a message of a task, at most. */
  private final val MostBytes = 1 << 16
  private final val NonceBytes = 32
  private final val ProofBytes = 32

  /** Milliseconds for each step of the proofs. */
  private final val PatienceMs = 40000

  /** Seconds for which it is tried again, and milliseconds between tries at most: all tasks of a query come at once. */
  private final val TriesSeconds = 10L
  private final val PauseMs = 500

  /** Connects to a store actor of another node. */
  def connected(address: DirectAddress, context: TaskContext): SealedChannel = {
    val until = System.nanoTime() + TriesSeconds * 1000000000L
    Iterator
      .continually {
        try Some(tried(address))
        catch {
          case error: ClosedByInterruptException => throw error
          case error: IOException =>
            if (System.nanoTime() > until) throw new Lost("cannot be reached from here", error, s"at $address")
            Thread.sleep(ThreadLocalRandom.current.nextInt(PauseMs))
            context.killTaskIfInterrupted()
            None
        }
      }
      .flatten
      .next()
  }

  private def tried(address: DirectAddress): SealedChannel = {
    val socket = SocketChannel.open()
    try {
      socket.socket.connect(new InetSocketAddress(address.host, address.port), PatienceMs)
      socket.socket.setTcpNoDelay(true)
      socket.socket.setSoTimeout(PatienceMs)
      val proved = new Proof(socket, address).proved()
      socket.configureBlocking(false)
      proved
    } catch {
      case error: Throwable =>
        socket.close()
        throw error
    }
  }

  /** The first messages of a connection. */
  private class Proof(socket: SocketChannel, address: DirectAddress) {
    private val (in, out) =
      (new DataInputStream(socket.socket.getInputStream), new DataOutputStream(socket.socket.getOutputStream))

    private def receive(): Array[Byte] = {
      val size = in.readInt()
      if (size < 0 || size > ProofBytes + CodeBytes) throw new IOException("it is no store actor")
      val bytes = new Array[Byte](size)
      in.readFully(bytes)
      bytes
    }

    private def send(bytes: Array[Byte]): Unit =
      out.write(ByteBuffer.allocate(LengthBytes + bytes.length).putInt(bytes.length).put(bytes).array)

    def proved(): SealedChannel = {
      val key = Base64.getDecoder.decode(address.key)
      val nonce = new Array[Byte](NonceBytes)
      new SecureRandom().nextBytes(nonce)
      val numbers = receive() ++ nonce
      def derived(purpose: String): Array[Byte] = Connection.hmac(key).doFinal(purpose.getBytes(US_ASCII) ++ numbers)
      send(nonce ++ derived("caller"))
      if (!MessageDigest.isEqual(receive(), derived("store actor"))) {
        throw new IllegalStateException(
          "the process that answers in the place of a store actor is another one; nothing was sent to it; see who " +
            s"listens there, then restart the query [address=`$address`]")
      }
      val (sends, receives) =
        (new MessageCodes(derived("codes of the caller")), new MessageCodes(derived("codes of the store actor")))
      val task = "task".getBytes(US_ASCII)
      send(sends.next(task, 0, task.length) ++ task)
      val expected = Connection.Format.getBytes(US_ASCII)
      if (!Arrays.equals(receive(), receives.next(expected, 0, expected.length) ++ expected)) throw Connection.anotherRelease(address.toString)
      new SealedChannel(socket, sends, receives)
    }
  }
}
