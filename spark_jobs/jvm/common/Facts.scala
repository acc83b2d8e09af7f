package org.apache.spark.sql.statefleet

import java.util.Locale
import org.apache.spark.sql.streaming.OutputMode

/**
 * An accumulator of an aggregation: its kind (coordinator/model/accumulator_kinds.py), input columns and state fields.
 *
 * @param words The size of its only state field, if that is several fields of Spark's.
 */
case class Accumulator(kind: String, inputs: Seq[String], state: Seq[String], words: Option[Int])

/** What an operator is, as Python's plan code says it; spark_jobs/plan/event_time.py (Upstream) explains each field. */
case class Facts(
    state: String,
    uri: String,
    appends: Boolean,
    hasWatermark: Boolean,
    name: String,
    again: String,
    lagMs: Long,
    mode: Option[String],
    modes: Seq[String],
    refused: Map[String, String],
    together: Boolean,
    lateColumns: Map[String, Seq[String]],
    shards: Option[Int],
    sockets: Option[String],
    byPython: Option[String],
    accumulators: Option[Seq[Accumulator]]) {

  /** Plans, which users see in errors, show the state's name only. */
  override def toString: String = state

  /** The URI of the folder of the operator's state. */
  def stateId: String = s"$uri/$state"

  /** The operator's own output mode, or else that of the query which is being planned; None if there is neither. */
  def modeIn(execution: Option[IncrementalExecution]): Option[String] =
    mode.orElse(execution.map(batch => Mode.of(batch.outputMode)))
}

/** Output modes, in Spark's words in lower case. */
object Mode {
  def of(mode: OutputMode): String = mode.toString.toLowerCase(Locale.ROOT)
}
