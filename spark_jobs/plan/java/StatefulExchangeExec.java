package statefleet.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.Partitioner;
import org.apache.spark.rdd.RDD;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.catalyst.plans.physical.Partitioning;
import org.apache.spark.sql.execution.CoalescedPartitionSpec;
import org.apache.spark.sql.execution.ShufflePartitionSpec;
import org.apache.spark.sql.execution.ShuffledRowRDD;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.exchange.Exchange;
import org.apache.spark.sql.execution.exchange.ReusedExchangeExec;
import org.apache.spark.sql.execution.exchange.ShuffleExchangeExec;
import org.apache.spark.sql.execution.exchange.ShuffleOrigin;
import org.apache.spark.sql.execution.streaming.IncrementalExecution;
import org.apache.spark.sql.execution.streaming.OneTimeTrigger$;
import org.apache.spark.sql.execution.streaming.StatefulOperatorStateInfo;
import org.apache.spark.sql.execution.streaming.StreamExecution;
import org.apache.spark.sql.streaming.StateOperatorProgress;
import org.apache.spark.status.api.v1.ExecutorSummary;
import org.apache.spark.util.CollectionAccumulator;
import scala.Function1;
import scala.Option;
import scala.Some;
import scala.collection.Seq;
import scala.reflect.ClassTag$;
import scala.reflect.ClassTag;

/**
 * The exchange in front of an operator.
 *
 * Where a user's function gets the rows, in a Python worker, the last row of each shard has the batch: query, run, batch and shard, and
 * Spark's watermarks of this operator and batch. It shows that the rows are whole: Spark ends what it sends a Python worker alike where its
 * task was killed, or could not fetch the next rows.
 *
 * Spark runs batches without data for the operator, and its progress has the operator's stats. Once Spark is done with a batch, and before
 * its commit log has the batch, shards that no task of the batch ran for (a sink that read only some rows) are run here. Once the commit log
 * has the batch, it is reported to the driver's Python, and readers see it.
 */
public class StatefulExchangeExec extends VersionedExchange {
    private transient IncrementalExecution execution;
    private transient JsonNode facts;
    private transient Map batchStats;
    private transient boolean settled;
    /** Whether the batch was reported as finished, and whether the states' logs have it: without data Spark asks repeatedly. */
    private transient boolean reported;
    private transient boolean written;
    private transient int[] selected;
    /** The batch as tasks that hand rows over tell it to the store actors, and the shards of each task. */
    private transient String batch;
    private transient int[][] shardsOfTasks;
    /** Pairs of a shard and the number of rows that a task sent it, also of tasks that did so again. */
    private transient CollectionAccumulator sentRows;
    private transient RDD mapTasks;
    private transient long evictMs;

    public StatefulExchangeExec(Partitioning partitioning, SparkPlan child, ShuffleOrigin origin, Option advisory) {
        super(partitioning, child, origin, advisory);
    }

    /** Returns the facts of the route column; null in a canonical form, which is compared and never run. */
    JsonNode facts() {
        if (facts == null) {
            // Not from the partitioning, which for one shard has no column.
            Seq columns = output();
            for (int i = 0; i < columns.size() && facts == null; i++) {
                String name = ((Attribute) columns.apply(i)).name();
                facts = name.startsWith(Route.PREFIX) ? Route.facts(name) : null;
            }
        }
        return facts;
    }

    /** Returns what the tasks of the operator send of it. */
    byte[] task() {
        Seq columns = output();
        return Route.task(((Attribute) columns.apply(columns.size() - 1)).name()).getBytes(StandardCharsets.UTF_8);
    }

    /** Finds the batch that this node is planned for. Called not only at planning: copies that Spark makes of a node lack it. */
    void bindToBatch() {
        if (execution == null) {
            execution = CurrentQuery.execution(session().sparkContext(), session());
        }
    }

    /** Returns the partition id of shard 0 in this batch. */
    private int firstPartition() {
        return Shards.of(execution, facts(), shards()).first;
    }

    public ShuffleExchangeExec withNewChildInternal(SparkPlan child) {
        StatefulExchangeExec copy =
            new StatefulExchangeExec(outputPartitioning(), child, shuffleOrigin(), advisoryPartitionSize());
        copy.execution = execution;
        return copy;
    }

    protected Object writeReplace() {
        return new ShuffleExchangeExec(outputPartitioning(), child(), shuffleOrigin(), advisoryPartitionSize());
    }

    // -- a stateful operator, as Spark calls it ---------------------------------------------------------------------

    /** The operator id is made of the state's name: the same in every batch, and far from the ids that Spark gives to its operators. */
    public Option stateInfo() {
        bindToBatch();
        if (facts() == null || execution == null) {
            return Option.apply(null);
        }
        long id = 1000000L + (facts().get("state").asText().hashCode() & 0x3fffffff);
        return new Some(operatorInfo(execution.checkpointLocation(), execution.runId(), id, execution.currentBatchId(), shards()));
    }

    /** Returns the URI of the state's folder. */
    private String stateId() {
        return Route.stateId(facts());
    }

    private int shards() {
        // Not numPartitions(), which would build the shuffle.
        return outputPartitioning().numPartitions();
    }

    private long operatorId() {
        return ((StatefulOperatorStateInfo) stateInfo().get()).operatorId();
    }

    /** Called after the commit log has this batch, when Spark plans the next one. */
    public boolean shouldRunAnotherBatch(long newWatermarkMs) {
        boolean again = needsAnotherBatch(newWatermarkMs);
        // A caller that waits for the query to process all its input returns after this. If a batch follows, its start reports this one.
        if (!again && !written && execution != null && !hasNewData()) {
            FinishedBatches.report(execution, true);
            written = true;
        }
        return again;
    }

    private boolean hasNewData() {
        StreamExecution query = CurrentQuery.query(sparkContext(), session());
        return query == null || !query.availableOffsets().equals(query.committedOffsets());
    }

    private boolean needsAnotherBatch(long newWatermarkMs) {
        // In complete mode no group ends.
        String when = "complete".equals(Mode.of(facts(), execution)) ? "never" : facts().get("again").asText();
        if (when.equals("watermark")) {
            return newWatermarkMs > evictMs;
        }
        if (when.equals("due") && batchStats != null && batchStats.get("due_ms") != null) {
            return ((Number) batchStats.get("due_ms")).longValue() < System.currentTimeMillis();
        }
        return false;
    }

    public Option produceOutputWatermark(long inputMs) {
        // Below zero at first, as of Spark's own joins: the operators that follow have to see it move.
        return new Some(Long.valueOf(inputMs - facts().get("lag_ms").asLong()));
    }

    public String shortName() {
        return facts().get("name").asText();
    }

    /** Called at the end of each trigger: if the trigger ran a batch, once the commit log has it. */
    public StateOperatorProgress getProgress() {
        if (!reported && execution != null && isCalledBy("finishTrigger", PROGRESS)) {
            FinishedBatches.report(execution, isLastCall());
            reported = true;
        }
        HashMap custom = new HashMap();
        Map stats = batchStats == null ? new HashMap() : batchStats;
        Map others = (Map) stats.get("custom");
        if (others != null) {
            for (Object key : others.keySet()) {
                custom.put(key, Long.valueOf(((Number) others.get(key)).longValue()));
            }
        }
        return new StateOperatorProgress(
            shortName(), count(stats, "rows_total"), count(stats, "rows_updated"), count(stats, "updates_ms"),
            count(stats, "rows_removed"), count(stats, "removals_ms"), count(stats, "commit_ms"), count(stats, "memory_bytes"),
            count(stats, "rows_late"), (long) shards(), count(stats, "instances"), custom);
    }

    /** Whether this is Spark's last call for the batch before a caller that waits for the query returns. */
    private boolean isLastCall() {
        StreamExecution query = CurrentQuery.query(sparkContext(), session());
        return query != null && query.trigger() instanceof OneTimeTrigger$
            || !execution.sparkSession().sessionState().conf().streamingNoDataMicroBatchesEnabled();
    }

    private static long count(Map stats, String name) {
        Object value = stats.get(name);
        return value == null ? 0L : ((Number) value).longValue();
    }

    // -- running ----------------------------------------------------------------------------------------------------

    String batch() {
        return batch;
    }

    int[][] shardsOfTasks() {
        return shardsOfTasks;
    }

    /** Returns the number of the store actor, on its node, that has the shards of each task. */
    int[] actorsOfTasks() {
        int[] actors = new int[shardsOfTasks.length];
        for (int i = 0; i < actors.length; i++) {
            actors[i] = ShardPlaces.actor(stateId(), shardsOfTasks[i][0]);
        }
        return actors;
    }

    CollectionAccumulator sentRows() {
        if (sentRows == null) {
            sentRows = sparkContext().collectionAccumulator();
        }
        return sentRows;
    }

    int[] routes() {
        return Shards.routes(shards());
    }

    /** Returns the map tasks; of a small batch there are no more than cores, as each costs more than its rows. */
    public RDD inputRDD() {
        if (mapTasks == null) {
            mapTasks = super.inputRDD();
            // Tasks of an operator below wait for their commits, side by side.
            if (LastBatch.isSmall(stateId()) && !hasExchange(child())) {
                int cores = 0;
                for (JsonNode ofHost : executors().get("cores")) {
                    cores += ofHost.asInt();
                }
                if (cores > 0 && cores < mapTasks.getNumPartitions()) {
                    mapTasks = mapTasks.coalesce(cores, false, (Option) Option.apply(null), null);
                }
            }
        }
        return mapTasks;
    }

    private static boolean hasExchange(SparkPlan plan) {
        boolean found = plan instanceof Exchange || plan instanceof ReusedExchangeExec;
        Seq children = plan.children();
        for (int i = 0; i < children.size() && !found; i++) {
            found = hasExchange((SparkPlan) children.apply(i));
        }
        return found;
    }

    public RDD doExecute() {
        bindToBatch();
        if (execution == null) {
            throw new IllegalStateException(
                "a stateful DataFrame of the fleet runs only inside a streaming query; start it with writeStream [state=`"
                    + facts().get("state").asText() + "`]");
        }
        evictMs = execution.watermarkPropagator().getInputWatermarkForEviction(execution.currentBatchId(), operatorId());
        RDD shuffled;
        int[] chosen = selected;
        if (chosen == null) {
            shuffled = super.doExecute();
            chosen = new int[shards()];
            for (int i = 0; i < chosen.length; i++) {
                chosen[i] = i;
            }
        } else {
            ShufflePartitionSpec[] specs = new ShufflePartitionSpec[chosen.length];
            for (int i = 0; i < chosen.length; i++) {
                specs[i] = new CoalescedPartitionSpec(chosen[i], chosen[i] + 1, (Option) Option.apply(null));
            }
            shuffled = new ShuffledRowRDD(shuffleDependency(), readMetrics(), specs);
        }
        ObjectNode message = Driver.batchFields(execution);
        message.put("late_ms", execution.watermarkPropagator().getInputWatermarkForLateEvents(execution.currentBatchId(), operatorId()));
        message.put("evict_ms", evictMs);
        message.put("first_partition", firstPartition());
        message.put("output_mode", Mode.of(facts(), execution));
        message.put("is_temporary", CurrentQuery.isTemporary(CurrentQuery.query(sparkContext(), session())));
        batch = message.toString();
        ClassTag tag = ClassTag$.MODULE$.apply(InternalRow.class);
        ArrayList parts = new ArrayList();
        parts.add(shuffled);
        // Tasks that hand rows over know the batch and their shards, and when they have sent all.
        if (isOfFunction()) {
            parts.add(new MarkerRDD(sparkContext(), ends(message, chosen), tag, (Partitioner) shuffled.partitioner().get()));
        }
        JsonNode cores = place();
        RDD placed = new PlacedRDD(sparkContext(), Lists.seq(parts), tag, stateId(), chosen);
        if (!facts().get("together").asBoolean()) {
            return placed;
        }
        TaskGroups groups = new TaskGroups(stateId(), chosen, cores, sparkContext());
        shardsOfTasks = groups.shards(chosen);
        return groups.of(placed, tag);
    }

    /** Has the shards placed before the first task of a run, and whenever the executors have changed. Returns cores by host. */
    private JsonNode place() {
        ObjectNode executors = executors();
        String state = stateId();
        // Shards of another layout are placed again.
        String runId = execution.runId().toString() + "/" + firstPartition();
        String present = executors.toString();
        if (!ShardPlaces.arePlaced(state, runId, present)) {
            ObjectNode message = request("place");
            message.set("executors", executors);
            ShardPlaces.put(state, runId, present, (List) Driver.ask(message).get("places"));
        }
        return executors.get("cores");
    }

    /** Returns how many executors there are ("present") and were asked for ("asked", 0 if not configured), and their cores by host ("cores"). */
    private ObjectNode executors() {
        java.util.TreeMap cores = new java.util.TreeMap();
        int present = 0;
        Seq all = sparkContext().statusStore().executorList(true);
        for (int i = 0; i < all.size(); i++) {
            ExecutorSummary executor = (ExecutorSummary) all.apply(i);
            if (!executor.id().equals("driver")) {
                // An executor that has just joined has no port yet.
                int port = executor.hostPort().lastIndexOf(':');
                String host = port < 0 ? executor.hostPort() : executor.hostPort().substring(0, port);
                Integer before = (Integer) cores.get(host);
                cores.put(host, Integer.valueOf((before == null ? 0 : before.intValue()) + executor.totalCores()));
                present++;
            }
        }
        ObjectNode message = Route.JSON.createObjectNode();
        message.put("present", present);
        message.put("asked", sparkContext().conf().getInt("spark.executor.instances", 0));
        ObjectNode hosts = message.putObject("cores");
        for (Object host : cores.keySet()) {
            hosts.put((String) host, ((Integer) cores.get(host)).intValue());
        }
        return message;
    }

    /** Whether a user's function gets the rows, in a Python worker; otherwise the tasks hand rows over. */
    private boolean isOfFunction() {
        return !facts().get("by_python").isNull();
    }

    /** Returns the last row of each shard: nulls, and the batch in the column before the route. */
    private Seq ends(ObjectNode message, int[] chosen) {
        UnsafeProjection projection = UnsafeProjection.create(schema());
        ArrayList rows = new ArrayList();
        for (int i = 0; i < chosen.length; i++) {
            message.put("shard", chosen[i]);
            Object[] values = new Object[output().size()];
            values[values.length - 2] = message.toString().getBytes(StandardCharsets.UTF_8);
            values[values.length - 1] = Integer.valueOf(0);
            rows.add(projection.apply(new GenericInternalRow(values)).copy());
        }
        return Lists.seq(rows);
    }

    /** Returns a request about this operator and batch, with the batch's shards. */
    private ObjectNode request(String asked) {
        ObjectNode message = Driver.request(execution, facts(), asked);
        message.put("shards", shards());
        message.put("first_partition", firstPartition());
        return message;
    }

    // -- the end of a batch -----------------------------------------------------------------------------------------

    /**
     * Spark walks the plan for the watermark once the sink is done with a batch and before the commit log has it. This is the only moment at
     * which missing shards can still be run, and at which an error still keeps the batch from being committed.
     */
    public void foreach(Function1 each) {
        if (!settled && execution != null && isCalledBy("updateWatermark", ".WatermarkTracker")) {
            settle();
        }
        if (OPERATOR_CHECK != null && isCalledBy(OPERATOR_CHECK, "")) {
            child().foreach(each);
            return;
        }
        super.foreach(each);
    }

    private static boolean isCalledBy(String method, String kind) {
        StackTraceElement[] calls = Thread.currentThread().getStackTrace();
        for (int i = 0; i < calls.length; i++) {
            if (calls[i].getMethodName().equals(method) && calls[i].getClassName().endsWith(kind)) {
                return true;
            }
        }
        return false;
    }

    private void settle() {
        int[] missing = askMissing();
        if (missing.length > 0) {
            run(missing);
            missing = askMissing();
            if (missing.length > 0) {
                throw new IllegalStateException(
                    "shards of a stateful operator did not commit the batch, or nobody counted their rows, though their tasks were run to "
                        + "their end; Spark's commit log does not count the batch, and a restart repeats it [state=`"
                        + facts().get("state").asText() + "`, batch_id=`"
                        + execution.currentBatchId() + "`, shards=`" + Arrays.toString(missing) + "`]");
            }
        }
        settled = true;
    }

    /** Returns the shards that lack the batch, or whose rows no task counted, and keeps the stats of the others for getProgress. */
    private int[] askMissing() {
        ObjectNode message = request("settle");
        if (!isOfFunction()) {
            ObjectNode sent = message.putObject("sent");
            for (Object pair : sentRows().value()) {
                sent.withArray(Long.toString(((long[]) pair)[0])).add(((long[]) pair)[1]);
            }
        }
        batchStats = Driver.ask(message);
        if (batchStats.get("refused") != null) {
            throw new IllegalStateException((String) batchStats.get("refused"));
        }
        ShardPlaces.renew(stateId(), (List) batchStats.get("places"));
        Shards.putNext(stateId(), execution, (Map) batchStats.get("next"));
        long read = ((Number) ((Map) batchStats.get("custom")).get("rowsRead")).longValue();
        LastBatch.put(stateId(), read, count(batchStats, "rows_updated"));
        List missing = (List) batchStats.get("missing");
        int[] shards = new int[missing.size()];
        for (int i = 0; i < shards.length; i++) {
            shards[i] = ((Number) missing.get(i)).intValue();
        }
        return shards;
    }

    /** Runs the operator's tasks for some shards only. */
    private void run(int[] missing) {
        selected = missing;
        try {
            taskAbove(execution.executedPlan(), null).execute().count();
        } finally {
            selected = null;
        }
    }

    /** Returns the nearest node above this that runs Python: the operator's tasks. Null if this is not below `node`. */
    private SparkPlan taskAbove(SparkPlan node, SparkPlan nearest) {
        if (node == this) {
            return nearest;
        }
        SparkPlan above = node instanceof HandOverExec || node.getClass().getSimpleName().endsWith("MapInArrowExec") ? node : nearest;
        Seq children = node.children();
        for (int i = 0; i < children.size(); i++) {
            SparkPlan found = taskAbove((SparkPlan) children.apply(i), above);
            if (found != null) {
                return found;
            }
        }
        return null;
    }
}
