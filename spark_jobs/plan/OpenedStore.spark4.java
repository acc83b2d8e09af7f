/** How a store of Spark 4 without column families is opened at a version. */
static final class OpenedStore {
    static org.apache.spark.sql.execution.streaming.state.ReadStateStore at(
        long version,
        String snapshot,
        org.apache.spark.sql.execution.streaming.state.StateStoreProvider provider,
        org.apache.spark.sql.execution.streaming.state.StateStoreId id,
        org.apache.spark.sql.types.StructType keys,
        org.apache.spark.sql.types.StructType values,
        int prefix,
        org.apache.spark.sql.execution.streaming.state.StateStoreConf conf,
        org.apache.hadoop.conf.Configuration hadoop) {
        org.apache.spark.sql.execution.streaming.state.KeyStateEncoderSpec lookups = prefix == 0
            ? (org.apache.spark.sql.execution.streaming.state.KeyStateEncoderSpec) new org.apache.spark.sql.execution.streaming.state.NoPrefixKeyStateEncoderSpec(keys)
            : (org.apache.spark.sql.execution.streaming.state.KeyStateEncoderSpec) new org.apache.spark.sql.execution.streaming.state.PrefixKeyScanStateEncoderSpec(keys, prefix);
        provider.init(id, keys, values, lookups, false, conf, hadoop, false, scala.Option.apply(null));
        return provider.getReadStore(version, scala.Option.apply(snapshot));
    }

    static scala.collection.Iterator rows(org.apache.spark.sql.execution.streaming.state.ReadStateStore reader) {
        return reader.iterator(org.apache.spark.sql.execution.streaming.state.StateStore$.MODULE$.DEFAULT_COL_FAMILY_NAME());
    }
}
