package org.apache.spark.sql.statefleet

import java.util.concurrent.TimeUnit.MILLISECONDS
import org.apache.spark.{SparkContext, SparkEnv}
import org.apache.spark.rpc.{RpcCallContext, RpcEndpointRef, RpcEnv, ThreadSafeRpcEndpoint}
import org.apache.spark.sql.execution.streaming.continuous._
import org.apache.spark.util.{RpcUtils, ThreadUtils}
import scala.collection.mutable.ArrayBuffer
import scala.util.{Failure, Success}

/**
 * Tells the tasks of a run at once that an epoch begins. Spark's readers ask at intervals which epoch it is: often, they take
 * a tenth of a core for two tasks; seldom, shards hold back what tasks that know it have sent, until the last one does.
 */
class EpochBell(first: Long) {
  private var epoch = first
  private var opened: Option[HeldAnswers] = None

  /** Has tasks of jobs that this thread starts find the bell, where they would find Spark's coordinator of epochs. */
  def open(context: SparkContext, tasks: Int): Unit = synchronized {
    val id = context.getLocalProperty(ContinuousExecution.EPOCH_COORDINATOR_ID_KEY)
    val env = SparkEnv.get.rpcEnv
    // Questions that are not answered in time fail, with their tasks.
    val longestMs = RpcUtils.askRpcTimeout(context.getConf).duration.toMillis / 4
    val answers = new HeldAnswers(env, EpochCoordinatorRef.get(id, SparkEnv.get), tasks, epoch, longestMs)
    env.setupEndpoint(s"EpochCoordinator-$id${EpochBell.Suffix}", answers)
    opened = Some(answers)
    context.setLocalProperty(ContinuousExecution.EPOCH_COORDINATOR_ID_KEY, id + EpochBell.Suffix)
  }

  /** Tells all tasks that an epoch begins. */
  def ring(begun: Long): Unit = synchronized {
    epoch = begun
    opened.foreach(_.self.send(EpochBegins(begun)))
  }

  def close(): Unit = synchronized {
    opened.foreach(_.stop())
    opened = None
  }
}

object EpochBell {
  private final val Suffix = "-bell"

  /** Returns Spark's own coordinator, which answers at once, of what tasks find. */
  def coordinator(found: String): RpcEndpointRef = EpochCoordinatorRef.get(found.stripSuffix(Suffix), SparkEnv.get)
}

private case class EpochBegins(epoch: Long)
private case object AnswerNow

/** Holds the answers to the tasks' questions which epoch it is until another one begins; Spark's coordinator has all else. */
private class HeldAnswers(
    override val rpcEnv: RpcEnv,
    coordinator: RpcEndpointRef,
    tasks: Int,
    private var epoch: Long,
    longestMs: Long)
  extends ThreadSafeRpcEndpoint {
  private val clock = ThreadUtils.newDaemonSingleThreadScheduledExecutor("statefleet-epoch-bell")
  private val asking = ArrayBuffer.empty[RpcCallContext]

  /** Whether a task may not know the epoch, as not all of them were asking when it began. Which one, a question does not say. */
  private var isNews = true

  override def onStart(): Unit =
    clock.scheduleWithFixedDelay(() => self.send(AnswerNow), longestMs, longestMs, MILLISECONDS)

  override def receive: PartialFunction[Any, Unit] = {
    case EpochBegins(begun) =>
      epoch = begun
      isNews = asking.size < tasks
      answer()
    case AnswerNow => answer()
    case other => coordinator.send(other)
  }

  override def receiveAndReply(context: RpcCallContext): PartialFunction[Any, Unit] = {
    case GetCurrentEpoch =>
      asking += context
      if (isNews && asking.size >= tasks) {
        isNews = false
        answer()
      }
    case other =>
      coordinator.ask[Any](other).onComplete {
        case Success(answer) => context.reply(answer)
        case Failure(error) => context.sendFailure(error)
      }(ThreadUtils.sameThread)
  }

  private def answer(): Unit = {
    asking.foreach(_.reply(epoch))
    asking.clear()
  }

  override def onStop(): Unit = {
    clock.shutdownNow()
    answer()
  }
}
