/*
 * The reduce side of an operator without a Python worker: a task hands the rows of its shards over to the store actor of its node, and gets
 * the rows that they emit (store_actors/connections/hand_over.py is the other side).
 *
 * The body of a class as Spark's own code generation writes them: executors get this text, and compile it as they compile the stages of a
 * query. Janino has neither lambdas nor usable generics, nor static methods of interfaces.
 *
 * A task sends the rows of one shard after another, and gives out results as they come: it sends only while there are none. So neither side
 * has all rows of a large task. The first megabytes are kept, and sent again to the next store actor if one was lost before it answered.
 * A task waits as long as its connection is there: one whose process hangs (stopped, deadlocked) is ended by the watch of Spark's driver
 * (spark_jobs/nodes/node_watch.py), and Ray starts it again.
 *
 * Both sides count: each shard's rows end with their number and bytes, and so does the answer. The driver gets the number of rows of each
 * shard, too, and compares it with what the shard committed. And a task sends nothing before the other side has proved that it can read the
 * file of the store actor, which is in a folder that only this user can enter: others can put a folder of their own in its place.
 */
public Object generate(Object[] references) {
    return new HandOver(references);
}

final class HandOver extends org.apache.spark.sql.execution.BufferedRowIterator {
    /** Raised with each change of what is sent. */
    private static final int FORMAT = 4;
    /** What follows in an answer (store_actors/connections/hand_over.py). */
    private static final int ROWS = 0;
    private static final int DONE = 1;
    private static final int FAILED = 2;
    private static final int UNSAFE_ROWS = 3;
    private static final int PROOF_BYTES = 32;
    /** Seconds until a process has to have proved who it is; a store actor that hangs is ended sooner. */
    private static final long PROOF_S = 40L;
    /** Rows and bytes of a record batch at most; the last row may exceed the bytes. */
    private static final int MOST_ROWS = 1 << 16;
    private static final long MOST_BYTES = 16L << 20;
    private static final int BUFFER_BYTES = 1 << 18;
    private static final int LENGTH_BYTES = 4;
    /** Where the bytes of an array begin. */
    private static final long ARRAY = org.apache.spark.unsafe.Platform.BYTE_ARRAY_OFFSET;
    /** Rows of more bytes are copied by a call. */
    private static final int SMALL_ROW = 64;
    /** Bytes of a request after which it is no longer kept, to be sent again. */
    private static final int KEPT_BYTES = 1 << 22;
    /** How long a task waits for a store actor that is started again, as a Python worker does. */
    private static final long DEADLINE_S = 120L;
    private static final long PAUSE_MS = 100L;
    /** Pauses after which a store actor that is not there is no longer just starting. */
    private static final int LATE = 50;
    /** A task looks so often whether it was cancelled, if nothing interrupts it. */
    private static final long LOOK_MS = 1000L;

    private final String sockets;
    private final byte[] operator;
    private final String batch;
    private final int[][] shards;
    private final int[] actors;
    private final int[] routes;
    private final org.apache.spark.sql.types.StructType inputType;
    private final org.apache.spark.sql.types.StructType outputType;
    private final String timeZone;
    /** Collects, for the driver, pairs of a shard and the number of rows that its operator is sent. */
    private final org.apache.spark.util.CollectionAccumulator sentRows;

    /** The task's shards, and the number of their store actor on its node. */
    private int[] ids;
    private int actor;
    private scala.collection.Iterator input;
    private Request request;
    private Rows rows;
    private Connection connection;
    private org.apache.arrow.memory.BufferAllocator allocator;
    private TaskContext context;
    /** Until when another store actor is waited for; 0 if none was lost. */
    private long until;

    /** The row that is given out next. */
    private InternalRow next;
    private boolean isAnswered;
    private boolean isOver;
    /** How many rows of the answer were read, and where the answer began among what came of the connection. */
    private long answeredRows;
    private long answerBegin;
    /** Rows in Spark's own format (store_actors/connections/unsafe_rows.py): a block of them, and where the next one begins. */
    private byte[] block;
    private int blockEnd;
    private int position;
    private UnsafeRow unsafeRow;
    /** The size of a row without strings; 0 if each has one of its own. */
    private int rowBytes;
    /** Rows as Arrow has them. */
    private org.apache.arrow.vector.ipc.ArrowStreamReader reader;
    private scala.collection.Iterator output;
    private org.apache.spark.sql.catalyst.expressions.UnsafeProjection projection;

    HandOver(Object[] references) {
        sockets = (String) references[0];
        operator = (byte[]) references[1];
        batch = (String) references[2];
        shards = (int[][]) references[3];
        actors = (int[]) references[4];
        routes = (int[]) references[5];
        inputType = (org.apache.spark.sql.types.StructType) references[6];
        outputType = (org.apache.spark.sql.types.StructType) references[7];
        timeZone = (String) references[8];
        sentRows = (org.apache.spark.util.CollectionAccumulator) references[9];
    }

    public void init(int index, scala.collection.Iterator[] inputs) {
        partitionIndex = index;
        ids = shards[index];
        actor = actors[index];
        input = inputs[0];
        allocator = org.apache.spark.sql.util.ArrowUtils.rootAllocator().newChildAllocator("statefleet", 0L, Long.MAX_VALUE);
        context = TaskContext.get();
        context.addTaskCompletionListener(new org.apache.spark.util.TaskCompletionListener() {
            public void onTaskCompletion(TaskContext ended) {
                close();
            }
        });
    }

    private void close() {
        try {
            if (connection != null) {
                connection.close();
            }
            if (reader != null) {
                reader.close(false);
            }
            if (rows != null) {
                rows.close();
            }
        } catch (java.io.IOException error) {
            throw new RuntimeException(error);
        }
        allocator.close();
    }

    /** Rows are given out one by one, without the list that other stages put them in. */
    public boolean hasNext() throws java.io.IOException {
        if (next == null) {
            next = read();
        }
        return next != null;
    }

    public InternalRow next() {
        InternalRow row = next;
        next = null;
        return row;
    }

    protected void processNext() {
    }

    /** Returns the next row that the shards emit; null after the last one. */
    private InternalRow read() throws java.io.IOException {
        if (request == null) {
            begin();
        }
        while (true) {
            InternalRow row = nextOfBlock();
            if (row != null || isOver) {
                return row;
            }
            try {
                if (connection == null) {
                    connection = connected();
                }
                if (request.isSent() || connection.hasArrived()) {
                    readMore();
                } else {
                    request.sendMore();
                }
            } catch (Lost error) {
                sendAgain(error);
            }
        }
    }

    /** Writes what is kept before anything is sent. */
    private void begin() throws java.io.IOException {
        request = new Request();
        writeHead();
        rows = isUnsafe(inputType) ? (Rows) new UnsafeRows() : new ArrowRows();
        rows.begin();
        while (request.isSmall() && !request.isWritten) {
            request.writeMore();
        }
    }

    /** Begins again with another store actor, if nothing came of this one and everything is still here. */
    private void sendAgain(Lost error) throws java.io.IOException {
        until = until == 0L ? deadline() : until;
        if (!request.isKept || isAnswered || System.nanoTime() > until) {
            throw error;
        }
        connection.close();
        connection = null;
        request.rewind();
        pause();
    }

    private InternalRow nextOfBlock() {
        if (position < blockEnd) {
            int size = rowBytes;
            if (size == 0) {
                size = (int) org.apache.spark.unsafe.Platform.getLong(block, ARRAY + position);
                position += 8;
            }
            if (size <= 0 || size > blockEnd - position) {
                throw broken("a row of " + size + " bytes is among them");
            }
            unsafeRow.pointTo(block, ARRAY + position, size);
            position += size;
            answeredRows++;
            return unsafeRow;
        }
        return output != null && output.hasNext() ? projection.apply((InternalRow) output.next()) : null;
    }

    /** Reads a block, or a record batch, of results. The store actor has written all of it when it has written some of it. */
    private void readMore() throws java.io.IOException {
        if (!isAnswered) {
            int kind = connection.next();
            isAnswered = true;
            answerBegin = connection.consumed;
            if (kind == DONE) {
                finish(0L);
            } else if (kind == UNSAFE_ROWS) {
                unsafeRow = new UnsafeRow(outputType.length());
                rowBytes = hasTexts(outputType)
                    ? 0 : UnsafeRow.calculateBitSetWidthInBytes(outputType.length()) + 8 * outputType.length();
            } else if (kind == ROWS) {
                reader = new org.apache.arrow.vector.ipc.ArrowStreamReader(connection, allocator);
                projection = org.apache.spark.sql.catalyst.expressions.UnsafeProjection.create(outputType);
            } else {
                throw broken("they begin with " + kind);
            }
        } else if (unsafeRow != null ? !readBlock() : !readBatch()) {
            // An error ends the rows, too, and a stream that was cut looks like one that has ended.
            if (connection.next() != DONE) {
                throw broken("something else follows them");
            }
            finish(connection.consumed - 1L - answerBegin);
        }
    }

    /** Reads the end of an answer, after DONE, and compares it with the rows that came and their bytes. */
    private void finish(long bytes) throws java.io.IOException {
        java.nio.ByteBuffer end = java.nio.ByteBuffer.allocate(16);
        connection.fill(end);
        if (end.getLong(0) != answeredRows || end.getLong(8) != bytes) {
            throw broken(end.getLong(0) + " rows in " + end.getLong(8) + " bytes were sent, and " + answeredRows + " in " + bytes + " came");
        }
        if (!request.isSent()) {
            throw broken("they ended before all rows of the task's shards were sent");
        }
        if (!connection.hasEnded()) {
            throw broken("something follows their end");
        }
        isOver = true;
    }

    private static IllegalStateException broken(String what) {
        return new IllegalStateException("what the store actor of this node answered are not the rows of the task's shards: " + what
            + "; none of them count; what the shards committed is safe, and the next attempt of this task gets their rows again");
    }

    private boolean readBlock() throws java.io.IOException {
        java.nio.ByteBuffer length = java.nio.ByteBuffer.allocate(LENGTH_BYTES);
        connection.fill(length);
        blockEnd = length.getInt(0);
        position = 0;
        if (blockEnd < 0) {
            throw broken("a block of " + blockEnd + " bytes is among them");
        }
        if (block == null || block.length < blockEnd) {
            block = new byte[blockEnd];
        }
        connection.fill(java.nio.ByteBuffer.wrap(block, 0, blockEnd));
        return blockEnd > 0;
    }

    private boolean readBatch() throws java.io.IOException {
        boolean isRead = reader.loadNextBatch();
        output = isRead ? rowsOf(reader.getVectorSchemaRoot()) : null;
        answeredRows += isRead ? reader.getVectorSchemaRoot().getRowCount() : 0;
        return isRead;
    }

    private static scala.collection.Iterator rowsOf(org.apache.arrow.vector.VectorSchemaRoot root) {
        java.util.List vectors = root.getFieldVectors();
        org.apache.spark.sql.vectorized.ColumnVector[] columns = new org.apache.spark.sql.vectorized.ColumnVector[vectors.size()];
        for (int i = 0; i < columns.length; i++) {
            columns[i] = new org.apache.spark.sql.vectorized.ArrowColumnVector((org.apache.arrow.vector.ValueVector) vectors.get(i));
        }
        return scala.collection.JavaConverters.asScalaIterator(
            new org.apache.spark.sql.vectorized.ColumnarBatch(columns, root.getRowCount()).rowIterator());
    }

    /** Whether a row of these columns can be sent as Spark has it in memory. */
    private static boolean isUnsafe(org.apache.spark.sql.types.StructType type) {
        for (int i = 0; i < type.length(); i++) {
            org.apache.spark.sql.types.DataType column = type.apply(i).dataType();
            boolean isWord = column instanceof org.apache.spark.sql.types.DecimalType
                ? ((org.apache.spark.sql.types.DecimalType) column).precision() <= 18
                : column instanceof org.apache.spark.sql.types.BooleanType || column instanceof org.apache.spark.sql.types.ByteType
                    || column instanceof org.apache.spark.sql.types.ShortType || column instanceof org.apache.spark.sql.types.IntegerType
                    || column instanceof org.apache.spark.sql.types.LongType || column instanceof org.apache.spark.sql.types.FloatType
                    || column instanceof org.apache.spark.sql.types.DoubleType || column instanceof org.apache.spark.sql.types.DateType
                    || column instanceof org.apache.spark.sql.types.TimestampType
                    || column instanceof org.apache.spark.sql.types.TimestampNTZType;
            if (!isWord && !isText(column)) {
                return false;
            }
        }
        return true;
    }

    private static boolean isText(org.apache.spark.sql.types.DataType column) {
        return column instanceof org.apache.spark.sql.types.StringType || column instanceof org.apache.spark.sql.types.BinaryType;
    }

    private static boolean hasTexts(org.apache.spark.sql.types.StructType type) {
        for (int i = 0; i < type.length(); i++) {
            if (isText(type.apply(i).dataType())) {
                return true;
            }
        }
        return false;
    }

    private void writeHead() throws java.io.IOException {
        String executor = host() + ":" + java.lang.management.ManagementFactory.getRuntimeMXBean().getPid();
        byte[] text = ("{\"batch\": " + batch + ", \"attempt\": " + context.taskAttemptId() + ", \"executor\": \"" + executor
            + "\", \"operator_bytes\": " + operator.length + ", \"unsafe_rows\": " + isUnsafe(inputType) + ", \"unsafe_results\": "
            + isUnsafe(outputType) + ", \"shards\": " + java.util.Arrays.toString(ids) + "}")
            .getBytes(java.nio.charset.StandardCharsets.UTF_8);
        request.write(java.nio.ByteBuffer.allocate(LENGTH_BYTES).putInt(0, text.length));
        request.write(java.nio.ByteBuffer.wrap(text));
        request.write(java.nio.ByteBuffer.wrap(operator));
    }

    private static String host() {
        return org.apache.spark.SparkEnv.get().blockManager().blockManagerId().host();
    }

    /**
     * Returns what a store actor's file says. The folder is looked at as it is open, and the file is opened in it: others who can write the
     * folder above may put one of their own in its place at any time.
     */
    private static String factsOf(java.nio.file.Path address) throws java.io.IOException {
        // To open something else may wait for ever.
        if (!java.nio.file.Files.readAttributes(address.getParent(), java.nio.file.attribute.BasicFileAttributes.class,
                new java.nio.file.LinkOption[] {java.nio.file.LinkOption.NOFOLLOW_LINKS}).isDirectory()) {
            throw notPrivate(address.getParent(), "it is no folder");
        }
        java.nio.file.SecureDirectoryStream folder =
            (java.nio.file.SecureDirectoryStream) java.nio.file.Files.newDirectoryStream(address.getParent());
        try {
            java.nio.file.attribute.PosixFileAttributes attributes = ((java.nio.file.attribute.PosixFileAttributeView)
                folder.getFileAttributeView(java.nio.file.attribute.PosixFileAttributeView.class)).readAttributes();
            String mode = java.nio.file.attribute.PosixFilePermissions.toString(attributes.permissions());
            if (!attributes.owner().equals(thisUser()) || !mode.endsWith("------")) {
                throw notPrivate(address.getParent(), "owner " + attributes.owner() + ", mode " + mode);
            }
            java.nio.channels.ByteChannel file = folder.newByteChannel(address.getFileName(),
                java.util.Collections.singleton(java.nio.file.StandardOpenOption.READ), new java.nio.file.attribute.FileAttribute[0]);
            try {
                return new String(java.nio.channels.Channels.newInputStream(file).readAllBytes(), java.nio.charset.StandardCharsets.US_ASCII);
            } finally {
                file.close();
            }
        } finally {
            folder.close();
        }
    }

    private static IllegalStateException notPrivate(java.nio.file.Path folder, String why) {
        return new IllegalStateException("the folder in which Spark's tasks find the store actor of their node is not this user's alone; "
            + "nothing was sent, and nothing of this batch was lost; remove it, upon which the store actor makes one within seconds, then "
            + "restart the query [folder=`" + folder + "`: " + why + "]");
    }

    /** Returns the user of this process as the kernel has it, whether or not the user has a name. */
    private static java.nio.file.attribute.UserPrincipal thisUser() throws java.io.IOException {
        java.util.Scanner lines = new java.util.Scanner(java.nio.file.Paths.get("/proc/self/status", new String[0]));
        try {
            // The real user, and the effective one.
            lines.findWithinHorizon("\nUid:\\s+\\d+\\s+(\\d+)", 0);
            return java.nio.file.FileSystems.getDefault().getUserPrincipalLookupService().lookupPrincipalByName(lines.match().group(1));
        } finally {
            lines.close();
        }
    }

    private static long deadline() {
        return System.nanoTime() + DEADLINE_S * 1000000000L;
    }

    private static void pause() throws java.io.IOException {
        try {
            Thread.sleep(PAUSE_MS);
        } catch (InterruptedException error) {
            throw new java.io.InterruptedIOException();
        }
    }

    /** Connects to a store actor of this node, which may still be on its way back. */
    private Connection connected() throws java.io.IOException {
        java.util.zip.CRC32 checksum = new java.util.zip.CRC32();
        checksum.update(host().getBytes(java.nio.charset.StandardCharsets.UTF_8));
        String first = sockets + String.format("%08x", new Object[] {Long.valueOf(checksum.getValue())});
        String holder = first + "-" + actor;
        long until = deadline();
        for (int tries = 0; true; tries++) {
            // Every store actor can do it. A task that runs elsewhere than planned may find fewer of them.
            String address = actor > 0 && tries % 2 == 0 && new java.io.File(holder).exists() ? holder : first;
            try {
                return new Connection(java.nio.file.Paths.get(address, new String[0]));
            } catch (java.nio.channels.ClosedByInterruptException error) {
                throw error;
            } catch (java.io.IOException error) {
                if (tries == LATE) {
                    checkFolder(new java.io.File(address).getParentFile());
                }
                if (System.nanoTime() > until) {
                    throw new java.io.IOException("no store actor of this node came back in " + DEADLINE_S + " s; committed versions "
                        + "are safe in the object store and nothing of this batch was lost; see `ray list actors` and the actor's log, then "
                        + "restart the query [socket=`" + address + "`]", error);
                }
            }
            pause();
            context.killTaskIfInterrupted();
        }
    }

    /** Raises an error if nothing can be written where the store actor, a process of the same user on this node, makes its socket. */
    private static void checkFolder(java.io.File sockets) throws java.io.IOException {
        java.io.File folder = sockets.isDirectory() ? sockets : sockets.getParentFile();
        java.io.File written = null;
        try {
            written = java.io.File.createTempFile("statefleet", null, folder);
            java.nio.file.Files.write(written.toPath(), new byte[BUFFER_BYTES], new java.nio.file.OpenOption[0]);
        } catch (java.io.IOException error) {
            throw new java.io.IOException("nothing can be written where Spark's tasks find the store actor of their node: "
                + error.getMessage() + "; nothing of this batch was lost; make room there, then "
                + "restart the query [folder=`" + folder + "`]", error);
        } finally {
            if (written != null) {
                written.delete();
            }
        }
    }

    /** Writes the rows of the task's shards to the request, a shard after the other. */
    private abstract class Rows {
        /** The route is the last column of a row. */
        private final int routeColumn = inputType.length();
        /** The column of the number of rows that a row stands for; below zero if there is none. */
        private final int countColumn = java.util.Arrays.asList(inputType.fieldNames()).indexOf("__rows");
        private int shard;
        /** Of the shard: rows, what they stand for, and where they begin in the request. */
        private long rows;
        private long rowsRead;
        private long begin;
        final org.apache.arrow.vector.VectorSchemaRoot root = org.apache.arrow.vector.VectorSchemaRoot.create(
            org.apache.spark.sql.util.ArrowUtils.toArrowSchema(inputType, timeZone, true, false), allocator);

        /** Writes some rows; returns whether there may be more. */
        boolean write() throws java.io.IOException {
            boolean isFull = false;
            while (!isFull && input.hasNext()) {
                UnsafeRow row = (UnsafeRow) input.next();
                int route = row.getInt(routeColumn);
                while (routes[ids[shard]] != route) {
                    endShard();
                    if (shard == ids.length) {
                        throw new IllegalStateException("Spark's shuffle gave a task a row of a shard that is not the task's, or after that "
                            + "shard's rows; nothing of the shard counts [shards=`" + java.util.Arrays.toString(ids) + "`]");
                    }
                }
                rows++;
                rowsRead += countColumn < 0 ? 1L : row.getLong(countColumn);
                isFull = add(row);
            }
            if (isFull) {
                return true;
            }
            while (shard < ids.length) {
                endShard();
            }
            close();
            return false;
        }

        /** Begins the first shard. */
        void begin() throws java.io.IOException {
            begin = request.size;
            beginShard();
        }

        private void endShard() throws java.io.IOException {
            finishShard();
            request.write((java.nio.ByteBuffer) java.nio.ByteBuffer.allocate(20)
                .putInt(ids[shard]).putLong(rows).putLong(request.size - begin).flip());
            sentRows.add(new long[] {ids[shard], rowsRead});
            rows = 0L;
            rowsRead = 0L;
            shard++;
            if (shard < ids.length) {
                begin();
            }
        }

        abstract void beginShard() throws java.io.IOException;

        /** Adds a row of the shard; returns whether rows were written to the request. */
        abstract boolean add(UnsafeRow row) throws java.io.IOException;

        /** Writes what is left of the shard, and the end of its rows. */
        abstract void finishShard() throws java.io.IOException;

        void close() {
            root.close();
        }
    }

    /** Rows as they are (store_actors/connections/unsafe_rows.py reads them), after a stream that only has their schema. */
    private final class UnsafeRows extends Rows {
        /** Bytes before each row: its size, where a column has texts. */
        private final int sizeBytes = hasTexts(inputType) ? 8 : 0;
        /** A block after its length, which is part of the request once it is full. */
        private byte[] bytes = new byte[BUFFER_BYTES];
        private int used = LENGTH_BYTES;

        UnsafeRows() throws java.io.IOException {
            org.apache.arrow.vector.ipc.ArrowStreamWriter stream = new org.apache.arrow.vector.ipc.ArrowStreamWriter(root, null, request);
            stream.start();
            stream.end();
        }

        void beginShard() {
        }

        boolean add(UnsafeRow row) {
            int size = row.getSizeInBytes();
            boolean isFull = used > LENGTH_BYTES && size > bytes.length - used - sizeBytes;
            if (isFull) {
                addBlock();
            }
            if (size > bytes.length - used - sizeBytes) {
                // A block of its own, with room for nothing else.
                bytes = new byte[Math.addExact(size, LENGTH_BYTES + sizeBytes)];
            }
            if (sizeBytes > 0) {
                org.apache.spark.unsafe.Platform.putLong(bytes, ARRAY + used, size);
                used += sizeBytes;
            }
            copy(row, size, bytes, used);
            used += size;
            return isFull;
        }

        /** Adds the block to the request, which has its bytes from now on. */
        private void addBlock() {
            request.add((java.nio.ByteBuffer) java.nio.ByteBuffer.wrap(bytes).putInt(0, used - LENGTH_BYTES).position(used));
            bytes = request.unused().array();
            used = LENGTH_BYTES;
        }

        /** A block without rows is the end. */
        void finishShard() {
            if (bytes.length > BUFFER_BYTES) {
                addBlock();
            } else if (used > LENGTH_BYTES) {
                // Small shards share a block of the request.
                request.write(java.nio.ByteBuffer.wrap(bytes, 0, used).putInt(0, used - LENGTH_BYTES));
                used = LENGTH_BYTES;
            }
            request.write(java.nio.ByteBuffer.allocate(LENGTH_BYTES));
        }
    }

    private static void copy(UnsafeRow row, int size, byte[] target, int at) {
        Object from = row.getBaseObject();
        long begin = row.getBaseOffset();
        if (size > SMALL_ROW) {
            org.apache.spark.unsafe.Platform.copyMemory(from, begin, target, ARRAY + at, size);
        } else {
            for (int i = 0; i < size; i += 8) {
                org.apache.spark.unsafe.Platform.putLong(
                    target, ARRAY + at + i, org.apache.spark.unsafe.Platform.getLong(from, begin + i));
            }
        }
    }

    /** An Arrow stream for each shard. */
    private final class ArrowRows extends Rows {
        private final org.apache.spark.sql.execution.arrow.ArrowWriter writer = org.apache.spark.sql.execution.arrow.ArrowWriter.create(root);
        private org.apache.arrow.vector.ipc.ArrowStreamWriter stream;
        private int pending;
        private long bytes;

        void beginShard() throws java.io.IOException {
            stream = new org.apache.arrow.vector.ipc.ArrowStreamWriter(root, null, request);
            stream.start();
        }

        boolean add(UnsafeRow row) throws java.io.IOException {
            writer.write(row);
            pending++;
            bytes += row.getSizeInBytes();
            boolean isFull = pending == MOST_ROWS || bytes >= MOST_BYTES;
            if (isFull) {
                writeBatch();
            }
            return isFull;
        }

        void finishShard() throws java.io.IOException {
            if (pending > 0) {
                writeBatch();
            }
            stream.end();
        }

        private void writeBatch() throws java.io.IOException {
            writer.finish();
            stream.writeBatch();
            writer.reset();
            pending = 0;
            bytes = 0;
        }
    }

    /** The store actor's process was lost; what it committed is safe. */
    private static final class Lost extends java.io.IOException {
        Lost(String what, Throwable cause) {
            super("the store actor of this node " + what + "; what it committed is safe, and the next attempt of this task goes on from there",
                cause);
        }
    }

    /** What a task sends: all of it while it is kept, and then what is written but not sent yet. */
    private final class Request implements java.nio.channels.WritableByteChannel {
        /** Buffers, whose positions are the ends of what they have. */
        private final java.util.ArrayList blocks = new java.util.ArrayList();
        private final java.util.ArrayList unused = new java.util.ArrayList();
        long size;
        /** The block of which bytes are sent next, and how many of them are sent. */
        private int current;
        private int sent;
        /** Whether all blocks are still here, and can be sent again. */
        boolean isKept = true;
        boolean isWritten;

        public int write(java.nio.ByteBuffer source) {
            int all = source.remaining();
            size += all;
            while (source.hasRemaining()) {
                if (blocks.isEmpty() || !block(blocks.size() - 1).hasRemaining()) {
                    blocks.add(unused());
                }
                java.nio.ByteBuffer last = block(blocks.size() - 1);
                java.nio.ByteBuffer piece = (java.nio.ByteBuffer) source.duplicate();
                piece.limit(piece.position() + Math.min(last.remaining(), piece.remaining()));
                last.put(piece);
                source.position(piece.position());
            }
            return all;
        }

        /** Adds a block, whose bytes are no longer its writer's. */
        void add(java.nio.ByteBuffer block) {
            size += block.position();
            blocks.add(block);
        }

        /** Returns a buffer for a block. */
        java.nio.ByteBuffer unused() {
            return unused.isEmpty() ? java.nio.ByteBuffer.allocate(BUFFER_BYTES) : (java.nio.ByteBuffer) unused.remove(unused.size() - 1);
        }

        private java.nio.ByteBuffer block(int number) {
            return (java.nio.ByteBuffer) blocks.get(number);
        }

        boolean isSmall() {
            return size <= KEPT_BYTES;
        }

        private boolean areBlocksSent() {
            return current == blocks.size() - 1 && sent == block(current).position();
        }

        boolean isSent() {
            return isWritten && areBlocksSent();
        }

        void rewind() {
            current = 0;
            sent = 0;
        }

        void writeMore() throws java.io.IOException {
            isWritten = !rows.write();
        }

        /** Sends what the other side takes at once; if that is nothing, waits until it takes something, or something comes. */
        void sendMore() throws java.io.IOException {
            if (areBlocksSent()) {
                forget();
                writeMore();
            } else if (sent == block(current).position()) {
                current++;
                sent = 0;
            }
            java.nio.ByteBuffer bytes = (java.nio.ByteBuffer) block(current).duplicate();
            bytes.flip();
            bytes.position(sent);
            connection.send(bytes);
            sent = bytes.position();
            if (isSent()) {
                connection.endSending();
            }
        }

        /** Drops all blocks; their buffers are used again. */
        private void forget() {
            isKept = false;
            for (int i = 0; i < blocks.size(); i++) {
                if (block(i).capacity() == BUFFER_BYTES) {
                    unused.add(block(i).clear());
                }
            }
            blocks.clear();
            rewind();
        }

        public boolean isOpen() {
            return true;
        }

        public void close() {
        }
    }

    /** A connection to the store actor's process. */
    private final class Connection implements java.nio.channels.ReadableByteChannel {
        private final java.nio.channels.SocketChannel channel;
        private java.nio.channels.Selector selector;
        private java.nio.channels.SelectionKey key;
        private final java.nio.ByteBuffer received = java.nio.ByteBuffer.allocate(BUFFER_BYTES);
        /** Whether the process has proved who it is: a stranger's, which nobody ends, could have a task wait for ever. */
        private boolean isProved;
        private final long proofUntil = System.nanoTime() + PROOF_S * 1000000000L;
        /** Bytes that were read. */
        long consumed;

        /** Connects to the process that a store actor's file names; see address_of in hand_over.py. */
        Connection(java.nio.file.Path address) throws java.io.IOException {
            channel = java.nio.channels.SocketChannel.open(java.net.StandardProtocolFamily.UNIX);
            received.limit(0);
            boolean isMade = false;
            try {
                String[] facts = factsOf(address).split(" ");
                if (facts.length < 3 || !facts[1].equals(Integer.toString(FORMAT))) {
                    throw new IllegalStateException("the fleet was started by another release of Statefleet than this query, and the two "
                        + "cannot talk; nothing of this batch was lost; use the release that started it, or stop its queries and run "
                        + "`statefleet stop` with that one, and start the queries with this [socket=`" + address + "`]");
                }
                channel.configureBlocking(false);
                if (!channel.connect(java.net.UnixDomainSocketAddress.of(address + "." + facts[0]))) {
                    throw new java.net.ConnectException("too many connections wait to be taken");
                }
                selector = java.nio.channels.Selector.open();
                key = channel.register(selector, 0);
                checkProof(java.util.Base64.getDecoder().decode(facts[2]), address);
                isMade = true;
            } finally {
                if (!isMade) {
                    close();
                }
            }
        }

        /** Raises an error unless the process proves that it has the secret. */
        private void checkProof(byte[] secret, java.nio.file.Path address) throws java.io.IOException {
            byte[] challenge = new byte[PROOF_BYTES];
            new java.security.SecureRandom().nextBytes(challenge);
            java.nio.ByteBuffer sent = java.nio.ByteBuffer.wrap(challenge);
            while (sent.hasRemaining()) {
                send(sent);
            }
            java.nio.ByteBuffer proof = java.nio.ByteBuffer.allocate(PROOF_BYTES);
            fill(proof);
            try {
                javax.crypto.Mac code = javax.crypto.Mac.getInstance("HmacSHA256");
                code.init(new javax.crypto.spec.SecretKeySpec(secret, "HmacSHA256"));
                if (!java.security.MessageDigest.isEqual(code.doFinal(challenge), proof.array())) {
                    throw new IllegalStateException("the process that answers in the place of this node's store actor is another one; nothing "
                        + "was sent to it, and nothing of this batch was lost; see who owns the socket, then restart the query [socket=`"
                        + address + "`]");
                }
                isProved = true;
            } catch (java.security.GeneralSecurityException error) {
                throw new IllegalStateException(error);
            }
        }

        /** Has the other side see that nothing follows. */
        void endSending() throws java.io.IOException {
            channel.shutdownOutput();
        }

        /** Sends what the other side takes at once; if that is nothing, waits until it takes something, or something comes. */
        void send(java.nio.ByteBuffer bytes) throws java.io.IOException {
            // Java copies what it writes, and keeps the memory.
            bytes.limit(Math.min(bytes.limit(), bytes.position() + BUFFER_BYTES));
            if (!bytes.hasRemaining()) {
                return;
            }
            int size = 0;
            try {
                size = channel.write(bytes);
            } catch (java.nio.channels.ClosedChannelException error) {
                throw error;
            } catch (java.io.IOException error) {
                // It may have said why it did not want all.
                if (!hasArrived()) {
                    throw new Lost("was lost in the middle of a batch", error);
                }
            }
            if (size == 0) {
                await(java.nio.channels.SelectionKey.OP_WRITE | java.nio.channels.SelectionKey.OP_READ);
            }
        }

        /** Whether something came. */
        boolean hasArrived() throws java.io.IOException {
            if (!received.hasRemaining()) {
                received.clear();
                int size = receivedNow(received);
                received.flip();
                if (size < 0) {
                    throw new Lost("was lost in the middle of a batch", null);
                }
            }
            return received.hasRemaining();
        }

        /** Returns what follows in the answer: rows or DONE. */
        int next() throws java.io.IOException {
            java.nio.ByteBuffer one = java.nio.ByteBuffer.allocate(1);
            read(one);
            int next = one.get(0);
            if (next != FAILED) {
                return next;
            }
            java.io.ByteArrayOutputStream text = new java.io.ByteArrayOutputStream();
            try {
                do {
                    text.write(received.array(), received.position(), received.remaining());
                    received.clear();
                    received.limit(Math.max(0, receive(received)));
                    received.position(0);
                } while (received.hasRemaining());
            } catch (Lost cut) {
                // How a connection ends that the other side did not read to its end.
            }
            throw new IllegalStateException(text.toString("UTF-8"));
        }

        /** Reads some bytes. An answer has an end of its own, so the end of the connection is a loss. */
        public int read(java.nio.ByteBuffer target) throws java.io.IOException {
            int wanted = target.remaining();
            if (!received.hasRemaining()) {
                boolean isLarge = wanted >= BUFFER_BYTES;
                java.nio.ByteBuffer into = isLarge ? target : received;
                received.clear();
                int size = receive(into);
                if (size < 0) {
                    received.limit(0);
                    throw new Lost("was lost in the middle of a batch", null);
                }
                if (isLarge) {
                    received.limit(0);
                    consumed += size;
                    return size;
                }
                received.flip();
            }
            int size = Math.min(wanted, received.remaining());
            target.put(received.array(), received.position(), size);
            received.position(received.position() + size);
            consumed += size;
            return size;
        }

        void fill(java.nio.ByteBuffer target) throws java.io.IOException {
            while (target.hasRemaining()) {
                read(target);
            }
        }

        private int receive(java.nio.ByteBuffer target) throws java.io.IOException {
            int size = receivedNow(target);
            while (size == 0) {
                await(java.nio.channels.SelectionKey.OP_READ);
                size = receivedNow(target);
            }
            return size;
        }

        /** Receives what is there; returns its size, or -1 at the end of the connection. */
        private int receivedNow(java.nio.ByteBuffer target) throws java.io.IOException {
            try {
                return channel.read(target);
            } catch (java.nio.channels.ClosedChannelException error) {
                throw error;
            } catch (java.io.IOException error) {
                throw new Lost("was lost in the middle of a batch", error);
            }
        }

        /** Whether the other side sends nothing more. */
        boolean hasEnded() throws java.io.IOException {
            received.compact();
            boolean hasEnded = received.position() == 0 && receive(received) < 0;
            received.flip();
            return hasEnded;
        }

        /** Waits until something can be sent or received. */
        void await(int operation) throws java.io.IOException {
            key.interestOps(operation);
            // It also looks whether the task was cancelled.
            do {
                if (!isProved && System.nanoTime() > proofUntil) {
                    throw new Lost("did not say who it is in " + PROOF_S + " s", null);
                }
            } while (!isReady());
        }

        /** Waits for a second at most; returns whether something happened. */
        private boolean isReady() throws java.io.IOException {
            selector.selectedKeys().clear();
            boolean isReady = selector.select(LOOK_MS) > 0;
            context.killTaskIfInterrupted();
            if (Thread.currentThread().isInterrupted()) {
                throw new java.io.InterruptedIOException();
            }
            return isReady;
        }

        public boolean isOpen() {
            return channel.isOpen();
        }

        public void close() throws java.io.IOException {
            channel.close();
            if (selector != null) {
                selector.close();
            }
        }
    }
}
