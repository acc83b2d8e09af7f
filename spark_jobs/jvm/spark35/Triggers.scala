package org.apache.spark.sql.statefleet

import org.apache.spark.sql.catalyst.streaming.WriteToStreamStatement

object Triggers {
  /** Whether a query runs without batches that end before their results are seen. */
  def isContinuous(query: WriteToStreamStatement): Boolean = query.isContinuousTrigger
}
