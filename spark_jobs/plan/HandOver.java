/*
 * The reduce side of an operator without a Python worker: a task hands the rows of its shards over to the store actor of its node, and gets
 * the rows that they emit (store_actors/hand_over.py is the other side).
 *
 * The body of a class as Spark's own code generation writes them: executors get this text, and compile it as they compile the stages of a
 * query. Janino has neither lambdas nor usable generics, nor static methods of interfaces.
 *
 * A task waits as long as the store actor's process answers pings; one that hangs (stopped, deadlocked) is ended, and Ray starts it again.
 * What a task has sent is kept while it is small, and sent again to a store actor that was lost before it answered.
 */
public Object generate(Object[] references) {
    return new HandOver(references);
}

final class HandOver extends org.apache.spark.sql.execution.BufferedRowIterator {
    /** What follows in an answer (store_actors/hand_over.py). */
    private static final int ROWS = 0;
    private static final int DONE = 1;
    private static final int FAILED = 2;
    private static final int UNSAFE_ROWS = 3;
    /** Rows and bytes of a record batch at most; the last row may exceed the bytes. */
    private static final int MOST_ROWS = 1 << 16;
    private static final long MOST_BYTES = 16L << 20;
    private static final int BUFFER_BYTES = 1 << 18;
    /** Where the bytes of an array begin. */
    private static final long ARRAY = org.apache.spark.unsafe.Platform.BYTE_ARRAY_OFFSET;
    /** Rows of more bytes are copied by a call. */
    private static final int SMALL_ROW = 64;
    /** Bytes of a request at most that is sent again. */
    private static final int KEPT_BYTES = 1 << 22;
    /** How long a task waits for a store actor that is started again, as a Python worker does. */
    private static final long DEADLINE_S = 120L;
    private static final long PAUSE_MS = 100L;
    /** Pauses after which a store actor that is not there is no longer just starting. */
    private static final int LATE = 50;
    /** A task looks so often whether it was cancelled, if nothing interrupts it. */
    private static final long LOOK_MS = 1000L;

    private final String sockets;
    private final byte[] function;
    private final String batch;
    private final int[][] shards;
    private final int[] routes;
    private final org.apache.spark.sql.types.StructType inputType;
    private final org.apache.spark.sql.types.StructType outputType;
    private final String timeZone;

    private scala.collection.Iterator input;
    /** The row that is given out next. */
    private InternalRow next;
    /** Rows in Spark's own format (store_actors/unsafe_rows.py): a block of them, and where the next one begins. */
    private byte[] block;
    private int blockEnd;
    private int position;
    private UnsafeRow unsafeRow;
    /** The size of a row without strings; 0 if each has one of its own. */
    private int rowBytes;
    /** Rows as Arrow has them. */
    private scala.collection.Iterator output;
    private org.apache.spark.sql.catalyst.expressions.UnsafeProjection projection;
    private org.apache.arrow.vector.ipc.ArrowStreamReader reader;
    private Connection connection;
    private org.apache.arrow.memory.BufferAllocator allocator;
    private TaskContext context;

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
        if (connection == null) {
            int answer = answered();
            if (answer == UNSAFE_ROWS) {
                unsafeRow = new UnsafeRow(outputType.length());
                rowBytes = hasTexts(outputType)
                    ? 0 : UnsafeRow.calculateBitSetWidthInBytes(outputType.length()) + 8 * outputType.length();
            } else if (answer == ROWS) {
                reader = new org.apache.arrow.vector.ipc.ArrowStreamReader(connection, allocator);
                projection = org.apache.spark.sql.catalyst.expressions.UnsafeProjection.create(outputType);
            }
        }
        return unsafeRow != null ? readUnsafe() : readArrow();
    }

    private InternalRow readUnsafe() throws java.io.IOException {
        if (position == blockEnd && !readBlock()) {
            // An error ends the rows, too.
            connection.next();
            unsafeRow = null;
            return null;
        }
        int size = rowBytes;
        if (size == 0) {
            size = (int) org.apache.spark.unsafe.Platform.getLong(block, ARRAY + position);
            position += 8;
        }
        unsafeRow.pointTo(block, ARRAY + position, size);
        position += size;
        return unsafeRow;
    }

    private boolean readBlock() throws java.io.IOException {
        java.nio.ByteBuffer length = java.nio.ByteBuffer.allocate(4);
        connection.fill(length);
        blockEnd = length.getInt(0);
        position = 0;
        if (block == null || block.length < blockEnd) {
            block = new byte[blockEnd];
        }
        connection.fill(java.nio.ByteBuffer.wrap(block, 0, blockEnd));
        return blockEnd > 0;
    }

    private InternalRow readArrow() throws java.io.IOException {
        while (reader != null) {
            if (output != null && output.hasNext()) {
                return projection.apply((InternalRow) output.next());
            }
            if (reader.loadNextBatch()) {
                output = rows(reader.getVectorSchemaRoot());
            } else {
                // A stream that was cut looks like one that has ended.
                connection.next();
                reader.close(false);
                reader = null;
            }
        }
        return null;
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

    private scala.collection.Iterator rows(org.apache.arrow.vector.VectorSchemaRoot root) {
        java.util.List vectors = root.getFieldVectors();
        org.apache.spark.sql.vectorized.ColumnVector[] columns = new org.apache.spark.sql.vectorized.ColumnVector[vectors.size()];
        for (int i = 0; i < columns.length; i++) {
            columns[i] = new org.apache.spark.sql.vectorized.ArrowColumnVector((org.apache.arrow.vector.ValueVector) vectors.get(i));
        }
        return scala.collection.JavaConverters.asScalaIterator(
            new org.apache.spark.sql.vectorized.ColumnarBatch(columns, root.getRowCount()).rowIterator());
    }

    /** Sends everything, again if the store actor is lost and a request is small, and returns what follows in the answer: rows or DONE. */
    private int answered() throws java.io.IOException {
        Request request = new Request();
        writeRequest(request);
        long until = 0L;
        while (true) {
            try {
                request.send();
                return connection.next();
            } catch (Lost error) {
                until = until == 0L ? deadline() : until;
                if (!request.isKept || System.nanoTime() > until) {
                    throw error;
                }
                connection.close();
                connection = null;
            }
            pause();
        }
    }

    private void writeRequest(Request request) throws java.io.IOException {
        int[] ids = shards[partitionIndex];
        String executor = host() + ":" + java.lang.management.ManagementFactory.getRuntimeMXBean().getPid();
        byte[] text = ("{\"batch\": " + batch + ", \"attempt\": " + context.taskAttemptId() + ", \"executor\": \"" + executor
            + "\", \"function_bytes\": " + function.length + ", \"unsafe_rows\": " + isUnsafe(inputType) + ", \"unsafe_results\": "
            + isUnsafe(outputType) + ", \"shards\": " + java.util.Arrays.toString(ids) + "}")
            .getBytes(java.nio.charset.StandardCharsets.UTF_8);
        request.write(java.nio.ByteBuffer.allocate(4).putInt(0, text.length));
        request.write(java.nio.ByteBuffer.wrap(text));
        request.write(java.nio.ByteBuffer.wrap(function));
        long[] counts = new long[ids.length];
        writeRows(request, ids, counts);
        java.nio.ByteBuffer numbers = java.nio.ByteBuffer.allocate(8 * counts.length);
        numbers.asLongBuffer().put(counts);
        request.write(numbers);
    }

    private static String host() {
        return org.apache.spark.SparkEnv.get().blockManager().blockManagerId().host();
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

    /** Connects to the store actor of this node, which may still be on its way back. */
    private Connection connected() throws java.io.IOException {
        java.util.zip.CRC32 checksum = new java.util.zip.CRC32();
        checksum.update(host().getBytes(java.nio.charset.StandardCharsets.UTF_8));
        String address = sockets + String.format("%08x", new Object[] {Long.valueOf(checksum.getValue())});
        long until = deadline();
        for (int tries = 0; true; tries++) {
            try {
                return new Connection(address);
            } catch (java.nio.channels.ClosedByInterruptException error) {
                throw error;
            } catch (java.io.IOException error) {
                if (tries == LATE) {
                    checkFolder(new java.io.File(address).getParentFile());
                }
                if (System.nanoTime() > until) {
                    throw new java.io.IOException("the store actor of this node did not come back in " + DEADLINE_S + " s; committed versions "
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
            throw new java.io.IOException("nothing can be written in Ray's folder of this session, where Spark's tasks find the store actor of "
                + "their node: " + error.getMessage() + "; nothing of this batch was lost; make room there, or set "
                + "spark.statefleet.handOver to false, then restart the query [folder=`" + folder + "`]", error);
        } finally {
            if (written != null) {
                written.delete();
            }
        }
    }

    /** Writes the rows, and counts those of each shard. */
    private void writeRows(Request request, int[] ids, long[] counts) throws java.io.IOException {
        org.apache.arrow.vector.VectorSchemaRoot root = org.apache.arrow.vector.VectorSchemaRoot.create(
            org.apache.spark.sql.util.ArrowUtils.toArrowSchema(inputType, timeZone, true, false), allocator);
        try {
            org.apache.arrow.vector.ipc.ArrowStreamWriter stream = new org.apache.arrow.vector.ipc.ArrowStreamWriter(root, null, request);
            stream.start();
            Shard shard = new Shard(ids, counts);
            if (isUnsafe(inputType)) {
                stream.end();
                writeUnsafe(request, shard);
            } else {
                writeArrow(root, stream, shard);
                stream.end();
            }
        } finally {
            root.close();
        }
    }

    private void writeArrow(
        org.apache.arrow.vector.VectorSchemaRoot root, org.apache.arrow.vector.ipc.ArrowStreamWriter stream, Shard shard) throws java.io.IOException {
        org.apache.spark.sql.execution.arrow.ArrowWriter rows = org.apache.spark.sql.execution.arrow.ArrowWriter.create(root);
        int pending = 0;
        long bytes = 0;
        while (input.hasNext()) {
            UnsafeRow row = (UnsafeRow) input.next();
            shard.count(row);
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
    }

    /** Writes the rows as they are (store_actors/unsafe_rows.py reads them). */
    private void writeUnsafe(Request request, Shard shard) throws java.io.IOException {
        boolean hasSizes = hasTexts(inputType);
        byte[] rows = new byte[BUFFER_BYTES];
        int used = 0;
        while (input.hasNext()) {
            UnsafeRow row = (UnsafeRow) input.next();
            shard.count(row);
            int size = row.getSizeInBytes();
            if (size > rows.length - used - 8) {
                writeBlock(request, rows, used);
                used = 0;
                if (size > rows.length - 8) {
                    rows = new byte[size + 8];
                }
            }
            if (hasSizes) {
                org.apache.spark.unsafe.Platform.putLong(rows, ARRAY + used, size);
                used += 8;
            }
            copy(row, size, rows, used);
            used += size;
        }
        writeBlock(request, rows, used);
        if (used > 0) {
            writeBlock(request, rows, 0);
        }
    }

    private static void writeBlock(Request request, byte[] rows, int used) throws java.io.IOException {
        request.write(java.nio.ByteBuffer.allocate(4).putInt(0, used));
        request.write(java.nio.ByteBuffer.wrap(rows, 0, used));
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

    /** Counts the rows of each shard of a task, which come one shard after another. The route is the last column. */
    private final class Shard {
        private final int[] ids;
        private final long[] counts;
        private final int routeColumn = inputType.length();
        private int number = -1;
        private int route;

        Shard(int[] ids, long[] counts) {
            this.ids = ids;
            this.counts = counts;
        }

        void count(UnsafeRow row) {
            int rowRoute = row.getInt(routeColumn);
            while (number < 0 || rowRoute != route) {
                number++;
                route = routes[ids[number]];
            }
            counts[number]++;
        }
    }

    /** The store actor's process was lost; what it committed is safe. */
    private static final class Lost extends java.io.IOException {
        Lost(String what, Throwable cause) {
            super("the store actor of this node " + what + "; what it committed is safe, and the next attempt of this task goes on from there",
                cause);
        }
    }

    /** What a task sends: kept to its end while it is small. */
    private final class Request implements java.nio.channels.WritableByteChannel {
        private java.nio.ByteBuffer bytes = java.nio.ByteBuffer.allocate(BUFFER_BYTES);
        boolean isKept = true;

        public int write(java.nio.ByteBuffer source) throws java.io.IOException {
            int size = source.remaining();
            while (source.hasRemaining()) {
                if (!bytes.hasRemaining()) {
                    makeRoom();
                }
                int end = source.limit();
                source.limit(Math.min(end, source.position() + bytes.remaining()));
                bytes.put(source);
                source.limit(end);
            }
            return size;
        }

        private void makeRoom() throws java.io.IOException {
            if (bytes.capacity() < KEPT_BYTES) {
                bytes.flip();
                bytes = java.nio.ByteBuffer.allocate(4 * bytes.capacity()).put(bytes);
            } else {
                send();
                isKept = false;
                bytes.clear();
            }
        }

        /** Sends what is here. */
        void send() throws java.io.IOException {
            if (connection == null) {
                connection = connected();
            }
            java.nio.ByteBuffer all = (java.nio.ByteBuffer) bytes.duplicate();
            all.flip();
            connection.send(all);
        }

        public boolean isOpen() {
            return true;
        }

        public void close() {
        }
    }

    /** A connection to the store actor's process. */
    private final class Connection implements java.nio.channels.ReadableByteChannel {
        private final String address;
        /** The store actor's process as it was when this was made; see address_of in hand_over.py. */
        private final String process;
        private final long pid;
        private final String start;
        private final int hungAfterS;
        private final java.nio.channels.SocketChannel channel;
        private java.nio.channels.Selector selector;
        private java.nio.channels.SelectionKey key;
        private final java.nio.ByteBuffer received = java.nio.ByteBuffer.allocate(BUFFER_BYTES);

        Connection(String address) throws java.io.IOException {
            this.address = address;
            process = processNow();
            String[] facts = process.split(" ");
            pid = Long.parseLong(facts[0]);
            start = facts[1];
            hungAfterS = Integer.parseInt(facts[2]);
            received.limit(0);
            channel = opened();
            try {
                selector = java.nio.channels.Selector.open();
                key = channel.register(selector, 0);
            } catch (java.io.IOException error) {
                close();
                throw error;
            }
        }

        private String processNow() throws java.io.IOException {
            return java.nio.file.Files.readString(java.nio.file.Paths.get(address, new String[0]));
        }

        private java.nio.channels.SocketChannel opened() throws java.io.IOException {
            java.nio.channels.SocketChannel made = java.nio.channels.SocketChannel.open(java.net.StandardProtocolFamily.UNIX);
            try {
                made.configureBlocking(false);
                if (made.connect(java.net.UnixDomainSocketAddress.of(address + "." + pid))) {
                    return made;
                }
            } catch (java.io.IOException error) {
                made.close();
                throw error;
            }
            made.close();
            throw new java.net.ConnectException("too many connections wait to be taken");
        }

        void send(java.nio.ByteBuffer bytes) throws java.io.IOException {
            int end = bytes.limit();
            while (bytes.position() < end) {
                // Java copies what it writes, and keeps the memory.
                bytes.limit(Math.min(end, bytes.position() + BUFFER_BYTES));
                int sent = 0;
                try {
                    sent = channel.write(bytes);
                } catch (java.nio.channels.ClosedChannelException error) {
                    throw error;
                } catch (java.io.IOException error) {
                    // It may have said why it did not want all.
                    next();
                    throw new Lost("was lost in the middle of a batch", error);
                }
                if (sent == 0) {
                    await(java.nio.channels.SelectionKey.OP_WRITE);
                }
            }
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
                    return size;
                }
                received.flip();
            }
            int size = Math.min(wanted, received.remaining());
            target.put(received.array(), received.position(), size);
            received.position(received.position() + size);
            return size;
        }

        void fill(java.nio.ByteBuffer target) throws java.io.IOException {
            while (target.hasRemaining()) {
                read(target);
            }
        }

        private int receive(java.nio.ByteBuffer target) throws java.io.IOException {
            while (true) {
                int size = 0;
                try {
                    size = channel.read(target);
                } catch (java.nio.channels.ClosedChannelException error) {
                    throw error;
                } catch (java.io.IOException error) {
                    throw new Lost("was lost in the middle of a batch", error);
                }
                if (size != 0) {
                    return size;
                }
                await(java.nio.channels.SelectionKey.OP_READ);
            }
        }

        /** Waits until something can be sent or received, as long as the process answers pings. */
        private void await(int operation) throws java.io.IOException {
            key.interestOps(operation);
            for (int quietS = 1; !isReady(); quietS++) {
                if (4 * quietS >= hungAfterS) {
                    lookAfter();
                    quietS = 0;
                }
            }
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

        /** Pings the process, and ends it if nothing comes. */
        private void lookAfter() throws java.io.IOException {
            java.nio.channels.SocketChannel ping = null;
            try {
                if (!process.equals(processNow())) {
                    throw new Lost("was replaced in the middle of a batch", null);
                }
                ping = opened();
                // A request of no bytes.
                ping.write(java.nio.ByteBuffer.allocate(4));
            } catch (Lost error) {
                throw error;
            } catch (java.nio.channels.ClosedByInterruptException error) {
                throw error;
            } catch (java.io.IOException error) {
                // It could not be asked: it has just ended, which the connection tells, or this process has too many files open.
                if (ping != null) {
                    ping.close();
                }
                return;
            }
            try {
                ping.register(selector, java.nio.channels.SelectionKey.OP_READ);
                // Seconds of waiting, not of a clock, which goes on while the machine or this process is halted.
                for (int waitedS = 0; waitedS < hungAfterS; waitedS++) {
                    if (isReady()) {
                        return;
                    }
                }
            } finally {
                ping.close();
                selector.selectNow();
            }
            Lost hung = new Lost("did not answer a ping for " + hungAfterS + " s in the middle of a batch; "
                + (isEnded() ? "it was ended, and Ray starts it again" : "it could not be ended: end process " + pid), null);
            org.slf4j.LoggerFactory.getLogger("statefleet").warn(hung.getMessage());
            throw hung;
        }

        /** Ends the process, which another task may have ended already; its number may also be that of another one. */
        private boolean isEnded() {
            try {
                Object found = java.lang.ProcessHandle.class.getMethod("of", new Class[] {Long.TYPE})
                    .invoke(null, new Object[] {Long.valueOf(pid)});
                return !((java.util.Optional) found).isPresent()
                    || start.equals(startNow()) && ((java.lang.ProcessHandle) ((java.util.Optional) found).get()).destroyForcibly();
            } catch (Exception error) {
                return false;
            }
        }

        private String startNow() throws java.io.IOException {
            java.nio.file.Path facts = java.nio.file.Paths.get("/proc/" + pid + "/stat", new String[0]);
            if (!java.nio.file.Files.exists(facts, new java.nio.file.LinkOption[0])) {
                return "-";
            }
            String text = new String(java.nio.file.Files.readAllBytes(facts), java.nio.charset.StandardCharsets.ISO_8859_1);
            return text.substring(text.lastIndexOf(')') + 2).split(" ")[19];
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
