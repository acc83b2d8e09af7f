package statefleet.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.spark.sql.execution.streaming.IncrementalExecution;

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

    /** Returns for each shard a route that Spark's partitioning puts there. */
    static int[] routes(int number) {
        int[] routes = new int[number];
        boolean[] present = new boolean[number];
        int remaining = number;
        for (int route = 0; remaining > 0; route++) {
            int shard = Math.floorMod(org.apache.spark.unsafe.hash.Murmur3_x86_32.hashInt(route, 42), number);
            if (!present[shard]) {
                present[shard] = true;
                routes[shard] = route;
                remaining--;
            }
        }
        return routes;
    }

    private static Shards fromAnswer(Map answer, String runId, long batchId) {
        int first = ((Number) answer.get("first_partition")).intValue();
        return new Shards(first, ((Number) answer.get("shards")).intValue(), runId, batchId);
    }

    private boolean areOf(IncrementalExecution execution) {
        return batchId == execution.currentBatchId() && runId.equals(execution.runId().toString());
    }

    /** Keeps the shards of the batch after this one. */
    static void putNext(String state, IncrementalExecution execution, Map answer) {
        NEXT.put(state, fromAnswer(answer, execution.runId().toString(), execution.currentBatchId() + 1));
    }

    /**
     * Returns the shards of a batch: as answered at the end of the batch before, or else as the coordinator answers now. They do not
     * change within a batch.
     */
    static Shards of(IncrementalExecution execution, JsonNode facts, int planned) {
        String state = Route.stateId(facts);
        Shards shards = (Shards) PRESENT.get(state);
        if (shards == null || !shards.areOf(execution)) {
            shards = (Shards) NEXT.get(state);
            if (shards == null || !shards.areOf(execution)) {
                ObjectNode message = Driver.request(execution, facts, "begin");
                message.put("shards", planned);
                Driver.putActive(message, execution.sparkSession());
                Map answer = Driver.ask(message);
                if (answer.get("refused") != null) {
                    throw new IllegalStateException((String) answer.get("refused"));
                }
                shards = fromAnswer(answer, execution.runId().toString(), execution.currentBatchId());
            }
            PRESENT.put(state, shards);
        }
        return shards;
    }
}

/**
 * Where the shards of a state are, as the coordinator said at the end of the batch before: a host and the number of a store actor there.
 * A place is null for a shard that may run anywhere.
 */
class ShardPlaces {
    private static final ConcurrentHashMap BY_STATE = new ConcurrentHashMap();

    private final String runId;
    private final String executors;
    private final List places;

    private ShardPlaces(String runId, String executors, List places) {
        this.runId = runId;
        this.executors = executors;
        this.places = places;
    }

    static void put(String state, String runId, String executors, List places) {
        BY_STATE.put(state, new ShardPlaces(runId, executors, places));
    }

    /** Keeps new places of a state; the run and its executors stay. */
    static void renew(String state, List places) {
        ShardPlaces before = (ShardPlaces) BY_STATE.get(state);
        if (before != null) {
            BY_STATE.put(state, new ShardPlaces(before.runId, before.executors, places));
        }
    }

    /** Whether the shards of a state were placed for a run and for these executors. */
    static boolean arePlaced(String state, String runId, String executors) {
        ShardPlaces known = (ShardPlaces) BY_STATE.get(state);
        return known != null && known.runId.equals(runId) && known.executors.equals(executors);
    }

    static String host(String state, int shard) {
        List place = place(state, shard);
        return place == null ? null : (String) place.get(0);
    }

    /** Returns the number of a shard's store actor on its host; that of the first for a shard that may run anywhere. */
    static int actor(String state, int shard) {
        List place = place(state, shard);
        return place == null ? 0 : ((Number) place.get(1)).intValue();
    }

    private static List place(String state, int shard) {
        ShardPlaces known = (ShardPlaces) BY_STATE.get(state);
        return known == null || shard >= known.places.size() ? null : (List) known.places.get(shard);
    }
}
