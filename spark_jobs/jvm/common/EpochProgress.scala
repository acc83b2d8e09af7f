package org.apache.spark.sql.statefleet

import java.time.{Instant, ZoneOffset}
import java.time.format.DateTimeFormatter
import java.util.{Collections, Map => JavaMap}
import org.apache.spark.sql.Row
import org.apache.spark.sql.execution.streaming.continuous.ContinuousExecution
import org.apache.spark.sql.streaming.{SinkProgress, SourceProgress, StreamingQueryProgress}
import scala.collection.concurrent.TrieMap
import scala.jdk.CollectionConverters._

/**
 * What Spark reports of the epochs of a run: in `lastProgress`, to listeners and on its web pages, as of micro-batches.
 * Spark itself reports nothing of a continuous query.
 */
private class EpochProgress(query: ContinuousExecution, facts: Facts) {
  private val epochs = TrieMap.empty[Long, EpochProgress.Epoch]

  private def note(epoch: Long)(change: EpochProgress.Epoch => EpochProgress.Epoch): Unit =
    epochs.get(epoch).foreach(of => epochs.put(epoch, change(of)))

  def begin(epoch: Long): Unit = epochs.put(epoch, EpochProgress.Epoch(System.currentTimeMillis()))

  /** Notes that all tasks have read an epoch. */
  def end(epoch: Long, start: Option[String], end: SourceEnd): Unit =
    note(epoch)(_.copy(readMs = System.currentTimeMillis(), start = start, end = Some(end)))

  /** Notes that so many shards have committed an epoch. */
  def settle(epoch: Long, settled: Settled, shards: Int): Unit =
    note(epoch)(_.copy(settled = settled, shards = shards))

  /** Has Spark report an epoch, which its commit log has. */
  def report(epoch: Long): Unit = for (of <- epochs.remove(epoch); end <- of.end) {
    val nowMs = System.currentTimeMillis()
    val rows = of.settled.rowsRead
    val perSecond = 1000.0 * rows / math.max(1L, nowMs - of.begunMs)
    val source = new SourceProgress(
      description = end.source,
      startOffset = of.start.orNull,
      endOffset = end.offset.json,
      latestOffset = end.newest.fold[String](null)(_.json),
      numInputRows = rows,
      inputRowsPerSecond = perSecond,
      processedRowsPerSecond = perSecond,
      metrics = EpochProgress.behind(end.behind))
    val durations = Map(
      "addBatch" -> (of.readMs - of.begunMs),
      "commitBatch" -> (nowMs - of.readMs),
      "triggerExecution" -> (nowMs - of.begunMs))
    val progress = new StreamingQueryProgress(
      id = query.id,
      runId = query.runId,
      name = query.name,
      timestamp = EpochProgress.text(of.begunMs),
      batchId = epoch,
      batchDuration = nowMs - of.begunMs,
      durationMs = durations.map { case (what, ms) => what -> Long.box(ms) }.asJava,
      eventTime =
        if (facts.hasWatermark) Map("watermark" -> EpochProgress.text(of.settled.watermarkMs)).asJava
        else Collections.emptyMap[String, String],
      stateOperators = Array(of.settled.progress(facts.name, of.shards)),
      sources = Array(source),
      sink = SinkProgress(query.sink.toString, None),
      observedMetrics = Collections.emptyMap[String, Row])
    reportProgress(query, progress)
  }
}

private object EpochProgress {
  private final val Format = DateTimeFormatter.ofPattern("yyyy-MM-dd'T'HH:mm:ss.SSSX").withZone(ZoneOffset.UTC)

  private case class Epoch(
      begunMs: Long,
      readMs: Long = 0L,
      start: Option[String] = None,
      end: Option[SourceEnd] = None,
      settled: Settled = Settled.Nothing,
      shards: Int = 0)

  /** Returns a time as Spark writes it. */
  private def text(ms: Long): String = Format.format(Instant.ofEpochMilli(ms))

  /** Returns how far a source's partitions are behind their ends, by the names that Spark has for Kafka. */
  private def behind(offsets: Seq[Long]): JavaMap[String, String] =
    if (offsets.isEmpty) Collections.emptyMap[String, String]
    else
      Map(
        "minOffsetsBehindLatest" -> offsets.min.toString,
        "maxOffsetsBehindLatest" -> offsets.max.toString,
        "avgOffsetsBehindLatest" -> (offsets.sum.toDouble / offsets.size).toString).asJava
}
