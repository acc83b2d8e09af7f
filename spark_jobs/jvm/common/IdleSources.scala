package org.apache.spark.sql.statefleet

import org.apache.spark.sql.catalyst.plans.logical.{EventTimeWatermark, LogicalPlan}
import org.apache.spark.sql.catalyst.util.IntervalUtils
import org.apache.spark.sql.execution.SparkPlan
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.unsafe.types.UTF8String
import scala.collection.mutable

/**
 * The watermark of a query with several of them, in which one whose source has been silent holds the others back no
 * longer: as of Spark, the query's policy chooses, here among those that had rows within some time.
 */
private class IdleSources(chosenBy: WatermarkPolicy, plan: LogicalPlan, val idleMs: Long)
  extends SparkWatermarks(chosenBy, plan) {
  private val begunMs = System.currentTimeMillis()

  /** By the place of its node in the plan, the watermark of each source that had rows, and when it had the last ones. */
  private val newest = mutable.Map.empty[Int, Long]
  private val seenMs = mutable.Map.empty[Int, Long]

  override def updateWatermark(executed: SparkPlan): Unit = synchronized {
    super.updateWatermark(executed)
    val nowMs = System.currentTimeMillis()
    val sources = executed.collect { case source: WatermarkExec => source }
    for ((source, place) <- sources.zipWithIndex if source.eventTimeStats.value.count > 0) {
      val watermarkMs = source.eventTimeStats.value.max - source.delayMs
      newest(place) = newest.get(place).fold(watermarkMs)(math.max(_, watermarkMs))
      seenMs(place) = nowMs
    }
    val active = sources.indices.filter(seenMs.getOrElse(_, begunMs) > nowMs - idleMs)
    if (active.nonEmpty && active.length < sources.length) {
      val watermarkMs = chosenBy.chooseGlobalWatermark(active.map(newest.getOrElse(_, 0L)))
      if (watermarkMs > currentWatermark) {
        logInfo(s"The watermark moves to $watermarkMs ms without ${sources.length - active.length} silent sources")
        setWatermark(watermarkMs)
      }
    }
  }
}

object IdleSources {
  private val of = classOf[MicroBatchExecution].getMethod("watermarkTracker")
  private val set = classOf[MicroBatchExecution].getMethods.find(_.getName == "watermarkTracker_$eq").get

  /** Has a query's watermark leave out sources that are silent for so long; the longest of several operators counts. */
  def leaveOut(query: StreamExecution, idleMs: Long): Unit = query match {
    case batches: MicroBatchExecution =>
      of.invoke(batches) match {
        case sources: IdleSources if sources.idleMs >= idleMs =>
        case present: SparkTracker =>
          val policy = batches.sparkSession.sessionState.conf.getConf(SQLConf.STREAMING_MULTIPLE_WATERMARK_POLICY)
          val sources = new IdleSources(WatermarkPolicy(policy), batches.logicalPlan, idleMs)
          sources.setWatermark(present.currentWatermark)
          set.invoke(batches, sources)
        case _ =>
      }
    case _ =>
  }

  /** Returns a time as `withWatermark` takes it, in milliseconds. */
  def milliseconds(time: String): Long =
    EventTimeWatermark.getDelayMs(IntervalUtils.stringToInterval(UTF8String.fromString(time)))
}
