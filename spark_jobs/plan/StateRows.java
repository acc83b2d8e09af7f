/*
 * Rows of a state store of a Spark checkpoint at a version: a task reads a partition of the state.
 *
 * The body of a class as Spark's own code generation writes them: executors get this text, and compile it as they compile the stages of a
 * query (spark_jobs/plan/checkpoint_state.py), so nothing has to be installed on them. Only Spark's provider reads the files: no shared
 * instance is registered, no maintenance runs, and nothing is written below the checkpoint. Janino has no usable generics.
 */
public Object generate(Object[] references) {
    return new StateRows(references);
}

final class StateRows extends org.apache.spark.sql.execution.BufferedRowIterator {
    private final String folder;
    private final long operator;
    private final String store;
    private final long version;
    private final org.apache.spark.sql.types.StructType keys;
    private final org.apache.spark.sql.types.StructType values;
    private final int prefix;
    private final org.apache.spark.sql.execution.streaming.state.StateStoreConf conf;
    private final org.apache.spark.util.SerializableConfiguration hadoop;
    private final Object[] functions;
    private final Object[] snapshots;
    private final org.apache.spark.sql.catalyst.expressions.UnsafeProjection row;

    private scala.collection.Iterator rows;

    StateRows(Object[] references) {
        folder = (String) references[0];
        operator = ((Number) references[1]).longValue();
        store = (String) references[2];
        version = ((Number) references[3]).longValue();
        keys = (org.apache.spark.sql.types.StructType) references[4];
        values = (org.apache.spark.sql.types.StructType) references[5];
        prefix = ((Number) references[6]).intValue();
        conf = (org.apache.spark.sql.execution.streaming.state.StateStoreConf) references[7];
        hadoop = (org.apache.spark.util.SerializableConfiguration) references[8];
        row = org.apache.spark.sql.catalyst.expressions.UnsafeProjection.create(
            (org.apache.spark.sql.types.StructType) references[9]);
        functions = (Object[]) references[10];
        snapshots = (Object[]) references[11];
    }

    public void init(int index, scala.collection.Iterator[] inputs) {
        partitionIndex = index;
        org.apache.spark.sql.execution.streaming.state.StateStoreId id =
            new org.apache.spark.sql.execution.streaming.state.StateStoreId(folder, operator, index, store);
        final org.apache.spark.sql.execution.streaming.state.StateStoreProvider provider =
            org.apache.spark.sql.execution.streaming.state.StateStoreProvider$.MODULE$.create(conf.providerClass());
        final org.apache.spark.sql.execution.streaming.state.ReadStateStore reader =
            OpenedStore.at(version, snapshot(index), provider, id, keys, values, prefix, conf, hadoop.value());
        TaskContext.get().addTaskCompletionListener(new org.apache.spark.util.TaskCompletionListener() {
            public void onTaskCompletion(TaskContext context) {
                reader.abort();
                provider.close();
            }
        });
        rows = OpenedStore.rows(reader);
    }

    /** Returns the id in the names of a partition's files; null if they have none. */
    private String snapshot(int partition) {
        return snapshots.length == 0 ? null : (String) snapshots[partition];
    }

    protected void processNext() throws java.io.IOException {
        if (!rows.hasNext()) {
            return;
        }
        org.apache.spark.sql.execution.streaming.state.UnsafeRowPair pair =
            (org.apache.spark.sql.execution.streaming.state.UnsafeRowPair) rows.next();
        append(row.apply(new org.apache.spark.sql.catalyst.expressions.JoinedRow(pair.key(), decoded(pair.value()))));
    }

    /** Returns a value with columns in place of the buffers that Spark stores as bytes, for functions that have them. */
    private InternalRow decoded(UnsafeRow value) {
        if (functions.length == 0) {
            return value;
        }
        Object[] fields = new Object[values.length()];
        for (int i = 0; i < fields.length; i++) {
            fields[i] = value.isNullAt(i) ? null : value.get(i, values.apply(i).dataType());
            if (functions[i] != null && fields[i] != null) {
                fields[i] = decoded(
                    (org.apache.spark.sql.catalyst.expressions.aggregate.TypedImperativeAggregate) functions[i], (byte[]) fields[i]);
            }
        }
        return new org.apache.spark.sql.catalyst.expressions.GenericInternalRow(fields);
    }

    /** Returns the values with their counts, for a function that counts them; else the function's result. */
    private Object decoded(
        org.apache.spark.sql.catalyst.expressions.aggregate.TypedImperativeAggregate function, byte[] bytes) {
        Object buffer = function.deserialize(bytes);
        if (!(buffer instanceof org.apache.spark.util.collection.OpenHashMap)) {
            return function.eval(buffer);
        }
        java.util.ArrayList pairs = new java.util.ArrayList();
        scala.collection.Iterator counted = ((org.apache.spark.util.collection.OpenHashMap) buffer).iterator();
        while (counted.hasNext()) {
            scala.Tuple2 pair = (scala.Tuple2) counted.next();
            pairs.add(new org.apache.spark.sql.catalyst.expressions.GenericInternalRow(new Object[] {pair._1(), pair._2()}));
        }
        return new org.apache.spark.sql.catalyst.util.GenericArrayData(pairs.toArray());
    }
}
