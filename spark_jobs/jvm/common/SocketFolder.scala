package org.apache.spark.sql.statefleet

import java.io.{File, InterruptedIOException, IOException}
import java.nio.channels.{Channels, ClosedByInterruptException}
import java.nio.charset.StandardCharsets.{US_ASCII, UTF_8}
import java.nio.file.{Files, FileSystems, LinkOption, Path, Paths, SecureDirectoryStream, StandardOpenOption}
import java.nio.file.attribute._
import java.util.Collections
import java.util.zip.CRC32
import org.apache.spark.TaskContext
import scala.annotation.tailrec
import scala.util.matching.Regex

/**
 * The folder in which tasks find the store actors of their node, which only this user can enter. Others can put a
 * folder of their own in its place, so a task looks at it as it is open.
 */
object SocketFolder {
  /** How long a task waits for a store actor that is started again. */
  private val DeadlineSeconds = 120L
  private val PauseMs = 100L

  /** Pauses after which a store actor that is not there is no longer just starting. */
  private val Late = 50

  /** The real user in /proc/self/status, and the effective one. */
  private val Users: Regex = raw"(?m)^Uid:\s+\d+\s+(\d+)".r

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
    val checksum = new CRC32
    checksum.update(host.getBytes(UTF_8))
    val first = f"$sockets${checksum.getValue}%08x"
    val holder = s"$first-$actor"
    val until = deadline()

    @tailrec def tried(tries: Int): Connection = {
      // Every store actor of the node can take the rows. A task that runs elsewhere than planned may find fewer of them.
      val address = if (actor > 0 && tries % 2 == 0 && new File(holder).exists) holder else first
      connectedTo(address, tries == Late, until, context) match {
        case Some(connection) => connection
        case None =>
          pause()
          context.killTaskIfInterrupted()
          tried(tries + 1)
      }
    }
    tried(0)
  }

  private def connectedTo(address: String, isLate: Boolean, until: Long, context: TaskContext): Option[Connection] =
    try Some(new Connection(Paths.get(address), context))
    catch {
      case error: ClosedByInterruptException => throw error
      case error: IOException =>
        if (isLate) checkWritable(new File(address).getParentFile)
        if (System.nanoTime() > until) {
          throw new IOException(
            s"no store actor of this node came back in $DeadlineSeconds s; committed versions are safe in the object " +
              "store and nothing of this batch was lost; see `ray list actors` and the actor's log, then restart the " +
              s"query [socket=`$address`]",
            error)
        }
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
      if (attributes.owner != thisUser || !mode.endsWith("------")) {
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

  /** Returns the user of this process as the kernel has it, whether or not the user has a name. */
  private def thisUser: UserPrincipal = {
    val id = Users.findFirstMatchIn(Files.readString(Paths.get("/proc/self/status"))).get.group(1)
    FileSystems.getDefault.getUserPrincipalLookupService.lookupPrincipalByName(id)
  }

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
