package statefleet.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.HashMap;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.Function;
import org.apache.spark.SparkContext;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.streaming.IncrementalExecution;
import org.apache.spark.sql.execution.streaming.OffsetSeqMetadata;
import org.apache.spark.sql.execution.streaming.StreamExecution;
import scala.collection.Seq;

/** Calls from the JVM into the driver's Python: a JSON message each, answered by JSON. */
class Driver {
    static volatile Function callback;

    static Map ask(ObjectNode message) {
        String answer = (String) callback.apply(message.toString());
        try {
            return (Map) Route.JSON.readValue(answer, HashMap.class);
        } catch (java.io.IOException error) {
            throw new IllegalStateException("what Python answered is no JSON: " + answer, error);
        }
    }

    /** Returns the fields that identify a batch, as tasks and the driver's Python get them. */
    static ObjectNode batchFields(IncrementalExecution execution) {
        ObjectNode message = Route.JSON.createObjectNode();
        message.put("query_id", execution.queryId().toString());
        message.put("run_id", execution.runId().toString());
        message.put("batch_id", execution.currentBatchId());
        message.put("time_ms", execution.offsetSeqMetadata().batchTimestampMs());
        if (execution.prevOffsetSeqMetadata().isDefined()) {
            message.put("former_time_ms", ((OffsetSeqMetadata) execution.prevOffsetSeqMetadata().get()).batchTimestampMs());
        }
        return message;
    }

    /** Returns a request about an operator in a batch; `asked` names the request. */
    static ObjectNode request(IncrementalExecution execution, JsonNode operator, String asked) {
        ObjectNode message = batchFields(execution);
        message.put("asked", asked);
        message.set("operator", operator);
        return message;
    }

    /** Adds the ids of the queries that run now. */
    static void putActive(ObjectNode message, SparkSession session) {
        ArrayNode active = message.putArray("active");
        for (Object id : session.sharedState().activeStreamingQueries().keySet()) {
            active.add(id.toString());
        }
    }
}

/** The query that this thread plans or runs. */
class CurrentQuery {
    /** Returns the execution of the query's batch; null outside a streaming query, as for explain() before it starts. */
    static IncrementalExecution execution(SparkContext context, SparkSession session) {
        StreamExecution query = query(context, session);
        return query == null ? null : query.lastExecution();
    }

    /** Returns the query whose thread this is; null if it is the thread of no query. */
    static StreamExecution query(SparkContext context, SparkSession session) {
        String id = context.getLocalProperty("sql.streaming.queryId");
        return id == null ? null : (StreamExecution) session.sharedState().activeStreamingQueries().get(UUID.fromString(id));
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
}

/** Reports batches that Spark's commit log has: each batch once, for all operators of a query at once. */
class FinishedBatches {
    /** By run, the newest batch that was reported (REPORTED), and the newest that is known to be in the states' logs (WRITTEN). */
    private static final ConcurrentHashMap REPORTED = new ConcurrentHashMap();
    private static final ConcurrentHashMap WRITTEN = new ConcurrentHashMap();

    /** isAtOnce: whether to return only once the states' logs have the batch. */
    static void report(IncrementalExecution execution, boolean isAtOnce) {
        String runId = execution.runId().toString();
        Long batch = Long.valueOf(execution.currentBatchId());
        if (batch.equals(WRITTEN.get(runId)) || !isAtOnce && batch.equals(REPORTED.get(runId))) {
            return;
        }
        ObjectNode message = Route.JSON.createObjectNode();
        message.put("asked", "finished").put("run_id", runId).put("batch_id", batch.longValue()).put("at_once", isAtOnce);
        collect(execution.executedPlan(), message.putObject("states"));
        Driver.ask(message);
        REPORTED.put(runId, batch);
        if (isAtOnce) {
            WRITTEN.put(runId, batch);
        }
    }

    static void forget(String runId) {
        REPORTED.remove(runId);
        WRITTEN.remove(runId);
    }

    /** Adds the names of the states of a plan's operators, by the URI of their fleet. */
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
