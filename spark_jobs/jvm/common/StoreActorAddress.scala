package org.apache.spark.sql.statefleet

import java.io.File
import org.apache.spark.{SparkEnv, TaskContext}
import org.apache.spark.rpc.{IsolatedRpcEndpoint, RpcCallContext, RpcEnv}
import org.apache.spark.util.RpcUtils

/**
 * How a task finds a store actor.
 *
 * @param sockets How the paths of the fleet's sockets begin (sockets_of in store_actors/connections/hand_over.py).
 * @param at By its socket on this machine, unless it has a direct address.
 */
case class StoreActorAddress(sockets: String, at: Place) {
  def connected(context: TaskContext): Connection = at.direct match {
    case Some(address) => Connection.direct(address, context)
    case None => SocketFolder.connected(sockets, at.host, at.actor, context)
  }

  /** Returns it as a Python worker of Spark's gets it (FunctionConnection in store_actors/connections/function_stream.py). */
  def fields: Map[String, Any] =
    Map("sockets" -> sockets, "host" -> at.host, "actor" -> at.actor, "direct" -> at.direct)
}

object StoreActorAddress {
  /**
   * Returns how a task finds the store actor of its own node, which takes rows of all shards; or else the one that has
   * its shard, by a socket of its machine, or directly.
   *
   * @param place Where the shard was when the batch began.
   * @param host The executor's.
   * @param uri The fleet's.
   * @param isLost Whether the store actor may have been lost since.
   */
  def nearest(
      sockets: String,
      place: Option[Place],
      host: String,
      uri: String,
      isLost: Boolean): StoreActorAddress = place match {
    case _ if isThere(sockets, host) => StoreActorAddress(sockets, Place(host, place.fold(0)(_.actor)))
    case Some(at) =>
      val known = holder(sockets, at, host)
      if (isLost && known.at.direct.nonEmpty) holder(sockets, Places.ofDriver(uri, at), host) else known
    case None => holder(sockets, Places.ofDriver(uri, Place(host, 0)), host)
  }

  /** Returns how a task finds the store actor that has a shard; raises an error if it cannot. */
  def holder(sockets: String, place: Place, host: String): StoreActorAddress = {
    val isNear = place.host == host || !isThere(sockets, host) && isThere(sockets, place.host)
    if (!isNear && place.direct.isEmpty) {
      throw new IllegalStateException(
        s"this task is on another machine ($host) than a store actor (${place.host}) which only takes connections of " +
          "its own machine, as Ray has TLS, or as nothing can be listened to; nothing of the task's shards counts")
    }
    StoreActorAddress(sockets, if (isNear) place.copy(direct = None) else place)
  }

  private def isThere(sockets: String, host: String): Boolean = new File(SocketFolder.fileOf(sockets, host)).exists
}

/**
 * Tells tasks on other machines where a store actor is by now: one that was started again has another port and key.
 * Messages are JSON: executors may not have the classes of this jar when they read one.
 */
private[spark] class Places(override val rpcEnv: RpcEnv) extends IsolatedRpcEndpoint {
  override def threadCount(): Int = 1

  override def receiveAndReply(context: RpcCallContext): PartialFunction[Any, Unit] = { case message: String =>
    try context.reply(Driver.callback(message))
    catch { case error: Exception => context.sendFailure(error) }
  }
}

object Places {
  private final val Name = "statefleet-places"
  private var isServed: RpcEnv = _

  /** Has the driver answer tasks. */
  def serve(): Unit = synchronized {
    val rpcEnv = SparkEnv.get.rpcEnv
    if (isServed ne rpcEnv) {
      rpcEnv.setupEndpoint(Name, new Places(rpcEnv))
      isServed = rpcEnv
    }
  }

  /** Returns where a store actor, or another one of the fleet, is now, as the driver knows. */
  def ofDriver(uri: String, at: Place): Place = {
    val asked = Driver.json.writeValueAsString(Map("asked" -> "again", "uri" -> uri, "place" -> at.copy(direct = None)))
    val driver = RpcUtils.makeDriverRef(Name, SparkEnv.get.conf, SparkEnv.get.rpcEnv)
    Driver.json.readValue(driver.askSync[String](asked), classOf[Place])
  }
}
