"""What the sides of a comparison share, also those in other environments: so it imports nothing."""

#: Partitions of each topic, and tasks of each stage, of :mod:`benchmarks.realtime`.
PARTITIONS = 2
_PROVIDER = "org.apache.spark.sql.execution.streaming.state."
#: Spark's own stores, with their configuration.
SPARK_STORES = {
    "hdfs": {"spark.sql.streaming.stateStore.providerClass": f"{_PROVIDER}HDFSBackedStateStoreProvider"},
    "rocksdb": {
        "spark.sql.streaming.stateStore.providerClass": f"{_PROVIDER}RocksDBStateStoreProvider",
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    },
}
