package org.apache.spark.sql.statefleet

import org.apache.spark.sql.execution.streaming.state._

/** How a store of Spark 3.5 is opened at a version. */
object OpenedStore {
  def apply(
      provider: StateStoreProvider,
      id: StateStoreId,
      state: StateRows,
      snapshot: Option[String]): ReadStateStore = {
    provider.init(id, state.keys, state.values, state.prefix, state.conf, state.hadoop.value)
    provider.getReadStore(state.version)
  }

  def rows(reader: ReadStateStore): Iterator[UnsafeRowPair] = reader.iterator()
}
