package org.apache.spark.sql.statefleet

import java.util.UUID
import org.apache.spark.sql.execution.SparkPlan

/** A stateful operator of Spark 3.5 whose state is not in a store of Spark's. */
trait StateWriter extends StateStoreWriter { self: SparkPlan =>
  protected def operatorInfo(checkpoint: String, runId: UUID, id: Long, batchId: Long, shards: Int) =
    new StatefulOperatorStateInfo(checkpoint, runId, id, batchId, shards)
}
