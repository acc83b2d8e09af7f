/** How a store of Spark 3.5 is opened at a version. */
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
        provider.init(id, keys, values, prefix, conf, hadoop);
        return provider.getReadStore(version);
    }

    static scala.collection.Iterator rows(org.apache.spark.sql.execution.streaming.state.ReadStateStore reader) {
        return reader.iterator();
    }
}
