package org.apache.spark.sql.statefleet

import java.io.IOException
import org.apache.hadoop.conf.Configuration
import org.apache.hadoop.fs.Path
import org.apache.spark.internal.Logging
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan

/**
 * The log of offsets of a query that reads its sources several times, once for each set of distinct values. It has an
 * offset for each time, and Spark refuses a query that reads them another number of times than its log says.
 */
private class RepeatedSources(session: SparkSession, checkpoint: String)
  extends OffsetSeqLog(session, s"$checkpoint/offsets") with Logging {

  /** Has the newest offsets, from which the query goes on, be there for each time that a plan reads its sources. */
  def fit(plan: LogicalPlan): Unit = {
    val read = plan.collectLeaves().filter(_.isStreaming)
    val sources = read.distinct
    if (isRepeated(read, sources.length)) {
      for (newest <- getLatestBatchId().toSeq; batch <- Seq(newest, newest - 1)) get(batch) match {
        case Some(logged: OffsetSeq) if logged.offsets.length != read.length =>
          if (isRepeated(logged.offsets.map(_.map(_.json)), sources.length)) {
            val once = logged.offsets.take(sources.length)
            logInfo(s"The offsets of batch $batch are written for ${read.length} sources, of ${logged.offsets.length}")
            replace(batch, logged.copy(offsets = Seq.fill(read.length / sources.length)(once).flatten))
          }
        case _ =>
      }
    }
  }

  private def isRepeated(items: Seq[Any], length: Int): Boolean =
    length > 0 && items.length % length == 0 && items.grouped(length).forall(_ == items.take(length))

  /** At once: a reader has the former offsets, or these. */
  private def replace(batch: Long, offsets: OffsetSeq): Unit = {
    val out = fileManager.createAtomic(batchIdToPath(batch), overwriteIfPossible = true)
    try {
      serialize(offsets, out)
      out.close()
    } catch {
      case error: Throwable =>
        out.cancel()
        throw error
    }
  }
}

object RepeatedSources {
  /** Whether a checkpoint has offsets. Spark's object of the log makes the folder for them, which some sinks refuse. */
  def mayDiffer(checkpoint: String, conf: Configuration): Boolean =
    try {
      val offsets = new Path(checkpoint, "offsets")
      offsets.getFileSystem(conf).exists(offsets)
    } catch { case _: IOException => false }
}
