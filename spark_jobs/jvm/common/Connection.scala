package org.apache.spark.sql.statefleet

import java.io.{File, InterruptedIOException, IOException}
import java.net.{ConnectException, StandardProtocolFamily, UnixDomainSocketAddress}
import java.nio.ByteBuffer
import java.nio.channels._
import java.nio.charset.StandardCharsets.{US_ASCII, UTF_8}
import java.nio.file.{Files, LinkOption, Path, Paths, SecureDirectoryStream, StandardOpenOption}
import java.nio.file.attribute._
import java.security.{MessageDigest, SecureRandom}
import java.util.{Base64, Collections}
import java.util.zip.CRC32
import javax.crypto.Mac
import javax.crypto.spec.SecretKeySpec
import org.apache.spark.TaskContext
import scala.annotation.tailrec

/**
 * The store actor's process was lost; what it committed is safe. As a task's failure it goes to the driver as another
 * error: there, Spark finds no class of a jar that a session has loaded, and would only say "unknown reason".
 */
class Lost(what: String, cause: Throwable = null, who: String = "of this node")
  extends IOException(
    s"the store actor $who $what; what it committed is safe, and the next attempt of this task goes on " +
      s"from there",
    cause) {
  private def writeReplace(): AnyRef = {
    val plain = new IOException(getMessage, getCause)
    plain.setStackTrace(getStackTrace)
    plain
  }
}

/**
 * A connection to a store actor's process (store_actors/connections/hand_over.py is the other side).
 *
 * A task waits as long as its connection is there: one whose process hangs (stopped, deadlocked) is ended by the watch
 * of Spark's driver (spark_jobs/nodes/node_watch.py), and Ray starts it again.
 *
 * @param socket Does not block.
 * @param channel What is sent to and received from, by way of the socket.
 * @param context The task, which may be cancelled while it waits.
 * @param who The store actor, in errors.
 */
class Connection(val socket: SocketChannel, val channel: ByteChannel, context: TaskContext, who: String = "of this node")
  extends ReadableByteChannel {
  private final val ProofBytes = 32

  /** Milliseconds between checks whether the task was cancelled, if nothing interrupts it. */
  private final val LookMs = 1000L
  private final val InTheMiddle = "was lost in the middle of a batch"

  private val selector = Selector.open()
  private val key = socket.register(selector, 0)
  private val received = ByteBuffer.allocate(Request.BlockBytes)

  /** Until when the process has to have proved who it is. Another user's, which is not watched, could hang for ever. */
  private var proofUntil = Long.MaxValue
  var consumed = 0L

  received.limit(0)

  /** Has the process of a store actor's file prove that it can read the file. */
  private[statefleet] def checkProof(address: Path, secret: Array[Byte], seconds: Long): Unit = {
    proofUntil = System.nanoTime() + seconds * 1000000000L
    val challenge = new Array[Byte](ProofBytes)
    new SecureRandom().nextBytes(challenge)
    val sent = ByteBuffer.wrap(challenge)
    while (sent.hasRemaining) send(sent)
    val proof = next(ProofBytes)
    if (!MessageDigest.isEqual(Connection.hmac(secret).doFinal(challenge), proof.array)) {
      throw new IllegalStateException(
        "the process that answers in the place of this node's store actor is another one; nothing was sent to it, " +
          s"and nothing of this batch was lost; see who owns the socket, then restart the query [socket=`$address`]")
    }
    proofUntil = Long.MaxValue
  }

  /** Has the other side see that nothing follows. */
  def endSending(): Unit = {
    sealing.foreach(_.flush())
    while (!sealing.forall(_.isFlushed)) {
      await(SelectionKey.OP_WRITE)
      sealing.foreach(_.flush())
    }
    socket.shutdownOutput()
  }

  /** Where a message may wait to be sent on. */
  private def sealing: Option[SealedChannel] = Option(channel).collect { case sealing: SealedChannel => sealing }

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
          case error: IOException => if (hasArrived()) 0 else throw new Lost(InTheMiddle, error, who)
        }
      if (size == 0) await(SelectionKey.OP_WRITE | SelectionKey.OP_READ)
    }
  }

  def hasArrived(): Boolean = {
    if (!received.hasRemaining) refill(waits = false)
    received.hasRemaining
  }

  /** Reads some bytes. An answer has an end of its own, so the end of the connection is a loss. */
  override def read(target: ByteBuffer): Int = {
    val size =
      if (!received.hasRemaining && target.remaining >= Request.BlockBytes) {
        orLost(receive(target, waits = true))
      } else {
        if (!received.hasRemaining) refill(waits = true)
        val some = math.min(received.remaining, target.remaining)
        target.put(received.array, received.position(), some)
        received.position(received.position() + some)
        some
      }
    consumed += size
    size
  }

  private def refill(waits: Boolean): Unit = {
    received.clear()
    try orLost(receive(received, waits))
    finally received.flip()
  }

  private def orLost(size: Int): Int = if (size < 0) throw new Lost(InTheMiddle, who = who) else size

  def fill(target: ByteBuffer): Unit = while (target.hasRemaining) read(target)

  /** Returns the next bytes. */
  def next(size: Int): ByteBuffer = {
    val bytes = ByteBuffer.allocate(size)
    fill(bytes)
    bytes.flip()
  }

  def hasEnded(): Boolean = {
    received.compact()
    val hasEnded = received.position() == 0 && receive(received, waits = true) < 0
    received.flip()
    hasEnded
  }

  /** Receives what is there, or waits for something; returns its size, or -1 at the end of the connection. */
  @tailrec private def receive(target: ByteBuffer, waits: Boolean): Int = {
    val size =
      try {
        sealing.foreach(_.flush())
        channel.read(target)
      } catch {
        case error: ClosedChannelException => throw error
        case error: IOException => throw new Lost(InTheMiddle, error, who)
      }
    if (size == 0 && waits) {
      await(SelectionKey.OP_READ | (if (sealing.forall(_.isFlushed)) 0 else SelectionKey.OP_WRITE))
      receive(target, waits)
    } else {
      size
    }
  }

  /** Waits until something can be sent or received; looks each second whether the task was cancelled. */
  private def await(operations: Int): Unit = {
    key.interestOps(operations)
    var isReady = false
    while (!isReady) {
      if (System.nanoTime() > proofUntil) throw new Lost("did not say in time who it is")
      selector.selectedKeys.clear()
      isReady = selector.select(LookMs) > 0
      context.killTaskIfInterrupted()
      if (Thread.currentThread.isInterrupted) throw new InterruptedIOException
    }
  }

  /** Lets go of socket and channel, for another use of them; nothing has come yet. */
  def release(): Unit = {
    key.cancel()
    selector.close()
  }

  override def isOpen: Boolean = channel.isOpen

  override def close(): Unit = {
    channel.close()
    selector.close()
  }
}

object Connection {
  /**
   * Connects to a store actor of this machine, which proves that it can read its file.
   *
   * @param address The file.
   * @param proofSeconds Seconds until it has to have done so; one that hangs is ended sooner.
   */
  def near(address: Path, context: TaskContext, proofSeconds: Long = 40L): Connection = {
    val (process, secret) = SocketFolder.factsOf(address).split(" ") match {
      case Array(process, format, secret, _*) if format == Format => (process, secret)
      case _ => throw anotherRelease(address.toString)
    }
    val socket = SocketChannel.open(StandardProtocolFamily.UNIX)
    socket.configureBlocking(false)
    val connection = new Connection(socket, socket, context)
    try {
      if (!socket.connect(UnixDomainSocketAddress.of(s"$address.$process"))) {
        throw new ConnectException("too many connections wait to be taken")
      }
      connection.checkProof(address, Base64.getDecoder.decode(secret), proofSeconds)
      connection
    } catch {
      case error: Throwable =>
        connection.close()
        throw error
    }
  }

  /** Connects to a store actor of another node. */
  def direct(address: DirectAddress, context: TaskContext): Connection = {
    val channel = SealedChannel.connected(address, context)
    new Connection(channel.socket, channel, context, s"at $address")
  }

  /** Raised with each change of what is sent (FORMAT in store_actors/connections/hand_over.py). */
  final val Format = "9"

  def hmac(key: Array[Byte]): Mac = {
    val code = Mac.getInstance("HmacSHA256")
    code.init(new SecretKeySpec(key, "HmacSHA256"))
    code
  }

  def anotherRelease(address: String) = new IllegalStateException(
    "the fleet was started by another release of Statefleet than this query, and the two cannot talk; nothing " +
      "of this batch was lost; use the release that started it, or stop its queries and run `statefleet stop` " +
      s"with that one, and start the queries with this [socket=`$address`]")
}

/**
 * The folder in which tasks find the store actors of their node, which only this user can enter. Others can put a
 * folder of their own in its place, so a task looks at it as it is open.
 */
object SocketFolder {
  private val DeadlineSeconds = 120L
  private val PauseMs = 100L

  /** Pauses after which a store actor that is not there is no longer just starting. */
  private val Late = 50

  /** This process as the kernel has it: its owner is the effective user, whether or not the user has a name. */
  private val Process = Paths.get("/proc/self")

  /** Returns the time, of System.nanoTime, until which a store actor is waited for. */
  def deadline(): Long = System.nanoTime() + DeadlineSeconds * 1000000000L

  def pause(): Unit =
    try Thread.sleep(PauseMs)
    catch { case _: InterruptedException => throw new InterruptedIOException }

  /**
   * Connects to a store actor of this node, which may still be on its way back.
   *
   * @param sockets How the paths of the fleet's sockets begin (sockets_of in store_actors/connections/hand_over.py).
   * @param actor The number of the store actor on its node.
   * @param context The task, which may be cancelled while it waits.
   */
  def connected(sockets: String, host: String, actor: Int, context: TaskContext): Connection = {
    val first = fileOf(sockets, host)
    val holder = s"$first-$actor"
    val until = deadline()
    Iterator.from(0).flatMap { tries =>
      // Every store actor of the node can take the rows. A task that runs elsewhere than planned may find fewer of them.
      val address = if (actor > 0 && tries % 2 == 0 && new File(holder).exists) holder else first
      connectedTo(address, tries, until, context)
    }.next()
  }

  /** Returns the file of a node's first store actor. */
  def fileOf(sockets: String, host: String): String = {
    val checksum = new CRC32
    checksum.update(host.getBytes(UTF_8))
    f"$sockets${checksum.getValue}%08x"
  }

  private def connectedTo(address: String, tries: Int, until: Long, context: TaskContext): Option[Connection] =
    try Some(Connection.near(Paths.get(address), context))
    catch {
      case error: ClosedByInterruptException => throw error
      case error: IOException =>
        if (tries == Late) checkWritable(new File(address).getParentFile)
        if (System.nanoTime() > until) {
          throw new IOException(
            s"no store actor of this node came back in $DeadlineSeconds s; committed versions are safe in the object " +
              "store and nothing of this batch was lost; see `ray list actors` and the actor's log, then restart the " +
              s"query [socket=`$address`]",
            error)
        }
        pause()
        context.killTaskIfInterrupted()
        None
    }

  /** Returns what a store actor's file says. The file is opened in the folder that was looked at. */
  def factsOf(address: Path): String = {
    // Opening anything but a folder may block for ever.
    if (!Files.readAttributes(address.getParent, classOf[BasicFileAttributes], LinkOption.NOFOLLOW_LINKS).isDirectory) {
      throw notPrivate(address.getParent, "it is no folder")
    }
    val folder = Files.newDirectoryStream(address.getParent).asInstanceOf[SecureDirectoryStream[Path]]
    try {
      val attributes = folder.getFileAttributeView(classOf[PosixFileAttributeView]).readAttributes()
      val mode = PosixFilePermissions.toString(attributes.permissions)
      if (attributes.owner != Files.getOwner(Process) || !mode.endsWith("------")) {
        throw notPrivate(address.getParent, s"owner ${attributes.owner}, mode $mode")
      }
      val file = folder.newByteChannel(address.getFileName, Collections.singleton(StandardOpenOption.READ))
      try new String(Channels.newInputStream(file).readAllBytes(), US_ASCII)
      finally file.close()
    } finally folder.close()
  }

  private def notPrivate(folder: Path, why: String) = new IllegalStateException(
    "the folder in which Spark's tasks find the store actor of their node is not this user's alone; nothing was " +
      "sent, and nothing of this batch was lost; remove it, upon which the store actor makes one within seconds, " +
      s"then restart the query [folder=`$folder`: $why]")

  /**
   * Raises an error if nothing can be written where the store actor, a process of the same user on this node, makes its
   * socket.
   */
  private def checkWritable(sockets: File): Unit = {
    val folder = if (sockets.isDirectory) sockets else sockets.getParentFile
    try {
      val written = File.createTempFile("statefleet", null, folder)
      try Files.write(written.toPath, new Array[Byte](Request.BlockBytes))
      finally written.delete()
    } catch {
      case error: IOException =>
        throw new IOException(
          s"nothing can be written where Spark's tasks find the store actor of their node: ${error.getMessage}; " +
            s"nothing of this batch was lost; make room there, then restart the query [folder=`$folder`]",
          error)
    }
  }
}
