package org.apache.spark.sql.statefleet

import org.apache.spark.sql.catalyst.streaming.WriteToStreamStatement
import org.apache.spark.sql.execution.streaming.{ContinuousTrigger, RealTimeTrigger}

object Triggers {
  /** Whether a query runs without batches that end before their results are seen. */
  def isContinuous(query: WriteToStreamStatement): Boolean = query.trigger match {
    case _: ContinuousTrigger | _: RealTimeTrigger => true
    case _ => false
  }
}
