/*
 * The exchange in front of a fleet's operator, as a stateful operator that Spark knows.
 *
 * Compiled when a session is made ready, by the compiler that comes with Spark (Janino), so nothing is built or installed; it runs on the
 * driver only. An executor never sees a class of this file: what is shipped to it is replaced by Spark's own (writeReplace).
 * Janino has neither lambdas nor generics worth the name, and compiles private methods in a way that serialisation does not find, which
 * is why writeReplace is protected and types are raw.
 */
package statefleet.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.Function;
import org.apache.hadoop.fs.Path;
import org.apache.spark.Partition;
import org.apache.spark.Partitioner;
import org.apache.spark.SparkContext;
import org.apache.spark.rdd.CoalescedRDD;
import org.apache.spark.rdd.CoalescedRDDPartition;
import org.apache.spark.rdd.ParallelCollectionRDD;
import org.apache.spark.rdd.PartitionerAwareUnionRDD;
import org.apache.spark.rdd.RDD;
import org.apache.spark.scheduler.TaskScheduler;
import org.apache.spark.scheduler.TaskSchedulerImpl;
import org.apache.spark.sql.ExperimentalMethods;
import org.apache.spark.sql.AnalysisException;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.catalyst.analysis.Analyzer;
import org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker$;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.Alias;
import org.apache.spark.sql.catalyst.expressions.And;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.CurrentBatchTimestamp;
import org.apache.spark.sql.catalyst.expressions.CurrentDate;
import org.apache.spark.sql.catalyst.expressions.CurrentTimestampLike;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.LocalTimestamp;
import org.apache.spark.sql.catalyst.expressions.NamedExpression;
import org.apache.spark.sql.catalyst.expressions.PythonUDF;
import org.apache.spark.sql.catalyst.expressions.SubqueryExpression$;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.catalyst.plans.logical.Aggregate;
import org.apache.spark.sql.catalyst.plans.logical.BaseEvalPython;
import org.apache.spark.sql.catalyst.plans.logical.Deduplicate;
import org.apache.spark.sql.catalyst.plans.logical.EventTimeWatermark;
import org.apache.spark.sql.catalyst.plans.logical.Filter;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.plans.logical.RepartitionByExpression;
import org.apache.spark.sql.catalyst.plans.logical.ReturnAnswer;
import org.apache.spark.sql.catalyst.plans.physical.Partitioning;
import org.apache.spark.sql.catalyst.rules.Rule;
import org.apache.spark.sql.catalyst.streaming.WriteToStreamStatement;
import org.apache.spark.sql.catalyst.trees.TreeNode;
import org.apache.spark.sql.catalyst.trees.TreeNodeTag;
import org.apache.spark.sql.execution.CoalescedPartitionSpec;
import org.apache.spark.sql.execution.ShufflePartitionSpec;
import org.apache.spark.sql.execution.ShuffledRowRDD;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.SparkStrategy;
import org.apache.spark.sql.execution.exchange.REPARTITION_BY_NUM$;
import org.apache.spark.sql.execution.exchange.ShuffleExchangeExec;
import org.apache.spark.sql.execution.exchange.ShuffleOrigin;
import org.apache.spark.sql.execution.streaming.IncrementalExecution;
import org.apache.spark.sql.execution.streaming.OffsetSeqMetadata;
import org.apache.spark.sql.execution.streaming.OneTimeTrigger$;
import org.apache.spark.sql.execution.streaming.StateStoreWriter;
import org.apache.spark.sql.execution.streaming.StatefulOperatorStateInfo;
import org.apache.spark.sql.execution.streaming.StreamExecution;
import org.apache.spark.sql.execution.streaming.StreamMetadata;
import org.apache.spark.sql.execution.streaming.StreamMetadata$;
import org.apache.spark.sql.streaming.OutputMode;
import org.apache.spark.sql.streaming.StateOperatorProgress;
import org.apache.spark.sql.streaming.StreamingQueryListener;
import org.apache.spark.status.api.v1.ExecutorSummary;
import org.apache.spark.unsafe.Platform;
import scala.Function1;
import scala.Option;
import scala.Some;
import scala.collection.JavaConverters;
import scala.collection.Seq;
import scala.reflect.ClassTag;
import scala.reflect.ClassTag$;

/** What Python calls. */
public class Sessions {
    /**
     * Makes a session plan the fleet's exchanges as StatefulExchangeExec; once is enough, twice does no harm.
     *
     * driver: what the driver's Python answers, from JSON to JSON: how many shards an operator has in a batch ("begin"), where they shall
     * be ("place"), and at the end of a batch which shards lack it and what the others did ("settle"). It is told of batches that the commit
     * log has ("finished") and of ended runs ("ended"). When a query is started, it is asked whether the states are the query's ("start").
     */
    public void install(SparkSession session, Function driver) {
        Batch.driver = driver;
        ExperimentalMethods methods = session.experimental();
        if (!holds(methods.extraStrategies(), ExchangeStrategy.class)) {
            session.streams().addListener(new RunEnds());
            methods.extraStrategies_$eq(with(methods.extraStrategies(), new ExchangeStrategy()));
        }
        if (!holds(methods.extraOptimizations(), UnmarkRule.class)) {
            methods.extraOptimizations_$eq(with(methods.extraOptimizations(), new UnmarkRule()));
            methods.extraOptimizations_$eq(with(methods.extraOptimizations(), new LateRowsRule()));
        }
        StartRule.install(session);
    }

    public boolean isInstalled(SparkSession session) {
        return holds(session.experimental().extraStrategies(), ExchangeStrategy.class);
    }

    private static boolean holds(Seq seq, Class kind) {
        for (int i = 0; i < seq.size(); i++) {
            if (seq.apply(i).getClass() == kind) {
                return true;
            }
        }
        return false;
    }

    private static Seq with(Seq seq, Object one) {
        ArrayList all = new ArrayList(JavaConverters.seqAsJavaList(seq));
        all.add(one);
        return Lists.seq(all);
    }
}

/**
 * Tells the driver's Python of ended runs. A listener of PySpark's own would be handed the progress of each batch as well, which is
 * hundreds of calls between the two, each time.
 */
class RunEnds extends StreamingQueryListener {
    public void onQueryStarted(StreamingQueryListener.QueryStartedEvent event) {}

    public void onQueryProgress(StreamingQueryListener.QueryProgressEvent event) {}

    public void onQueryTerminated(StreamingQueryListener.QueryTerminatedEvent event) {
        Finished.forget(event.runId().toString());
        Batch.ask(Route.JSON.createObjectNode().put("asked", "ended").put("run_id", event.runId().toString()));
    }
}

class Lists {
    static Seq seq(List list) {
        return JavaConverters.asScalaBuffer(list).toList();
    }
}

/** What the name of the route column says of an operator (spark_jobs/plan/event_time.py writes it). */
class Route {
    static final String PREFIX = "__route:";
    static final ObjectMapper JSON = new ObjectMapper();

    static String nameIn(Seq expressions) {
        if (expressions.size() == 1 && expressions.apply(0) instanceof Attribute) {
            String name = ((Attribute) expressions.apply(0)).name();
            return name.startsWith(PREFIX) ? name : null;
        }
        return null;
    }

    static JsonNode facts(String name) {
        try {
            return JSON.readTree(name.substring(PREFIX.length()));
        } catch (java.io.IOException error) {
            throw new IllegalStateException("a route column without facts: " + name, error);
        }
    }
}

/** Output modes, in Spark's words in lower case. */
class Mode {
    static String of(OutputMode mode) {
        return mode.toString().toLowerCase();
    }

    /** That of an operator: its own, or else that of the query which is being planned; null if there is none. */
    static String of(JsonNode facts, IncrementalExecution execution) {
        if (!facts.get("mode").isNull()) {
            return facts.get("mode").asText();
        }
        return execution == null ? null : of(execution.outputMode());
    }
}

/** The batch that is being planned or run in this thread; the callback into Python. */
class Batch {
    static volatile Function driver;

    static Map ask(ObjectNode told) {
        String answer = (String) driver.apply(told.toString());
        try {
            return (Map) Route.JSON.readValue(answer, HashMap.class);
        } catch (java.io.IOException error) {
            throw new IllegalStateException("what Python answered is no JSON: " + answer, error);
        }
    }

    /** What a task, or Python on the driver, is told of a batch. */
    static ObjectNode told(IncrementalExecution execution) {
        ObjectNode told = Route.JSON.createObjectNode();
        told.put("query_id", execution.queryId().toString());
        told.put("run_id", execution.runId().toString());
        told.put("batch_id", execution.currentBatchId());
        told.put("time_ms", execution.offsetSeqMetadata().batchTimestampMs());
        if (execution.prevOffsetSeqMetadata().isDefined()) {
            told.put("former_time_ms", ((OffsetSeqMetadata) execution.prevOffsetSeqMetadata().get()).batchTimestampMs());
        }
        return told;
    }

    /** Adds the ids of the queries that run now. */
    static void putActive(ObjectNode told, SparkSession session) {
        com.fasterxml.jackson.databind.node.ArrayNode active = told.putArray("active");
        for (Object id : session.sharedState().activeStreamingQueries().keySet()) {
            active.add(id.toString());
        }
    }

    /** What Python is asked of an operator in a batch. */
    static ObjectNode described(IncrementalExecution execution, JsonNode operator, String asked) {
        ObjectNode told = told(execution);
        told.put("asked", asked);
        told.set("operator", operator);
        return told;
    }

    /** Null outside a streaming query, as for explain() before it starts. */
    static IncrementalExecution current(SparkContext context, SparkSession session) {
        StreamExecution query = query(context, session);
        return query == null ? null : query.lastExecution();
    }

    /** Whether a query's checkpoint is deleted when it ends. */
    static boolean isTemporary(StreamExecution query) {
        try {
            java.lang.reflect.Field field = StreamExecution.class.getDeclaredField("deleteCheckpointOnStop");
            field.setAccessible(true);
            return query != null && field.getBoolean(query);
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException("this Spark does not say which checkpoints it deletes", error);
        }
    }

    /** The query whose thread this is; null if it is none's. */
    static StreamExecution query(SparkContext context, SparkSession session) {
        String id = context.getLocalProperty("sql.streaming.queryId");
        return id == null ? null : (StreamExecution) session.sharedState().activeStreamingQueries().get(UUID.fromString(id));
    }
}

/** Reports batches that Spark's commit log has, of all operators of a query at once, each batch once. */
class Finished {
    /** Newest batch of each run that was reported, and that is known to be in the states' logs. */
    private static final ConcurrentHashMap REPORTED = new ConcurrentHashMap();
    private static final ConcurrentHashMap WRITTEN = new ConcurrentHashMap();

    static void report(IncrementalExecution execution, boolean isAtOnce) {
        String runId = execution.runId().toString();
        Long batch = Long.valueOf(execution.currentBatchId());
        if (batch.equals(WRITTEN.get(runId)) || !isAtOnce && batch.equals(REPORTED.get(runId))) {
            return;
        }
        ObjectNode told = Route.JSON.createObjectNode();
        told.put("asked", "finished").put("run_id", runId).put("batch_id", batch.longValue()).put("at_once", isAtOnce);
        collect(execution.executedPlan(), told.putObject("states"));
        Batch.ask(told);
        REPORTED.put(runId, batch);
        if (isAtOnce) {
            WRITTEN.put(runId, batch);
        }
    }

    static void forget(String runId) {
        REPORTED.remove(runId);
        WRITTEN.remove(runId);
    }

    /** States of the operators of a plan, by fleet. */
    private static void collect(SparkPlan node, ObjectNode states) {
        if (node instanceof StatefulExchangeExec) {
            JsonNode facts = ((StatefulExchangeExec) node).facts();
            String uri = facts.get("uri").asText();
            ArrayNode names = states.has(uri) ? (ArrayNode) states.get(uri) : states.putArray(uri);
            names.add(facts.get("state").asText());
        }
        Seq children = node.children();
        for (int i = 0; i < children.size(); i++) {
            collect((SparkPlan) children.apply(i), states);
        }
    }
}

/** Where the coordinator says that the shards of a state are, as of the end of the batch before: hosts by shard, null for "anywhere". */
class Places {
    private static final ConcurrentHashMap OF = new ConcurrentHashMap();

    private final String runId;
    private final String executors;
    private final List hosts;

    private Places(String runId, String executors, List hosts) {
        this.runId = runId;
        this.executors = executors;
        this.hosts = hosts;
    }

    static void put(String state, String runId, String executors, List hosts) {
        OF.put(state, new Places(runId, executors, hosts));
    }

    /** The same executors, other hosts. */
    static void renew(String state, List hosts) {
        Places before = (Places) OF.get(state);
        if (before != null) {
            OF.put(state, new Places(before.runId, before.executors, hosts));
        }
    }

    /** Whether the shards of a state were placed for a run and for these executors. */
    static boolean arePlaced(String state, String runId, String executors) {
        Places places = (Places) OF.get(state);
        return places != null && places.runId.equals(runId) && places.executors.equals(executors);
    }

    static String host(String state, int shard) {
        Places places = (Places) OF.get(state);
        return places == null || shard >= places.hosts.size() ? null : (String) places.hosts.get(shard);
    }
}

class ExchangeStrategy extends SparkStrategy {
    public Seq apply(LogicalPlan plan) {
        if (plan instanceof RepartitionByExpression) {
            RepartitionByExpression wanted = (RepartitionByExpression) plan;
            String route = Route.nameIn(wanted.partitionExpressions());
            if (route != null) {
                SparkSession session = SparkSession.active();
                IncrementalExecution execution = Batch.current(session.sparkContext(), session);
                int planned = ((Number) wanted.optNumPartitions().get()).intValue();
                int shards = execution == null ? planned : Shards.of(execution, Route.facts(route), planned).number;
                LogicalPlan below = wanted.child();
                if (shards != planned) {
                    below = renumbered(below, shards);
                    wanted = new RepartitionByExpression(
                        wanted.partitionExpressions(), below, new Some(Integer.valueOf(shards)), wanted.optAdvisoryPartitionSize());
                }
                StatefulExchangeExec exchange = new StatefulExchangeExec(
                    wanted.partitioning(),
                    planLater(below),
                    REPARTITION_BY_NUM$.MODULE$,
                    wanted.optAdvisoryPartitionSize());
                exchange.find();
                return Lists.seq(Arrays.asList(new Object[] {exchange}));
            }
        }
        return Lists.seq(new ArrayList());
    }

    /** The rows for so many shards: the functions above them read that off the name of a column (spark_jobs/worker/exchange.py). */
    private static LogicalPlan renumbered(LogicalPlan node, int shards) {
        ArrayList changed = new ArrayList();
        Seq children = node.children();
        boolean isMapped = node.getClass().getSimpleName().endsWith("MapInArrow");
        for (int i = 0; i < children.size(); i++) {
            LogicalPlan child = (LogicalPlan) children.apply(i);
            changed.add(isMapped ? renamed(child, shards) : renumbered(child, shards));
        }
        return (LogicalPlan) node.withNewChildren(Lists.seq(changed));
    }

    private static LogicalPlan renamed(LogicalPlan rows, int shards) {
        ArrayList columns = new ArrayList();
        Seq output = rows.output();
        for (int i = 0; i < output.size(); i++) {
            Attribute one = (Attribute) output.apply(i);
            Seq none = Lists.seq(new ArrayList());
            columns.add(!one.name().equals("__hash") ? one
                : (Object) new Alias(one, "__hash/" + shards, one.exprId(), none, Option.apply(null), none));
        }
        return new Project(Lists.seq(columns), rows);
    }
}

/** The shards of a batch, as the coordinator has decided: how many, and the partition id of the first. */
class Shards {
    private static final ConcurrentHashMap PRESENT = new ConcurrentHashMap();
    private static final ConcurrentHashMap NEXT = new ConcurrentHashMap();

    final int first;
    final int number;
    private final String runId;
    private final long batchId;

    Shards(int first, int number, String runId, long batchId) {
        this.first = first;
        this.number = number;
        this.runId = runId;
        this.batchId = batchId;
    }

    private static Shards told(Map answer, String runId, long batchId) {
        int first = ((Number) answer.get("first_partition")).intValue();
        return new Shards(first, ((Number) answer.get("shards")).intValue(), runId, batchId);
    }

    private boolean areOf(IncrementalExecution execution) {
        return batchId == execution.currentBatchId() && runId.equals(execution.runId().toString());
    }

    /** Those of the batch after one that is at its end. */
    static void putNext(String state, IncrementalExecution execution, Map answer) {
        NEXT.put(state, told(answer, execution.runId().toString(), execution.currentBatchId() + 1));
    }

    /** Those of a batch: as was told at the end of the one before, or else as the coordinator says now. Once known they stay so. */
    static Shards of(IncrementalExecution execution, JsonNode facts, int planned) {
        String state = facts.get("uri").asText() + "/" + facts.get("state").asText();
        Shards shards = (Shards) PRESENT.get(state);
        if (shards == null || !shards.areOf(execution)) {
            shards = (Shards) NEXT.get(state);
            if (shards == null || !shards.areOf(execution)) {
                ObjectNode told = Batch.described(execution, facts, "begin");
                told.put("shards", planned);
                Batch.putActive(told, execution.sparkSession());
                Map answer = Batch.ask(told);
                if (answer.get("refused") != null) {
                    throw new IllegalStateException((String) answer.get("refused"));
                }
                shards = told(answer, execution.runId().toString(), execution.currentBatchId());
            }
            PRESENT.put(state, shards);
        }
        return shards;
    }
}

/**
 * An exchange that gives each task of the operator behind it, as the first row of each of its shards, what it must know of its batch: which it
 * is, whose, which shard, and Spark's watermarks of this operator and batch. Spark runs its batches without data for it, and its progress has the
 * operator's figures. Once Spark is done with a batch, and before it says so in its commit log, shards that no task of the batch ran
 * for (a sink that read some rows only) are run here. Once the commit log has the batch, the driver's Python is told, and readers see it.
 */
public class StatefulExchangeExec extends ShuffleExchangeExec implements StateStoreWriter {
    /** Source of the row in which a task is told of its batch. */
    static final short HEADER = -3;

    private transient IncrementalExecution execution;
    private transient JsonNode facts;
    private transient Map figures;
    private transient boolean settled;
    /** Whether the fleet heard that the batch is finished, and whether its logs have it: Spark asks again and again while it has no data. */
    private transient boolean reported;
    private transient boolean written;
    private transient int[] only;
    private transient scala.collection.immutable.Map noMetrics;
    private transient long evictMs;

    public StatefulExchangeExec(Partitioning partitioning, SparkPlan child, ShuffleOrigin origin, Option advisory) {
        super(partitioning, child, origin, advisory);
    }

    /** What the route column says; null in a canonical form, which is compared and never run. */
    JsonNode facts() {
        if (facts == null) {
            // Not by the partitioning, which for one shard has no column.
            Seq columns = output();
            for (int i = 0; i < columns.size() && facts == null; i++) {
                String name = ((Attribute) columns.apply(i)).name();
                facts = name.startsWith(Route.PREFIX) ? Route.facts(name) : null;
            }
        }
        return facts;
    }

    /** Which batch this is a part of. Not only when it is planned: Spark makes copies of a node, which do not know. */
    void find() {
        if (execution == null) {
            execution = Batch.current(session().sparkContext(), session());
        }
    }

    /** Partition id of shard 0 in this batch. */
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

    // -- what Spark asks of a stateful operator ---------------------------------------------------------------------

    /** Its number is the state's own, the same in every batch and far from those that Spark gives to its operators. */
    public Option stateInfo() {
        find();
        if (facts() == null || execution == null) {
            return Option.apply(null);
        }
        long id = 1000000L + (facts().get("state").asText().hashCode() & 0x3fffffff);
        return new Some(new StatefulOperatorStateInfo(
            execution.checkpointLocation(), execution.runId(), id, execution.currentBatchId(), shards()));
    }

    /** The state's folder. */
    private String stateId() {
        return facts().get("uri").asText() + "/" + facts().get("state").asText();
    }

    private int shards() {
        // Not numPartitions(), which would build the shuffle.
        return outputPartitioning().numPartitions();
    }

    private long operatorId() {
        return ((StatefulOperatorStateInfo) stateInfo().get()).operatorId();
    }

    /** Asked after the commit log has this batch, when the next one is to be planned. */
    public boolean shouldRunAnotherBatch(long newWatermarkMs) {
        boolean again = needsAnotherBatch(newWatermarkMs);
        // Whoever waits for the query to have done all its input goes on after this. Where a batch follows, it will be known by that.
        if (!again && !written && execution != null && !hasNewData()) {
            Finished.report(execution, true);
            written = true;
        }
        return again;
    }

    private boolean hasNewData() {
        StreamExecution query = Batch.query(sparkContext(), session());
        return query == null || !query.availableOffsets().equals(query.committedOffsets());
    }

    private boolean needsAnotherBatch(long newWatermarkMs) {
        // In complete mode nothing ends.
        String when = "complete".equals(Mode.of(facts(), execution)) ? "never" : facts().get("again").asText();
        if (when.equals("watermark")) {
            return newWatermarkMs > evictMs;
        }
        if (when.equals("due") && figures != null && figures.get("due_ms") != null) {
            return ((Number) figures.get("due_ms")).longValue() < System.currentTimeMillis();
        }
        return false;
    }

    public Option produceOutputWatermark(long inputMs) {
        // Below zero at first, as of Spark's own joins: what follows has to see that it moves.
        return new Some(Long.valueOf(inputMs - facts().get("lag_ms").asLong()));
    }

    public String shortName() {
        return facts().get("name").asText();
    }

    /** Asked at the end of each trigger: of one that ran a batch, once the commit log has it. */
    public StateOperatorProgress getProgress() {
        if (!reported && execution != null && isCalledBy("finishTrigger", "ProgressReporter")) {
            Finished.report(execution, isLastWord());
            reported = true;
        }
        HashMap custom = new HashMap();
        Map told = figures == null ? new HashMap() : figures;
        Map others = (Map) told.get("custom");
        if (others != null) {
            for (Object key : others.keySet()) {
                custom.put(key, Long.valueOf(((Number) others.get(key)).longValue()));
            }
        }
        return new StateOperatorProgress(
            shortName(), told(told, "rows_total"), told(told, "rows_updated"), told(told, "updates_ms"),
            told(told, "rows_removed"), told(told, "removals_ms"), told(told, "commit_ms"), told(told, "memory_bytes"),
            told(told, "rows_late"), (long) shards(), told(told, "instances"), custom);
    }

    /** Whether Spark asks nothing more after this batch, before whoever waits for the query goes on. */
    private boolean isLastWord() {
        StreamExecution query = Batch.query(sparkContext(), session());
        return query != null && query.trigger() instanceof OneTimeTrigger$
            || !execution.sparkSession().sessionState().conf().streamingNoDataMicroBatchesEnabled();
    }

    private static long told(Map figures, String name) {
        Object value = figures.get(name);
        return value == null ? 0L : ((Number) value).longValue();
    }

    public SparkContext org$apache$spark$sql$execution$streaming$StateStoreWriter$$super$sparkContext() {
        return sparkContext();
    }

    public scala.collection.immutable.Map pythonMetrics() {
        return noMetrics;
    }

    public void org$apache$spark$sql$execution$python$PythonSQLMetrics$_setter_$pythonMetrics_$eq(
        scala.collection.immutable.Map metrics) {
        noMetrics = metrics;
    }

    // -- running ----------------------------------------------------------------------------------------------------

    public RDD doExecute() {
        find();
        if (execution == null) {
            throw new IllegalStateException(
                "a stateful DataFrame of the fleet runs only inside a streaming query; start it with writeStream [state=`"
                    + facts().get("state").asText() + "`]");
        }
        evictMs = execution.watermarkPropagator().getInputWatermarkForEviction(execution.currentBatchId(), operatorId());
        RDD shuffled;
        int[] chosen = only;
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
        ArrayList rows = new ArrayList();
        UnsafeProjection projection = UnsafeProjection.create(schema());
        ObjectNode told = Batch.told(execution);
        told.put("late_ms", execution.watermarkPropagator().getInputWatermarkForLateEvents(execution.currentBatchId(), operatorId()));
        told.put("evict_ms", evictMs);
        told.put("first_partition", firstPartition());
        told.put("output_mode", Mode.of(facts(), execution));
        told.put("is_temporary", Batch.isTemporary(Batch.query(sparkContext(), session())));
        for (int i = 0; i < chosen.length; i++) {
            told.put("shard", chosen[i]);
            rows.add(projection.apply(header(told.toString())).copy());
        }
        ClassTag tag = ClassTag$.MODULE$.apply(InternalRow.class);
        RDD headers = new HeaderRDD(sparkContext(), Lists.seq(rows), rows.size(), tag, (Partitioner) shuffled.partitioner().get());
        Seq both = Lists.seq(Arrays.asList(new Object[] {headers, shuffled}));
        JsonNode cores = place();
        RDD placed = new PlacedRDD(sparkContext(), both, tag, stateId(), chosen);
        return facts().get("together").asBoolean() ? new Together(stateId(), chosen, cores, sparkContext()).of(placed, tag) : placed;
    }

    /** Has the shards placed before the first task of a run, and whenever other executors are there than before. Returns cores by host. */
    private JsonNode place() {
        ObjectNode executors = executors();
        String state = stateId();
        // Other shards are placed anew.
        String runId = execution.runId().toString() + "/" + firstPartition();
        String present = executors.toString();
        if (!Places.arePlaced(state, runId, present)) {
            ObjectNode told = described("place");
            told.set("executors", executors);
            Places.put(state, runId, present, (List) Batch.ask(told).get("hosts"));
        }
        return executors.get("cores");
    }

    /** Executors that are there ("present") and that were asked for ("asked", 0 if nobody said), and the cores of those on each host ("cores"). */
    private ObjectNode executors() {
        java.util.TreeMap cores = new java.util.TreeMap();
        int present = 0;
        Seq all = sparkContext().statusStore().executorList(true);
        for (int i = 0; i < all.size(); i++) {
            ExecutorSummary one = (ExecutorSummary) all.apply(i);
            if (!one.id().equals("driver")) {
                // One that has just come has no port yet.
                int port = one.hostPort().lastIndexOf(':');
                String host = port < 0 ? one.hostPort() : one.hostPort().substring(0, port);
                Integer before = (Integer) cores.get(host);
                cores.put(host, Integer.valueOf((before == null ? 0 : before.intValue()) + one.totalCores()));
                present++;
            }
        }
        ObjectNode told = Route.JSON.createObjectNode();
        told.put("present", present);
        told.put("asked", sparkContext().conf().getInt("spark.executor.instances", 0));
        ObjectNode hosts = told.putObject("cores");
        for (Object host : cores.keySet()) {
            hosts.put((String) host, ((Integer) cores.get(host)).intValue());
        }
        return told;
    }

    /** A row of the exchange that says nothing but what a task is told. */
    private InternalRow header(String told) {
        Seq columns = output();
        Object[] values = new Object[columns.size()];
        for (int i = 0; i < values.length; i++) {
            String name = ((Attribute) columns.apply(i)).name();
            if (name.startsWith(Route.PREFIX)) {
                values[i] = Integer.valueOf(0);
            } else if (name.equals("rows_read")) {
                values[i] = Long.valueOf(0L);
            } else if (name.equals("input")) {
                values[i] = Byte.valueOf((byte) 0);
            } else if (name.equals("source")) {
                values[i] = Short.valueOf(HEADER);
            } else if (name.equals("chunk")) {
                values[i] = told.getBytes(StandardCharsets.UTF_8);
            }
        }
        return new GenericInternalRow(values);
    }

    /** What Python is asked of this operator and batch, whose shards are decided. */
    private ObjectNode described(String asked) {
        ObjectNode told = Batch.described(execution, facts(), asked);
        told.put("shards", shards());
        told.put("first_partition", firstPartition());
        return told;
    }

    // -- the end of a batch -----------------------------------------------------------------------------------------

    /**
     * Spark walks the plan for the watermark once the sink is done with a batch and before the commit log says so: the one moment at which
     * what is missing can still be run, and an error still keeps the batch from counting.
     */
    public void foreach(Function1 each) {
        if (!settled && execution != null && isCalledBy("updateWatermark", ".WatermarkTracker")) {
            settle();
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
        int[] missing = ask();
        if (missing.length > 0) {
            run(missing);
            missing = ask();
            if (missing.length > 0) {
                throw new IllegalStateException(
                    "shards of a stateful operator did not commit the batch though their tasks were run to their end; Spark's commit "
                        + "log does not count the batch, and a restart repeats it [state=`" + facts().get("state").asText() + "`, batch_id=`"
                        + execution.currentBatchId() + "`, shards=`" + Arrays.toString(missing) + "`]");
            }
        }
        settled = true;
    }

    /** Shards that lack the batch; what the others did is kept for getProgress. */
    private int[] ask() {
        figures = Batch.ask(described("settle"));
        Places.renew(stateId(), (List) figures.get("hosts"));
        Shards.putNext(stateId(), execution, (Map) figures.get("next"));
        List missing = (List) figures.get("missing");
        int[] shards = new int[missing.size()];
        for (int i = 0; i < shards.length; i++) {
            shards[i] = ((Number) missing.get(i)).intValue();
        }
        return shards;
    }

    private void run(int[] missing) {
        only = missing;
        try {
            taskAbove(execution.executedPlan(), null).execute().count();
        } finally {
            only = null;
        }
    }

    /** The nearest node above this one that runs Python: the operator's tasks. Null if this is not below `node`. */
    private SparkPlan taskAbove(SparkPlan node, SparkPlan nearest) {
        if (node == this) {
            return nearest;
        }
        SparkPlan above = node.getClass().getSimpleName().endsWith("MapInArrowExec") ? node : nearest;
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

/**
 * The rows of an exchange, with their tasks on the nodes that have their shards. Only the driver knows of it. Spark asks it when it
 * submits the stage, in the thread of its scheduler: it must not wait for anybody.
 */
public class PlacedRDD extends PartitionerAwareUnionRDD {
    private final transient ClassTag tag;
    private final transient String state;
    private final transient int[] shards;

    PlacedRDD(SparkContext context, Seq both, ClassTag tag, String state, int[] shards) {
        super(context, both, tag);
        this.tag = tag;
        this.state = state;
        this.shards = shards;
    }

    public Seq getPreferredLocations(Partition split) {
        return preferred(context(), Places.host(state, shards[split.index()]));
    }

    /** A host as the place that a task prefers; null for "anywhere". */
    static Seq preferred(SparkContext context, String host) {
        ArrayList places = new ArrayList();
        // A stage waits for a place that it prefers, also for one that is gone.
        if (host != null && isAlive(context, host)) {
            places.add(host);
        }
        return Lists.seq(places);
    }

    private static boolean isAlive(SparkContext context, String host) {
        TaskScheduler scheduler = context.taskScheduler();
        return !(scheduler instanceof TaskSchedulerImpl) || ((TaskSchedulerImpl) scheduler).hasExecutorsAliveOnHost(host);
    }

    protected Object writeReplace() {
        return new PartitionerAwareUnionRDD(context(), rdds(), tag);
    }
}

/**
 * Puts shards together to tasks where there are more of them than cores: each task waits for the object store once, and has the commits of
 * all of its shards under way meanwhile. Shards of one host only, and as many tasks there as it has cores for.
 */
class Together {
    private final ArrayList groups = new ArrayList();
    private final ArrayList hosts = new ArrayList();
    private final int number;

    Together(String state, int[] shards, JsonNode cores, SparkContext context) {
        number = shards.length;
        int each = Math.max(1, context.conf().getInt("spark.task.cpus", 1));
        int all = Math.max(1, context.defaultParallelism() / each);
        // A place that nobody has is anywhere.
        HashMap byHost = new HashMap();
        for (int i = 0; i < shards.length; i++) {
            String host = Places.host(state, shards[i]);
            host = host != null && cores.has(host) ? host : null;
            ArrayList there = (ArrayList) byHost.get(host);
            if (there == null) {
                there = new ArrayList();
                byHost.put(host, there);
            }
            there.add(Integer.valueOf(i));
        }
        for (Object host : byHost.keySet()) {
            int tasks = host == null ? all : Math.max(1, cores.get((String) host).asInt() / each);
            add((String) host, (ArrayList) byHost.get(host), tasks);
        }
    }

    private void add(String host, ArrayList places, int tasks) {
        int number = Math.min(tasks, places.size());
        for (int i = 0; i < number; i++) {
            int[] group = new int[(places.size() - i + number - 1) / number];
            for (int j = 0; j < group.length; j++) {
                group[j] = ((Integer) places.get(i + j * number)).intValue();
            }
            groups.add(group);
            hosts.add(host);
        }
    }

    /** The rows, with several shards in a task where it has several; else as they were. */
    RDD of(RDD placed, ClassTag tag) {
        return groups.size() == number ? placed : new TogetherRDD(placed, groups, hosts, tag);
    }
}

/** Shards put together to tasks, each on the host that has them. Only the driver knows of it. */
public class TogetherRDD extends CoalescedRDD {
    private final transient RDD placed;
    private final transient ArrayList groups;
    private final transient ArrayList hosts;
    private final transient ClassTag tag;

    TogetherRDD(RDD placed, ArrayList groups, ArrayList hosts, ClassTag tag) {
        super(placed, groups.size(), (Option) Option.apply(null), tag);
        this.placed = placed;
        this.groups = groups;
        this.hosts = hosts;
        this.tag = tag;
    }

    public Partition[] getPartitions() {
        Partition[] partitions = new Partition[groups.size()];
        for (int i = 0; i < partitions.length; i++) {
            partitions[i] = new CoalescedRDDPartition(i, placed, (int[]) groups.get(i), (Option) Option.apply(hosts.get(i)));
        }
        return partitions;
    }

    public Seq getPreferredLocations(Partition split) {
        return PlacedRDD.preferred(context(), (String) hosts.get(split.index()));
    }

    protected Object writeReplace() {
        CoalescedRDD plain = new CoalescedRDD(placed, groups.size(), (Option) Option.apply(null), tag);
        // An executor has none but those that it is sent.
        plain.dependencies();
        return plain;
    }
}

/** One row a partition, partitioned as the exchange is. */
public class HeaderRDD extends ParallelCollectionRDD {
    private final transient Partitioner like;
    private final transient Seq rows;
    private final transient ClassTag tag;

    HeaderRDD(SparkContext context, Seq rows, int count, ClassTag tag, Partitioner like) {
        super(context, rows, count, new scala.collection.immutable.HashMap(), tag);
        this.rows = rows;
        this.tag = tag;
        this.like = like;
    }

    public Option partitioner() {
        return new Some(like);
    }

    protected Object writeReplace() {
        return new ParallelCollectionRDD(context(), rows, rows.size(), new scala.collection.immutable.HashMap(), tag);
    }
}

/**
 * An exchange whose rows are a whole result, not a stream of changes: what stands above is planned as for a table (sorting, limits).
 */
public class ResultExchange extends RepartitionByExpression {
    public ResultExchange(Seq by, LogicalPlan child, Option partitions, Option advisory) {
        super(by, child, partitions, advisory);
    }

    public boolean isStreaming() {
        return false;
    }

    public RepartitionByExpression withNewChildInternal(LogicalPlan child) {
        return new ResultExchange(partitionExpressions(), child, optNumPartitions(), optAdvisoryPartitionSize());
    }

    protected Object writeReplace() {
        return new RepartitionByExpression(partitionExpressions(), child(), optNumPartitions(), optAdvisoryPartitionSize());
    }
}

/**
 * Above the exchange of an aggregation that has its query's output mode, or complete mode, stands one that aggregates nothing, for Spark's
 * checks: they then take the query for what it is. It is taken out here, before it is planned.
 */
class UnmarkRule extends Rule {
    public TreeNode apply(TreeNode plan) {
        return unmarked((LogicalPlan) plan, true);
    }

    /** asTable: whether nothing above is stateful itself, as a streaming dropDuplicates is. */
    private static LogicalPlan unmarked(LogicalPlan plan, boolean asTable) {
        Seq children = plan.children();
        ArrayList changed = new ArrayList();
        boolean differs = false;
        for (int i = 0; i < children.size(); i++) {
            LogicalPlan child = (LogicalPlan) children.apply(i);
            LogicalPlan after = unmarked(child, asTable && !(plan instanceof Deduplicate));
            differs |= after != child;
            changed.add(after);
        }
        LogicalPlan node = differs ? (LogicalPlan) plan.withNewChildren(Lists.seq(changed)) : plan;
        if (node instanceof Aggregate) {
            LogicalPlan below = result(((Aggregate) node).child(), asTable);
            if (below != null) {
                return new Project(((Aggregate) node).aggregateExpressions(), below);
            }
        }
        return node;
    }

    /** The exchange of an operator with the projections above it; null if it is none. */
    private static LogicalPlan result(LogicalPlan plan, boolean asTable) {
        if (plan instanceof Project) {
            LogicalPlan below = result(((Project) plan).child(), asTable);
            return below == null ? null : new Project(((Project) plan).projectList(), below);
        }
        if (plan instanceof RepartitionByExpression && !(plan instanceof ResultExchange)) {
            RepartitionByExpression exchange = (RepartitionByExpression) plan;
            String name = Route.nameIn(exchange.partitionExpressions());
            if (name != null) {
                SparkSession session = SparkSession.active();
                String mode = Mode.of(Route.facts(name), Batch.current(session.sparkContext(), session));
                return !asTable || !"complete".equals(mode) ? exchange : new ResultExchange(
                    exchange.partitionExpressions(),
                    exchange.child(),
                    exchange.optNumPartitions(),
                    exchange.optAdvisoryPartitionSize());
            }
        }
        return null;
    }
}

/**
 * Spark prunes the column of a watermark where nothing above its own operator reads it, and then no row is late for that operator. An
 * operator of the fleet is sent such a column all the same; here it becomes null, which is never late.
 */
class LateRowsRule extends Rule {
    public TreeNode apply(TreeNode plan) {
        LogicalPlan root = (LogicalPlan) plan;
        // From the top down: the column that one operator is sent is what reads that of the operator below it.
        java.util.LinkedHashMap late = new java.util.LinkedHashMap();
        ArrayList tasks = tasks(root, null);
        for (int i = 0; i < tasks.size(); i++) {
            late.put(((Task) tasks.get(i)).state, ((Task) tasks.get(i)).late);
        }
        for (Object state : late.keySet()) {
            java.util.Iterator names = ((JsonNode) late.get(state)).fieldNames();
            while (names.hasNext()) {
                root = pruned(root, (String) state, (String) names.next());
            }
        }
        return root;
    }

    /** An operator's exchange, and the node above it that emits its rows. */
    private static class Task {
        final String state;
        final JsonNode late;
        final LogicalPlan exchange;
        final LogicalPlan emitting;

        Task(JsonNode facts, LogicalPlan exchange, LogicalPlan emitting) {
            this.state = facts.get("state").asText();
            this.late = facts.get("late_columns");
            this.exchange = exchange;
            this.emitting = emitting;
        }
    }

    private static boolean isMapped(LogicalPlan node) {
        return node.getClass().getSimpleName().endsWith("MapInArrow");
    }

    private static String routeOf(LogicalPlan node) {
        return node instanceof RepartitionByExpression
            ? Route.nameIn(((RepartitionByExpression) node).partitionExpressions()) : null;
    }

    /** The operators of the fleet (of one name, unless it is null), each before those below it. */
    private static ArrayList tasks(LogicalPlan root, String state) {
        ArrayList tasks = new ArrayList();
        find(root, null, state, tasks);
        return tasks;
    }

    private static void find(LogicalPlan node, LogicalPlan emitting, String state, ArrayList tasks) {
        String route = routeOf(node);
        if (route != null && emitting != null) {
            Task task = new Task(Route.facts(route), node, emitting);
            if (state == null || state.equals(task.state)) {
                tasks.add(task);
            }
        }
        Seq children = node.children();
        for (int i = 0; i < children.size(); i++) {
            find((LogicalPlan) children.apply(i), isMapped(node) ? node : emitting, state, tasks);
        }
    }

    /** An operator that is in the plan twice, as in a self join, stays the same in both places: it runs once. */
    private static LogicalPlan pruned(LogicalPlan root, String state, String column) {
        ArrayList tasks = tasks(root, state);
        for (int i = 0; i < tasks.size(); i++) {
            Task task = (Task) tasks.get(i);
            if (isRead(root, task.emitting, task.late.get(column))) {
                return root;
            }
        }
        for (int i = 0; i < tasks.size(); i++) {
            root = nulled(root, ((Task) tasks.get(i)).exchange, column, false);
        }
        return root;
    }

    private static boolean isRead(LogicalPlan root, LogicalPlan emitting, JsonNode names) {
        Seq emitted = emitting.output();
        for (int i = 0; i < emitted.size(); i++) {
            Attribute column = (Attribute) emitted.apply(i);
            for (JsonNode name : names) {
                if (name.asText().equals(column.name()) && (root.outputSet().contains(column) || isRead(root, emitting, column))) {
                    return true;
                }
            }
        }
        return false;
    }

    /** Whether a node that is not below the operator reads a column of its. */
    private static boolean isRead(LogicalPlan node, LogicalPlan emitting, Attribute column) {
        if (node == emitting) {
            return false;
        }
        if (node.references().contains(column)) {
            return true;
        }
        Seq children = node.children();
        for (int i = 0; i < children.size(); i++) {
            if (isRead((LogicalPlan) children.apply(i), emitting, column)) {
                return true;
            }
        }
        return false;
    }

    /** The plan with a column that an exchange's rows are made with as nulls. */
    private static LogicalPlan nulled(LogicalPlan node, LogicalPlan exchange, String column, boolean isBelow) {
        Seq children = node.children();
        ArrayList changed = new ArrayList();
        boolean differs = false;
        for (int i = 0; i < children.size(); i++) {
            LogicalPlan child = (LogicalPlan) children.apply(i);
            LogicalPlan after = isBelow && isMapped(node)
                ? (child instanceof Project ? without((Project) child, column) : child)
                : nulled(child, exchange, column, isBelow || node == exchange);
            differs |= after != child;
            changed.add(after);
        }
        return differs ? (LogicalPlan) node.withNewChildren(Lists.seq(changed)) : node;
    }

    private static LogicalPlan without(Project rows, String column) {
        ArrayList columns = new ArrayList();
        Seq list = rows.projectList();
        boolean differs = false;
        for (int i = 0; i < list.size(); i++) {
            NamedExpression one = (NamedExpression) list.apply(i);
            boolean isLate = one.name().equals(column) && one instanceof Alias && !(((Alias) one).child() instanceof Literal);
            Seq none = Lists.seq(new ArrayList());
            columns.add(!isLate ? one : (Object) new Alias(
                new Literal(null, ((Alias) one).child().dataType()), column, one.exprId(), none, Option.apply(null), none));
            differs |= isLate;
        }
        return differs ? new Project(Lists.seq(columns), rows.child()) : rows;
    }
}

/**
 * Filters that Spark moves below an operator, because of what follows it, and below the operator's watermark where it can.
 *
 * Only rows that pass them move the watermark, and so they decide which rows are late; and rows that do not pass them take no room in the
 * state. Spark's optimizer moves a filter on the groups of an aggregation, or on a side of a join, through the operator; it cannot move one
 * through an operator of the fleet. So it is shown the query with Spark's own operators in their places: once to see which filters it puts
 * below a watermark, and once for those that reach what an operator is made of. There they are put in the query. They only leave out rows
 * that add to no result, and stay where they were, too.
 */
class LateFilters {
    /** At the results of an operator: Spark's own, as it was analysed. Python sets it. */
    static final TreeNodeTag ANALYSED = new TreeNodeTag("statefleet.analysed");
    /** At what nothing is moved through: the number of the input that stands below. */
    private static final TreeNodeTag INPUT = new TreeNodeTag("statefleet.input");

    private final SparkSession session;
    /** Conditions by watermark. */
    private final HashMap conditions = new HashMap();
    /** Conditions by the number of an input. */
    private final HashMap ofInputs = new HashMap();
    /** Of the nodes of the query, as objects; and the numbers of those that are an operator's input. */
    private final java.util.IdentityHashMap nodes = new java.util.IdentityHashMap();
    private final java.util.IdentityHashMap inputs = new java.util.IdentityHashMap();
    private boolean standsFor;

    LateFilters(SparkSession session) {
        this.session = session;
    }

    /**
     * The query with these filters; itself if there are none.
     *
     * belowWatermarks: whether they stand below watermarks only, as for an operator that finds its watermark in the rows that it gets.
     */
    LogicalPlan pushed(LogicalPlan query, boolean belowWatermarks) {
        LogicalPlan own = asSparks(query);
        if (!standsFor) {
            return query;
        }
        collect((LogicalPlan) session.sessionState().optimizer().execute(own));
        if (!belowWatermarks) {
            remember(query);
            // What has come to one operator's input moves on through the operator that this is made of.
            boolean differs = true;
            for (int i = 0; differs && i <= inputs.size(); i++) {
                LogicalPlan moved = withInputs(query, false);
                HashMap found = new HashMap();
                collectAtInputs((LogicalPlan) session.sessionState().optimizer().execute(moved), found);
                differs = false;
                for (Object input : found.keySet()) {
                    differs |= add(input, (Expression) found.get(input));
                }
            }
        }
        return filtered(query, false);
    }

    /** Adds to the condition of an input what it has not yet; whether there was any. Spark leaves out filters of what holds below. */
    private boolean add(Object input, Expression found) {
        Expression condition = (Expression) ofInputs.get(input);
        ArrayList known = new ArrayList();
        ArrayList parts = new ArrayList();
        if (condition != null) {
            split(condition, known);
        }
        if (found != null) {
            split(found, parts);
        }
        boolean differs = false;
        for (Object each : parts) {
            boolean isNew = true;
            for (Object other : known) {
                isNew &= !((Expression) other).semanticEquals((Expression) each);
            }
            if (isNew) {
                condition = condition == null ? (Expression) each : new And(condition, (Expression) each);
                differs = true;
            }
        }
        ofInputs.put(input, condition);
        return differs;
    }

    private void remember(LogicalPlan node) {
        nodes.put(node, Boolean.TRUE);
        for (int i = 0; i < node.children().size(); i++) {
            remember((LogicalPlan) node.children().apply(i));
        }
    }

    /** The query with Spark's own operators, and nothing to be moved through what the fleet's are made of: the nodes that both have. */
    private LogicalPlan withInputs(LogicalPlan node, boolean isInOperator) {
        Option analysed = node.getTagValue(ANALYSED);
        if (isInOperator && node.isStreaming() && nodes.containsKey(node)) {
            if (!inputs.containsKey(node)) {
                inputs.put(node, Integer.valueOf(inputs.size()));
            }
            LogicalPlan input = new ReturnAnswer(filtered(withInputs(node, false), ofInputs.get(inputs.get(node))));
            input.setTagValue(INPUT, inputs.get(node));
            return input;
        }
        if (analysed.isDefined()) {
            return named(node, withInputs((LogicalPlan) analysed.get(), true));
        }
        ArrayList children = new ArrayList();
        for (int i = 0; i < node.children().size(); i++) {
            children.add(withInputs((LogicalPlan) node.children().apply(i), isInOperator));
        }
        return ofBatch(children.isEmpty() ? node : (LogicalPlan) node.withNewChildren(Lists.seq(children)));
    }

    private LogicalPlan asSparks(LogicalPlan node) {
        Option analysed = node.getTagValue(ANALYSED);
        if (analysed.isDefined()) {
            standsFor = true;
            return named(node, asSparks((LogicalPlan) analysed.get()));
        }
        ArrayList children = new ArrayList();
        boolean isLowest = node instanceof EventTimeWatermark;
        for (int i = 0; i < node.children().size(); i++) {
            boolean before = standsFor;
            standsFor = false;
            LogicalPlan child = asSparks((LogicalPlan) node.children().apply(i));
            isLowest &= !standsFor;
            standsFor |= before;
            children.add(child);
        }
        if (isLowest) {
            // Nothing is moved through this one, so filters stay where they are looked for.
            children.set(0, new ReturnAnswer((LogicalPlan) children.get(0)));
        }
        return ofBatch(children.isEmpty() ? node : (LogicalPlan) node.withNewChildren(Lists.seq(children)));
    }

    /** Spark's own operator with the columns of the fleet's. */
    private static LogicalPlan named(LogicalPlan results, LogicalPlan own) {
        Seq none = Lists.seq(new ArrayList());
        ArrayList columns = new ArrayList();
        for (int i = 0; i < results.output().size(); i++) {
            Attribute mine = (Attribute) results.output().apply(i);
            Attribute sparks = (Attribute) own.output().apply(i);
            // A self join gives the columns of one side other ids.
            columns.add(mine.exprId().equals(sparks.exprId())
                ? (Object) sparks
                : (Object) new Alias(sparks, mine.name(), mine.exprId(), none, Option.apply(null), none));
        }
        return new Project(Lists.seq(columns), own);
    }

    private static LogicalPlan ofBatch(LogicalPlan node) {
        return (LogicalPlan) node.mapExpressions(new scala.runtime.AbstractFunction1() {
            public Object apply(Object expression) {
                return ofBatch((Expression) expression);
            }
        });
    }

    /** As Spark has it in a query: the time of a batch, which is no constant and moves no filter. */
    private static Expression ofBatch(Expression expression) {
        if (expression instanceof CurrentTimestampLike || expression instanceof CurrentDate || expression instanceof LocalTimestamp) {
            return new CurrentBatchTimestamp(0L, expression.dataType(), new Some("UTC"));
        }
        ArrayList children = new ArrayList();
        boolean differs = false;
        for (int i = 0; i < expression.children().size(); i++) {
            Expression child = (Expression) expression.children().apply(i);
            Expression after = ofBatch(child);
            differs |= after != child;
            children.add(after);
        }
        return differs ? (Expression) expression.withNewChildren(Lists.seq(children)) : expression;
    }

    /** Remembers the filters below each watermark of an optimised plan, down to what nothing was moved through. */
    private void collect(LogicalPlan node) {
        if (node instanceof EventTimeWatermark) {
            Filtered below = new Filtered(((EventTimeWatermark) node).child());
            if (below.rows instanceof ReturnAnswer) {
                remember(conditions, key((EventTimeWatermark) node), below.condition());
            }
        }
        for (int i = 0; i < node.children().size(); i++) {
            collect((LogicalPlan) node.children().apply(i));
        }
    }

    /** Remembers the filters of each input of an operator. */
    private static void collectAtInputs(LogicalPlan node, HashMap conditions) {
        Filtered below = new Filtered(node);
        Option input = below.rows.getTagValue(INPUT);
        if (below.rows instanceof ReturnAnswer && input.isDefined()) {
            remember(conditions, input.get(), below.condition());
        }
        for (int i = 0; i < below.rows.children().size(); i++) {
            collectAtInputs((LogicalPlan) below.rows.children().apply(i), conditions);
        }
    }

    /** Rows in an optimised plan, and the filters above them. */
    private static class Filtered {
        final LogicalPlan rows;
        private final ArrayList parts = new ArrayList();
        private final HashMap functions = new HashMap();

        Filtered(LogicalPlan top) {
            LogicalPlan below = top;
            while (below instanceof Filter || below instanceof Project || below instanceof BaseEvalPython) {
                if (below instanceof Filter) {
                    split(((Filter) below).condition(), parts);
                } else if (below instanceof BaseEvalPython) {
                    BaseEvalPython calls = (BaseEvalPython) below;
                    for (int i = 0; i < calls.udfs().size(); i++) {
                        functions.put(((Attribute) calls.resultAttrs().apply(i)).exprId(), calls.udfs().apply(i));
                    }
                }
                below = (LogicalPlan) below.children().apply(0);
            }
            rows = below;
        }

        /** What the filters want of columns that the rows have; null if they want nothing. */
        Expression condition() {
            Expression condition = null;
            for (Object each : parts) {
                Expression part = called((Expression) each, functions);
                if (part.references().subsetOf(rows.outputSet()) && !SubqueryExpression$.MODULE$.hasSubquery(part)) {
                    condition = condition == null ? part : new And(condition, part);
                }
            }
            return condition;
        }
    }

    static void split(Expression condition, ArrayList parts) {
        if (condition instanceof And) {
            split(((And) condition).left(), parts);
            split(((And) condition).right(), parts);
        } else {
            parts.add(condition);
        }
    }

    /** With the calls of Python functions in the places of their results. */
    static Expression called(Expression expression, HashMap functions) {
        if (expression instanceof Attribute) {
            Object function = functions.get(((Attribute) expression).exprId());
            return function == null ? expression : called((PythonUDF) function, functions);
        }
        ArrayList children = new ArrayList();
        boolean differs = false;
        for (int i = 0; i < expression.children().size(); i++) {
            Expression child = (Expression) expression.children().apply(i);
            Expression after = called(child, functions);
            differs |= after != child;
            children.add(after);
        }
        return differs ? (Expression) expression.withNewChildren(Lists.seq(children)) : expression;
    }

    /** A stream that is read in several places has filters of its own in each: then no row may be left out for all. */
    private static void remember(HashMap conditions, Object key, Expression condition) {
        if (!conditions.containsKey(key)) {
            conditions.put(key, condition);
        } else {
            Expression other = (Expression) conditions.get(key);
            if (other == null || condition == null || !other.semanticEquals(condition)) {
                conditions.put(key, null);
            }
        }
    }

    /** isInOperator: whether an operator's input is still to come; the same rows may be read elsewhere, unfiltered. */
    private LogicalPlan filtered(LogicalPlan node, boolean isInOperator) {
        boolean isInput = isInOperator && inputs.containsKey(node);
        boolean isInOperatorBelow = isInOperator && !isInput || node.getTagValue(ANALYSED).isDefined();
        ArrayList children = new ArrayList();
        boolean differs = false;
        for (int i = 0; i < node.children().size(); i++) {
            LogicalPlan child = (LogicalPlan) node.children().apply(i);
            LogicalPlan after = filtered(child, isInOperatorBelow);
            if (node instanceof EventTimeWatermark) {
                after = filtered(after, conditions.get(key((EventTimeWatermark) node)));
            }
            differs |= after != child;
            children.add(after);
        }
        LogicalPlan rows = differs ? (LogicalPlan) node.withNewChildren(Lists.seq(children)) : node;
        return isInput ? filtered(rows, ofInputs.get(inputs.get(node))) : rows;
    }

    private static LogicalPlan filtered(LogicalPlan rows, Object condition) {
        boolean fits = condition != null && ((Expression) condition).references().subsetOf(rows.outputSet());
        return fits ? new Filter((Expression) condition, rows) : rows;
    }

    private static String key(EventTimeWatermark watermark) {
        return watermark.eventTime().exprId() + " " + watermark.delay();
    }
}

/**
 * Looks at a query when writeStream.start() has Spark analyse it: refuses what would only fail in its first batch, in words that are not
 * about exchanges. It stands before the rule that has Spark's own checks.
 */
class StartRule extends Rule {
    private final SparkSession session;

    StartRule(SparkSession session) {
        this.session = session;
    }

    /** Spark takes rules of its users when a session is made; this one may be older than the classes here. */
    static void install(SparkSession session) {
        Analyzer analyzer = session.sessionState().analyzer();
        ArrayList rules = new ArrayList(JavaConverters.seqAsJavaList(analyzer.extendedResolutionRules()));
        for (Object rule : rules) {
            if (rule instanceof StartRule) {
                return;
            }
        }
        rules.add(0, new StartRule(session));
        try {
            java.lang.reflect.Field field = analyzer.getClass().getDeclaredField("extendedResolutionRules");
            field.setAccessible(true);
            field.set(analyzer, Lists.seq(rules));
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException("this session's analyzer takes no rules", error);
        }
    }

    public TreeNode apply(TreeNode plan) {
        if (plan instanceof WriteToStreamStatement) {
            WriteToStreamStatement query = (WriteToStreamStatement) plan;
            ArrayList operators = new ArrayList();
            JsonNode twice = find(query.inputQuery(), true, operators, new HashMap());
            if (twice != null) {
                refuse("two stateful operators of the query have the same name, and would share one state; nothing was started; give each "
                    + "a name of its own", twice);
            }
            if (!operators.isEmpty()) {
                check(query, operators);
                boolean closesEarly = false;
                for (Object each : operators) {
                    closesEarly |= ((Operator) each).facts.get("sources").size() > 0;
                }
                LogicalPlan filtered = new LateFilters(session).pushed(query.inputQuery(), closesEarly);
                // One that comes in twice, with other filters above it each time, runs once for both.
                if (filtered != query.inputQuery() && find(filtered, true, new ArrayList(), new HashMap()) == null) {
                    return query.withNewChildren(Lists.seq(Arrays.asList(new Object[] {filtered})));
                }
            }
        }
        return plan;
    }

    /** An operator of the fleet, and whether no other one stands above it. */
    private static class Operator {
        final JsonNode facts;
        final boolean isLast;

        Operator(JsonNode facts, boolean isLast) {
            this.facts = facts;
            this.isLast = isLast;
        }
    }

    /** Collects the operators of a plan; returns the facts of one that would share its state with another one, if there is one. */
    private static JsonNode find(LogicalPlan node, boolean isLast, ArrayList operators, HashMap seen) {
        if (node instanceof RepartitionByExpression) {
            String name = Route.nameIn(((RepartitionByExpression) node).partitionExpressions());
            if (name != null) {
                JsonNode facts = Route.facts(name);
                String state = facts.get("uri").asText() + "/" + facts.get("state").asText();
                LogicalPlan same = (LogicalPlan) seen.get(state);
                if (same == null) {
                    seen.put(state, node);
                    operators.add(new Operator(facts, isLast));
                } else if (!same.sameResult(node)) {
                    // One that comes in twice, as in a self join, is the same and runs once.
                    return facts;
                }
                isLast = false;
            }
        }
        Seq children = node.children();
        for (int i = 0; i < children.size(); i++) {
            JsonNode twice = find((LogicalPlan) children.apply(i), isLast, operators, seen);
            if (twice != null) {
                return twice;
            }
        }
        return null;
    }

    private void check(WriteToStreamStatement query, ArrayList operators) {
        String mode = Mode.of(query.outputMode());
        if (query.isContinuousTrigger()) {
            refuse("stateful operators run in batches, the fleet's as well as Spark's, and a continuous query has none; nothing was started; "
                + "leave the trigger out, or use processingTime or availableNow", ((Operator) operators.get(0)).facts);
        }
        for (Object each : operators) {
            Operator operator = (Operator) each;
            if (operator.isLast) {
                checkMode(operator.facts, mode);
            } else if (operator.facts.get("mode").isNull() && !mode.equals("append")) {
                refuse("the query runs in " + mode + " mode, in which this operator emits a row again when it changes, and the one above "
                    + "would count it twice; nothing was started; use append mode, or write its results to a sink and read them in a second "
                    + "query", operator.facts);
            }
        }
        if (session.sessionState().conf().isUnsupportedOperationCheckEnabled()) {
            checkAsSpark(query);
        }
        checkStates(query, mode, operators);
    }

    private static void checkMode(JsonNode facts, String mode) {
        if (facts.get("refused").has(mode)) {
            refuse(facts.get("refused").get(mode).asText(), facts);
        }
        boolean fits = false;
        for (JsonNode one : facts.get("modes")) {
            fits |= one.asText().equals(mode);
        }
        if (!fits) {
            refuse("the operator emits its results for output mode " + facts.get("modes") + " and the query runs in " + mode
                + " mode, which would take them for something else; nothing was started; give writeStream.outputMode(..) one that it "
                + "has, or leave outputMode out of fleet.stateful(..) if it was given", facts);
        }
    }

    /** Spark's own check, without the plan in its words. */
    private static void checkAsSpark(WriteToStreamStatement query) {
        try {
            UnsupportedOperationChecker$.MODULE$.checkForStreaming(query.inputQuery(), query.outputMode());
        } catch (Exception error) {
            if (error instanceof AnalysisException) {
                refuse(((AnalysisException) error).getSimpleMessage());
            }
            Platform.throwException(error);
        }
    }

    private void checkStates(WriteToStreamStatement query, String mode, ArrayList operators) {
        ObjectNode told = Route.JSON.createObjectNode();
        told.put("asked", "start");
        String folder = checkpoint(query);
        told.put("query_id", folder == null ? null : queryId(folder, query));
        told.put("has_checkpoint", folder != null);
        Batch.putActive(told, session);
        com.fasterxml.jackson.databind.node.ArrayNode states = told.putArray("operators");
        for (Object each : operators) {
            JsonNode facts = ((Operator) each).facts;
            ObjectNode state = states.addObject();
            state.set("uri", facts.get("uri"));
            state.set("state", facts.get("state"));
            // Only of one that has the query's mode: of any other it was compared when it was built.
            state.put("mode", facts.get("mode").isNull() ? mode : null);
        }
        Object refused = Batch.ask(told).get("refused");
        if (refused != null) {
            refuse((String) refused);
        }
    }

    /** Where the query keeps its checkpoint; null if that is a folder of this start alone. */
    private String checkpoint(WriteToStreamStatement query) {
        if (query.userSpecifiedCheckpointLocation().isDefined()) {
            return (String) query.userSpecifiedCheckpointLocation().get();
        }
        boolean isNamed = query.userSpecifiedName().isDefined() && session.sessionState().conf().checkpointLocation().isDefined();
        return isNamed ? session.sessionState().conf().checkpointLocation().get() + "/" + query.userSpecifiedName().get() : null;
    }

    /** Id of the query that a checkpoint is of; null if it will be a new one. */
    private static String queryId(String folder, WriteToStreamStatement query) {
        Option found = StreamMetadata$.MODULE$.read(new Path(new Path(folder), "metadata"), query.hadoopConf());
        return found.isDefined() ? ((StreamMetadata) found.get()).id() : null;
    }

    private static void refuse(String words, JsonNode facts) {
        refuse(words + " [state=`" + facts.get("state").asText() + "`]");
    }

    private static void refuse(String words) {
        Option none = Option.apply(null);
        Platform.throwException(new AnalysisException(
            words, none, none, none, none, new scala.collection.immutable.HashMap(), new org.apache.spark.QueryContext[0]));
    }
}
