package org.apache.spark.sql.statefleet

import org.apache.spark.sql.execution.streaming.state._

/** How a store of Spark 4 without column families is opened at a version. */
object OpenedStore {
  def apply(
      provider: StateStoreProvider,
      id: StateStoreId,
      state: StateRows,
      snapshot: Option[String]): ReadStateStore = {
    val lookups =
      if (state.prefix == 0) NoPrefixKeyStateEncoderSpec(state.keys)
      else PrefixKeyScanStateEncoderSpec(state.keys, state.prefix)
    provider.init(id, state.keys, state.values, lookups, false, state.conf, state.hadoop.value, false, None)
    provider.getReadStore(state.version, snapshot)
  }

  def rows(reader: ReadStateStore): Iterator[UnsafeRowPair] = reader.iterator(StateStore.DEFAULT_COL_FAMILY_NAME)
}
