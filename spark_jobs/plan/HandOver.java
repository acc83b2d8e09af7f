/*
 * The reduce side of an operator without a Python worker: a task hands the rows of its shards over to the store actor of its node, and gets
 * the rows that they emit (store_actors/hand_over.py is the other side).
 *
 * The body of a class as Spark's own code generation writes them: executors get this text, and compile it as they compile the stages of a
 * query. Janino has neither lambdas nor usable generics, nor static methods of interfaces.
 */
public Object generate(Object[] references) {
    return new HandOver(references);
}

final class HandOver extends org.apache.spark.sql.execution.BufferedRowIterator {
    /** What follows in an answer (store_actors/hand_over.py). */
    private static final int ROWS = 0;
    private static final int DONE = 1;
    private static final int FAILED = 2;
    /** Rows and bytes of a record batch at most; the last row may exceed the bytes. */
    private static final int MOST_ROWS = 1 << 16;
    private static final long MOST_BYTES = 16L << 20;
    private static final int BUFFER_BYTES = 1 << 18;
    /** How long a task waits for a store actor that is started again, as a Python worker does. */
    private static final long DEADLINE_S = 120L;
    private static final long PAUSE_MS = 100L;

    private final String sockets;
    private final byte[] function;
    private final String batch;
    private final int[][] shards;
    private final int[] routes;
    private final org.apache.spark.sql.types.StructType inputType;
    private final org.apache.spark.sql.types.StructType outputType;
    private final String timeZone;

    private scala.collection.Iterator input;
    private scala.collection.Iterator output;
    private org.apache.spark.sql.catalyst.expressions.UnsafeProjection projection;
    private org.apache.arrow.vector.ipc.ArrowStreamReader reader;
    private java.nio.channels.SocketChannel channel;
    private java.io.InputStream answer;
    private org.apache.arrow.memory.BufferAllocator allocator;

    HandOver(Object[] references) {
        sockets = (String) references[0];
        function = (byte[]) references[1];
        batch = (String) references[2];
        shards = (int[][]) references[3];
        routes = (int[]) references[4];
        inputType = (org.apache.spark.sql.types.StructType) references[5];
        outputType = (org.apache.spark.sql.types.StructType) references[6];
        timeZone = (String) references[7];
    }

    public void init(int index, scala.collection.Iterator[] inputs) {
        partitionIndex = index;
        input = inputs[0];
        allocator = org.apache.spark.sql.util.ArrowUtils.rootAllocator().newChildAllocator("statefleet", 0L, Long.MAX_VALUE);
        TaskContext.get().addTaskCompletionListener(new org.apache.spark.util.TaskCompletionListener() {
            public void onTaskCompletion(TaskContext context) {
                close();
            }
        });
    }

    private void close() {
        try {
            if (channel != null) {
                channel.close();
            }
            if (reader != null) {
                reader.close(false);
            }
        } catch (java.io.IOException error) {
            throw new RuntimeException(error);
        }
        allocator.close();
    }

    protected void processNext() throws java.io.IOException {
        if (channel == null) {
            send();
            if (read() == ROWS) {
                reader = new org.apache.arrow.vector.ipc.ArrowStreamReader(answer, allocator);
                projection = org.apache.spark.sql.catalyst.expressions.UnsafeProjection.create(outputType);
            }
        }
        while (reader != null) {
            if (output != null && output.hasNext()) {
                append(projection.apply((InternalRow) output.next()));
                return;
            }
            if (reader.loadNextBatch()) {
                output = rows(reader.getVectorSchemaRoot());
            } else {
                // A stream that was cut looks like one that has ended.
                read();
                reader.close(false);
                reader = null;
            }
        }
    }

    private scala.collection.Iterator rows(org.apache.arrow.vector.VectorSchemaRoot root) {
        java.util.List vectors = root.getFieldVectors();
        org.apache.spark.sql.vectorized.ColumnVector[] columns = new org.apache.spark.sql.vectorized.ColumnVector[vectors.size()];
        for (int i = 0; i < columns.length; i++) {
            columns[i] = new org.apache.spark.sql.vectorized.ArrowColumnVector((org.apache.arrow.vector.ValueVector) vectors.get(i));
        }
        return scala.collection.JavaConverters.asScalaIterator(
            new org.apache.spark.sql.vectorized.ColumnarBatch(columns, root.getRowCount()).rowIterator());
    }

    /** Returns what follows in the answer: ROWS or DONE. */
    private int read() throws java.io.IOException {
        int next = answer.read();
        if (next == ROWS || next == DONE) {
            return next;
        }
        if (next == FAILED) {
            throw new IllegalStateException(new String(answer.readAllBytes(), java.nio.charset.StandardCharsets.UTF_8));
        }
        throw new java.io.EOFException("the store actor of this node was lost in the middle of a batch; what it committed is safe, and "
            + "the next attempt of this task goes on from there");
    }

    /** Connects to the store actor of this node, which may still be on its way back, and sends it everything. */
    private void send() throws java.io.IOException {
        String host = org.apache.spark.SparkEnv.get().blockManager().blockManagerId().host();
        java.util.zip.CRC32 checksum = new java.util.zip.CRC32();
        checksum.update(host.getBytes(java.nio.charset.StandardCharsets.UTF_8));
        channel = connected(sockets + String.format("%08x", new Object[] {Long.valueOf(checksum.getValue())}) + ".sock");
        int[] ids = shards[partitionIndex];
        String executor = host + ":" + java.lang.management.ManagementFactory.getRuntimeMXBean().getPid();
        String request = "{\"batch\": " + batch + ", \"attempt\": " + TaskContext.get().taskAttemptId() + ", \"executor\": \"" + executor
            + "\", \"function_bytes\": " + function.length + ", \"shards\": " + java.util.Arrays.toString(ids) + "}";
        byte[] text = request.getBytes(java.nio.charset.StandardCharsets.UTF_8);
        java.io.DataOutputStream out = new java.io.DataOutputStream(
            new java.io.BufferedOutputStream(java.nio.channels.Channels.newOutputStream(channel), BUFFER_BYTES));
        out.writeInt(text.length);
        out.write(text);
        out.write(function);
        long[] counts = new long[ids.length];
        writeRows(out, ids, counts);
        for (int i = 0; i < counts.length; i++) {
            out.writeLong(counts[i]);
        }
        out.flush();
        answer = new java.io.BufferedInputStream(java.nio.channels.Channels.newInputStream(channel), BUFFER_BYTES);
    }

    private java.nio.channels.SocketChannel connected(String path) throws java.io.IOException {
        long until = System.nanoTime() + DEADLINE_S * 1000000000L;
        while (true) {
            try {
                return java.nio.channels.SocketChannel.open(java.net.UnixDomainSocketAddress.of(path));
            } catch (java.nio.channels.ClosedByInterruptException error) {
                throw error;
            } catch (java.io.IOException error) {
                if (System.nanoTime() > until) {
                    throw new java.io.IOException("the store actor of this node did not come back in " + DEADLINE_S + " s; committed versions "
                        + "are safe in the object store and nothing of this batch was lost; see `ray list actors` and the actor's log, then "
                        + "restart the query [socket=`" + path + "`]", error);
                }
            }
            try {
                Thread.sleep(PAUSE_MS);
            } catch (InterruptedException error) {
                throw new java.io.InterruptedIOException();
            }
        }
    }

    /** Writes the rows as an Arrow stream, and counts those of each shard. The route is the last column, which is not written. */
    private void writeRows(java.io.OutputStream out, int[] ids, long[] counts) throws java.io.IOException {
        org.apache.arrow.vector.VectorSchemaRoot root = org.apache.arrow.vector.VectorSchemaRoot.create(
            org.apache.spark.sql.util.ArrowUtils.toArrowSchema(inputType, timeZone, true, false), allocator);
        try {
            org.apache.spark.sql.execution.arrow.ArrowWriter rows = org.apache.spark.sql.execution.arrow.ArrowWriter.create(root);
            org.apache.arrow.vector.ipc.ArrowStreamWriter stream = new org.apache.arrow.vector.ipc.ArrowStreamWriter(root, null, out);
            stream.start();
            int shard = -1;
            int route = 0;
            int pending = 0;
            long bytes = 0;
            int routeColumn = inputType.length();
            while (input.hasNext()) {
                UnsafeRow row = (UnsafeRow) input.next();
                int rowRoute = row.getInt(routeColumn);
                while (shard < 0 || rowRoute != route) {
                    shard++;
                    route = routes[ids[shard]];
                }
                counts[shard]++;
                rows.write(row);
                pending++;
                bytes += row.getSizeInBytes();
                if (pending == MOST_ROWS || bytes >= MOST_BYTES) {
                    rows.finish();
                    stream.writeBatch();
                    rows.reset();
                    pending = 0;
                    bytes = 0;
                }
            }
            if (pending > 0) {
                rows.finish();
                stream.writeBatch();
            }
            stream.end();
        } finally {
            root.close();
        }
    }
}
